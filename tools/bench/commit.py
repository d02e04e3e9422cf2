"""`agentstore bench commit`: what one confirmed commit costs, beside a bare durable write, SQLite and LMDB.

Three questions: one thread of one process (medians, CPU beyond the two system calls), many processes on one store, many
threads of one process (confirmed commits a second against the bare loop's), and how many syncs each really did.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from contextlib import ExitStack
from typing import Any

from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.files import Files
from agentstore.engine.segment import FRAMES_AT

from . import syncs
from .frame import Contender, Timing, interleave, machine
from .peers import agentstore_commit, bare_loop, peers
from .processes import WRITER, run_together

BLOCK = 25
"""Operations of one contender before the next has its turn."""

PROCESSES = 8
THREADS = 32
REPETITIONS = 3
"""How often the many writers and the bare loop take turns."""

SYNC_OPERATIONS = 200
"""Operations that strace counts the syncs of."""


class _CountingFiles(Files):
    """The real system calls, and how many bytes each frame has."""

    def __init__(self) -> None:
        self.frames: list[int] = []

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        if offset >= FRAMES_AT and any(data[:8]):
            self.frames.append(len(data))
        super().pwrite(fd, data, offset)


def frame_bytes() -> int:
    """The size of the frame that one commit of the benchmark writes, in bytes.

    The median, not the mean: the background's snapshots are large frames in the same log, and a bare loop that
    wrote more bytes than a commit does would be too easy a peer.
    """
    with tempfile.TemporaryDirectory() as directory:
        files = _CountingFiles()
        # A process has one engine per store: the contender's commits go through these files.
        engine = EmbeddedEngine.open(os.path.join(directory, "store"), files=files)
        try:
            with agentstore_commit().open(directory) as operation:
                files.frames.clear()
                for _ in range(200):
                    operation()
                return round(statistics.median(files.frames))
        finally:
            engine.close()


def run(directory: str, *, rounds: int = 40, seconds: float = 2.0, strace: bool = True) -> dict[str, Any]:
    """The whole scenario in the empty `directory`; a result for JSON. Durations are of each part and contender."""
    size = frame_bytes()
    contenders = [bare_loop(size), agentstore_commit(), *peers()]
    result: dict[str, Any] = {"scenario": "commit", "machine": machine(directory), "frame_bytes": size}
    result["single"] = _single(directory, contenders, rounds)
    result["processes"] = _many(directory, "processes", size, seconds)
    result["threads"] = _many(directory, "threads", size, seconds)
    result["syncs"] = _syncs(directory, contenders, size) if strace and syncs.available() else None
    return result


def _single(directory: str, contenders: list[Contender], rounds: int) -> list[dict[str, Any]]:
    with ExitStack() as opened:
        operations = {
            contender.name: opened.enter_context(contender.open(_fresh(directory, contender.name)))
            for contender in contenders
        }
        for operation in operations.values():
            for _ in range(BLOCK):
                operation()
        timings = interleave(operations, rounds=rounds, block=BLOCK)
    bare = timings["bare"]
    return [_row(contender, timings[contender.name], bare) for contender in contenders]


def _row(contender: Contender, timing: Timing, bare: Timing) -> dict[str, Any]:
    return {
        "name": contender.name,
        "settings": contender.settings,
        "operations": len(timing.wall_ns),
        "p50_us": round(timing.p50_us, 1),
        "p99_us": round(timing.p99_us, 1),
        "p50_ratio": round(timing.p50_us / bare.p50_us, 2),
        "cpu_us": round(timing.cpu_us, 1),
        "cpu_beyond_bare_us": round(timing.cpu_us - bare.cpu_us, 1),
        "process_cpu_us": round(timing.process_cpu_us, 1),
    }


def _many(directory: str, kind: str, size: int, seconds: float) -> dict[str, Any]:
    """Many writers on one store against one bare loop, in turns."""
    rates: dict[str, list[float]] = {"agentstore": [], "bare": []}
    latest: list[dict[str, Any]] = []
    store = _fresh(directory, kind)
    for turn in range(REPETITIONS):
        bare_directory = _fresh(directory, f"{kind}-bare-{turn}")
        bare = run_together([_loop("bare", bare_directory, seconds, "--frame-bytes", str(size))])
        rates["bare"].append(_rate(bare))
        if kind == "processes":
            latest = run_together([_loop("agentstore", store, seconds)] * PROCESSES)
        else:
            latest = run_together([_loop("agentstore", store, seconds, "--threads", str(THREADS))])
        rates["agentstore"].append(_rate(latest))
    commits, bare_rate = statistics.median(rates["agentstore"]), statistics.median(rates["bare"])
    return {
        "writers": PROCESSES if kind == "processes" else THREADS,
        "commits_per_s": round(commits),
        "bare_per_s": round(bare_rate),
        "ratio": round(commits / bare_rate, 2),
        "p50_us": round(statistics.median(result["p50_us"] for result in latest), 1),
        "p99_us": round(max(result["p99_us"] for result in latest), 1),
        "cpu_us": round(statistics.mean(result["cpu_us"] for result in latest), 1),
    }


def _rate(results: list[dict[str, Any]]) -> float:
    return float(sum(result["operations"] / result["seconds"] for result in results))


def _loop(contender: str, directory: str, seconds: float, *more: str) -> list[str]:
    return ["loop", contender, directory, "--seconds", str(seconds), *more]


def _syncs(directory: str, contenders: list[Contender], size: int) -> dict[str, dict[str, float]]:
    """Syncs per operation as strace sees them: of each contender alone, and of many writers on one store."""
    counted = {
        contender.name: _per_operation(directory, contender.name, 1, "--frame-bytes", str(size))
        for contender in contenders
    }
    counted[f"agentstore, {PROCESSES} processes"] = _per_operation(directory, "agentstore", PROCESSES)
    counted[f"agentstore, {THREADS} threads"] = _per_operation(directory, "agentstore", 1, "--threads", str(THREADS))
    return counted


def _per_operation(directory: str, contender: str, processes: int, *more: str) -> dict[str, float]:
    """Counted with and without operations: what setting up and closing costs does not count."""
    threads = int(more[1]) if more[:1] == ("--threads",) else 1
    counts = []
    for operations in (0, SYNC_OPERATIONS):
        fresh = _fresh(directory, f"syncs-{contender}-{processes}-{threads}-{operations}")
        command = [*WRITER, "loop", contender, fresh, "--count", str(operations), *more]
        counts.append(syncs.count_syncs([command] * processes))
    setup, everything = counts
    total = SYNC_OPERATIONS * threads * processes
    counted = {call: round((everything[call] - setup[call]) / total, 3) for call in syncs.CALLS}
    # Opening and closing sync now and then once more or less: that is not an operation's.
    return {call: number for call, number in counted.items() if number > 0.002}


def _fresh(directory: str, name: str) -> str:
    path = os.path.join(directory, name)
    os.makedirs(path)
    return path
