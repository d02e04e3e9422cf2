"""Folding: replaying the durable part of the WAL into base, so that segments can be used again."""

from __future__ import annotations

import lmdb

from agentstore.engine.control import DURABLE_LSN
from agentstore.engine.lmdbfile import translate_lmdb
from agentstore.engine.log import LogReader, batches, chain
from agentstore.engine.parts import Parts
from agentstore.engine.segments import Found
from agentstore.errors import CorruptionError, StoreFailed

WAL_SOFT_BYTES = 8 * 1024 * 1024
"""Segments that are not folded yet: at this size the background folds."""

TAIL_SLICE = 256
"""Entries dropped from tail per transaction: it holds the writers' lock."""


class Folder:
    """One fold at a time, across processes. Safe for threads."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.folds = 0

    def fold(self, *, wait: bool = False) -> bool:
        """Replay up to the durable LSN and drop what tail holds of it. False if somebody else is at it.

        The lock is held from the first read to the last deletion. O(log + tail).
        """
        lock = self._parts.fold_lock
        try:
            if not lock.acquire(wait=wait):
                return False
            try:
                self._parts.check()
                self._replay()
                self._clear_tail()
            finally:
                lock.release()
        except lmdb.Error as error:
            raise self._failed(error, self._parts.path) from error
        except OSError as error:
            raise self._parts.fault(error, "a fold") from error
        self.folds += 1
        return True

    def _replay(self) -> None:
        parts = self._parts
        durable = parts.control.words[DURABLE_LSN]
        # After the durable LSN, so that the active segment and what leads to it cover all of it.
        active = parts.tail.position()
        base = parts.base.settled_position()
        if durable <= base.applied_lsn:
            return
        headers = parts.segments.headers()
        top = _named(headers, active.segment, active.epoch)
        links = chain(headers, base, top)
        reader = LogReader(parts.segments, links, base, durable_lsn=durable, to=durable)
        for replay in batches(reader):
            try:
                parts.base.apply(replay.writes, replay.reached, replay.first_lsn)
            except lmdb.Error as error:
                raise self._failed(error, parts.base.path) from error

    def _clear_tail(self) -> None:
        tail = self._parts.tail
        try:
            # Only to notice a failed write-back, which would serve stale pages from here on.
            tail.env.sync(True)
        except lmdb.Error as error:
            raise self._parts.poison(OSError(getattr(error, "code", 0), str(error)), tail.path) from error
        applied = self._parts.base.position().applied_lsn
        after: bytes | None = b""
        while after is not None:
            after = tail.drop_folded(applied, after, TAIL_SLICE)

    def _failed(self, error: lmdb.Error, what: str) -> Exception:
        typed = translate_lmdb(error, what)
        if isinstance(typed, StoreFailed):
            return self._parts.poison(OSError(getattr(error, "code", 0), str(error)), what)
        return typed


def _named(headers: list[Found], number: int, epoch: int) -> Found:
    for found in headers:
        if (found.header.number, found.header.epoch) == (number, epoch):
            return found
    raise CorruptionError(
        f"the active segment {number} of the WAL is missing; keep a copy of the directory, then run 'agentstore verify'"
    )
