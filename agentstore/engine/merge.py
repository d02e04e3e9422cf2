"""Scanning tail over base: what tail has, value or tombstone, hides what base has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentstore.engine.base import Base, unseal
from agentstore.engine.tail import ENTRY, ENTRY_BYTES, TOMBSTONE

Pair = tuple[bytes, bytes]


def _ascending(txn: Any, lo: bytes, hi: bytes) -> Iterator[Pair]:
    with txn.cursor() as cursor:
        if cursor.set_range(lo):
            for key, raw in cursor:
                if key >= hi:
                    return
                yield key, raw


def _descending(txn: Any, lo: bytes, hi: bytes) -> Iterator[Pair]:
    with txn.cursor() as cursor:
        # set_range finds the first key not below hi: the one before it is the last one wanted.
        found = cursor.prev() if cursor.set_range(hi) else cursor.last()
        while found:
            key = cursor.key()
            if key < lo:
                return
            yield key, cursor.value()
            found = cursor.prev()


def merged(
    tail: Any, base_txn: Any, base: Base, lo: bytes, hi: bytes, reverse: bool
) -> Iterator[tuple[bytes, bytes | None, int]]:
    """(key, value or None for a tombstone, LSN or 0 from base) in order, each key once. Lazy.

    `tail` may be None (a store on a read-only file system).
    """
    walk = _descending if reverse else _ascending
    upper = iter(()) if tail is None else walk(tail, lo, hi)
    lower = walk(base_txn, lo, hi)
    above, below = next(upper, None), next(lower, None)
    while above is not None or below is not None:
        if above is None or (below is not None and below[0] != above[0] and (below[0] > above[0]) == reverse):
            assert below is not None
            yield below[0], unseal(below[0], below[1], base.path), 0
            below = next(lower, None)
            continue
        key, raw = above
        if below is not None and below[0] == key:
            below = next(lower, None)
        (lsn,) = ENTRY.unpack_from(raw)
        yield key, (None if raw[8] == TOMBSTONE else raw[ENTRY_BYTES:]), lsn
        above = next(upper, None)
