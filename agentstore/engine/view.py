"""A consistent view for readers: tail first, then base, both read transactions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentstore.engine.control import DURABLE_LSN
from agentstore.engine.merge import merged
from agentstore.engine.parts import Parts
from agentstore.engine.sync import Syncer
from agentstore.engine.tail import ENTRY, ENTRY_BYTES, POSITION_KEY, TOMBSTONE, decode_position


class View:
    """A snapshot. What it returns is durable: it helps with the sync before it shows anything newer.

    The other way round (base first) would miss what was folded in between. If base was
    folded beyond this tail, both are begun again. For one thread.
    """

    __slots__ = ("_base", "_base_txn", "_syncer", "_tail_txn", "_words", "lsn")

    def __init__(self, parts: Parts, syncer: Syncer) -> None:
        self._base = parts.base
        self._words = parts.control.words
        self._syncer = syncer
        while True:
            tail = parts.tail.env.begin()
            base = self._base.begin()
            self.lsn = decode_position(tail.get(POSITION_KEY)).lsn
            if self._base.meta(base)[1].applied_lsn <= self.lsn:
                break
            tail.abort()
            base.abort()
        self._tail_txn: Any = tail
        self._base_txn: Any = base

    def get(self, key: bytes) -> bytes | None:
        raw: bytes | None = self._tail_txn.get(key)
        if raw is None:
            return self._base.get(self._base_txn, key)
        (lsn,) = ENTRY.unpack_from(raw)
        if lsn > self._words[DURABLE_LSN]:
            self._syncer.sync(lsn)
        return None if raw[8] == TOMBSTONE else raw[ENTRY_BYTES:]

    def scan(self, lo: bytes, hi: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        for key, value, lsn in merged(self._tail_txn, self._base_txn, self._base, lo, hi, reverse):
            if lsn > self._words[DURABLE_LSN]:
                self._syncer.sync(lsn)
            if value is not None:
                yield key, value

    def end(self) -> None:
        self._tail_txn.abort()
        self._base_txn.abort()


class FrozenView:
    """Base alone: the log is empty and nobody can write."""

    __slots__ = ("_base", "_txn", "lsn")

    def __init__(self, base: Any) -> None:
        self._base = base
        self._txn = base.begin()
        self.lsn: int = base.meta(self._txn)[1].applied_lsn

    def get(self, key: bytes) -> bytes | None:
        value: bytes | None = self._base.get(self._txn, key)
        return value

    def scan(self, lo: bytes, hi: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        for key, value, _ in merged(None, self._txn, self._base, lo, hi, reverse):
            if value is not None:
                yield key, value

    def end(self) -> None:
        self._txn.abort()
