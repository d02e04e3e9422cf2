"""`agentstore bench threads`: a store with very many threads stays quick to open, to look into and to list."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

from agentstore import Store

from .frame import machine, percentile
from .processes import Writer, rss_anon_bytes
from .writer import thread_name

NEWEST = 20


def run(directory: str, *, threads: int = 100_000, turns: int = 200) -> dict[str, Any]:
    """The whole scenario in the empty `directory`; a result for JSON."""
    store_path = os.path.join(directory, "store")
    writer = Writer("threads", store_path, "--count", str(threads))
    with writer.sample_memory() as memory:
        writer.go()
        wrote = writer.result()
    begin = time.perf_counter()
    with Store.open(store_path, create=False) as store:
        opened_ms = (time.perf_counter() - begin) * 1000
        timings = _look(store, threads, turns)
        base_bytes = store.stats()["base_bytes"]
        memory_of_reader = rss_anon_bytes()
    return {
        "scenario": "threads",
        "machine": machine(directory),
        "threads": threads,
        "write_s": round(wrote["seconds"], 2),
        "writer_rss_anon_bytes": memory.max_bytes,
        "reader_rss_anon_bytes": memory_of_reader,
        "base_bytes": base_bytes,
        "store_open_ms": round(opened_ms, 2),
        **timings,
    }


def _look(store: Store, threads: int, turns: int) -> dict[str, float]:
    """Open one, list the newest, list by name and by prefix: in turns."""
    rng = random.Random(0)

    def open_one() -> None:
        state = store.thread(thread_name(rng.randrange(threads))).load()
        assert state["step"] == 0

    def newest() -> None:
        assert len(list(store.threads(order="created", limit=NEWEST))) == min(NEWEST, threads)

    def by_name() -> None:
        assert len(list(store.threads(limit=NEWEST))) == min(NEWEST, threads)

    def by_prefix() -> None:
        assert list(store.threads(prefix=f"user-{rng.randrange(min(threads, 1000))}:", limit=NEWEST))

    looks: dict[str, Callable[[], None]] = {
        "open_one": open_one,
        "list_newest": newest,
        "list_by_name": by_name,
        "list_by_prefix": by_prefix,
    }
    took: dict[str, list[int]] = {name: [] for name in looks}
    for _ in range(turns):
        for name, look in looks.items():
            begin = time.perf_counter_ns()
            look()
            took[name].append(time.perf_counter_ns() - begin)
    return {
        f"{name}_{label}_ms": round(percentile(times, percent) / 1e6, 3)
        for name, times in took.items()
        for label, percent in (("p50", 50), ("p99", 99))
    }
