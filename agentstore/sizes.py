"""How many bytes of a store go where: by kind of record, and by thread. What `Store.sizes` does.

Counted are keys and values as they are stored, compressed; what LMDB adds (page headers, free pages, half-full pages)
is the difference to the size of the files.
"""

from __future__ import annotations

import heapq
from typing import Final, NamedTuple

from agentstore import records
from agentstore.engine import keys
from agentstore.engine.api import Reader
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.errors import CorruptionError

KINDS: Final = {
    "h": "heads",
    "c": "checkpoints",
    "q": "packs",
    "s": "snapshots",
    "k": "chunks",
    "p": "pins",
    "i": "effects",
    "e": "effects",
    "r": "effect index",
    "l": "leases",
    "d": "decisions",
    "v": "events",
    "x": "retention",
    "y": "retention",
}
"""Name of a record of a thread by the second part of its key. A new kind needs one line here; without it the record is
counted as ``other``."""

STORE_KINDS: Final = {
    "n": "names",
    "t": "names",
    "g": "deleted threads",
    "m": "counters",
    "o": "once",
    "w": "leases",
    "z": "dictionaries",
}
"""The same for the first part of the keys that belong to no thread."""

OTHER: Final = "other"

_INT: Final = keys.encode(0)[0]
_INT_BYTES_MAX: Final = keys.encode(keys.INT_MAX)[0] - _INT
_TEXT: Final = keys.encode("h")[0]

SLICE_RECORDS: Final = 20_000
"""Records counted in one snapshot, which pins pages while it is open."""


class KindSize(NamedTuple):
    """Records of one kind: how many, and bytes of their keys and values."""

    records: int
    bytes: int


class ThreadSize(NamedTuple):
    """A thread with the bytes of its records' keys and values."""

    thread_id: str
    records: int
    bytes: int


class Sizes(NamedTuple):
    """What `Store.sizes` counted."""

    records: int
    bytes: int
    kinds: dict[str, KindSize]
    """By name, the largest first."""
    threads: list[ThreadSize]
    """The largest, the largest first."""


class _Counting:
    def __init__(self) -> None:
        self.kinds: dict[str, list[int]] = {}
        self.threads: dict[int, list[int]] = {}

    def add(self, key: bytes, value: bytes) -> None:
        size = len(key) + len(value)
        number, kind = _kind_of(key)
        for counted in (
            self.kinds.setdefault(kind, [0, 0]),
            *([] if number is None else [self.threads.setdefault(number, [0, 0])]),
        ):
            counted[0] += 1
            counted[1] += size


def sizes(engine: EmbeddedEngine, threads_max: int) -> Sizes:
    """Count every record, slice by slice: threads that grow meanwhile may or may not be counted whole. O(store)."""
    counting = _Counting()
    low, high = b"\x10", b"\xff"
    while low:
        with engine.read() as snap:
            low = _slice(snap, low, high, counting)
    largest = heapq.nlargest(threads_max, counting.threads.items(), key=lambda pair: (pair[1][1], -pair[0]))
    with engine.read() as snap:
        threads = [ThreadSize(_name_of(snap, number), *counted) for number, counted in largest]
    kinds = sorted(counting.kinds.items(), key=lambda pair: -pair[1][1])
    return Sizes(
        sum(counted[0] for counted in counting.kinds.values()),
        sum(counted[1] for counted in counting.kinds.values()),
        {name: KindSize(*counted) for name, counted in kinds},
        threads,
    )


def _slice(snap: Reader, low: bytes, high: bytes, counting: _Counting) -> bytes:
    """Count the next records; the key to go on at, empty at the end."""
    for count, (key, value) in enumerate(snap.scan(low, high)):
        if count == SLICE_RECORDS:
            return key
        counting.add(key, value)
    return b""


def _kind_of(key: bytes) -> tuple[int | None, str]:
    """(number of the thread, name of the kind) of a record. Read by hand: `keys.decode` reads all parts of a key."""
    size = key[0] - _INT
    if 0 <= size <= _INT_BYTES_MAX:
        at = 1 + size
        return int.from_bytes(key[1:at], "big"), KINDS.get(_letter(key, at), OTHER)
    return None, STORE_KINDS.get(_letter(key, 0), OTHER)


def _letter(key: bytes, at: int) -> str:
    """The text of one letter that stands at `at` in a key; empty if there is something else."""
    part = key[at : at + 3]
    return chr(part[1]) if len(part) == 3 and part[0] == _TEXT and not part[2] else ""


def _name_of(snap: Reader, number: int) -> str:
    name = snap.get(records.CREATED + records.int_part(number))
    if name is None:
        return f"(number {number}, deleted)"
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise CorruptionError(f"the name of thread number {number} is damaged; run 'agentstore verify'") from error
