"""Reading a state: from the nearest snapshot on its line, through the deltas, to fields that match their checksums."""

from __future__ import annotations

from agentstore import fields, records
from agentstore.codec import zstd
from agentstore.codec.crc import crc32c
from agentstore.engine.api import Reader
from agentstore.errors import CheckpointNotFound, CorruptionError, LimitExceeded
from agentstore.fields import Chunk, Field, State
from agentstore.lines import Line
from agentstore.packs import NO_PARENT, Entry, Pack
from agentstore.records import (
    FLAG_ROOT,
    FLAG_ZSTD,
    OP_APPEND,
    OP_PATCH,
    OP_SET,
    OP_SPLICE,
    SNAPSHOT,
    int_part,
)


class Loaded:
    """A state as it was read, and what reading it took."""

    __slots__ = ("cost", "entry", "since_sums", "snapshot_seq", "state", "state_sum")

    def __init__(self, entry: Entry) -> None:
        self.state: State = {}
        self.entry = entry
        self.snapshot_seq: int | None = None
        self.cost = Cost()
        """Of what was read since the snapshot."""
        self.since_sums = 0
        """How many checkpoints came after the newest that has the checksums of all fields."""
        self.state_sum: int | None = None
        """Checksum of the state as the newest record that was applied whole has it; None: it ends inside a pack."""


class Cost:
    """What stands between a snapshot and a checkpoint."""

    __slots__ = ("content_bytes", "deltas", "packs", "stored_bytes")

    def __init__(self, deltas: int = 0, packs: int = 0, content_bytes: int = 0, stored_bytes: int = 0) -> None:
        self.deltas = deltas
        """Checkpoints with a record of their own."""
        self.packs = packs
        self.content_bytes = content_bytes
        """Of all of them, inflated."""
        self.stored_bytes = stored_bytes


def load(
    reader: Reader, prefix: bytes, at: int, where: str, *, without: int | None = None, check_each: bool = False
) -> Loaded:
    """The state at `at`, its lists perhaps in chunks that are not read yet.

    Costs the deltas since the nearest snapshot on its line (other than the one at `without`); `check_each`
    compares the checksum of every op that has one, where `verify` compares that of the outcome.
    CheckpointNotFound, CorruptionError.
    """
    line = Line(reader, prefix, where)
    last = line.get(at)
    if last is None:
        raise CheckpointNotFound(f"{where}: there is no checkpoint {at}")
    found = Loaded(last)
    steps, snapshot_seq, snapshot = _steps(reader, prefix, line, last, where, without)
    if snapshot_seq != NO_PARENT:
        found.snapshot_seq = snapshot_seq
        found.state = read_snapshot(reader, prefix, snapshot_seq, snapshot, where)
        found.state_sum = SNAPSHOT.unpack_from(snapshot)[3]
    else:
        found.state_sum = 0
    for step in reversed(steps):
        if isinstance(step, Entry):
            apply_entry(found.state, step, where, check_each=check_each)
            found.state_sum = step.state_sum
            found.cost.deltas += 1
            found.cost.content_bytes += step.stored_bytes
            found.cost.stored_bytes += step.stored_bytes
        else:
            _apply_pack(found, *step, where)
    if last.state_sum is not None:
        found.state_sum = last.state_sum
    return found


def _steps(
    reader: Reader, prefix: bytes, line: Line, last: Entry, where: str, without: int | None
) -> tuple[list[Entry | tuple[Pack, int, int]], int, bytes]:
    """What leads from a snapshot to `last`, newest first; the snapshot's seq (or `NO_PARENT`) and record."""
    steps: list[Entry | tuple[Pack, int, int]] = []
    seq = last.seq
    snapshot_seq, snapshot = snapshot_before(reader, prefix, seq + 1, without)
    if seq != snapshot_seq:
        line.read_ahead(snapshot_seq + 1, seq)
    while seq != snapshot_seq:
        if seq < snapshot_seq:
            # The line left the one with this snapshot: the next older one may be on it.
            snapshot_seq, snapshot = snapshot_before(reader, prefix, seq + 1, without)
            continue
        pack = line.pack(seq)
        if pack is None:
            entry = line.entry(seq)
            if entry.flags & FLAG_ROOT:
                raise CorruptionError(f"{where}: the snapshot {seq}, which is all there is of that state, is missing")
            steps.append(entry)
            parent = entry.parent
        else:
            high = pack.index(seq)
            if high is None:
                raise CorruptionError(f"{where}: the checkpoint {seq} on its line is missing")
            known = pack.index(snapshot_seq)
            steps.append((pack, 0 if known is None else known + 1, high))
            parent = pack.parent if known is None else snapshot_seq
        if parent >= seq:
            raise CorruptionError(f"{where}: the checkpoint {seq} names {parent} as its parent, which came later")
        seq = parent
    return steps, snapshot_seq, snapshot


def _apply_pack(found: Loaded, pack: Pack, low: int, high: int, where: str) -> None:
    """Members `low` to `high`, which must be of the state that there is."""
    state = found.state
    whole = high == pack.count - 1
    if not low:
        before = fields.state_sum(state) if found.state_sum is None or not whole else found.state_sum
        if before != pack.before:
            raise CorruptionError(f"{where}: the pack {pack.last} is not of the state that it is applied to")
    pack.apply(state, low, high)
    found.state_sum = pack.after if whole else None
    cost = found.cost
    cost.packs += 1
    cost.content_bytes += pack.content_bytes
    cost.stored_bytes += len(pack.raw)


def snapshot_before(reader: Reader, prefix: bytes, below: int, without: int | None = None) -> tuple[int, bytes]:
    """(seq, record) of the newest snapshot below a seq; (`NO_PARENT`, b"") if there is none."""
    low = records.snapshots(prefix)
    for key, raw in reader.scan(low, low + int_part(below), reverse=True):
        seq = records.seq_of(key, low)
        if seq != without:
            return seq, raw
    return NO_PARENT, b""


def apply_entry(state: State, entry: Entry, where: str, *, check_each: bool) -> None:
    """Change `state` as one checkpoint says."""
    try:
        ops = entry.ops()
        if not check_each:
            fields.apply(state, ops)
            return
        for op in ops:
            _check_before(state, op)
            fields.apply(state, [op])
            if op[0] in (OP_SPLICE, OP_PATCH) and not fields.verify_parts(state[op[1]]):
                raise CorruptionError(f"field {op[1]!r}: its bytes do not match their checksum")
    except CorruptionError as error:
        raise CorruptionError(f"{where}, checkpoint {entry.seq}: {error}") from error


def _check_before(state: State, op: fields.Op) -> None:
    """Compare the checksum of an op whose outcome's follows from it alone, if it has one."""
    if op[0] == OP_SET:
        matches = op[3] is None or crc32c(op[2]) == op[3]
    elif op[0] == OP_APPEND:
        field = state.get(op[1])
        matches = field is not None and (op[3] is None or crc32c(op[2], field.crc) == op[3])
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
    if loaded.state_sum is not None and fields.state_sum(state) != loaded.state_sum:
        raise CorruptionError(f"{where}, checkpoint {at}: the fields together do not match the checksum of the state")


def load_sums(reader: Reader, prefix: bytes, at: int, where: str) -> Loaded:
    """The checksums of the state at `at`, without its bytes. Reads the few records back to one that has them all."""
    line = Line(reader, prefix, where)
    last = line.get(at)
    if last is None:
        raise CheckpointNotFound(f"{where}: there is no checkpoint {at}")
    found = Loaded(last)
    later: list[Entry | tuple[Pack, int]] = []
    state = found.state
    seq = at
    while seq != NO_PARENT:
        pack = line.pack(seq)
        if pack is None:
            entry = line.entry(seq)
            sums, parent, high = entry.sums(), entry.parent, 0
            if sums is None and entry.flags & FLAG_ROOT:
                sums = fields.sums_of(_root(reader, prefix, seq, where))
        else:
            high = pack.index(seq) or 0
            sums, parent = pack.sums() if high == pack.count - 1 else None, pack.parent
        if sums is not None:
            state.update(fields.state_from_sums(sums))
            break
        later.append(line.entry(seq) if pack is None else (pack, high))
        found.since_sums += 1 if pack is None else high + 1
        if parent >= seq:
            raise CorruptionError(f"{where}: the checkpoint {seq} names {parent} as its parent, which came later")
        seq = parent
    for step in reversed(later):
        if isinstance(step, Entry):
            apply_entry(state, step, where, check_each=False)
        else:
            step[0].apply(state, 0, step[1])
    for field in state.values():
        field.parts = None
    found.state_sum = fields.state_sum(state)
    if last.state_sum is not None and found.state_sum != last.state_sum:
        raise CorruptionError(f"{where}, checkpoint {at}: the checksums of the fields do not match that of the state")
    return found


# --- snapshots -----------------------------------------------------------------------


def _root(reader: Reader, prefix: bytes, seq: int, where: str) -> State:
    raw = reader.get(records.snapshots(prefix) + int_part(seq))
    if raw is None:
        raise CorruptionError(f"{where}: the snapshot {seq}, which is all there is of that state, is missing")
    return read_snapshot(reader, prefix, seq, raw, where)


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
