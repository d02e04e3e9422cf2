"""Making packs: checkpoints that follow each other, alone or packed, become one pack, swapped in by one transaction.

What goes in is compared with its checksums first, since a pack keeps only some of them; what comes out is read
back and compared before it takes the place of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from agentstore import deltas, dictionaries, fields, lines, loading, packs, records, snapshots
from agentstore.codec import zstd
from agentstore.engine.api import Reader, Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.errors import CorruptionError
from agentstore.fields import Op, State
from agentstore.packs import NO_PARENT, PACK_MEMBERS, Entry, Pack
from agentstore.records import FLAG_ROOT, ThreadKeys, int_part

PACK_LEVEL: Final = 9
"""Of zstd. Measured on transcripts: level 3 packs to 0.156, 9 to 0.142, 19 to 0.136 of their CBOR."""
REST_MEMBERS_MIN: Final = 8
REST_BYTES_MIN: Final = 2048
"""A rest of a line is packed at close if it has so many members, or two and so many bytes."""
CONTENT_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of one pack, inflated: what a load reads at least."""
RECORD_OVERHEAD: Final = 24
"""Bytes that a record of its own costs beside its value: key, checksum, LMDB's header."""
SUMS_FIELDS_PER_MEMBER: Final = 4
"""A state of more fields than so many for each member has no list of checksums in the pack."""


@dataclass(frozen=True, slots=True)
class Single:
    """A checkpoint with a record of its own."""

    entry: Entry
    raw: bytes

    @property
    def first(self) -> int:
        return self.entry.seq

    @property
    def last(self) -> int:
        return self.entry.seq

    @property
    def parent(self) -> int:
        return self.entry.parent

    @property
    def count(self) -> int:
        return 1

    @property
    def content_bytes(self) -> int:
        return len(self.raw)


Piece: TypeAlias = Single | Pack
"""A part of a line, to become a part of a pack."""


@dataclass(frozen=True, slots=True)
class Swap:
    """A pack that is ready, and the records whose place it takes."""

    keys: ThreadKeys
    pieces: list[Piece]
    record: bytes
    snapshot: int | None = None
    """The snapshot that had the state of a root, which the pack has now."""

    def write(self, tx: Tx) -> bool:
        """Put the pack for the others, if they are as they were read; whether they are. O(records)."""
        prefix = self.keys.prefix
        if tx.get(self.keys.head) is None or any(raw_of(tx, self.keys, piece) != piece.raw for piece in self.pieces):
            return False
        for piece in self.pieces:
            delete(tx, self.keys, piece)
        lines.put_pack(tx, prefix, self.pieces[-1].last, self.record)
        if self.snapshot is not None:
            snapshots.remove(tx, self.keys, {self.snapshot}, f"thread number {self.keys.number}")
        return True


def raw_of(reader: Reader, keys: ThreadKeys, piece: Piece) -> bytes | None:
    """What stands now where a piece was read."""
    if isinstance(piece, Single):
        return reader.get(keys.checkpoints + int_part(piece.last))
    return lines.get_pack(reader, keys.prefix, piece.last)


def delete(tx: Tx, keys: ThreadKeys, piece: Piece) -> None:
    """Remove the record of a piece."""
    if isinstance(piece, Single):
        tx.delete(keys.checkpoints + int_part(piece.last))
    else:
        lines.delete_pack(tx, keys.prefix, piece.last)


def entries_of(piece: Piece) -> list[Entry]:
    """The checkpoints in it, ascending."""
    return [piece.entry] if isinstance(piece, Single) else piece.entries()


def piece_at(reader: Reader, keys: ThreadKeys, last: int, alone: bool, where: str) -> Piece | None:
    """The record that ends with checkpoint `last`; None if there is none of that kind."""
    raw = reader.get(keys.checkpoints + int_part(last)) if alone else lines.get_pack(reader, keys.prefix, last)
    if raw is None:
        return None
    return Single(lines.entry_of(last, raw, where), raw) if alone else lines.pack_of(reader, last, raw, where)


# --- finding what can be packed --------------------------------------------------------


def singles(reader: Reader, keys: ThreadKeys, where: str, low: int = 0, high: int | None = None) -> Iterator[Single]:
    """The checkpoints with ``low <= seq < high`` that have records of their own, ascending."""
    prefix = keys.checkpoints
    end = records.end_of(prefix) if high is None else prefix + int_part(high)
    for key, raw in reader.scan(prefix + int_part(low), end):
        yield Single(lines.entry_of(records.seq_of(key, prefix), raw, where), raw)


def pieces(reader: Reader, keys: ThreadKeys, where: str, low: int = 0, high: int | None = None) -> Iterator[Piece]:
    """The whole thread, or what ends with a seq of ``low <= seq < high``, ascending. Lazy; O(size of these)."""
    alone = singles(reader, keys, where, low, high)
    single = next(alone, None)
    for last, raw in lines.scan_packs(reader, keys.prefix, low, high):
        pack = lines.pack_of(reader, last, raw, where)
        while single is not None and single.last < pack.first:
            yield single
            single = next(alone, None)
        yield pack
    if single is not None:
        yield single
        yield from alone


def runs(
    found: Iterator[Piece],
    members: int,
    content_bytes: int = CONTENT_BYTES_MAX,
    *,
    takes_root: Callable[[Single], bool] | None = None,
    apart: Callable[[int, int], bool] | None = None,
) -> Iterator[list[Piece]]:
    """Pieces in runs where each follows the one before in its line, of at most so many members and bytes.

    A root, whose state is in a snapshot alone, is in no run, or the first of one if `takes_root`: its state cannot be
    computed from what stands before. Nor do two pieces stand in one whose seqs (last of one, first of the next) are
    `apart`.
    """
    run: list[Piece] = []
    count = size = 0
    for piece in found:
        root = is_root(piece)
        fits = count + piece.count <= members and size + piece.content_bytes <= content_bytes
        follows = bool(run) and piece.parent == run[-1].last
        if follows and apart is not None and piece.first > run[-1].last + 1:
            follows = not apart(run[-1].last, piece.first)
        if run and (root or not fits or not follows):
            yield run
            run, count, size = [], 0, 0
        if not root or (takes_root is not None and isinstance(piece, Single) and takes_root(piece)):
            run.append(piece)
            count += piece.count
            size += piece.content_bytes
    if run:
        yield run


def is_root(piece: Piece) -> bool:
    """Whether a snapshot has its state, and nothing else."""
    return isinstance(piece, Single) and bool(piece.entry.flags & FLAG_ROOT)


def single_runs(reader: Reader, keys: ThreadKeys, where: str, low: int = 0) -> Iterator[list[Piece]]:
    """Runs of `singles`, with no pack between the members of one: a pack has all checkpoints of its range."""
    ends = records.packs(keys.prefix)

    def apart(last: int, following: int) -> bool:
        return any(reader.scan(ends + int_part(last + 1), ends + int_part(following)))

    return runs(singles(reader, keys, where, low), PACK_MEMBERS, apart=apart)


def pays(run: list[Piece]) -> bool:
    """Whether a rest of a line is worth a pack."""
    if len(run) < 2:
        return False
    return len(run) >= REST_MEMBERS_MIN or sum([piece.content_bytes for piece in run]) >= REST_BYTES_MIN


def dictionaries_named(reader: Reader, keys: ThreadKeys) -> set[int]:
    """The ids of the dictionaries that a thread's packs need."""
    where = f"thread number {keys.number}"
    found: set[int] = set()
    for last, raw in lines.scan_packs(reader, keys.prefix):
        try:
            found.add(packs.head_of(raw, last, where).dictionary)
        except CorruptionError:
            continue  # nothing reads it any more
    return found


# --- making one ------------------------------------------------------------------------


def make(
    reader: Reader,
    keys: ThreadKeys,
    run: list[Piece],
    where: str,
    *,
    level: int = PACK_LEVEL,
    dictionary: zstd.Dictionary | None = None,
    cold: bool = False,
    forced: bool = False,
) -> Swap | None:
    """The pack of a run; None if it would not be smaller (unless `forced`). `cold`: made by the offline job.

    CorruptionError if something in it is damaged. O(size).
    """
    parent = run[0].parent
    state: State = {} if parent == NO_PARENT else loading.load_sums(reader, keys.prefix, parent, where).state
    before = fields.state_sum(state)
    entries: list[Entry] = []
    ops: list[list[Op]] = []
    rooted = is_root(run[0])
    for piece in run:
        if isinstance(piece, Single):
            entries.append(piece.entry)
            ops.append(_relative(ops_of(reader, keys, piece, where), piece, state, where))
        else:
            if fields.state_sum(state) != piece.before:
                raise CorruptionError(f"{where}: the pack {piece.last} is not of the state that it is applied to")
            entries += piece.entries()
            ops += piece.all_ops()
            piece.apply(state, 0, piece.count - 1)
        _forget_bytes(state)
        expected = piece.entry.state_sum if isinstance(piece, Single) else piece.after
        if fields.state_sum(state) != expected:
            raise CorruptionError(
                f"{where}, checkpoint {piece.last}: the fields do not match the checksum of the state"
            )
    few = len(state) <= SUMS_FIELDS_PER_MEMBER * len(entries)
    record = packs.encode(
        entries,
        ops,
        before=before,
        after=fields.state_sum(state),
        sums=fields.sums_of(state) if few else None,
        level=level,
        dictionary=dictionary,
        cold=cold,
    )
    if (
        not forced
        and not rooted
        and len(record) + RECORD_OVERHEAD >= sum([len(piece.raw) + RECORD_OVERHEAD for piece in run])
    ):
        return None
    _check_same(record, entries, ops, where, dictionary)
    return Swap(keys, run, record, run[0].first if rooted else None)


def ops_of(reader: Reader, keys: ThreadKeys, piece: Single, where: str) -> list[Op]:
    """What a checkpoint changed; of a root, what makes its state out of nothing. O(size)."""
    if not is_root(piece):
        return piece.entry.ops()
    loaded = loading.load(reader, keys.prefix, piece.last, where)
    loading.verify(loaded, reader, keys.prefix, piece.last, where)
    return deltas.plan_copy(loaded.state).ops


def _relative(ops: list[Op], piece: Single, state: State, where: str) -> list[Op]:
    try:
        return packs.relative(ops, state)
    except CorruptionError as error:
        raise CorruptionError(f"{where}, checkpoint {piece.last}: {error}") from error


def _forget_bytes(state: State) -> None:
    for field in state.values():
        field.parts = None


def _check_same(
    record: bytes, entries: list[Entry], ops: list[list[Op]], where: str, dictionary: zstd.Dictionary | None
) -> None:
    """Nothing takes the place of what it was not compared with."""
    made = Pack(record, entries[-1].seq, where, None if dictionary is None else lambda _: dictionary)
    for old, new in zip(entries, made.entries(), strict=True):
        if _identity(old) != _identity(new):
            raise AssertionError(f"{where}: checkpoint {old.seq} would be packed as another one")
    for old_ops, new_ops in zip(ops, made.all_ops(), strict=True):
        if sorted(old_ops, key=_by_field) != sorted(new_ops, key=_by_field):
            raise AssertionError(f"{where}: ops would be packed as other ones")


def _by_field(op: Op) -> str:
    return str(op[1])


def _identity(entry: Entry) -> tuple[object, ...]:
    return entry.seq, entry.parent, entry.reason, entry.created_us, entry.lsn, entry.commit_id, entry.meta


# --- doing it --------------------------------------------------------------------------


def pack_full(engine: EmbeddedEngine, number: int, low: int = 0) -> int:
    """Pack what makes full packs among a thread's checkpoints from seq `low` on; the seq to begin at next time.

    A transaction for each pack. O(checkpoints with records of their own).
    """
    keys, where = ThreadKeys(number), f"thread number {number}"
    with engine.read() as snap:
        if snap.get(keys.head) is None:
            return low
        found = list(single_runs(snap, keys, where, low))
        dictionary = dictionaries.newest(snap)
        swaps = [make(snap, keys, run, where, dictionary=dictionary) for run in found if len(run) == PACK_MEMBERS]
    for swap in swaps:
        if swap is not None:
            engine.transact(swap.write)
    if not found:
        return low
    # What stands before the last run is packed, or never will be: the next checkpoint follows the last one at most.
    return found[-1][0].first if len(found[-1]) < PACK_MEMBERS else found[-1][-1].last + 1


def rest(reader: Reader, number: int, dictionary: zstd.Dictionary | None = None) -> list[Swap]:
    """The packs that pay for what `pack_full` left of a thread, a small pack at its end included.

    O(checkpoints with records of their own).
    """
    keys, where = ThreadKeys(number), f"thread number {number}"
    if reader.get(keys.head) is None:
        return []
    found = [run for run in single_runs(reader, keys, where) if pays(run)]
    last = next(lines.scan_packs(reader, keys.prefix, reverse=True), None)
    for at, run in enumerate(found):
        if last is not None and run[0].parent == last[0] and run[0].first > last[0]:
            pack = lines.pack_of(reader, *last, where)
            if not pack.is_cold and pack.count + len(run) <= PACK_MEMBERS:
                found[at] = [pack, *run]
    return [swap for run in found if (swap := make(reader, keys, run, where, dictionary=dictionary)) is not None]
