"""Snapshots: whole states kept to make loading fast, rebuildable from the deltas unless retention took those away.

Record "s", seq: `records.SNAPSHOT`, then (one zstd frame where that is smaller) the CBOR array of

    [name, crc, count, size, [[seq, index, bytes, flag], …], rest]

for every field in order: its body is the chunks named there, one after the other, then `rest`. A chunk, "k" seq index,
is the bytes, or with flag 1 a zstd frame of them. It is written with the first snapshot that has it, and later
ones name it again for as long as their field only grew: a snapshot costs what changed since the one before. (Whole
states in every snapshot were the alternative: then either loading is slow or the snapshots outgrow the deltas.)
"""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agentstore import fields, lines, loading, records
from agentstore.codec import zstd
from agentstore.engine.api import Reader, Tx
from agentstore.errors import AgentStoreError, CorruptionError
from agentstore.fields import Chunk, State
from agentstore.loading import Cost, Loaded
from agentstore.packs import PACK_MEMBERS
from agentstore.records import FLAG_ROOT, FLAG_ZSTD, SNAPSHOT, VERSION, ThreadKeys, int_part

if TYPE_CHECKING:
    from agentstore.engine.embedded import EmbeddedEngine

logger = logging.getLogger("agentstore")

LOAD_US_MIN: Final = 2000
"""What stands between a snapshot and a checkpoint may cost so much, whatever the state's size: in microseconds."""

# Measured on transcripts: to read and apply a pack of 64 (one alone takes 10 µs); to inflate; to decode.
_PACK_US: Final = 60
_INFLATED_PER_US: Final = 500
_DECODED_PER_US: Final = 300

CHUNK_BYTES_MIN: Final = 16 * 1024
"""A rest shorter than this stays in the snapshot's record."""
CHUNK_BYTES_MAX: Final = 64 * 1024
"""Below the size, 128 KiB, from which malloc fetches fresh pages for each value: those cost more than to copy it."""

DENSE_SNAPSHOTS: Final = 8
"""The newest ones are not thinned."""
GAP_MIN: Final = 1024
"""Between two snapshots there are at least so many checkpoints, but for the newest."""
THIN_EVERY: Final = 16
"""Thinning looks at a thread after every so many of its snapshots."""


def state_bytes(reader: Reader, keys: ThreadKeys, seq: int, where: str) -> int | None:
    """The size of the state that a snapshot holds, in bytes; None if there is none. O(fields)."""
    raw = reader.get(records.snapshots(keys.prefix) + int_part(seq))
    if raw is None:
        return None
    return sum([field.size for field in loading.read_snapshot(reader, keys.prefix, seq, raw, where).values()])


def is_due(cost: Cost, state_bytes: int) -> bool:
    """Whether loading costs more than about twice reading the state itself, and not little.

    So a thread that only appends messages gets none: its packs hold each byte once, and are read about as fast as a
    snapshot would be. It is what was set again and again, or taken out, that makes deltas outweigh their state.

    >>> is_due(Cost(deltas=1_000), 2_000), is_due(Cost(deltas=5_000), 2_000)
    (False, True)
    >>> is_due(Cost(deltas=10_000, content_bytes=6_000_000), 6_000_000)
    False
    """
    between = cost_us(cost)
    return between >= LOAD_US_MIN and between + state_bytes / _DECODED_PER_US > 2 * _state_us(state_bytes)


def cost_us(cost: Cost) -> float:
    """What it takes to read what stands between a snapshot and a checkpoint, in microseconds.

    Deltas that stand alone are counted as if they were packed: soon they are, and no snapshot would spare that.
    """
    return (cost.packs + cost.deltas / PACK_MEMBERS) * _PACK_US + cost.content_bytes / _INFLATED_PER_US


def _state_us(state_bytes: int) -> float:
    """What it takes to read a state from a snapshot, in microseconds."""
    return state_bytes / _INFLATED_PER_US + state_bytes / _DECODED_PER_US


# --- taking --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepared:
    """A snapshot that is ready to be written."""

    keys: ThreadKeys
    seq: int
    record: bytes
    chunks: list[bytes]
    base: int | None
    """The snapshot whose chunks it names."""

    @property
    def bytes(self) -> int:
        """What it adds to the store."""
        return len(self.record) + sum([len(data) for data in self.chunks])

    def write(self, tx: Tx) -> bool:
        """Put it; False if another one is there, or the one that it is based on is gone. O(chunks)."""
        snapshots = records.snapshots(self.keys.prefix)
        if self.base is not None and tx.get(snapshots + int_part(self.base)) is None:
            return False  # thinned since, and perhaps chunks that we name with it
        chunk_keys = records.chunks(self.keys.prefix) + int_part(self.seq)
        if tx.get(snapshots + int_part(self.seq)) is not None or any(tx.scan(chunk_keys, records.end_of(chunk_keys))):
            # Another process took it, now or long ago: its chunks may differ from ours, and later snapshots name them.
            return False
        for index, data in enumerate(self.chunks):
            tx.put(chunk_keys + int_part(index), data)
        tx.put(snapshots + int_part(self.seq), self.record)
        return True


def prepare(keys: ThreadKeys, loaded: Loaded) -> Prepared:
    """The snapshot of a state that was read and compared with its checksums. O(what changed since its base)."""
    entry = loaded.entry
    divided, chunks = _divide(loaded.state, entry.seq)
    flag, blob = records.squeeze(records.pack(divided))
    record = SNAPSHOT.pack(VERSION, flag, entry.commit_id, fields.state_sum(loaded.state)) + blob
    return Prepared(keys, entry.seq, record, chunks, loaded.snapshot_seq)


def take(engine: EmbeddedEngine, number: int, seq: int, commit_id: bytes) -> bool:
    """Write the snapshot of a checkpoint, unless there is one, it is gone, or it would not pay. O(what changed).

    Every op since the snapshot before is compared with its checksum on the way. CorruptionError, and what `transact`
    raises.
    """
    keys = ThreadKeys(number)
    where = f"thread number {number}"
    with engine.read() as snap:
        if not _is_there(snap, keys, seq, commit_id):
            return False
        if snap.get(records.snapshots(keys.prefix) + int_part(seq)) is not None:
            return False
        loaded = loading.load(snap, keys.prefix, seq, where, check_each=True)
        if loaded.state_sum is not None and fields.state_sum(loaded.state) != loaded.state_sum:
            raise CorruptionError(f"{where}, checkpoint {seq}: the fields do not match the checksum of the state")
        prepared = prepare(keys, loaded)
    state_bytes = sum([field.size for field in loaded.state.values()])
    if prepared.bytes > 2 * loaded.cost.stored_bytes and not is_due(loaded.cost, state_bytes):
        # A large state of which little is shared: wait until the deltas weigh as much.
        return False
    return engine.transact(lambda tx: _is_there(tx, keys, seq, commit_id) and prepared.write(tx)).value


def _is_there(reader: Reader, keys: ThreadKeys, seq: int, commit_id: bytes) -> bool:
    """Whether the thread exists and has this very checkpoint."""
    entry = lines.find(reader, keys.prefix, seq, f"thread number {keys.number}")
    return entry is not None and entry.commit_id == commit_id and reader.get(keys.head) is not None


def _divide(state: State, seq: int) -> tuple[list[Any], list[bytes]]:
    """The fields as the record has them, and the new chunks as they are stored."""
    divided: list[Any] = []
    chunks: list[bytes] = []
    for name, field in state.items():
        assert field.parts is not None
        refs = [part.ref for part in field.parts if isinstance(part, Chunk)]
        rest = b"".join([part for part in field.parts if not isinstance(part, Chunk)])
        if len(rest) >= CHUNK_BYTES_MIN:
            for at in range(0, len(rest), CHUNK_BYTES_MAX):
                piece = rest[at : at + CHUNK_BYTES_MAX]
                flag, data = _stored_chunk(piece)
                refs.append([seq, len(chunks), len(piece), flag])
                chunks.append(data)
            rest = b""
        divided.append([name, field.crc, field.count, field.size, refs, rest])
    return divided, chunks


def _stored_chunk(piece: bytes) -> tuple[int, bytes]:
    """(flag, bytes) of a chunk as it is stored."""
    frame = zstd.compress(piece)
    return (FLAG_ZSTD, frame) if len(frame) < len(piece) else (0, piece)


# --- thinning ------------------------------------------------------------------------


def thin(engine: EmbeddedEngine, number: int) -> int:
    """Drop snapshots that loading can do without: gaps may grow with the distance from the newest. Returns how many.

    Each is dropped only after its state was rebuilt without it and matched. O(snapshots) when there is nothing to do.
    """
    keys = ThreadKeys(number)
    with engine.read() as snap:
        seqs = [seq for seq, _ in _all(snap, keys)]
    if len(seqs) % THIN_EVERY:
        return 0
    dropped = 0
    for seq in to_drop(seqs):
        dropped += drop(engine, number, seq)
    return dropped


def to_drop(seqs: list[int]) -> list[int]:
    """Which of a thread's snapshots (ascending) can go.

    >>> to_drop(list(range(0, 10240, 512)))
    [512, 1536, 2560, 3584, 4608, 5632]
    """
    found: list[int] = []
    if len(seqs) <= DENSE_SNAPSHOTS:
        return found
    newest = seqs[-1]
    before = seqs[0]
    for index in range(1, len(seqs) - DENSE_SNAPSHOTS):
        seq = seqs[index]
        if seqs[index + 1] - before <= max(GAP_MIN, (newest - seq) // 10):
            found.append(seq)
        else:
            before = seq
    return found


def drop(engine: EmbeddedEngine, number: int, seq: int) -> bool:
    """Remove a snapshot, once its state was rebuilt without it and matched. O(size of the state).

    False, and a warning, if it did not match: then the snapshot is what is left of that state.
    """
    keys = ThreadKeys(number)
    where = f"thread number {number}"
    key = records.snapshots(keys.prefix) + int_part(seq)
    with engine.read() as snap:
        raw = snap.get(key)
        if raw is None:
            return False
        try:
            entry = lines.find(snap, keys.prefix, seq, where)
            if entry is not None and entry.flags & FLAG_ROOT:
                return False
            rebuilt = loading.load(snap, keys.prefix, seq, where, without=seq)
            loading.verify(rebuilt, snap, keys.prefix, seq, where)
            kept = loading.read_snapshot(snap, keys.prefix, seq, raw, where)
        except AgentStoreError as error:
            logger.warning("%s: the snapshot at %d is kept: %s", where, seq, error)
            return False
        if fields.sums_of(kept) != fields.sums_of(rebuilt.state):
            logger.warning("%s: the snapshot at %d is kept: the deltas lead to another state", where, seq)
            return False

    def write(tx: Tx) -> bool:
        now = lines.find(tx, keys.prefix, seq, where)
        if tx.get(key) != raw or (now is not None and now.flags & FLAG_ROOT):
            return False
        remove(tx, keys, {seq}, where)
        return True

    return engine.transact(write).value


def remove(tx: Tx, keys: ThreadKeys, seqs: Set[int], where: str) -> None:
    """Remove snapshots, and the chunks that no other one names. O(snapshots)."""
    mine: set[tuple[int, int]] = set()
    others: set[tuple[int, int]] = set()
    doomed: list[int] = []
    for other, record in _all(tx, keys):
        refs = chunks_of(loading.read_snapshot(tx, keys.prefix, other, record, where))
        (mine if other in seqs else others).update(refs)
        if other in seqs:
            doomed.append(other)
    for of, index in mine - others:
        tx.delete(records.chunks(keys.prefix) + int_part(of) + int_part(index))
    for seq in doomed:
        tx.delete(records.snapshots(keys.prefix) + int_part(seq))


def chunks_of(state: State) -> set[tuple[int, int]]:
    """(seq, index) of the chunks that a state which was just read from a snapshot names."""
    return {(p.seq, p.index) for field in state.values() for p in field.parts or () if isinstance(p, Chunk)}


def _all(reader: Reader, keys: ThreadKeys) -> list[tuple[int, bytes]]:
    low = records.snapshots(keys.prefix)
    return [(records.seq_of(key, low), raw) for key, raw in reader.scan(low, records.end_of(low))]
