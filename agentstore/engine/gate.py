"""The gate: what an engine does holds it shared; fork, close and poisoning hold it exclusively."""

from __future__ import annotations

import threading


class Gate:
    """A readers-writer lock for threads of one process, cheap on the shared side.

    A thread that is inside may enter again, also while somebody waits for the exclusive
    side: otherwise two nested reads and a fork would wait for each other.
    """

    __slots__ = ("_changed", "_closed", "_count", "_inside", "_mutex")

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._count = 0
        self._closed = False
        self._inside = threading.local()

    def enter(self) -> None:
        """Hold the gate shared."""
        inside = self._inside
        depth = getattr(inside, "depth", 0)
        with self._mutex:
            if self._closed and not depth:
                while self._closed:
                    self._changed.wait()
            self._count += 1
        inside.depth = depth + 1

    def leave(self) -> None:
        self._inside.depth -= 1
        with self._mutex:
            self._count -= 1
            if self._closed and not self._count:
                self._changed.notify_all()

    @property
    def held_here(self) -> bool:
        """Whether the calling thread is inside (it can then not hold the gate exclusively)."""
        return getattr(self._inside, "depth", 0) > 0

    def close(self) -> None:
        """Hold the gate exclusively: wait until nobody is inside, keep everybody out."""
        with self._mutex:
            while self._closed:
                self._changed.wait()
            self._closed = True
            try:
                while self._count:
                    self._changed.wait()
            except BaseException:
                self._closed = False
                self._changed.notify_all()
                raise

    def open(self) -> None:
        """Give the exclusive hold back."""
        with self._mutex:
            self._closed = False
            self._changed.notify_all()
