"""`agentstore bench compact`: what the offline job costs as the store grows."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from agentstore import Append, Set, Store
from agentstore.compaction import compact
from agentstore.engine.job import disk_bytes

from .frame import machine, message
from .processes import rss_anon_bytes

MESSAGES_PER_COMMIT = 4
THREAD_BYTES = 128 * 1024
SAMPLE_S = 0.05


def run(
    directory: str, files: Sequence[str] = (), *, megabytes: Sequence[int] = (10, 100), jobs: Sequence[int] = (1, 2)
) -> dict[str, Any]:
    """The scenario in the empty `directory`; a result for JSON. `files`: JSONL transcripts; without them words."""
    rows = []
    for size in megabytes:
        source = os.path.join(directory, f"{size}")
        json_bytes, threads = _fill(source, files, size * 1_000_000)
        for number in jobs:
            path = os.path.join(directory, f"{size}-{number}")
            shutil.copytree(source, path)
            rows.append({"json_mb": size, "threads": threads, "jobs": number} | _compacted(path, number, json_bytes))
            shutil.rmtree(path)
        shutil.rmtree(source)
    return {"scenario": "compact", "machine": machine(directory), "rows": rows}


def _compacted(path: str, jobs: int, json_bytes: int) -> dict[str, Any]:
    before = disk_bytes(path)
    peak = [0]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            peak[0] = max(peak[0], rss_anon_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    begin, cpu = time.perf_counter(), time.process_time()
    try:
        compact(path, jobs=jobs)
    finally:
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
        done.set()
        sampler.join()
    after = disk_bytes(path)
    return {
        "seconds": round(seconds, 1),
        "s_per_10_mb": round(seconds / json_bytes * 1e7, 2),
        "cpu_s": round(cpu_seconds, 1),
        "before_ratio": round(before / json_bytes, 3),
        "after_ratio": round(after / json_bytes, 3),
        "rss_anon_peak_mb": round(peak[0] / 1e6, 1),
    }


def _fill(path: str, files: Sequence[str], wanted: int) -> tuple[int, int]:
    """A closed store of threads until their JSON has so many bytes; (JSON bytes, threads)."""
    written = threads = 0
    with Store.open(path) as store:
        for messages in _conversations(files):
            thread = store.thread(f"thread {threads}")
            for step in range(0, len(messages), MESSAGES_PER_COMMIT):
                part = messages[step : step + MESSAGES_PER_COMMIT]
                thread.commit(Append("conversation_history", *part), Set("step", step), reason="round", step=step)
                written += sum(len(json.dumps(each)) + 1 for each in part)
            threads += 1
            if written >= wanted:
                break
    return written, threads


def _conversations(files: Sequence[str]) -> Iterator[list[Any]]:
    """The transcripts again and again, with other words in them each time; or words alone, without end."""
    turn = 0
    while files:
        for file in files:
            with open(file, encoding="utf-8") as lines:
                yield [_renewed(json.loads(line), random.Random(f"{turn} {file}")) for line in lines if line.strip()]
        turn += 1
    while True:
        count = THREAD_BYTES // 800
        yield [message(turn * count + n, 800) for n in range(count)]
        turn += 1


def _renewed(value: Any, rng: random.Random) -> Any:
    """A message with every tenth word of its texts replaced, so that no turn is a copy of the one before."""
    if isinstance(value, dict):
        return {key: _renewed(each, rng) if key not in ("role", "type") else each for key, each in value.items()}
    if isinstance(value, list):
        return [_renewed(each, rng) for each in value]
    if not isinstance(value, str) or len(value) < 24:
        return value
    words = value.split(" ")
    for at in range(0, len(words), 10):
        words[at] = f"{rng.getrandbits(32):x}"
    return " ".join(words)
