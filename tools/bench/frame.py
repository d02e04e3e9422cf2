"""The frame of the benchmarks: contenders take turns, and every number stands beside its peer's.

A disk is faster in one second than in the next, so contenders never run one after the
other: they take turns in short blocks (A B A B …), each operation is timed by itself, and
what is compared are medians, 99th percentiles and their ratios. What a contender really
synced is counted from outside, by strace (`agentstore.tools.bench.syncs`), not believed.
"""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import metadata, util

from agentstore.engine.files import Files

Operation = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that is measured: its name, its settings in words, and how to set it up in an empty directory.

    `open(directory)` is a context manager that gives the operation to be timed.
    """

    name: str
    settings: str
    open: Callable[[str], AbstractContextManager[Operation]]


@dataclass(slots=True)
class Timing:
    """What one contender took: wall time of every operation, CPU time of the blocks (all in nanoseconds)."""

    wall_ns: list[int] = field(default_factory=list)
    thread_cpu_ns: int = 0
    process_cpu_ns: int = 0

    @property
    def p50_us(self) -> float:
        return percentile(self.wall_ns, 50) / 1000

    @property
    def p99_us(self) -> float:
        return percentile(self.wall_ns, 99) / 1000

    @property
    def cpu_us(self) -> float:
        """CPU of the calling thread, per operation."""
        return self.thread_cpu_ns / max(1, len(self.wall_ns)) / 1000

    @property
    def process_cpu_us(self) -> float:
        """CPU of the whole process (background threads too) in this contender's blocks, per operation."""
        return self.process_cpu_ns / max(1, len(self.wall_ns)) / 1000


def percentile(values: Sequence[int], percent: float) -> float:
    """The nearest-rank percentile; nan of nothing. O(n log n).

    >>> percentile([5, 1, 4, 2, 3], 50), percentile(range(1, 101), 99), percentile([7], 99)
    (3.0, 99.0, 7.0)
    """
    if not values:
        return float("nan")
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)  # ceiling
    return float(ordered[max(0, int(rank) - 1)])


def interleave(operations: dict[str, Operation], *, rounds: int, block: int) -> dict[str, Timing]:
    """Run every operation `rounds` x `block` times in turns: a block of A, a block of B, a block of A …

    The order inside a round rotates, so that nobody is always the one after the slow one.
    """
    timings = {name: Timing() for name in operations}
    names = list(operations)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            _block(operations[name], block, timings[name])
    return timings


def _block(operation: Operation, count: int, timing: Timing) -> None:
    clock = time.perf_counter_ns
    wall = timing.wall_ns
    process, thread = time.process_time_ns(), time.thread_time_ns()
    for _ in range(count):
        begin = clock()
        operation()
        wall.append(clock() - begin)
    timing.thread_cpu_ns += time.thread_time_ns() - thread
    timing.process_cpu_ns += time.process_time_ns() - process


def machine(directory: str) -> dict[str, object]:
    """What the numbers were measured on: they mean nothing without it."""
    return {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": Files().file_system(directory) or "unknown",
        "agentstore": metadata.version("agentstore-wal"),
        "google_crc32c": util.find_spec("google_crc32c") is not None,
    }


_TEXT = (
    "the flight to is was booked agent please check order refund customer status of a tool returned error retry file"
    " line function test passed value index which would have been updated account because policy within days request"
)
_WORDS = _TEXT.split()


def message(number: int, size_bytes: int = 600) -> dict[str, object]:
    """The `number`-th chat message: text of about `size_bytes`, different for each number, the same on every run.

    >>> message(3) == message(3) != message(4)
    True
    >>> len(str(message(3)["content"]))
    600
    """
    random_words = random.Random(number)
    words: list[str] = []
    length = 0
    while length < size_bytes:
        # Some of a conversation is not prose: numbers and ids do not compress.
        word = random_words.choice(_WORDS) if random_words.random() < 0.8 else f"{random_words.getrandbits(40):x}"
        words.append(word)
        length += len(word) + 1
    return {"role": "user" if number % 2 == 0 else "assistant", "content": " ".join(words)[:size_bytes]}
