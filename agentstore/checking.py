"""Every invariant of the store, checked: what `Store.check` and ``agentstore verify`` run, and every crash test.

The rules, in the order in which they are looked at:

1.  The engine's own (`EmbeddedEngine.verify`).
2.  Every name leads to a number, that number's entry in the creation index back to the name, and both to a head; the
    counters agree with what there is; no record belongs to a number without a thread, but to one marked gone.
3.  The head names a checkpoint of its commit id, the next seq is above all there are.
4.  Every checkpoint but the first has a parent that came before; all records can be read.
5.  Every checkpoint's state, rebuilt op by op, matches the checksum of every op, of every field, and of the state;
    packs have no others between their first and last member, and match the checksums of the states at both ends.
6.  Every snapshot is of a checkpoint that is there, its bytes match their checksums, and it is the state that the
    deltas lead to; every chunk belongs to a snapshot that names it.
7.  Every piece of every dictionary is there.
8.  Pins are of checkpoints that are there; the effects' rules (`effect_views.check`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Final

from agentstore import dictionaries, effect_views, fields, leases, lines, loading, packs, records, snapshots
from agentstore.checkpoint import Checkpoint
from agentstore.engine import keys as key_codec
from agentstore.engine.api import Reader
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.errors import AgentStoreError, CorruptionError
from agentstore.fields import State
from agentstore.packing import Piece, Single, entries_of, is_root
from agentstore.packs import Entry
from agentstore.records import Head, ThreadKeys, int_part, shown

PROBLEMS_MAX: Final = 1000
"""More are not reported: the store needs another look first."""

LOST: Final = -2
"""In the place of a seq: where the walk stands is not known."""

_PARTS: Final = frozenset("cqskpherldvixy")
"""The second parts of the keys of a thread that this version writes."""


def problems(engine: EmbeddedEngine) -> list[str]:
    """A sentence for each invariant that does not hold. Never raises for damage. O(store)."""
    found = _noting(lambda: iter(engine.verify()), "the engine")
    with engine.read() as snap:
        found += _noting(lambda: _indexes(snap), "the indexes")
        for number, name in _threads(snap, found):
            found += _noting(lambda n=number, of=name: _thread(snap, ThreadKeys(n), of), f"thread {shown(name)}")  # type: ignore[misc]  # defaults of a lambda have no types
            if len(found) >= PROBLEMS_MAX:
                break
        found += _noting(lambda: _strays(snap), "the records")
        found += _noting(lambda: dictionaries.check(snap), "the dictionaries")
    return found[:PROBLEMS_MAX]


def _noting(look: Callable[[], Iterator[str]], what: str) -> list[str]:
    """What `look` finds, and the damage that stops it."""
    found: list[str] = []
    try:
        found.extend(look())
    except AgentStoreError as error:
        found.append(f"{what}: {error}")
    return found


# --- indexes -------------------------------------------------------------------------


def _threads(snap: Reader, found: list[str]) -> list[tuple[int, str]]:
    """(number, name) of all threads, from the creation index."""
    low = records.CREATED
    threads: list[tuple[int, str]] = []
    try:
        for key, name in snap.scan(low, records.end_of(low)):
            threads.append((records.seq_of(key, low), name.decode()))
    except (AgentStoreError, UnicodeDecodeError) as error:
        found.append(f"the creation index: {error}")
    return threads


def _indexes(snap: Reader) -> Iterator[str]:
    named: dict[int, bytes] = {}
    for key, value in snap.scan(records.NAMES, records.end_of(records.NAMES)):
        number, name = records.name_of(value)
        if key != records.name_key(name):
            yield f"the name index has {shown(name)} under the key of another name"
        if number in named:
            yield f"the number {number} has two names, {shown(name)} and {shown(named[number])}"
        named[number] = name
    following, threads, _ = records.counters_of(snap.get(records.COUNTERS_KEY))
    if threads != len(named):
        yield f"the counters say {threads} threads, the name index has {len(named)}"
    low = records.CREATED
    for key, name in snap.scan(low, records.end_of(low)):
        number = records.seq_of(key, low)
        if named.pop(number, None) != name:
            yield f"the creation index says that number {number} is {shown(name)}, the name index does not"
        if number >= following:
            yield f"the number {number} was given to {shown(name)}, but the counter would give it again"
        if snap.get(ThreadKeys(number).head) is None:
            yield f"thread {shown(name)} has no head"
    for number, name in named.items():
        yield f"thread {shown(name)}, number {number}, is missing in the creation index"


def _strays(snap: Reader) -> Iterator[str]:
    """Records of no thread, of no kind. Jumps from thread to thread: O(threads)."""
    low, high = key_codec.encode(0), key_codec.encode(key_codec.INT_MAX) + b"\xff"
    while True:
        first = next(iter(snap.scan(low, high)), None)
        if first is None:
            return
        size = first[0][0] - 0x10
        number = int.from_bytes(first[0][1 : 1 + size], "big")
        part = int_part(number)
        if snap.get(records.CREATED + part) is None and snap.get(records.GONE + part) is None:
            yield f"there are records of the thread number {number}, which does not exist"
        low = records.end_of(part)


# --- one thread ----------------------------------------------------------------------


def _thread(snap: Reader, keys: ThreadKeys, name: str) -> Iterator[str]:
    where = f"thread {shown(name)}"
    raw = snap.get(keys.head)
    if raw is None:
        return  # said with the indexes
    head = Head.decode(raw)
    last = lines.find(snap, keys.prefix, head.seq, where)
    if last is None:
        yield f"{where}: the head names checkpoint {head.seq}, which is not there"
    elif last.commit_id != head.commit_id:
        yield f"{where}: the head and checkpoint {head.seq} are not of one commit"
    states = States(snap, keys, where)
    yield from states.walk(head, name)
    yield from _snapshots(snap, keys, where, states)
    for key, _ in snap.scan(records.pins(keys.prefix), records.end_of(records.pins(keys.prefix))):
        seq = records.seq_of(key, records.pins(keys.prefix))
        if seq not in states.sums:
            yield f"{where}: checkpoint {seq} is pinned and not there"
    for key, _ in snap.scan(keys.prefix, records.end_of(keys.prefix)):
        if key[len(keys.prefix) : len(keys.prefix) + 1] != b"\x31" or chr(key[len(keys.prefix) + 1]) not in _PARTS:
            yield f"{where}: the record {key.hex()} is of no kind that this version writes"
    yield from effect_views.check(snap, keys.prefix, head.token, name)
    yield from leases.check(snap, keys.prefix, head.token, name)


class States:
    """Walks over all checkpoints of a thread in the order of their seqs, and remembers the sum of each state."""

    def __init__(self, snap: Reader, keys: ThreadKeys, where: str) -> None:
        self._snap = snap
        self._keys = keys
        self._where = where
        self.sums: dict[int, tuple[bytes, int] | None] = {}
        """(commit id, checksum of the state) by seq; None for a damaged one."""
        self._state: State = {}
        self._at = packs.NO_PARENT

    def walk(self, head: Head, name: str) -> Iterator[str]:
        """Every checkpoint: its record, its parent, its state."""
        for piece in self._pieces():
            if isinstance(piece, str):
                yield piece
                self._at = LOST
                continue
            entries = entries_of(piece)
            for entry in entries:
                self.sums[entry.seq] = None
                if entry.seq >= head.next_seq:
                    yield f"{self._where}, checkpoint {entry.seq}: the head says that the next one is {head.next_seq}"
            try:
                if not (yield from self._begin(piece)):
                    self._at = LOST
                    continue
                for entry in entries:
                    Checkpoint.from_entry(name, head.uuid, entry, self._where)
                    yield from self._step(entry)
            except CorruptionError as error:
                self._at = LOST
                yield str(error)

    def _pieces(self) -> Iterator[Piece | str]:
        """Records and packs, ascending; a sentence for each that cannot be read."""
        low = self._keys.checkpoints
        found: list[tuple[int, int, bytes]] = [
            (records.seq_of(key, low), 0, raw) for key, raw in self._snap.scan(low, records.end_of(low))
        ]
        for last, raw in lines.scan_packs(self._snap, self._keys.prefix):
            try:
                found.append((packs.head_of(raw, last, self._where).first, last, raw))
            except CorruptionError as error:
                yield str(error)
        end = -1
        for first, last, raw in sorted(found):
            try:
                piece = (
                    lines.pack_of(self._snap, last, raw, self._where)
                    if last
                    else Single(lines.entry_of(first, raw, self._where), raw)
                )
            except CorruptionError as error:
                yield str(error)
                continue
            if first <= end:
                yield f"{self._where}: checkpoint {first} stands in the range of a pack that ends with {end}"
            end = max(end, piece.last)
            yield piece

    def _begin(self, piece: Piece) -> Generator[str, None, bool]:
        """Have the state that a piece is of; whether there is one."""
        parent = piece.parent
        if is_root(piece):
            self._state = loading.load(self._snap, self._keys.prefix, piece.first, self._where).state
        elif parent == packs.NO_PARENT:
            self._state = {}
        elif self.sums.get(parent) is None:
            yield f"{self._where}, checkpoint {piece.first}: its parent {parent} is damaged or not there"
            return False
        elif parent != self._at:
            self._state = loading.load(self._snap, self._keys.prefix, parent, self._where).state
        self._at = parent
        if not isinstance(piece, Single) and fields.state_sum(self._state) != piece.before:
            yield f"{self._where}: the pack {piece.last} is not of the state of its parent {parent}"
        return True

    def _step(self, entry: Entry) -> Iterator[str]:
        where = f"{self._where}, checkpoint {entry.seq}"
        loading.apply_entry(self._state, entry, self._where, check_each=True)
        self._at = entry.seq
        found = fields.state_sum(self._state)
        self.sums[entry.seq] = (entry.commit_id, found)
        if entry.state_sum is not None and found != entry.state_sum:
            yield f"{where}: the fields do not match the checksum of the state"
        sums = entry.sums()
        if sums is not None and sums != fields.sums_of(self._state):
            yield f"{where}: its list of all checksums is not that of its state"


def _snapshots(snap: Reader, keys: ThreadKeys, where: str, states: States) -> Iterator[str]:
    named: set[tuple[int, int]] = set()
    low = records.snapshots(keys.prefix)
    for key, raw in snap.scan(low, records.end_of(low)):
        seq = records.seq_of(key, low)
        try:
            state = loading.read_snapshot(snap, keys.prefix, seq, raw, where)
            named |= snapshots.chunks_of(state)
            there = states.sums.get(seq)
            if there is None:
                yield f"{where}: the snapshot {seq} is of a checkpoint that is damaged or not there"
            elif there != (loading.snapshot_commit(raw), fields.state_sum(state)):
                yield f"{where}: the snapshot {seq} is not the state that the deltas lead to"
            for name in state:
                if not fields.verify(state, name):
                    yield f"{where}: the snapshot {seq} does not match the checksum of the field {name!r}"
        except CorruptionError as error:
            yield str(error)
    low = records.chunks(keys.prefix)
    for key, _ in snap.scan(low, records.end_of(low)):
        chunk = key_codec.decode(key[len(low) :])
        if chunk not in named:
            yield f"{where}: the chunk {chunk} belongs to no snapshot"
