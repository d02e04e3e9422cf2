"""A process that dies by SIGKILL at the n-th thing that it commits: for enumerating every boundary of a program.

A commit is a frame in the log, whoever wrote it: a checkpoint, an intent, a receipt, a lease. The
points are ``commit-before`` (nothing of it is written), ``commit-inside`` (half of it is) and
``commit-after`` (it is on stable storage, and its writer has not heard of it). Run a program
with n = 1, 2, 3 … until it ends by itself, and every boundary that it has was one to die at:

    crashpoints.install("commit-after", n)       # before the store is opened
    with Store.open(path) as store:
        agent.run(store, "trip-1", "book it", input_id="1")

>>> CrashingFiles("commit-after", 0)
Traceback (most recent call last):
ValueError: there is no commit number 0; the first is 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from agentstore.engine.files import Files, set_default_files
from agentstore.engine.segments import SEGMENT
from agentstore.testing.faults import Call, FaultyFiles, die, is_frame

T = TypeVar("T")

POINTS: Final = ("commit-before", "commit-inside", "commit-after")


class CrashingFiles(FaultyFiles):
    """System calls that end the process at one commit. Safe for threads.

    Of commits that share a sync, the process dies at the first sync that covers the n-th.
    """

    def __init__(self, point: str, nth: int, *, real: Files | None = None) -> None:
        if point not in POINTS:
            raise ValueError(f"there is no crash point {point!r}; the points are {', '.join(POINTS)}")
        if nth < 1:
            raise ValueError(f"there is no commit number {nth}; the first is 1")
        super().__init__(real=real)
        self._point = point
        self._nth = nth
        self.frames = 0
        """Frames begun so far."""

    def around(self, call: Call, run: Callable[[], T], partly: Callable[[float], object]) -> T:
        if is_frame(call):
            with self._mutex:
                self.frames += 1
                due = self.frames == self._nth and self._point != "commit-after"
            if due:
                if self._point == "commit-inside":
                    partly(0.5)
                die()
        elif call.name == "fdatasync" and self._point == "commit-after" and call.path.endswith(SEGMENT):
            with self._mutex:
                due = self.frames >= self._nth
            result = super().around(call, run, partly)
            if due:
                die()
            return result
        return super().around(call, run, partly)


def install(point: str, nth: int) -> CrashingFiles:
    """Have every store that this process opens from now on end it at its `nth` commit. For programs under test."""
    files = CrashingFiles(point, nth)
    set_default_files(files)
    return files
