"""Snapshots: whole states kept to make loading fast, always rebuildable from the deltas.

Record "s", seq: `records.SNAPSHOT`, then (one zstd frame where that is smaller) the CBOR array of

    [name, crc, count, size, [[seq, index, bytes, flag], …], rest]

for every field in order: its body is the chunks named there, one after the other, then `rest`. A chunk, "k" seq index,
is the bytes, or with flag 1 a zstd frame of them. It is written with the first snapshot that has it, and later
ones name it again for as long as their field only grew: a snapshot costs what changed since the one before, so there
can be one every `DELTAS_MAX` deltas without the store growing with its square. (Whole states in every snapshot were
the alternative: then either loading is slow or the snapshots outgrow the deltas.)
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from agentstore import fields, loading, records
from agentstore.codec import zstd
from agentstore.engine.api import Reader, Tx
from agentstore.errors import AgentStoreError, CorruptionError, ReadOnlyStore
from agentstore.fields import Chunk, State
from agentstore.records import FLAG_ZSTD, SNAPSHOT, VERSION, CheckpointHeader, ThreadKeys, int_part

if TYPE_CHECKING:
    from agentstore.engine.embedded import EmbeddedEngine

logger = logging.getLogger("agentstore")

DELTAS_MIN: Final = 64
"""Below this many deltas since the last snapshot loading is fast enough anyway …"""
DELTA_BYTES_MIN: Final = 1024 * 1024
"""… unless they have this many bytes."""
DELTAS_MAX: Final = 256
"""So many deltas are read at most, whatever the state's size: about 3 ms."""

# Measured: reading, inflating and applying a delta; decoding and inflating bytes.
_DELTA_US: Final = 10
_BYTES_PER_US: Final = 300

CHUNK_BYTES_MIN: Final = 16 * 1024
"""A rest shorter than this stays in the snapshot's record."""
CHUNK_BYTES_MAX: Final = 64 * 1024
"""Below the size, 128 KiB, from which malloc fetches fresh pages for each value: those cost more than to copy it."""
CHUNK_RATIO_MIN: Final = 8
"""A chunk is compressed only where that makes it so much smaller. To inflate ordinary text, which zstd makes four times
smaller, takes as long as to decode it, and would be half of every load; what is eight times smaller inflates fast."""

DENSE_SNAPSHOTS: Final = 8
"""The newest ones are not thinned."""
THIN_EVERY: Final = 16
"""Thinning looks at a thread after every so many of its snapshots."""


def is_due(count: int, delta_bytes: int, state_bytes: int) -> bool:
    """Whether loading costs more than about twice reading the state itself.

    >>> is_due(63, 10_000, 2_000), is_due(64, 10_000, 2_000)
    (False, True)
    >>> is_due(64, 10_000, 6_000_000), is_due(256, 40_000, 6_000_000)
    (False, True)
    """
    if count < DELTAS_MIN and delta_bytes < DELTA_BYTES_MIN:
        return False
    return count >= DELTAS_MAX or _delta_cost_us(count, delta_bytes) > state_bytes / _BYTES_PER_US


def _delta_cost_us(count: int, delta_bytes: int) -> float:
    return count * _DELTA_US + delta_bytes / _BYTES_PER_US


class Snapshots:
    """Takes and thins the snapshots of one engine's threads, in the background where it has one. Thread-safe."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[int, bytes]] = {}

    def ask(self, number: int, seq: int, commit_id: bytes) -> None:
        """Have a snapshot of this checkpoint taken, now or soon. Errors are logged: nothing depends on a snapshot."""
        with self._lock:
            self._asked[number] = (seq, commit_id)
        if self._engine.has_background:
            self._engine.poke()
        else:
            self.run()

    def run(self) -> bool:
        """Take one snapshot that was asked for; whether there was one."""
        with self._lock:
            if not self._asked:
                return False
            number = next(iter(self._asked))
            seq, commit_id = self._asked.pop(number)
        try:
            if take(self._engine, number, seq, commit_id):
                thin(self._engine, number)
        except ReadOnlyStore:
            pass
        except AgentStoreError as error:
            logger.warning("no snapshot of thread number %d at checkpoint %d: %s", number, seq, error)
        return True


# --- taking --------------------------------------------------------------------------


def take(engine: EmbeddedEngine, number: int, seq: int, commit_id: bytes) -> bool:
    """Write the snapshot of a checkpoint, unless there is one, it is gone, or it would not pay. O(what changed).

    Every op since the snapshot before is compared with its checksum on the way. CorruptionError, and what `transact`
    raises.
    """
    keys = ThreadKeys(number)
    where = f"thread number {number}"
    snapshot_key = records.snapshots(keys.prefix) + int_part(seq)
    with engine.read() as snap:
        if not _is_there(snap, keys, seq, commit_id) or snap.get(snapshot_key) is not None:
            return False
        loaded = loading.load(snap, keys.prefix, seq, where, check_each=True)
        if fields.state_sum(loaded.state) != loaded.header.state_sum:
            raise CorruptionError(f"{where}, checkpoint {seq}: the fields do not match the checksum of the state")
        divided, chunks = _divide(loaded.state, seq)
    flag, blob = records.squeeze(records.pack(divided))
    record = SNAPSHOT.pack(VERSION, flag, commit_id, loaded.header.state_sum) + blob
    written = len(record) + sum([len(data) for data in chunks])
    state_bytes = sum([field.size for field in loaded.state.values()])
    cost = _delta_cost_us(loaded.deltas, loaded.delta_bytes)
    if written > 2 * loaded.delta_bytes and cost <= state_bytes / _BYTES_PER_US:
        # A large state of which little is shared: wait until the deltas weigh as much.
        return False
    chunk_keys = records.chunks(keys.prefix) + int_part(seq)
    base = loaded.snapshot_seq

    def write(tx: Tx) -> bool:
        if not _is_there(tx, keys, seq, commit_id):
            return False
        if base is not None and tx.get(records.snapshots(keys.prefix) + int_part(base)) is None:
            return False  # thinned since, and perhaps chunks that we name with it
        if tx.get(snapshot_key) is not None or any(tx.scan(chunk_keys, records.end_of(chunk_keys))):
            # Another process took it, now or long ago: its chunks may differ from ours, and later snapshots name them.
            return False
        for index, data in enumerate(chunks):
            tx.put(chunk_keys + int_part(index), data)
        tx.put(snapshot_key, record)
        return True

    return engine.transact(write).value


def _is_there(reader: Reader, keys: ThreadKeys, seq: int, commit_id: bytes) -> bool:
    """Whether the thread exists and has this very checkpoint."""
    raw = reader.get(keys.checkpoints + int_part(seq))
    if raw is None or reader.get(keys.head) is None:
        return False
    header = CheckpointHeader(raw, f"thread number {keys.number}, checkpoint {seq}")
    return header.commit_id == commit_id


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
    sample = piece[:CHUNK_BYTES_MIN]
    if CHUNK_RATIO_MIN * len(zstd.compress(sample, 1)) > len(sample):
        return 0, piece
    return FLAG_ZSTD, zstd.compress(piece)


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

    >>> to_drop(list(range(0, 5120, 256)))
    [256, 768, 1280, 1792, 2304, 2816]
    """
    found: list[int] = []
    if len(seqs) <= DENSE_SNAPSHOTS:
        return found
    newest = seqs[-1]
    before = seqs[0]
    for index in range(1, len(seqs) - DENSE_SNAPSHOTS):
        seq = seqs[index]
        if seqs[index + 1] - before <= max(2 * DELTAS_MAX, (newest - seq) // 10):
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
        if tx.get(key) != raw:
            return False
        mine: set[tuple[int, int]] = set()
        others: set[tuple[int, int]] = set()
        for other, record in _all(tx, keys):
            refs = chunks_of(loading.read_snapshot(tx, keys.prefix, other, record, where))
            (mine if other == seq else others).update(refs)
        for of, index in mine - others:
            tx.delete(records.chunks(keys.prefix) + int_part(of) + int_part(index))
        tx.delete(key)
        return True

    return engine.transact(write).value


def chunks_of(state: State) -> set[tuple[int, int]]:
    """(seq, index) of the chunks that a state which was just read from a snapshot names."""
    return {(p.seq, p.index) for field in state.values() for p in field.parts or () if isinstance(p, Chunk)}


def _all(reader: Reader, keys: ThreadKeys) -> list[tuple[int, bytes]]:
    low = records.snapshots(keys.prefix)
    return [(records.seq_of(key, low), raw) for key, raw in reader.scan(low, records.end_of(low))]
