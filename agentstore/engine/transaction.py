"""What a transaction's function sees: tail over base, its own writes over both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentstore.engine.api import KEY_BYTES_MAX
from agentstore.engine.base import Base
from agentstore.engine.merge import merged
from agentstore.engine.segment import DELETED, ITEM
from agentstore.engine.tail import ENTRY, ENTRY_BYTES, TOMBSTONE
from agentstore.errors import LimitExceeded

_newest_of = ENTRY.unpack_from


def _not_a_key(key: bytes) -> LimitExceeded:
    return LimitExceeded(f"a key has 1 to {KEY_BYTES_MAX} bytes (KEY_BYTES_MAX), not {len(key)}")


class Transaction:
    """Reads through to tail and base; keeps its writes to itself until its frame is written.

    So that one function that raises costs nothing to undo, while those before it in the same group stay.
    Base may be begun late: as long as the writers' lock is held no entry leaves tail, so a key
    that is not in tail has its newest value in base, whatever was folded since.
    """

    __slots__ = ("_base", "_tail", "base_txn", "lsn", "newest", "writes")

    def __init__(self, tail: Any, base: Base, lsn: int) -> None:
        self._tail = tail
        self._base = base
        self.base_txn: Any = None
        """A read of base, once it was needed; whoever made the transaction ends it."""
        self.lsn = lsn
        self.newest = 0
        """The newest LSN that was read."""
        self.writes: dict[bytes, bytes | None] = {}

    def get(self, key: bytes) -> bytes | None:
        if key in self.writes:
            return self.writes[key]
        raw: bytes | None = self._tail.get(key)
        if raw is None:
            return self._base.get(self.base_txn or self._begin_base(), key)
        lsn = _newest_of(raw)[0]
        if lsn > self.newest:
            self.newest = lsn
        return None if raw[8] == TOMBSTONE else raw[ENTRY_BYTES:]

    def put(self, key: bytes, value: bytes) -> None:
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise _not_a_key(key)
        self.writes[key] = value

    def delete(self, key: bytes) -> None:
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise _not_a_key(key)
        self.writes[key] = None

    def scan(self, lo: bytes, hi: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        own = {key: value for key, value in self.writes.items() if lo <= key < hi}
        below = self._below(lo, hi, reverse)
        if own:
            # Rare, and short ranges: a scan of what the same transaction wrote.
            both: dict[bytes, bytes | None] = dict(below)
            both.update(own)
            pairs = sorted(both.items(), reverse=reverse)
            return ((key, value) for key, value in pairs if value is not None)
        return below

    def _below(self, lo: bytes, hi: bytes, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        base = self.base_txn or self._begin_base()
        for key, value, lsn in merged(self._tail, base, self._base, lo, hi, reverse):
            if lsn > self.newest:
                self.newest = lsn
            if value is not None:
                yield key, value

    def _begin_base(self) -> Any:
        self.base_txn = self._base.begin()
        return self.base_txn

    def payload(self) -> bytes:
        """The writes as a frame carries them."""
        parts: list[bytes] = []
        pack = ITEM.pack
        for key, value in self.writes.items():
            if value is None:
                parts += (pack(len(key), DELETED), key)
            else:
                parts += (pack(len(key), len(value)), key, value)
        return b"".join(parts)
