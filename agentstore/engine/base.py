"""base.mdb: everything up to `applied_lsn`, always consistent on disk.

Written by replay only. Each value is preceded by a CRC-32C over key and value, since
LMDB has no page checksums: a flipped bit is noticed when the record is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import lmdb

from agentstore.codec.crc import crc32c
from agentstore.engine.files import Files
from agentstore.engine.lmdbfile import MAP_BYTES, open_environment, translate_lmdb
from agentstore.errors import CorruptionError

META_KEY = b"\x01base"
"""Below 0x10, where no key of `keys.encode` begins."""

_META = struct.Struct("<16sQQQQI")
_CRC = struct.Struct("<I")
CRC_BYTES = _CRC.size


class Position(NamedTuple):
    """How far the log was applied, and where in the log that is."""

    applied_lsn: int
    segment: int
    epoch: int
    end: int
    crc: int


START = Position(0, 0, 0, 0, 0)


def seal(key: bytes, value: bytes) -> bytes:
    return _CRC.pack(crc32c(value, crc32c(key))) + value


def unseal(key: bytes, raw: bytes, path: str) -> bytes:
    """The value in `raw`; CorruptionError if it is not what was written under `key`."""
    value = raw[CRC_BYTES:]
    if len(raw) < CRC_BYTES or _CRC.unpack_from(raw)[0] != crc32c(value, crc32c(key)):
        raise CorruptionError(
            f"{path}: the record under key {key.hex()} fails its checksum; run 'agentstore verify' to see all "
            "that is damaged"
        )
    return value


class Base:
    """The open environment. Calls of it hold the engine's gate."""

    def __init__(self, files: Files, path: str, *, map_bytes: int = MAP_BYTES, frozen: bool = False) -> None:
        self.path = path
        try:
            self.env: Any = open_environment(files, path, sync=True, create=False, map_bytes=map_bytes, frozen=frozen)
        except lmdb.Error as error:
            raise translate_lmdb(error, path) from error

    @classmethod
    def create(cls, files: Files, path: str, uuid: bytes) -> None:
        """Write a base that holds nothing but its own record, and sync it."""
        env = open_environment(files, path, sync=True, create=True)
        try:
            with env.begin(write=True) as txn:
                txn.put(META_KEY, _encode_meta(uuid, START))
        finally:
            env.close()

    def begin(self) -> Any:
        """A read transaction."""
        return self.env.begin()

    def get(self, txn: Any, key: bytes) -> bytes | None:
        raw = txn.get(key)
        return None if raw is None else unseal(key, raw, self.path)

    def meta(self, txn: Any) -> tuple[bytes, Position]:
        """(store uuid, position)."""
        return self._decode_meta(txn.get(META_KEY))

    def position(self) -> Position:
        txn = self.env.begin()
        try:
            return self.meta(txn)[1]
        finally:
            txn.abort()

    def settled_position(self) -> Position:
        """The position as the next writer finds it. What `position` reads may be older: a process that is killed inside
        LMDB's commit can leave a state that is complete on disk and that readers see only after the next writer."""
        txn = self.env.begin(write=True)
        try:
            return self.meta(txn)[1]
        finally:
            txn.abort()

    def apply(self, writes: dict[bytes, bytes | None], reached: Position, first_lsn: int) -> None:
        """Put and delete `writes` and move to `reached`, in one synchronous transaction.

        `first_lsn` is the LSN of the first frame in `writes`: it must follow what is applied.
        """
        txn = self.env.begin(write=True)
        try:
            uuid, now = self._decode_meta(txn.get(META_KEY))
            if now.applied_lsn + 1 != first_lsn:
                raise AssertionError(f"replay from LSN {first_lsn} onto a base at {now.applied_lsn}")
            for key in sorted(writes):
                value = writes[key]
                if value is None:
                    txn.delete(key)
                else:
                    txn.put(key, seal(key, value))
            txn.put(META_KEY, _encode_meta(uuid, reached))
            txn.commit()
        except BaseException:
            txn.abort()
            raise

    def damaged_records(self) -> Iterator[str]:
        """A sentence for each record that fails its checksum, and one if their count is off."""
        txn = self.env.begin()
        try:
            count = 0
            for key, raw in txn.cursor():
                count += 1
                if key == META_KEY:
                    continue
                try:
                    unseal(key, raw, self.path)
                except CorruptionError as error:
                    yield str(error)
            entries = txn.stat()["entries"]
            if entries != count:
                yield f"{self.path}: {entries} records are counted, {count} are found"
        finally:
            txn.abort()

    def _decode_meta(self, raw: bytes | None) -> tuple[bytes, Position]:
        if raw is None or len(raw) != _META.size + CRC_BYTES:
            raise CorruptionError(
                f"{self.path}: its own record is missing; run 'agentstore verify', keep a copy of the directory"
            )
        uuid, *numbers = _META.unpack(unseal(META_KEY, raw, self.path))
        return uuid, Position._make(numbers)

    def close(self) -> None:
        self.env.close()


def _encode_meta(uuid: bytes, position: Position) -> bytes:
    return seal(META_KEY, _META.pack(uuid, *position))
