"""Deleting a thread: unreachable at once, its records removed in bounded slices."""

from __future__ import annotations

from typing import Final

from agentstore import records
from agentstore.engine.api import Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.records import Head, ThreadKeys, int_part

SLICE_RECORDS: Final = 1000
"""Records removed in one transaction."""


def unlink(tx: Tx, keys: ThreadKeys, name: bytes, head: Head) -> None:
    """Take a thread out of the indexes and remove its records; those beyond a slice are left for `finish`."""
    records.delete_name(tx, keys.number, name, head.token)
    # The head first: without it no handle can read or write the thread, whatever is still there.
    tx.delete(keys.head)
    if not remove_slice(tx, keys.prefix):
        tx.put(records.GONE + int_part(keys.number), b"")


def remove_slice(tx: Tx, prefix: bytes) -> bool:
    """Remove up to `SLICE_RECORDS` records under a prefix; whether nothing is left."""
    doomed: list[bytes] = []
    for key, _ in tx.scan(prefix, records.end_of(prefix)):
        if len(doomed) == SLICE_RECORDS:
            break
        doomed.append(key)
    else:
        for key in doomed:
            tx.delete(key)
        return True
    for key in doomed:
        tx.delete(key)
    return False


def finish(engine: EmbeddedEngine, number: int) -> bool:
    """Remove one more slice of a deleted thread; whether it was the last."""
    mark = records.GONE + int_part(number)

    def write(tx: Tx) -> bool:
        if tx.get(mark) is None:
            return True
        if not remove_slice(tx, ThreadKeys(number).prefix):
            return False
        tx.delete(mark)
        return True

    return engine.transact(write).value


def leftovers(engine: EmbeddedEngine) -> list[int]:
    """Numbers of deleted threads that still have records: their deletion was interrupted."""
    with engine.read() as snap:
        low = records.GONE
        return [records.seq_of(key, low) for key, _ in snap.scan(low, records.end_of(low))]


def finish_all(engine: EmbeddedEngine) -> None:
    """Remove all leftovers. O(their records)."""
    for number in leftovers(engine):
        while not finish(engine, number):
            pass


class Sweeper:
    """Removes, slice by slice in the background, what deletions that were interrupted before the open left behind."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._numbers: list[int] | None = None

    def run(self) -> bool:
        """Remove one slice; whether there was one."""
        if self._numbers is None:
            self._numbers = leftovers(self._engine)
        if not self._numbers:
            return False
        if finish(self._engine, self._numbers[-1]):
            self._numbers.pop()
        return True
