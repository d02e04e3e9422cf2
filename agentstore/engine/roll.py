"""The roll: going on in a new segment. A step of its own, holding the writers' lock.

The order is what makes a predecessor record a proof: the old segment is synced before the
header that names it is written, and a number is given out before anything carries it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from agentstore.engine.control import LAST_SEGMENT
from agentstore.engine.parts import Parts
from agentstore.engine.segment import FRAME_BYTES, FRAMES_AT, SEGMENT_BYTES, Header
from agentstore.engine.sync import Syncer
from agentstore.engine.tail import POSITION_KEY, TailPosition, pack_position

PAGE_BYTES = 4096

WAL_HARD_BYTES = 32 * 1024 * 1024
"""Segments that are not folded yet: at this size a committer that needs a new one folds first."""


class Roller:
    """Gives the log its next segment. `begin` takes the writers' lock and finishes the dead."""

    def __init__(
        self, parts: Parts, syncer: Syncer, begin: Callable[[], tuple[Any, TailPosition]], fold: Callable[[], object]
    ) -> None:
        self._parts = parts
        self._syncer = syncer
        self._begin = begin
        self._fold = fold
        self.count = 0

    def roll(self, room: int) -> None:
        """Go on in a segment with space for `room` bytes of frames, unless somebody did meanwhile."""
        if not self._try_roll(room, limited=True):
            # Over WAL_HARD_BYTES: fold before the log grows, holding no lock.
            self._fold()
            self._try_roll(room, limited=False)

    def due(self, position: TailPosition) -> bool:
        """Whether the next frame must not go where the position says: after a recovery, or when a roller died."""
        return position.must_roll or self._parts.control.words[LAST_SEGMENT] > position.segment

    def _try_roll(self, room: int, *, limited: bool) -> bool:
        """False if the log is at its limit."""
        parts = self._parts
        txn, position = self._begin()
        try:
            full = position.offset + max(room, FRAME_BYTES) > position.size
            if not full and not self.due(position):
                return True  # somebody else has rolled since
            applied = parts.base.position().applied_lsn
            if limited and parts.segments.live_bytes(applied, position) >= WAL_HARD_BYTES:
                return False
            self._enter_segment(txn, position, room, applied)
        finally:
            txn.abort()
        self.count += 1
        return True

    def _enter_segment(self, txn: Any, position: TailPosition, room: int, applied_lsn: int) -> None:
        parts, words = self._parts, self._parts.control.words
        needed = FRAMES_AT + room
        size = SEGMENT_BYTES if needed <= SEGMENT_BYTES else -(-needed // PAGE_BYTES) * PAGE_BYTES
        number = max(words[LAST_SEGMENT], position.segment) + 1
        try:
            file = parts.segments.take(size, applied_lsn, position.file)
        except OSError as error:
            raise parts.fault(error, "a new WAL segment") from error
        # Durable before the new header says so: a predecessor record is a proof.
        self._syncer.sync_retired(position.file, position.offset)
        # From here on nobody else uses this number, even if this process dies before the header is whole.
        words[LAST_SEGMENT] = number
        epoch = secrets.randbits(64)
        header = Header(
            uuid=parts.uuid,
            size=size,
            number=number,
            epoch=epoch,
            first_lsn=position.lsn + 1,
            previous_number=position.segment,
            previous_epoch=position.epoch,
            previous_lsn=position.lsn,
            previous_end=position.offset,
        )
        try:
            fd = parts.segments.write_header(file, header)
        except OSError as error:
            # What stands there of a header names no frame, and the next roller takes another number and file.
            raise parts.fault(error, f"the header of segment {number}") from error
        try:
            parts.files.fdatasync(fd)
        except OSError as error:
            raise parts.poison(error, f"sync of the header of segment {number}") from error
        parts.check()
        txn.put(POSITION_KEY, pack_position(position.lsn, number, epoch, file, size, FRAMES_AT, position.crc, False))
        txn.commit()
        parts.segments.remember_last(position.file, position.epoch, position.lsn)
