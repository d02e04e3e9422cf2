"""Reading a state: from the nearest snapshot on its line, through the deltas, to fields that match their checksums."""

from __future__ import annotations

from typing import Final

from agentstore import fields, records
from agentstore.codec import zstd
from agentstore.codec.crc import crc32c
from agentstore.engine.api import Reader
from agentstore.errors import CheckpointNotFound, CorruptionError, LimitExceeded
from agentstore.fields import Chunk, Field, State
from agentstore.records import (
    CHECKPOINT,
    FLAG_SUMS,
    FLAG_ZSTD,
    OP_APPEND,
    OP_PATCH,
    OP_SET,
    OP_SPLICE,
    SNAPSHOT,
    CheckpointHeader,
    int_part,
)

NO_PARENT: Final = -1


class Loaded:
    """A state as it was read, and what reading it took."""

    __slots__ = ("delta_bytes", "deltas", "header", "raw", "since_sums", "snapshot_seq", "state")

    def __init__(self, state: State, header: CheckpointHeader, raw: bytes) -> None:
        self.state = state
        self.header = header
        self.raw = raw
        """The record of the checkpoint itself."""
        self.snapshot_seq: int | None = None
        self.deltas = 0
        """Deltas read since the snapshot."""
        self.delta_bytes = 0
        """Their stored size in bytes."""
        self.since_sums = 0
        """How many of them came after the newest that has the checksums of all fields."""


class _Line:
    """Walks from a checkpoint to its ancestors, reading ahead where the line is straight."""

    def __init__(self, reader: Reader, prefix: bytes, where: str) -> None:
        self._reader = reader
        self._checkpoints = records.checkpoints(prefix)
        self._where = where
        self._read: dict[int, bytes] = {}

    def read_ahead(self, low: int, high: int) -> None:
        """Read the records from `low` to `high` in one scan: most lines are straight."""
        prefix = self._checkpoints
        at = len(prefix) + 1
        for key, raw in self._reader.scan(prefix + int_part(low), prefix + int_part(high + 1)):
            self._read[int.from_bytes(key[at:], "big")] = raw

    def record(self, seq: int) -> bytes:
        raw = self._read.pop(seq, None)
        if raw is None:
            raw = self._reader.get(self._checkpoints + int_part(seq))
        if raw is None:
            raise CorruptionError(f"{self._where}: the checkpoint {seq} on its line is missing")
        if len(raw) < CHECKPOINT.size or raw[0] != records.VERSION:
            raise CorruptionError(f"{self._where}: the record of checkpoint {seq} is damaged")
        return raw


def parent_of(raw: bytes) -> int:
    """The parent's seq in a checkpoint record, or `NO_PARENT`."""
    return int.from_bytes(raw[8:16], "little") - 1


def load(
    reader: Reader, prefix: bytes, at: int, where: str, *, without: int | None = None, check_each: bool = False
) -> Loaded:
    """The state at `at`, its lists perhaps in chunks that are not read yet.

    Costs the deltas since the nearest snapshot on its line (other than the one at `without`); `check_each`
    compares the checksum of every op, where `verify` compares that of the outcome.
    CheckpointNotFound, CorruptionError.
    """
    last = reader.get(records.checkpoints(prefix) + int_part(at))
    if last is None:
        raise CheckpointNotFound(f"{where}: there is no checkpoint {at}")
    header = CheckpointHeader(last, f"{where}, checkpoint {at}")
    found = Loaded({}, header, last)
    line = _Line(reader, prefix, where)
    chain: list[tuple[int, bytes]] = []
    seq = at
    has_sums = False
    snapshot_seq, snapshot = snapshot_before(reader, prefix, at + 1, without)
    if seq != snapshot_seq:
        line.read_ahead(snapshot_seq + 1, seq)
    while seq != snapshot_seq:
        if seq < snapshot_seq:
            # The line left the one with this snapshot: the next older one may be on it.
            snapshot_seq, snapshot = snapshot_before(reader, prefix, seq + 1, without)
            continue
        raw = line.record(seq)
        chain.append((seq, raw))
        found.delta_bytes += len(raw)
        has_sums = has_sums or bool(raw[1] & FLAG_SUMS)
        found.since_sums += not has_sums
        parent = parent_of(raw)
        if parent >= seq:
            raise CorruptionError(f"{where}: the checkpoint {seq} names {parent} as its parent, which came later")
        seq = parent
    found.deltas = len(chain)
    if snapshot_seq != NO_PARENT:
        found.snapshot_seq = snapshot_seq
        found.state = read_snapshot(reader, prefix, snapshot_seq, snapshot, where)
    while chain:
        seq, raw = chain.pop()
        apply_record(found.state, raw, where, seq, check_each=check_each)
    return found


def snapshot_before(reader: Reader, prefix: bytes, below: int, without: int | None = None) -> tuple[int, bytes]:
    """(seq, record) of the newest snapshot below a seq; (`NO_PARENT`, b"") if there is none."""
    low = records.snapshots(prefix)
    for key, raw in reader.scan(low, low + int_part(below), reverse=True):
        seq = records.seq_of(key, low)
        if seq != without:
            return seq, raw
    return NO_PARENT, b""


def apply_record(state: State, raw: bytes, where: str, seq: int, *, check_each: bool) -> None:
    try:
        ops = records.payload_of(raw, where)[0]
        if not check_each:
            fields.apply(state, ops)
            return
        for op in ops:
            _check_before(state, op)
            fields.apply(state, [op])
            if op[0] in (OP_SPLICE, OP_PATCH) and not fields.verify_parts(state[op[1]]):
                raise CorruptionError(f"field {op[1]!r}: its bytes do not match their checksum")
    except CorruptionError as error:
        raise CorruptionError(f"{where}, checkpoint {seq}: {error}") from error


def _check_before(state: State, op: fields.Op) -> None:
    """Compare the checksum of an op whose outcome's follows from it alone."""
    if op[0] == OP_SET:
        matches = crc32c(op[2]) == op[3]
    elif op[0] == OP_APPEND:
        field = state.get(op[1])
        matches = field is not None and crc32c(op[2], field.crc) == op[3]
    else:
        return
    if not matches:
        raise CorruptionError(f"field {op[1]!r}: its bytes do not match their checksum")


def verify(loaded: Loaded, reader: Reader, prefix: bytes, at: int, where: str) -> None:
    """Compare every field with its checksum, and all with the checkpoint's. O(size).

    CorruptionError names the first checkpoint and the field that do not match.
    """
    state = loaded.state
    for name in state:
        if not fields.verify(state, name):
            load(reader, prefix, at, where, check_each=True)  # raises at the first op that does not match
            source = f"the snapshot at {loaded.snapshot_seq}" if loaded.snapshot_seq is not None else "the deltas"
            raise CorruptionError(f"{where}, checkpoint {at}, field {name!r}: {source} do not match the checksum")
    if fields.state_sum(state) != loaded.header.state_sum:
        raise CorruptionError(f"{where}, checkpoint {at}: the fields together do not match the checksum of the state")


def load_sums(reader: Reader, prefix: bytes, at: int, where: str) -> Loaded:
    """The checksums of the state at `at`, without its bytes. Reads the few records back to one that has them all."""
    raw = reader.get(records.checkpoints(prefix) + int_part(at))
    if raw is None:
        raise CheckpointNotFound(f"{where}: there is no checkpoint {at}")
    found = Loaded({}, CheckpointHeader(raw, f"{where}, checkpoint {at}"), raw)
    line = _Line(reader, prefix, where)
    later: list[tuple[int, list[fields.Op]]] = []
    state = found.state
    seq = at
    while True:
        payload = records.payload_of(raw, f"{where}, checkpoint {seq}")
        if raw[1] & FLAG_SUMS:
            state.update(fields.state_from_sums(payload[1]))
            break
        later.append((seq, payload[0]))
        parent = parent_of(raw)
        if parent == NO_PARENT:
            break
        if parent >= seq:
            raise CorruptionError(f"{where}: the checkpoint {seq} names {parent} as its parent, which came later")
        seq = parent
        raw = line.record(seq)
    for seq, ops in reversed(later):
        try:
            fields.apply(state, ops)
        except CorruptionError as error:
            raise CorruptionError(f"{where}, checkpoint {seq}: {error}") from error
    for field in state.values():
        field.parts = None
    found.since_sums = len(later)
    if fields.state_sum(state) != found.header.state_sum:
        raise CorruptionError(f"{where}, checkpoint {at}: the checksums of the fields do not match that of the state")
    return found


# --- snapshots -----------------------------------------------------------------------


def read_snapshot(reader: Reader, prefix: bytes, seq: int, raw: bytes, where: str) -> State:
    """The state that a snapshot holds, its chunks not read yet."""
    where = f"{where}, snapshot {seq}"
    if len(raw) < SNAPSHOT.size or raw[0] != records.VERSION:
        raise CorruptionError(f"{where}: the record is damaged or of another format")
    _, flags, _, total = SNAPSHOT.unpack_from(raw)
    chunk_keys = records.chunks(prefix)

    def read_chunk(chunk: Chunk) -> bytes:
        data = reader.get(chunk_keys + int_part(chunk.seq) + int_part(chunk.index))
        if data is None:
            raise CorruptionError(f"{where}: its chunk {chunk.seq}/{chunk.index} is missing")
        try:
            if chunk.flag & FLAG_ZSTD:
                data = zstd.decompress(data, chunk.size)
            if len(data) != chunk.size:
                raise CorruptionError(f"it has {len(data)} bytes, not {chunk.size}")
        except (CorruptionError, LimitExceeded) as error:
            raise CorruptionError(f"{where}: its chunk {chunk.seq}/{chunk.index} is damaged: {error}") from error
        return data

    blob = records.unsqueeze(flags, raw[SNAPSHOT.size :], where)
    state: State = {}
    try:
        for name, crc, count, size, refs, rest in records.unpack(blob, where):
            parts: list[bytes | Chunk] = [Chunk(ref, read_chunk) for ref in refs]
            if rest or not parts:
                parts.append(rest)
            state[name] = Field(fields.name_crc(name), count, crc, size, parts)
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptionError(f"{where}: the record is damaged: {error!r}") from error
    if fields.state_sum(state) != total:
        raise CorruptionError(f"{where}: the checksums of the fields do not match that of the state")
    return state


def snapshot_commit(raw: bytes) -> bytes:
    """The commit id of the checkpoint that a snapshot record is of."""
    commit_id: bytes = SNAPSHOT.unpack_from(raw)[2]
    return commit_id
