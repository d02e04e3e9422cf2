"""A pack: checkpoints that follow each other in one line, in one compressed record.

Record "q", seq of its last member: `PACK`, then one zstd frame of

    length of the heads (4 bytes), length of the changes (4), heads, changes, streams

`heads` is the CBOR array ``[seqs, reasons, times, lsns, commit ids, metas, sums]``, each but the last with one value
for each member: `seqs`, `times`, `lsns` and `commit ids` as differences to the one before (an empty `seqs` says that
all are 1), `reasons` a byte each, `metas` as the checkpoint's record has it. `sums` are those of the state after the
last member (see `records`), or null where they would be large beside the rest.

`changes` is the CBOR array ``[fields, ops]``. Where every member has at most one op for a field, and all are set or
append, `ops` is null and `fields` has for each field ``[name, members, kinds, sizes, counts]``: which members have an
op of it (null: all), its kind in a byte each, how many bytes of the field's stream it has, and its count (of an append:
how many items it adds). The streams follow in the order of the fields. So the bytes that hundreds of members added to a
list are one slice. Otherwise `fields` is empty and `ops` has a list of ops for each member.

What can be computed is not stored: of set and append no checksum (the frame has its own, and the bytes were compared
with the ops' when the pack was made), of the states only that before the first and that after the last member.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from agentstore import fields as state_fields
from agentstore import records
from agentstore.codec import zstd
from agentstore.codec.crc import extend
from agentstore.errors import CorruptionError, LimitExceeded
from agentstore.fields import Field, Op, State
from agentstore.records import NO_COUNT, OP_APPEND, OP_PATCH, OP_SET, OP_SPLICE, REASON_CODES, REASONS

NO_PARENT: Final = -1

FLAG_COLD: Final = 1
"""Made by the offline job: as small as it can be."""

# version, flags, members, id of the dictionary (0: none), first seq, its parent + 1, checksums of the state before
# the first and after the last member, CRC-32C of all this and the seq of the last member (8 bytes)
PACK = struct.Struct("<BBHIQQIII")
assert PACK.size == 36
_LAST = struct.Struct("<Q")
_CRC = struct.Struct("<I")
PACK_MEMBERS: Final = 64
"""So many deltas of one line become a pack in the background: more save little, and an old state is read for longer."""
MEMBERS_MAX: Final = (1 << 16) - 1
_LENGTHS = struct.Struct("<II")
_STREAMED: Final = frozenset({OP_SET, OP_APPEND})


def _no_ops() -> tuple[list[Op], list[Any] | None]:
    raise AssertionError("this entry was made without its ops")


class Entry:
    """One checkpoint as it stands in the store, in a record of its own or in a pack. Immutable."""

    __slots__ = (
        "_ops",
        "commit_id",
        "created_us",
        "flags",
        "lsn",
        "meta",
        "parent",
        "reason",
        "seq",
        "state_sum",
        "stored_bytes",
    )

    def __init__(
        self,
        seq: int,
        parent: int,
        reason: str,
        created_us: int,
        lsn: int,
        commit_id: bytes,
        state_sum: int | None,
        meta: bytes,
        flags: int,
        stored_bytes: int,
        ops: Callable[[], tuple[list[Op], list[Any] | None]],
    ) -> None:
        self.seq = seq
        self.parent = parent
        """`NO_PARENT` for a first one."""
        self.reason = reason
        self.created_us = created_us
        self.lsn = lsn
        self.commit_id = commit_id
        self.state_sum = state_sum
        """Checksum of the state; None inside a pack, which has only that of its last member."""
        self.meta = meta
        """CBOR of ``[step, status, metadata]``, or empty when all are None."""
        self.flags = flags
        self.stored_bytes = stored_bytes
        self._ops = ops

    def with_parent(self, parent: int) -> Entry:
        """The same checkpoint on another parent."""
        return Entry(
            self.seq,
            parent,
            self.reason,
            self.created_us,
            self.lsn,
            self.commit_id,
            self.state_sum,
            self.meta,
            self.flags,
            self.stored_bytes,
            self._ops,
        )

    def alone(self) -> Entry:
        """The same checkpoint without what it changed: a list of these does not keep their packs in memory."""
        made = self.with_parent(self.parent)
        made._ops = _no_ops
        return made

    def ops(self) -> list[Op]:
        """What it changed. CorruptionError. O(size)."""
        return self._ops()[0]

    def sums(self) -> list[Any] | None:
        """The checksums of all fields after it, if it has them."""
        return self._ops()[1]


class Head(NamedTuple):
    """What stands before the frame of a pack."""

    flags: int
    members: int
    dictionary: int
    first: int
    parent: int
    before: int
    after: int


def head_of(raw: bytes, last: int, where: str) -> Head:
    """The head of the pack that ends with `last`; CorruptionError if it is damaged. O(1)."""
    if len(raw) < PACK.size or raw[0] != records.VERSION:
        raise CorruptionError(f"{where}, pack {last}: the record is damaged or of another format")
    _, flags, count, dictionary, first, above, before, after, crc = PACK.unpack_from(raw)
    if crc != _head_crc(raw, last) or not count or not above - 1 < first <= last:
        raise CorruptionError(f"{where}, pack {last}: the record is damaged: {raw[: PACK.size].hex()}")
    return Head(flags, count, dictionary, first, above - 1, before, after)


def _head_crc(raw: bytes, last: int) -> int:
    return extend(extend(0, raw[: PACK.size - _CRC.size]), _LAST.pack(last))


class Pack:
    """A pack as it was read: inflated, its columns decoded at first use. CorruptionError names what is damaged."""

    __slots__ = (
        "_changes",
        "_content",
        "_heads",
        "_sums_of_heads",
        "_where",
        "after",
        "before",
        "count",
        "dictionary",
        "first",
        "is_cold",
        "last",
        "parent",
        "raw",
    )

    def __init__(self, raw: bytes, last: int, where: str, dictionary: zstd.Lookup | None = None) -> None:
        self.raw = raw
        self.last = last
        self._where = f"{where}, pack {last}"
        self._heads: list[Any] | None = None
        self._sums_of_heads: tuple[list[int], bytes, list[int], list[int], list[int], list[bytes]] | None = None
        self._changes: tuple[list[Any], list[list[Op]] | None, int] | None = None
        head = head_of(raw, last, where)
        self.count, self.first, self.parent = head.members, head.first, head.parent
        self.before, self.after = head.before, head.after
        self.dictionary, self.is_cold = head.dictionary, bool(head.flags & FLAG_COLD)
        try:
            self._content = zstd.decompress(raw[PACK.size :], records.RECORD_BYTES_MAX, dictionary)
        except (CorruptionError, LimitExceeded) as error:
            raise CorruptionError(f"{self._where}: the record is damaged: {error}") from error

    @property
    def content_bytes(self) -> int:
        return len(self._content)

    def _decoded_heads(self) -> list[Any]:
        heads = self._heads
        if heads is None:
            end = _LENGTHS.size + self._lengths()[0]
            heads = self._heads = records.unpack(self._content[_LENGTHS.size : end], self._where)
            if len(heads) != 7:
                raise CorruptionError(f"{self._where}: its members have {len(heads)} columns")
        return heads

    def _decoded_changes(self) -> tuple[list[Any], list[list[Op]] | None, int]:
        """(fields, ops, where the streams begin)."""
        changes = self._changes
        if changes is None:
            heads, size = self._lengths()
            start = _LENGTHS.size + heads
            decoded = records.unpack(self._content[start : start + size], self._where)
            if len(decoded) != 2:
                raise CorruptionError(f"{self._where}: its changes have {len(decoded)} columns")
            changes = self._changes = decoded[0], decoded[1], start + size
        return changes

    def _lengths(self) -> tuple[int, int]:
        if len(self._content) < _LENGTHS.size:
            raise CorruptionError(f"{self._where}: it is cut short")
        lengths: tuple[int, int] = _LENGTHS.unpack_from(self._content)
        return lengths

    def _damaged(self, error: Exception) -> CorruptionError:
        return CorruptionError(f"{self._where}: the record is damaged: {error!r}")

    # --- its members ---------------------------------------------------------------------

    def seqs(self) -> list[int]:
        """The seqs of its members, ascending."""
        if self.count == self.last - self.first + 1:
            return list(range(self.first, self.last + 1))
        gaps = self._decoded_heads()[0]
        found, seq = [], self.first
        try:
            for gap in gaps:
                found.append(seq := seq + gap)
        except TypeError as error:
            raise self._damaged(error) from error
        if len(found) != self.count or found[-1] != self.last:
            raise CorruptionError(f"{self._where}: its seqs do not end with its last one")
        return found

    def index(self, seq: int) -> int | None:
        """Which member has this seq; None if none has."""
        first: int = self.first
        if not first <= seq <= self.last:
            return None
        if self.count == self.last - first + 1:
            return seq - first
        seqs = self.seqs()
        at = bisect_left(seqs, seq)
        return at if seqs[at] == seq else None  # `first` and `last` are members: there is one at `at`

    def sums(self) -> list[Any] | None:
        """The checksums of all fields after its last member, if it has them."""
        found: list[Any] | None = self._decoded_heads()[6]
        return found

    def entries(self) -> list[Entry]:
        """All members, ascending. O(members)."""
        return [self.entry(at) for at in range(self.count)]

    def entry(self, at: int) -> Entry:
        """Member `at`. O(1) but for the first one asked for, O(members)."""
        seqs, reasons, times, lsns, ids, metas = self._summed()
        try:
            return Entry(
                seqs[at],
                seqs[at - 1] if at else self.parent,
                REASONS[reasons[at]],
                times[at],
                lsns[at],
                (ids[at] & _ID_MASK).to_bytes(8, "big"),
                self.after if at == self.count - 1 else None,
                metas[at],
                0,
                len(self.raw) // self.count,
                lambda: (self.ops(at), self.sums() if at == self.count - 1 else None),
            )
        except (IndexError, TypeError, ValueError, OverflowError) as error:
            raise self._damaged(error) from error

    def _summed(self) -> tuple[list[int], bytes, list[int], list[int], list[int], list[bytes]]:
        """The columns of the heads, differences added up."""
        if self._sums_of_heads is None:
            _, reasons, times, lsns, ids, metas, _ = self._decoded_heads()
            try:
                added = list(accumulate(times)), list(accumulate(lsns)), list(accumulate(ids))
            except TypeError as error:
                raise self._damaged(error) from error
            self._sums_of_heads = self.seqs(), reasons, *added, metas
        return self._sums_of_heads

    def ops(self, at: int) -> list[Op]:
        """The ops of member `at`; their order is that in which fields first appear. O(members)."""
        fields, ops, end = self._decoded_changes()
        try:
            if ops is not None:
                found: list[Op] = ops[at]
                return found
            made: list[Op] = []
            for name, members, kinds, sizes, counts in fields:
                place = at if members is None else bisect_left(members, at)
                if members is None or (place < len(members) and members[place] == at):
                    start = end + sum(sizes[:place])
                    body = self._content[start : start + sizes[place]]
                    made.append([kinds[place], name, body, None, counts[place]])
                end += sum(sizes)
        except (IndexError, TypeError, ValueError) as error:
            raise self._damaged(error) from error
        return made

    def all_ops(self) -> list[list[Op]]:
        """`ops` of all members. O(size)."""
        fields, ops, at = self._decoded_changes()
        if ops is not None:
            return list(ops)
        made: list[list[Op]] = [[] for _ in range(self.count)]
        content = self._content
        try:
            for name, members, kinds, sizes, counts in fields:
                for place, size in enumerate(sizes):
                    member = place if members is None else members[place]
                    made[member].append([kinds[place], name, content[at : at + size], None, counts[place]])
                    at += size
        except (IndexError, TypeError, ValueError) as error:
            raise self._damaged(error) from error
        return made

    # --- applying ------------------------------------------------------------------------

    def apply(self, state: State, low: int, high: int) -> None:
        """Change `state` as the members from `low` to `high` (both included) say. O(their bytes)."""
        fields, ops, at = self._decoded_changes()
        try:
            if ops is not None:
                for each in ops[low : high + 1]:
                    state_fields.apply(state, each)
                return
            for name, members, kinds, sizes, counts in fields:
                a, b = (
                    (low, high + 1) if members is None else (bisect_left(members, low), bisect_left(members, high + 1))
                )
                if a < b:
                    self._apply_field(state, name, at, a, b, kinds, sizes, counts)
                at += sum(sizes)
        except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(error) from error
        if at != len(self._content):
            raise CorruptionError(f"{self._where}: its streams have another length than its columns say")

    def _apply_field(
        self, state: State, name: str, at: int, a: int, b: int, kinds: bytes, sizes: list[int], counts: list[int]
    ) -> None:
        """Ops `a` to `b` of one field: what the last set and the appends behind it say lies in one piece."""
        last_set = kinds.rfind(OP_SET, a, b)
        begin = a if last_set < 0 else last_set
        start = at + sum(sizes[:begin])
        body = self._content[start : start + sum(sizes[begin:b])]
        field = state.get(name)
        if last_set < 0:
            if field is None or field.count == NO_COUNT:
                raise CorruptionError(f"{self._where}: an append does not fit the field {name!r}")
            if field.parts is not None:
                field.parts.append(body)
            field.renew(field.count + sum(counts[a:b]), extend(field.crc, body), field.size + len(body))
            return
        count = counts[last_set] if b == last_set + 1 else counts[last_set] + sum(counts[last_set + 1 : b])
        if field is None:
            state[name] = Field(state_fields.name_crc(name), count, extend(0, body), len(body), [body])
        else:
            field.parts = [body]
            field.renew(count, extend(0, body), len(body))


_ID_MASK: Final = (1 << 64) - 1


# --- making one ------------------------------------------------------------------------


def encode(
    members: Sequence[Entry],
    ops: Sequence[list[Op]],
    *,
    before: int,
    after: int,
    sums: list[Any] | None,
    level: int,
    dictionary: zstd.Dictionary | None = None,
    cold: bool = False,
) -> bytes:
    """The record of a pack of `members` with their `ops`, each the parent of the next. O(size).

    `ops` as `relative` makes them.
    """
    first = members[0]
    gaps = [b.seq - a.seq for a, b in zip([first, *members], members, strict=False)]
    consecutive = members[-1].seq - first.seq + 1 == len(members)
    fields, plain, streams = _columns_of(ops)
    heads = records.pack(
        [
            [] if consecutive else gaps,
            bytes([REASON_CODES[entry.reason] for entry in members]),
            _differences([entry.created_us for entry in members]),
            _differences([entry.lsn for entry in members]),
            _differences([int.from_bytes(entry.commit_id, "big") for entry in members]),
            [entry.meta for entry in members],
            sums,
        ]
    )
    changes = records.pack([fields, plain])
    content = b"".join([_LENGTHS.pack(len(heads), len(changes)), heads, changes, *streams])
    head = PACK.pack(
        records.VERSION,
        FLAG_COLD if cold else 0,
        len(members),
        0 if dictionary is None else dictionary.id,
        first.seq,
        first.parent + 1,
        before,
        after,
        0,
    )
    head = head[: -_CRC.size] + _CRC.pack(_head_crc(head, members[-1].seq))
    return head + zstd.compress(content, level, dictionary)


def _differences(numbers: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *numbers], numbers, strict=False)]


def _columns_of(ops: Sequence[list[Op]]) -> tuple[list[Any], list[list[Op]] | None, list[bytes]]:
    """(fields, ops, streams) of a pack: by fields where that can be, else as they are."""
    by_name: dict[str, tuple[list[int], bytearray, list[int], list[int], list[bytes]]] = {}
    for at, each in enumerate(ops):
        seen: set[str] = set()
        for op in each:
            if op[0] not in _STREAMED or op[1] in seen:
                return [], list(ops), []
            seen.add(op[1])
            _, name, body, _, count = op
            members, kinds, sizes, counts, stream = by_name.setdefault(name, ([], bytearray(), [], [], []))
            members.append(at)
            kinds.append(op[0])
            sizes.append(len(body))
            counts.append(count)
            stream.append(body)
    fields = [
        [name, None if len(members) == len(ops) else members, bytes(kinds), sizes, counts]
        for name, (members, kinds, sizes, counts, _) in by_name.items()
    ]
    return fields, None, [b"".join(stream) for *_, stream in by_name.values()]


def size_of(ops: list[Op]) -> int:
    """Bytes of the values in ops, nearly: what they add to a pack's content."""
    size = 0
    for op in ops:
        if op[0] in _STREAMED:
            size += len(op[2])
        elif op[0] == OP_SPLICE:
            size += len(op[4])
        elif op[0] == OP_PATCH:
            size += sum([len(frame) for *_, frame in op[4]])
    return size


def relative(ops: list[Op], state: State) -> list[Op]:
    """Ops as packs have them: without what follows from the state before, and an append with the number of its items.

    Moves `state`, of which the checksums are enough, to the one after. CorruptionError if an op does not match its own
    checksum: what was never compared must not lose it.
    """
    made: list[Op] = []
    for op in ops:
        kind = op[0]
        if kind not in _STREAMED or op[3] is None:
            made.append(op)
        else:
            _, name, body, crc, count = op
            field = state.get(name)
            if kind == OP_APPEND:
                if field is None:
                    raise CorruptionError(f"an append does not fit the field {name!r}")
                before, added = field.crc, count - field.count
            else:
                before, added = 0, count
            if extend(before, body) != crc:
                raise CorruptionError(f"field {name!r}: its bytes do not match their checksum")
            made.append([kind, name, body, None, added])
        state_fields.apply(state, [op])
    return made


def absolute(ops: list[Op], state: State) -> list[Op]:
    """The reverse of `relative`: ops as a checkpoint's own record has them. Moves `state` to the one after."""
    made: list[Op] = []
    for op in ops:
        state_fields.apply(state, [op])
        if op[0] in _STREAMED:
            field = state[op[1]]
            made.append([op[0], op[1], op[2], field.crc, field.count])
        else:
            made.append(op)
    return made
