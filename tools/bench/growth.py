"""`agentstore bench growth`: what a message costs as a conversation grows, in bytes, in commit time, in load time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from agentstore import Append, Set, Store, Thread
from agentstore.engine.job import disk_bytes

from .frame import Operation, interleave, machine, message, percentile
from .peers import bare_loop
from .processes import rss_anon_bytes

MESSAGE_BYTES = 1000
LOADS = 7
ROUNDS = 40
BLOCK = 25
LARGE, SMALL = 10_000_000, 10_000


def run(directory: str, *, counts: Sequence[int] = (1_000, 10_000, 100_000)) -> dict[str, Any]:
    """The scenario in the empty `directory`; a result for JSON."""
    rows = [_grown(os.path.join(directory, str(count)), count) for count in counts]
    first = rows[0]
    for row in rows:
        for name in ("bytes_per_message", "commit_x_bare", "load_ms_per_mb"):
            row[f"{name}, x first"] = round(row[name] / first[name], 2)
    return {
        "scenario": "growth",
        "machine": machine(directory),
        "message_bytes": MESSAGE_BYTES,
        "rows": rows,
        "state_size": _large_and_small(os.path.join(directory, "sizes")),
    }


def _committing(thread: Thread, start: int) -> Operation:
    steps = iter(range(start, 1 << 40))

    def operation() -> None:
        step = next(steps)
        changes = Append("conversation_history", message(step, MESSAGE_BYTES)), Set("step", step)
        thread.commit(*changes, reason="round", step=step)

    return operation


def _grown(path: str, count: int) -> dict[str, Any]:
    """A thread of `count` messages: the last thousand of its commits beside a bare durable write."""
    os.makedirs(path)
    store_path = os.path.join(path, "store")
    with ExitStack() as opened:
        bare = opened.enter_context(bare_loop(MESSAGE_BYTES + 250).open(path))
        store = opened.enter_context(Store.open(store_path))
        thread = store.thread("t")
        thread.commit(Set("conversation_history", []), Set("step", 0))
        first = _committing(thread, 0)
        for _ in range(max(0, count - ROUNDS * BLOCK)):
            first()
        timed = interleave({"bare": bare, "agentstore": first}, rounds=min(ROUNDS, count // BLOCK), block=BLOCK)
        memory = rss_anon_bytes()
    size = disk_bytes(store_path)
    with Store.open(store_path) as store:
        wall: list[int] = []
        for _ in range(LOADS):
            begin = time.perf_counter_ns()
            state = store.thread("t").load()
            wall.append(time.perf_counter_ns() - begin)
    if len(state["conversation_history"]) != count:
        raise AssertionError(f"{len(state['conversation_history'])} messages of {count} were loaded")
    load_ms = percentile(wall, 50) / 1e6
    return {
        "messages": count,
        "disk_bytes": size,
        "bytes_per_message": round(size / count, 1),
        "commit_p50_us": round(timed["agentstore"].p50_us, 1),
        "commit_x_bare": round(timed["agentstore"].p50_us / timed["bare"].p50_us, 2),
        "load_p50_ms": round(load_ms, 1),
        "load_ms_per_mb": round(load_ms / (count * MESSAGE_BYTES / 1e6), 2),
        "writer_rss_anon_mb": round(memory / 1e6, 1),
    }


def _large_and_small(path: str) -> dict[str, Any]:
    """Commits of one message to a state of 10 MB and to one of 10 KB, in turns."""
    with Store.open(path) as store:
        operations: dict[str, Operation] = {}
        for name, size in (("large", LARGE), ("small", SMALL)):
            thread = store.thread(name)
            messages = [message(n, MESSAGE_BYTES) for n in range(size // MESSAGE_BYTES)]
            thread.commit(Append("conversation_history", *messages), Set("step", 0))
            operations[name] = _committing(thread, 1)
        timed = interleave(operations, rounds=ROUNDS, block=BLOCK)
    large, small = timed["large"].p50_us, timed["small"].p50_us
    return {
        "large_bytes": LARGE,
        "small_bytes": SMALL,
        "large_p50_us": round(large, 1),
        "small_p50_us": round(small, 1),
        "ratio": round(large / small, 2),
    }
