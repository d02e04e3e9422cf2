"""The checkpoints of a thread as they stand in the store, alone or in packs: found, listed, and walked along a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentstore import dictionaries, records
from agentstore.codec import zstd
from agentstore.engine.api import Reader, Tx
from agentstore.errors import CorruptionError
from agentstore.fields import Op
from agentstore.packs import FLAG_COLD, NO_PARENT, Entry, Pack, head_of
from agentstore.records import CHECKPOINT, FLAG_SUMS, REASON_CODES, VERSION, CheckpointHeader, int_part


def entry_of(seq: int, raw: bytes, where: str) -> Entry:
    """The entry of a checkpoint's own record. CorruptionError if that is damaged."""
    header = CheckpointHeader(raw, f"{where}, checkpoint {seq}")

    def ops() -> tuple[list[Op], list[Any] | None]:
        payload = records.payload_of(raw, f"{where}, checkpoint {seq}")
        return payload[0], payload[1] if len(payload) > 1 else None

    return Entry(
        seq,
        NO_PARENT if header.parent is None else header.parent,
        header.reason,
        header.created_us,
        header.lsn,
        header.commit_id,
        header.state_sum,
        header.meta(raw),
        header.flags,
        len(raw),
        ops,
    )


def record_of(entry: Entry, parent: int, state_sum: int, ops: list[Op], sums: list[object] | None, flags: int) -> bytes:
    """A checkpoint's own record. `ops` as `packs.absolute` makes them; `flags`: `FLAG_ROOT` or 0."""
    zipped, blob = records.squeeze(records.pack_payload(ops, sums))
    if sums is not None:
        flags |= FLAG_SUMS
    return (
        CHECKPOINT.pack(
            VERSION,
            flags | zipped,
            REASON_CODES[entry.reason],
            0,
            len(entry.meta),
            parent + 1,
            entry.created_us,
            entry.lsn,
            entry.commit_id,
            state_sum,
        )
        + entry.meta
        + blob
    )


def dictionaries_of(reader: Reader) -> zstd.Lookup:
    """Finds the dictionaries that packs were made with."""

    return lambda number: dictionaries.find(reader, number)


def pack_of(reader: Reader, seq: int, raw: bytes, where: str) -> Pack:
    """The pack that ends with `seq`, inflated."""
    return Pack(raw, seq, where, dictionaries_of(reader))


def scan_packs(
    reader: Reader, prefix: bytes, low: int = 0, high: int | None = None, *, reverse: bool = False
) -> Iterator[tuple[int, bytes]]:
    """(seq of the last member, record) of the packs that end with ``low <= seq < high``, their parts joined. Lazy."""
    packs = records.packs(prefix)
    end = records.end_of(packs) if high is None else packs + int_part(high)
    at = len(packs)
    parts: list[bytes] = []
    last = -1
    for key, raw in reader.scan(packs + int_part(low), end, reverse=reverse):
        size = key[at] - 0x10
        seq = int.from_bytes(key[at + 1 : at + 1 + size], "big")
        if parts and seq != last:
            yield last, b"".join(reversed(parts) if reverse else parts)
            parts = []
        last = seq
        parts.append(raw)
    if parts:
        yield last, b"".join(reversed(parts) if reverse else parts)


def find_pack(reader: Reader, prefix: bytes, seq: int, where: str) -> Pack | None:
    """The pack whose range of seqs has `seq` in it, inflated. O(its size)."""
    for last, raw in scan_packs(reader, prefix, seq):
        if head_of(raw, last, where).first > seq:
            return None
        return pack_of(reader, last, raw, where)
    return None


def find(reader: Reader, prefix: bytes, seq: int, where: str) -> Entry | None:
    """The checkpoint with this seq; None if there is none (any more). O(1), or O(size of its pack)."""
    raw = reader.get(records.checkpoints(prefix) + int_part(seq))
    if raw is not None:
        return entry_of(seq, raw, where)
    pack = find_pack(reader, prefix, seq, where)
    at = None if pack is None else pack.index(seq)
    return None if pack is None or at is None else pack.entry(at)


def descending(reader: Reader, prefix: bytes, below: int, where: str) -> Iterator[Entry]:
    """All checkpoints with a seq below `below`, newest first. Lazy; O(checkpoints read)."""
    low = records.checkpoints(prefix)
    singles = reader.scan(low, low + int_part(below), reverse=True)
    single = next(singles, None)
    for pack in _packs_descending(reader, prefix, below, where):
        while single is not None and records.seq_of(single[0], low) > pack.last:
            yield entry_of(records.seq_of(single[0], low), single[1], where)
            single = next(singles, None)
        yield from (entry for entry in reversed(pack.entries()) if entry.seq < below)
    while single is not None:
        yield entry_of(records.seq_of(single[0], low), single[1], where)
        single = next(singles, None)


def _packs_descending(reader: Reader, prefix: bytes, below: int, where: str) -> Iterator[Pack]:
    across = find_pack(reader, prefix, below, where)
    if across is not None:
        yield across
    for last, raw in scan_packs(reader, prefix, 0, below, reverse=True):
        yield pack_of(reader, last, raw, where)


class Line:
    """Walks from a checkpoint to its ancestors, reading ahead where the line is straight. One thread, one snapshot."""

    def __init__(self, reader: Reader, prefix: bytes, where: str) -> None:
        self._reader = reader
        self._prefix = prefix
        self._checkpoints = records.checkpoints(prefix)
        self._where = where
        self._ahead: dict[int, bytes] = {}
        self._packs: list[tuple[int, int, bytes]] = []
        self._pack: Pack | None = None

    def read_ahead(self, low: int, high: int) -> None:
        """Read what there is from `low` to `high` in two scans: most lines are straight."""
        prefix = self._checkpoints
        at = len(prefix) + 1
        for key, raw in self._reader.scan(prefix + int_part(low), prefix + int_part(high + 1)):
            self._ahead[int.from_bytes(key[at:], "big")] = raw
        for last, raw in scan_packs(self._reader, self._prefix, low):
            if (first := head_of(raw, last, self._where).first) > high:
                break
            self._packs.append((first, last, raw))

    def pack(self, seq: int) -> Pack | None:
        """The pack that has `seq`; None if the checkpoint has a record of its own, or is not there."""
        known = self._pack
        if known is not None and known.first <= seq <= known.last:
            return known
        if seq in self._ahead:
            return None
        found: Pack | None = None
        while self._packs and found is None:
            first, last, raw = self._packs[-1]
            if first > seq:
                self._packs.pop()
            elif seq <= last:
                self._packs.pop()
                found = pack_of(self._reader, last, raw, self._where)
            else:
                break
        if found is None:
            if self._reader.get(self._checkpoints + int_part(seq)) is not None:
                return None
            found = find_pack(self._reader, self._prefix, seq, self._where)
        self._pack = found
        return found

    def entry(self, seq: int) -> Entry:
        """The checkpoint `seq`; CorruptionError if it is not there: a line has no gaps."""
        found = self.get(seq)
        if found is None:
            raise CorruptionError(
                f"{self._where}: the checkpoint {seq} on its line is missing; run 'agentstore verify'"
            )
        return found

    def get(self, seq: int) -> Entry | None:
        """The checkpoint `seq`; None if it is not there."""
        raw = self._ahead.pop(seq, None)
        if raw is None and (self._pack is None or not self._pack.first <= seq <= self._pack.last):
            raw = self._reader.get(self._checkpoints + int_part(seq))
        if raw is not None:
            return entry_of(seq, raw, self._where)
        pack = self.pack(seq)
        at = None if pack is None else pack.index(seq)
        if pack is None or at is None:
            return None
        return pack.entry(at)


# --- records of packs --------------------------------------------------------------------

PART_BYTES = 1320
"""A cold pack is cut into records of so many bytes: three fill a page of LMDB, and a value that is larger than half a
page has pages of its own, of which the last one is half empty."""


def get_pack(reader: Reader, prefix: bytes, last: int) -> bytes | None:
    """The record of the pack that ends with `last`, its parts joined; None if there is none."""
    for seq, raw in scan_packs(reader, prefix, last, last + 1):
        return raw if seq == last else None
    return None


def put_pack(tx: Tx, prefix: bytes, last: int, raw: bytes) -> None:
    """Write the record of a pack in the place of any other that ends with `last`."""
    delete_pack(tx, prefix, last)
    key = records.packs(prefix) + int_part(last)
    size = PART_BYTES if raw[1] & FLAG_COLD else len(raw)
    tx.put(key, raw[:size])
    for part, at in enumerate(range(size, len(raw), size), 1):
        tx.put(key + int_part(part), raw[at : at + size])


def delete_pack(tx: Tx, prefix: bytes, last: int) -> None:
    """Remove the record of a pack, with its parts."""
    key = records.packs(prefix) + int_part(last)
    for each, _ in [*tx.scan(key, records.end_of(key))]:
        tx.delete(each)
