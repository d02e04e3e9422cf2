"""The gate: what an engine does holds it shared; fork, close and poisoning hold it exclusively."""

from __future__ import annotations

import threading
from collections import deque

_ident = threading.get_ident


class Gate:
    """A readers-writer lock for threads of one process whose shared side is two atomic list operations.

    A thread that is inside may enter again, also while somebody waits for the exclusive
    side: otherwise two nested reads and a fork would wait for each other.
    """

    __slots__ = ("_changed", "_closed", "_closer", "_inside")

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._closer = 0
        self._inside: deque[int] = deque()

    def enter(self) -> None:
        """Hold the gate shared."""
        # In this order (first in, then look), while `close` first closes and then looks: one of the two sees the other.
        me = _ident()
        try:
            self._inside.append(me)
            if not self._closed or self._inside.count(me) > 1:
                return
        except BaseException:
            # A signal's handler raised just behind the append: nobody would leave for us.
            self._inside.remove(me)
            raise
        self._wait(me)

    def _wait(self, me: int) -> None:
        with self._changed:
            # The condition's lock is held from the last look to the entry, and `close` takes it.
            self._inside.remove(me)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._closed)
            self._inside.append(me)

    def leave(self) -> None:
        self._inside.remove(_ident())
        if self._closed:
            with self._changed:
                self._changed.notify_all()

    @property
    def held_here(self) -> bool:
        """Whether the calling thread is inside (it can then not hold the gate exclusively)."""
        return _ident() in self._inside

    def close(self) -> None:
        """Hold the gate exclusively: wait until nobody is inside, keep everybody out. Again by its holder: nothing."""
        me = _ident()
        with self._changed:
            if self._closed and self._closer == me:
                return
            self._changed.wait_for(lambda: not self._closed)
            self._closed, self._closer = True, me
            try:
                self._changed.wait_for(lambda: not self._inside)
            except BaseException:
                self._closed, self._closer = False, 0
                self._changed.notify_all()
                raise

    def open(self) -> None:
        """Give the exclusive hold back."""
        with self._changed:
            self._closed, self._closer = False, 0
            self._changed.notify_all()
