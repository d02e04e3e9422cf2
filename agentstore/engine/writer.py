"""Steps 2 to 5 of a commit: the writers' lock, the dead, the transaction, the frame; and the roll.

A roll (going on in a new segment) is a step of its own: the transaction that needs it is
given up and run again. See docs/engine.md for why each sentence of this is as it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import lmdb

from agentstore.engine.api import KEY_BYTES_MAX
from agentstore.engine.base import Base
from agentstore.engine.control import DURABLE_LSN, FAILED, LAST_SEGMENT
from agentstore.engine.files import FULL_DISK, translate
from agentstore.engine.lmdbfile import translate_lmdb
from agentstore.engine.merge import merged
from agentstore.engine.parts import Parts
from agentstore.engine.segment import (
    FRAME,
    FRAME_BYTES,
    FRAME_PAYLOAD_BYTES_MAX,
    FRAMES_AT,
    MARKER_MASK,
    SEGMENT_BYTES,
    Batch,
    Header,
    decode_batch,
    encode_batch,
    encode_frame,
    epoch_crc,
    frame_at,
)
from agentstore.engine.sync import Syncer
from agentstore.engine.tail import (
    ENTRY,
    ENTRY_BYTES,
    POSITION_KEY,
    TOMBSTONE,
    TailPosition,
    decode_position,
    encode_position,
    put_batch,
)
from agentstore.errors import CommitUnknown, DiskFull, LimitExceeded

T = TypeVar("T")

PAGE_BYTES = 4096

WAL_HARD_BYTES = 32 * 1024 * 1024
"""Segments that are not folded yet: at this size a committer that needs a new one folds first."""

_MARKER = FRAME.unpack_from


class Transaction:
    """What `fn` sees: reads from tail, then base; writes go to tail and into the batch of the frame.

    Base may be begun late here: while the writers' lock is held no entry leaves tail, so a key
    that is not in tail has its newest value in base, whatever was folded since.
    """

    __slots__ = ("_base", "_base_txn", "_batch", "_newest", "_stamp", "_tail", "lsn")

    def __init__(self, tail: Any, base: Base, lsn: int) -> None:
        self._tail = tail
        self._base = base
        self._base_txn: Any = None
        self._batch: Batch = []
        self._stamp = ENTRY.pack(lsn) + b"\1"
        self._newest = 0
        self.lsn = lsn

    def get(self, key: bytes) -> bytes | None:
        raw: bytes | None = self._tail.get(key)
        if raw is None:
            return self._base.get(self._base_txn or self._begin_base(), key)
        (lsn,) = ENTRY.unpack_from(raw)
        if lsn > self._newest and lsn < self.lsn:
            self._newest = lsn
        return None if raw[8] == TOMBSTONE else raw[ENTRY_BYTES:]

    def put(self, key: bytes, value: bytes) -> None:
        if len(key) > KEY_BYTES_MAX:
            raise LimitExceeded(f"a key of {len(key)} bytes is over KEY_BYTES_MAX ({KEY_BYTES_MAX})")
        self._tail.put(key, self._stamp + value)
        self._batch.append((key, value))

    def delete(self, key: bytes) -> None:
        self._tail.put(key, ENTRY.pack(self.lsn) + b"\0")
        self._batch.append((key, None))

    def scan(self, lo: bytes, hi: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        base = self._base_txn or self._begin_base()
        for key, value, lsn in merged(self._tail, base, self._base, lo, hi, reverse):
            if lsn > self._newest and lsn < self.lsn:
                self._newest = lsn
            if value is not None:
                yield key, value

    def _begin_base(self) -> Any:
        self._base_txn = self._base.begin()
        return self._base_txn

    def end(self) -> None:
        if self._base_txn is not None:
            self._base_txn.abort()


class _Roll(Exception):
    """The transaction was given up: a segment with room for this many bytes of frames is needed first."""

    def __init__(self, room: int) -> None:
        self.room = room


class Writer:
    """Runs transactions one at a time, across processes. Safe for threads."""

    def __init__(self, parts: Parts, syncer: Syncer, *, fold: Callable[[], object], rolled: Callable[[], None]) -> None:
        self._parts = parts
        self._syncer = syncer
        self._fold = fold
        self._rolled = rolled
        self._words = parts.control.words
        self._env = parts.tail.env
        self._pread = parts.files.pread
        self._pwrite = parts.files.pwrite
        self._fd = parts.segments.fd
        self._seeds: tuple[int, int] = (0, epoch_crc(0))
        self.rolls = 0
        self.finished_dead = 0

    def run(self, fn: Callable[[Any], T]) -> tuple[T, int]:
        """Run `fn`, write its frame, return its value and the LSN that must be durable before anybody hears of it."""
        while True:
            try:
                return self._attempt(fn)
            except _Roll as roll:
                room = roll.room
            self._roll(room)

    # --- one attempt -------------------------------------------------------------------

    def _attempt(self, fn: Callable[[Any], T]) -> tuple[T, int]:
        txn: Any = None
        tx: Transaction | None = None
        try:
            txn, position = self._begin()
            if position.must_roll or self._words[LAST_SEGMENT] > position.segment:
                raise _Roll(0)
            tx = Transaction(txn, self._parts.base, position.lsn + 1)
            try:
                value = fn(tx)
            except lmdb.Error:
                raise
            except Exception:
                # What made `fn` give up must be as durable as what it would have returned.
                txn.abort()
                self._syncer.sync(tx._newest)
                raise
            if not tx._batch:
                newest = tx._newest
                txn.abort()
                self._syncer.sync(newest)
                return value, newest
            self._write(txn, position, tx)
            return value, tx.lsn
        except lmdb.Error as error:
            raise translate_lmdb(error, self._parts.tail.path) from error
        finally:
            if tx is not None:
                tx.end()
            if txn is not None:
                txn.abort()

    def _begin(self) -> tuple[Any, TailPosition]:
        """The writers' lock, with the dead finished."""
        while True:
            txn: Any = self._env.begin(write=True)
            try:
                if self._words[FAILED]:
                    raise self._parts.failure()
                position = decode_position(txn.get(POSITION_KEY))
                if position.must_roll or not self._finish_dead(txn, position):
                    return txn, position
                txn.commit()
            except BaseException:
                txn.abort()
                raise

    def _finish_dead(self, txn: Any, position: TailPosition) -> bool:
        """Put the frame of a writer that died or failed after writing it into tail; overwrite anything else there."""
        fd = self._fd(position.file)
        if fd is None:
            raise self._parts.poison(FileNotFoundError(2, "no such file"), self._parts.segments.path(position.file))
        head = self._pread(fd, FRAME_BYTES, position.offset)
        if len(head) < FRAME_BYTES:
            return False
        marker, length, _, lsn, _, previous = _MARKER(head)
        if marker != position.epoch ^ MARKER_MASK or lsn != position.lsn + 1 or previous != position.crc:
            return False
        if length > min(FRAME_PAYLOAD_BYTES_MAX, position.size - position.offset - FRAME_BYTES):
            return False
        data = self._pread(fd, FRAME_BYTES + length, position.offset)
        frame = frame_at(data, 0, position.epoch)
        if frame is None:
            return False
        put_batch(txn, decode_batch(data[FRAME_BYTES:]), lsn)
        txn.put(
            POSITION_KEY,
            encode_position(
                lsn,
                position.segment,
                position.epoch,
                position.file,
                position.size,
                position.offset + frame.end,
                frame.crc,
                False,
            ),
        )
        self.finished_dead += 1
        return True

    def _write(self, txn: Any, position: TailPosition, tx: Transaction) -> None:
        """The frame, then the tail that knows it."""
        payload = encode_batch(tx._batch)
        if len(payload) > FRAME_PAYLOAD_BYTES_MAX:
            raise LimitExceeded(
                f"a transaction of {len(payload)} bytes is over FRAME_PAYLOAD_BYTES_MAX ({FRAME_PAYLOAD_BYTES_MAX})"
            )
        end = position.offset + FRAME_BYTES + len(payload)
        if end > position.size:
            raise _Roll(FRAME_BYTES + len(payload))
        epoch, seed = self._seeds
        if epoch != position.epoch:
            epoch, seed = self._seeds = (position.epoch, epoch_crc(position.epoch))
        frame, crc = encode_frame(epoch, seed, tx.lsn, self._words[DURABLE_LSN], position.crc, payload)
        fd = self._fd(position.file)
        assert fd is not None
        txn.put(
            POSITION_KEY,
            encode_position(tx.lsn, position.segment, epoch, position.file, position.size, end, crc, False),
        )
        try:
            self._pwrite(fd, frame, position.offset)
        except OSError as error:
            if error.errno in FULL_DISK:
                raise DiskFull(
                    f"no space left for a frame of {len(frame)} bytes in segment {position.segment}; nothing was lost"
                ) from error
            raise self._parts.poison(
                error, f"write to segment {position.segment} at offset {position.offset}"
            ) from error
        try:
            txn.commit()
        except lmdb.Error as error:
            raise CommitUnknown(
                f"the frame with LSN {tx.lsn} is complete, but {self._parts.tail.path} could not take it ({error}): "
                "it may become part of the log; reload before you try again"
            ) from error

    # --- the roll ----------------------------------------------------------------------

    def _roll(self, room: int) -> None:
        """Go on in a new segment with space for `room` bytes of frames."""
        if not self._try_roll(room, limited=True):
            # Over WAL_HARD_BYTES: fold before the log grows, holding no lock.
            self._fold()
            self._try_roll(room, limited=False)

    def _try_roll(self, room: int, *, limited: bool) -> bool:
        """Roll under the writers' lock; False if the log is at its limit."""
        txn: Any = None
        try:
            txn, position = self._begin()
            full = position.offset + max(room, FRAME_BYTES) > position.size
            if not (full or position.must_roll or self._words[LAST_SEGMENT] > position.segment):
                return True  # somebody else has rolled since
            applied = self._parts.base.position().applied_lsn
            if limited and self._parts.segments.live_bytes(applied, position) >= WAL_HARD_BYTES:
                return False
            self._enter_segment(txn, position, room, applied)
        except lmdb.Error as error:
            raise translate_lmdb(error, self._parts.tail.path) from error
        finally:
            if txn is not None:
                txn.abort()
        self._rolled()
        return True

    def _enter_segment(self, txn: Any, position: TailPosition, room: int, applied_lsn: int) -> None:
        parts, words = self._parts, self._words
        needed = FRAMES_AT + room
        size = SEGMENT_BYTES if needed <= SEGMENT_BYTES else -(-needed // PAGE_BYTES) * PAGE_BYTES
        number = max(words[LAST_SEGMENT], position.segment) + 1
        try:
            file = parts.segments.take(size, applied_lsn, position.file)
        except OSError as error:
            raise (translate(error, "a new WAL segment") or parts.poison(error, "a new WAL segment")) from error
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
            parts.segments.write_header(file, header)
        except OSError as error:
            raise parts.poison(error, f"the header of segment {number}") from error
        txn.put(POSITION_KEY, encode_position(position.lsn, number, epoch, file, size, FRAMES_AT, position.crc, False))
        txn.commit()
        parts.segments.remember_last(position.file, position.epoch, position.lsn)
        self.rolls += 1
