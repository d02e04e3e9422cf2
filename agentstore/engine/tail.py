"""tail.mdb: the newest value or tombstone of every key that the WAL holds beyond base.

Never synced and disposable: recovery makes it anew from nothing, since replay has put
everything into base. Its write transaction is the writers' lock, across processes: the
kernel frees it if the holder dies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import lmdb

from agentstore.engine.files import Files
from agentstore.engine.lmdbfile import MAP_BYTES, open_environment, translate_lmdb

POSITION_KEY = b"\xff"
"""Behind every key of `keys.encode`: beside what an agent wrote last, so that a commit dirties fewer pages."""
_POSITION = struct.Struct("<QQQQQQIB")

ENTRY = struct.Struct("<Q")
ENTRY_BYTES = 9  # LSN, then 0 for a tombstone or 1 for a value
TOMBSTONE = 0


class TailPosition(NamedTuple):
    """The end of the log as the committed tail knows it."""

    lsn: int
    segment: int
    epoch: int
    file: int
    """Random name of the segment's file, as in ``wal/<16 hex digits>.seg``."""
    size: int
    """Size of that file in bytes."""
    offset: int
    """Where the next frame goes."""
    crc: int
    """CRC of the newest frame."""
    must_roll: bool


new_tuple: Callable[[type[TailPosition], tuple[Any, ...]], TailPosition] = tuple.__new__
"""``new_tuple(TailPosition, fields)`` is what `TailPosition._make` does after a check: for the path of every commit."""

pack_position = _POSITION.pack
unpack_position = _POSITION.unpack


def decode_position(raw: bytes) -> TailPosition:
    return new_tuple(TailPosition, unpack_position(raw))


def put_batch(txn: Any, batch: dict[bytes, bytes | None], lsn: int) -> None:
    """Put the writes of frame `lsn` as they are."""
    stamp = ENTRY.pack(lsn)
    live = stamp + b"\1"
    put = txn.put
    for key, value in batch.items():
        put(key, stamp + b"\0" if value is None else live + value)


class Tail:
    """The open environment. Calls of it hold the engine's gate."""

    def __init__(self, files: Files, path: str, *, map_bytes: int = MAP_BYTES) -> None:
        self.path = path
        try:
            self.env: Any = open_environment(files, path, sync=False, create=False, map_bytes=map_bytes)
        except lmdb.Error as error:
            raise translate_lmdb(error, path) from error

    @classmethod
    def create(cls, files: Files, path: str, position: TailPosition) -> None:
        """A tail that holds nothing but the position."""
        files.remove(path)
        files.remove(path + "-lock")
        env = open_environment(files, path, sync=False, create=True)
        try:
            with env.begin(write=True) as txn:
                txn.put(POSITION_KEY, pack_position(*position))
        finally:
            env.close()

    def position(self) -> TailPosition:
        """The newest committed position. O(1)."""
        txn = self.env.begin()
        try:
            return decode_position(txn.get(POSITION_KEY))
        finally:
            txn.abort()

    def drop_folded(self, applied_lsn: int, after: bytes, limit: int) -> bytes | None:
        """Delete up to `limit` entries behind key `after` whose own LSN is at most `applied_lsn`.

        One short write transaction; returns the key to go on after, or None at the end.
        """
        txn = self.env.begin(write=True, buffers=True)
        try:
            cursor = txn.cursor()
            found = cursor.set_range(after + b"\0")
            last: bytes | None = None
            for _ in range(limit):
                if not found:
                    last = None
                    break
                last = bytes(cursor.key())
                if last != POSITION_KEY and ENTRY.unpack_from(cursor.value())[0] <= applied_lsn:
                    found = cursor.delete() and bool(cursor.key())
                else:
                    found = cursor.next()
            txn.commit()
            return last
        except BaseException:
            txn.abort()
            raise

    def close(self) -> None:
        self.env.close()
