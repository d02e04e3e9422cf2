"""The bytes of the effect ledger: intents, receipts, and the keys that they stand under.

All are CBOR. Under a thread's number stand (for `Store.once`, under ``"o"``, "i" and "e" with the name of the call)

    "i", decision uuid, decision seq, call, generation              an open call: its intent
    "e", decision uuid, decision seq, call, generation              a finished call: [intent, receipt]
    "e", decision uuid, decision seq, call, generation, receipt id  a duplicate: a second receipt of that call
    "r", call hash, decision uuid, decision seq, call, generation   index of receipts by tool and arguments: true

An intent moves from "i" to "e" when its receipt comes, so that what is open is found in O(open) however long the
thread is. (One record that is rewritten in place costs a scan of everything that ever happened.)

    intent   [1, key, call hash, tool, rule, arguments, timeout ms, owner, token, attempt, nonce, deadline ns,
              started us, LSN, mark, why]
    receipt  [1, id, outcome, source, result, error, checkpoint seq or null, owner, token, attempt, at us, LSN]

`arguments` and `result` are byte strings: one byte 0 and CBOR, or one byte 1 and a zstd frame of CBOR. Owner is 36
bytes (`agentstore.clock.Owner`), times are microseconds since 1970 UTC, deadlines
nanoseconds on the boot clock of the owner's boot.

>>> from agentstore.codec.cbor import canonical
>>> identity = Identity(bytes(16), 3, 0, 0)
>>> key, call_hash = hash_call(identity, "charge", canonical({"amount": 5}))
>>> key.hex()[:16], key == hash_call(identity._replace(generation=1), "charge", canonical({"amount": 5}))[0]
('41382582c9477569', False)
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

from agentstore.codec import zstd
from agentstore.codec.cbor import ENCODED_BYTES_MAX, array_header, decode, encode
from agentstore.engine import keys
from agentstore.errors import CorruptionError

RECORD_VERSION: Final = 1

COMPRESS_BYTES_MIN: Final = 512
"""Arguments and results below this many bytes are kept as they are: the frame would save little and cost more."""

_PLAIN, _ZSTD = b"\0", b"\1"


class Identity(NamedTuple):
    """Which call: the decision it belongs to, its place there, and how often it was allowed anew."""

    decision_uuid: bytes
    """Uuid of the thread where the decision was first confirmed, 16 bytes; forks carry it along."""
    decision_seq: int
    """Seq of the decision's checkpoint there."""
    call: int
    """Index of the call among the decision's, from 0."""
    generation: int
    """0, raised when an approval edited the arguments or the effect was undone."""

    def __str__(self) -> str:
        generation = f" generation {self.generation}" if self.generation else ""
        return f"call {self.call} of decision {self.decision_seq}{generation}"


MARK_STARTED: Final = 0
"""In flight until the caller is provably dead or the deadline passed."""
MARK_IN_DOUBT: Final = 1
"""The caller itself said that it ended without knowing the outcome."""
MARK_NOT_DONE: Final = 2
"""The tool or a person said that it did not happen."""
MARK_FORKED: Final = 3
"""Copied into a fork without a receipt: in doubt, and only a person decides."""

SOURCES: Final = ("call", "query", "person", "rule")
"""Who said so: the caller of the tool, the tool when asked about the key, a person, the rule of the tool."""


class Intent(NamedTuple):
    """The durable start record of a call (of its newest attempt)."""

    key: bytes
    call_hash: bytes
    tool: str
    rule: str
    arguments: bytes
    timeout_ms: int
    owner: bytes
    token: int
    attempt: int
    nonce: bytes
    """8 random bytes of this attempt: whoever holds them is its caller."""
    deadline_ns: int
    started_us: int
    lsn: int
    """Of its transaction; 0 for a `read`, whose intent stands with its receipt only."""
    mark: int
    why: str


class Receipt(NamedTuple):
    """The durable result of a call."""

    id: bytes
    """8 random bytes: a writer recognises its own receipt when it tries again."""
    outcome: str
    source: str
    result: bytes
    error: str
    seq: int | None
    """The checkpoint that was committed with it; None if it was stored alone."""
    owner: bytes
    token: int
    attempt: int
    at_us: int
    lsn: int


class Slot(NamedTuple):
    """The keys of one call."""

    intent: bytes
    receipt: bytes
    by_call: bytes
    """Of the index by tool and arguments; empty where there is none."""


def effect_slot(prefix: bytes, identity: Identity, call_hash: bytes) -> Slot:
    """Where the records of a call stand under the prefix of a thread. O(1)."""
    tail = keys.encode(*identity)
    return Slot(
        prefix + _INTENT_SPACE + tail,
        prefix + _RECEIPT_SPACE + tail,
        prefix + _INDEX_SPACE + keys.encode(call_hash) + tail,
    )


_INTENT_SPACE: Final = keys.encode("i")
_RECEIPT_SPACE: Final = keys.encode("e")
_INDEX_SPACE: Final = keys.encode("r")


def intent_space(prefix: bytes, *parts: int | str | bytes) -> bytes:
    """Begin of the keys of open calls under `prefix`, narrowed by the first `parts` of an identity."""
    return prefix + _INTENT_SPACE + keys.encode(*parts)


def receipt_space(prefix: bytes, *parts: int | str | bytes) -> bytes:
    """Begin of the keys of finished calls and duplicates under `prefix`, narrowed by first `parts` of an identity."""
    return prefix + _RECEIPT_SPACE + keys.encode(*parts)


def index_space(prefix: bytes, *parts: bytes) -> bytes:
    """Begin of the keys of the index by tool and arguments under `prefix`, narrowed by a call hash."""
    return prefix + _INDEX_SPACE + keys.encode(*parts)


def identity_of(key: bytes, space: bytes) -> tuple[Identity, bytes | None]:
    """The identity in a key that begins with `space` (of `intent_space` or `receipt_space` without parts), and the
    receipt id if it is of a duplicate."""
    try:
        uuid, seq, index, generation, *rest = keys.decode(key[len(space) :])
    except ValueError as error:
        raise CorruptionError(f"the key {key.hex()} is not one of an effect; run `agentstore verify`") from error
    return Identity(uuid, seq, index, generation), rest[0] if rest else None  # type: ignore[arg-type, return-value]  # the types of its parts are those it was written with


def hash_call(identity: Identity, tool: str, arguments: bytes) -> tuple[bytes, bytes]:
    """Key (32 bytes) and call hash (16 bytes) of a call; `arguments` is their canonical CBOR. O(size).

    The key is SHA-256 over the order-preserving encoding of (decision uuid, decision seq, index, generation, tool)
    followed by the canonical CBOR of the arguments; the call hash is the begin of SHA-256 over (tool) and the same.
    """
    key = hashlib.sha256(keys.encode(*identity, tool))
    key.update(arguments)
    call = hashlib.sha256(keys.encode(tool))
    call.update(arguments)
    return key.digest(), call.digest()[:16]


def pack(value: object, path: tuple[str, ...]) -> bytes:
    """`value` as bytes of a record. Raises UnencodableState or LimitExceeded naming `path`. O(size)."""
    data = encode(value, path)
    if len(data) >= COMPRESS_BYTES_MIN:
        frame = zstd.compress(data)
        if len(frame) < len(data):
            return _ZSTD + frame
    return _PLAIN + data


def unpack(data: bytes) -> Any:
    """The value that `pack` wrote, fresh at each call. CorruptionError if the bytes are not one. O(size)."""
    kind = data[:1]
    if kind == _PLAIN:
        return decode(data[1:])
    if kind == _ZSTD:
        return decode(zstd.decompress(data[1:], ENCODED_BYTES_MAX))
    raise CorruptionError(f"a packed value begins with {kind!r}; run `agentstore verify`")


def encode_intent(intent: Intent) -> bytes:
    """The bytes of an intent's record. O(size)."""
    return encode([RECORD_VERSION, *intent])


def encode_receipt(receipt: Receipt) -> bytes:
    """The bytes of a receipt's record. O(size)."""
    return encode([RECORD_VERSION, *receipt])


_PAIR_HEADER: Final = array_header(2)


def encode_pair(intent: Intent, receipt: Receipt) -> bytes:
    """The bytes of a finished call's record. O(size)."""
    return join_pair(encode_intent(intent), receipt)


def join_pair(intent: bytes, receipt: Receipt) -> bytes:
    """As `encode_pair`, with the intent as it stands in its own record. O(size)."""
    return _PAIR_HEADER + intent + encode_receipt(receipt)


def decode_intent(data: bytes) -> Intent:
    """The intent that `encode_intent` wrote; CorruptionError if the bytes are not one."""
    return _intent(decode(data))


def decode_receipt(data: bytes) -> Receipt:
    """The receipt that `encode_receipt` wrote; CorruptionError if the bytes are not one."""
    return _receipt(decode(data))


def decode_pair(data: bytes) -> tuple[Intent, Receipt]:
    """The pair that `encode_pair` wrote; CorruptionError if the bytes are not one."""
    pair = decode(data)
    if pair.__class__ is not list or len(pair) != 2:
        raise CorruptionError("the record of a finished call is not a pair; run `agentstore verify`")
    return _intent(pair[0]), _receipt(pair[1])


_INTENT_TYPES: Final = (int, bytes, bytes, str, str, bytes, int, bytes, int, int, bytes, int, int, int, int, str)
_RECEIPT_TYPES: Final = (int, bytes, str, str, bytes, str, object, bytes, int, int, int, int)
assert len(_INTENT_TYPES) == 1 + len(Intent._fields)
assert len(_RECEIPT_TYPES) == 1 + len(Receipt._fields)


def _intent(parts: Any) -> Intent:
    return Intent(*_checked(parts, _INTENT_TYPES, "an intent"))


def _receipt(parts: Any) -> Receipt:
    return Receipt(*_checked(parts, _RECEIPT_TYPES, "a receipt"))


def _checked(parts: Any, types: tuple[type, ...], what: str) -> list[Any]:
    if (
        parts.__class__ is not list
        or len(parts) != len(types)
        or parts[0] != RECORD_VERSION
        or not all(map(isinstance, parts, types))
    ):
        raise CorruptionError(f"the record of {what} has not the shape of one; run `agentstore verify`")
    return parts[1:]
