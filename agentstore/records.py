"""The store's records, byte by byte: what keys there are and what stands in their values.

All keys begin with a thread's number N, or with a word for what belongs to no thread:

    N "h"            head            HEAD: who the thread is, where its head is, who may write it
    N "c" seq        checkpoint      CHECKPOINT, then meta and payload (below)
    N "q" seq        pack            checkpoints that follow each other, by the seq of the last one (see packs.py)
    N "s" seq        snapshot        SNAPSHOT, then its fields (see snapshots.py)
    N "k" seq i      chunk           a piece of a snapshot's field: one flag byte, then the bytes
    N "p" seq        pin             the note, UTF-8
    N "x"            expired         what retention removed last, see pruning.py
    N "y"            rule            the thread's retention, see retention.py
    N "e" "r" "l" "v"                effects and leases (see effects.py, leases.py)
    "n" name         name index      NAME, then the name; a long name's key is its first bytes and a hash
    "t" N            creation index  the name, UTF-8
    "g" N            gone            empty: a deleted thread whose records are still being removed
    "z" id           dictionary      see dictionaries.py
    "m" "threads"    counters        COUNTERS
    "m" "retention"  rule            the store's retention

A checkpoint's payload is the CBOR array ``[ops]`` or ``[ops, sums]``, one zstd frame when that is smaller.
Every op has the checksum of its field as it is afterwards, so that loading verifies what it built:

    [1, name, body, crc, count]                     set: the whole field
    [2, name]                                       delete
    [3, name, body, crc, count]                     append: `body` at the end of the field
    [4, name, start, removed, body, crc, count]     splice: bytes from `start`, `removed` of them, become `body`
    [5, name, start, removed, pieces, crc, count]   patch: the same, but the bytes are the contents of the pieces
    [6, [name, …]]                                  order of all fields

A piece is ``[from, bytes, frame]``: a zstd frame whose raw dictionary is that part of the removed bytes.
`body` of a list is its items' encodings without the array's header, and `count` is the number of items; of
anything else it is the encoding, and `count` is -1. ``sums`` is ``[[name, crc, count, size], …]`` of all fields in
order, there from time to time so that a new handle reads few records to know them all.

Integers are little-endian. Times are microseconds since 1970 UTC.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, Final

import cbor2

from agentstore.codec import zstd
from agentstore.codec.cbor import array_header
from agentstore.codec.tags import DECODERS
from agentstore.engine import keys
from agentstore.engine.api import Tx
from agentstore.errors import CorruptionError, InvalidThreadId, LimitExceeded

VERSION = 1

RECORD_BYTES_MAX: Final = 512 * 1024 * 1024
"""Most bytes that a compressed record may say it holds: more than one state, since a splice may hold most of it."""
ZSTD_BYTES_MIN: Final = 1024
"""Payloads below this size, in bytes, are stored as they are: compressing the delta of one chat message takes a
quarter of what a commit may cost and saves 300 bytes, which packing many deltas into one frame saves again."""

THREAD_ID_BYTES_MAX = 4096
NAME_KEY_BYTES_MAX = 400
"""Longest part of a name in a key, in bytes after escaping; LMDB keys end at 511."""

NO_COUNT = -1

REASONS = (
    "manual",
    "input",
    "plan",
    "decision",
    "tool_result",
    "round",
    "approval",
    "interval",
    "summary",
    "fork",
    "final",
)
REASON_CODES = {reason: code for code, reason in enumerate(REASONS)}

OP_SET, OP_DELETE, OP_APPEND, OP_SPLICE, OP_PATCH, OP_ORDER = 1, 2, 3, 4, 5, 6

# version, flags, reason, 0, bytes of meta, parent + 1 (0: none), created_at, lsn, commit id, state checksum
CHECKPOINT = struct.Struct("<BBBBIQQQ8sI")
FLAG_ZSTD = 1
FLAG_SUMS = 2
FLAG_ROOT = 4
"""Its whole state stands in the snapshot of the same seq: those that it was made of are gone."""
assert CHECKPOINT.size == 44

# version, 0, uuid, head seq, next seq, fencing token, commit id of the head
HEAD = struct.Struct("<BB16sQQQ8s")
assert HEAD.size == 50

# version, flags, commit id of its checkpoint, state checksum
SNAPSHOT = struct.Struct("<BB8sI")
assert SNAPSHOT.size == 14

NAME = struct.Struct("<Q")  # number
# next number to give, threads that exist, smallest fencing token that a new thread begins with
COUNTERS = struct.Struct("<QQQ")

NAMES = keys.encode("n")
CREATED = keys.encode("t")
GONE = keys.encode("g")
COUNTERS_KEY = keys.encode("m", "threads")

_CHECKPOINTS = keys.encode("c")
_PACKS = keys.encode("q")
_SNAPSHOTS = keys.encode("s")
_CHUNKS = keys.encode("k")
_PINS = keys.encode("p")
_HEAD_PART = keys.encode("h")


class Head:
    """The head record of a thread: identity, position, fencing token, all that a commit has to check."""

    __slots__ = ("commit_id", "next_seq", "seq", "token", "uuid")

    def __init__(self, uuid: bytes, seq: int, next_seq: int, token: int, commit_id: bytes) -> None:
        self.uuid = uuid
        self.seq = seq
        self.next_seq = next_seq
        self.token = token
        self.commit_id = commit_id

    def encode(self) -> bytes:
        """The 50 bytes of the record."""
        return HEAD.pack(VERSION, 0, self.uuid, self.seq, self.next_seq, self.token, self.commit_id)

    @classmethod
    def decode(cls, raw: bytes) -> Head:
        """The record from its bytes; CorruptionError if they are not one."""
        if len(raw) != HEAD.size or raw[0] != VERSION:
            raise CorruptionError(f"a head record is damaged or of another format: {raw[:64].hex()}")
        _, _, uuid, seq, next_seq, token, commit_id = HEAD.unpack(raw)
        return cls(uuid, seq, next_seq, token, commit_id)


class CheckpointHeader:
    """What stands before a checkpoint's meta and payload."""

    __slots__ = ("commit_id", "created_us", "flags", "lsn", "meta_bytes", "parent", "reason", "state_sum")

    flags: int
    meta_bytes: int
    created_us: int
    lsn: int
    commit_id: bytes
    state_sum: int

    def __init__(self, raw: bytes, where: str) -> None:
        if len(raw) < CHECKPOINT.size or raw[0] != VERSION:
            raise CorruptionError(f"{where}: the checkpoint record is damaged or of another format")
        (
            _,
            self.flags,
            reason,
            _,
            self.meta_bytes,
            above,
            self.created_us,
            self.lsn,
            self.commit_id,
            self.state_sum,
        ) = CHECKPOINT.unpack_from(raw)
        if reason >= len(REASONS) or CHECKPOINT.size + self.meta_bytes > len(raw):
            raise CorruptionError(f"{where}: the checkpoint record is damaged: {raw[: CHECKPOINT.size].hex()}")
        self.reason = REASONS[reason]
        self.parent: int | None = above - 1 if above else None

    def meta(self, raw: bytes) -> bytes:
        """The bytes of the meta part: CBOR of ``[step, status, metadata]``, or empty when all are None."""
        return raw[CHECKPOINT.size : CHECKPOINT.size + self.meta_bytes]


def pack(value: list[Any]) -> bytes:
    """CBOR of a record's own list of ints, strs, bytes and lists: no survey of types, unlike a user's values."""
    return cbor2.dumps(value)


def pack_payload(ops: list[list[Any]], sums: list[Any] | None = None) -> bytes:
    """The payload of a checkpoint record: CBOR of ``[ops]`` or ``[ops, sums]``.

    The two ops of nearly every commit are put together by hand, with 4-byte ints: cbor2 takes 5 µs for what
    is 2 µs this way.
    """
    parts = [b"\x81" if sums is None else b"\x82", array_header(len(ops))]
    for op in ops:
        kind = op[0]
        if kind in _OP_BEGIN and op[4] < 1 << 32:
            _, name, body, crc, count = op
            named = _NAMES_PACKED.get(name) or _pack_name(name)
            end = _CRC_ALONE.pack(0x1A, crc, 0x20) if count == NO_COUNT else _CRC_COUNT.pack(0x1A, crc, 0x1A, count)
            parts += (_OP_BEGIN[kind], named, _BODY_HEADER.pack(0x5A, len(body)), body, end)
        else:
            parts.append(cbor2.dumps(op))
    if sums is not None:
        parts.append(cbor2.dumps(sums))
    return b"".join(parts)


_OP_BEGIN = {kind: bytes((0x85, kind)) for kind in (OP_APPEND, OP_SET)}
_BODY_HEADER = struct.Struct(">BI")
_CRC_ALONE = struct.Struct(">BIB")
_CRC_COUNT = struct.Struct(">BIBI")
_NAMES_PACKED: dict[str, bytes] = {}
_NAMES_PACKED_MAX = 1024


def _pack_name(name: str) -> bytes:
    packed = cbor2.dumps(name)
    if len(_NAMES_PACKED) < _NAMES_PACKED_MAX:
        _NAMES_PACKED[name] = packed
    return packed


def unpack(data: bytes, where: str) -> list[Any]:
    """The list that `pack` made `data` of. CorruptionError if it is not a list of such things."""
    try:
        value = cbor2.loads(data, semantic_decoders=DECODERS, max_depth=8, allow_indefinite=False)
    except cbor2.CBORDecodeError as error:
        raise CorruptionError(f"{where}: the record is damaged: {error}") from error
    if value.__class__ is not list:
        raise CorruptionError(f"{where}: the record is damaged: it holds no list")
    return value


def squeeze(payload: bytes) -> tuple[int, bytes]:
    """(flag, bytes) of a payload as it is stored: compressed where that is smaller."""
    if len(payload) >= ZSTD_BYTES_MIN:
        frame = zstd.compress(payload)
        if len(frame) < len(payload):
            return FLAG_ZSTD, frame
    return 0, payload


def unsqueeze(flags: int, stored: bytes, where: str) -> bytes:
    """What `squeeze` was given. CorruptionError if `stored` is not what it returned."""
    if not flags & FLAG_ZSTD:
        return stored
    try:
        return zstd.decompress(stored, RECORD_BYTES_MAX)
    except (CorruptionError, LimitExceeded) as error:
        raise CorruptionError(f"{where}: the record is damaged: {error}") from error


def payload_of(raw: bytes, where: str) -> list[Any]:
    """``[ops]`` or ``[ops, sums]`` of a checkpoint record. O(size)."""
    blob = raw[CHECKPOINT.size + int.from_bytes(raw[4:8], "little") :]
    flags = raw[1]
    payload = unpack(unsqueeze(flags, blob, where) if flags & FLAG_ZSTD else blob, where)
    if len(payload) != (2 if flags & FLAG_SUMS else 1) or payload[0].__class__ is not list:
        raise CorruptionError(f"{where}: the record is damaged: its payload has another shape than its flags say")
    return payload


end_of = keys.end_of


def int_part(value: int) -> bytes:
    """``keys.encode(value)`` without its loop over types: every commit makes two."""
    size = (value.bit_length() + 7) >> 3
    return bytes((0x10 + size,)) + value.to_bytes(size, "big")


class ThreadKeys:
    """The beginnings of a thread's keys, made once for each handle."""

    __slots__ = ("checkpoints", "head", "number", "prefix")

    def __init__(self, number: int) -> None:
        self.number = number
        self.prefix = prefix = keys.encode(number)
        self.head = prefix + _HEAD_PART
        self.checkpoints = prefix + _CHECKPOINTS


def head_key(prefix: bytes) -> bytes:
    return prefix + _HEAD_PART


def checkpoints(prefix: bytes) -> bytes:
    """The prefix of a thread's checkpoint keys; `int_part` of the seq completes it."""
    return prefix + _CHECKPOINTS


def packs(prefix: bytes) -> bytes:
    """The prefix of a thread's pack keys; `int_part` of the last member's seq completes it."""
    return prefix + _PACKS


def snapshots(prefix: bytes) -> bytes:
    """The prefix of a thread's snapshot keys."""
    return prefix + _SNAPSHOTS


def chunks(prefix: bytes) -> bytes:
    """The prefix of a thread's chunk keys."""
    return prefix + _CHUNKS


def pins(prefix: bytes) -> bytes:
    """The prefix of a thread's pin keys."""
    return prefix + _PINS


def seq_of(key: bytes, prefix: bytes) -> int:
    """The seq at the end of a key that begins with `prefix` and has one part more."""
    return int.from_bytes(key[len(prefix) + 1 :], "big")


def thread_id_bytes(thread_id: str) -> bytes:
    """A thread id as UTF-8; InvalidThreadId names what is wrong with it."""
    if not isinstance(thread_id, str):
        raise InvalidThreadId(f"a thread id is a str, not {type(thread_id).__name__}")
    try:
        raw = thread_id.encode("utf-8")
    except UnicodeEncodeError as error:
        # Lone surrogates have no UTF-8: no other program, terminal or database could name such a thread.
        raise InvalidThreadId(
            f"thread id {thread_id[:80]!r} has a lone surrogate at index {error.start}, which UTF-8 cannot hold"
        ) from None
    if not 1 <= len(raw) <= THREAD_ID_BYTES_MAX:
        raise InvalidThreadId(
            f"a thread id has 1 to {THREAD_ID_BYTES_MAX} bytes of UTF-8, this one has {len(raw)}: {thread_id[:80]!r}"
        )
    return raw


def name_key(name: bytes) -> bytes:
    """The key of a name in the name index; keys sort as the names do, except within one long prefix.

    A name that is too long for a key keeps its first bytes, cut so that exactly the names that share
    them sort between the same neighbours, and a hash.
    """
    escaped = len(name) + name.count(0)
    if escaped <= NAME_KEY_BYTES_MAX:
        return NAMES + keys.encode(name)
    return NAMES + keys.encode(cut_name(name), hashlib.sha256(name).digest()[:16])


def cut_name(name: bytes) -> bytes:
    """The longest beginning of `name` that has at most `NAME_KEY_BYTES_MAX` bytes after escaping."""
    cut = name[:NAME_KEY_BYTES_MAX]
    while len(cut) + cut.count(0) > NAME_KEY_BYTES_MAX:
        cut = cut[: len(cut) - max(1, (len(cut) + cut.count(0) - NAME_KEY_BYTES_MAX) // 2)]
    # The steps above may cut one byte more than they must: take back what still fits.
    while len(cut) < len(name):
        longer = name[: len(cut) + 1]
        if len(longer) + longer.count(0) > NAME_KEY_BYTES_MAX:
            break
        cut = longer
    return cut


def name_value(number: int, name: bytes) -> bytes:
    return NAME.pack(number) + name


def name_of(value: bytes) -> tuple[int, bytes]:
    """Number and name from a value of the name index."""
    if len(value) <= NAME.size:
        raise CorruptionError(f"a record of the name index is damaged: {value.hex()}")
    return NAME.unpack_from(value)[0], value[NAME.size :]


def delete_name(tx: Tx, number: int, name: bytes, token: int) -> None:
    """Forget that a thread exists; later threads begin with a fencing token that is no smaller than its last."""
    following, threads, floor = counters_of(tx.get(COUNTERS_KEY))
    tx.put(COUNTERS_KEY, COUNTERS.pack(following, threads - 1, max(floor, token)))
    tx.delete(name_key(name))
    tx.delete(CREATED + int_part(number))


def counters_of(raw: bytes | None) -> tuple[int, int, int]:
    """(next number, threads, token floor); of a new store (1, 0, 0)."""
    if raw is None:
        return 1, 0, 0
    if len(raw) != COUNTERS.size:
        raise CorruptionError(f"the thread counters are damaged: {raw.hex()}")
    counted: tuple[int, int, int] = COUNTERS.unpack(raw)
    return counted


def create_thread(tx: Tx, name: bytes, key: bytes) -> tuple[int, int]:
    """Give `name`, which the caller found free, the next number; that and the fencing token it begins with.

    Numbers are never given twice, so nothing of a deleted thread can appear in a later one of its name.
    """
    number, threads, token = counters_of(tx.get(COUNTERS_KEY))
    tx.put(COUNTERS_KEY, COUNTERS.pack(number + 1, threads + 1, token))
    tx.put(key, name_value(number, name))
    tx.put(CREATED + int_part(number), name)
    return number, token


def shown(name: Any) -> str:
    """A thread id as messages show it: quoted, and not longer than a line."""
    text = repr(name)
    return text if len(text) <= 120 else text[:117] + "...'"
