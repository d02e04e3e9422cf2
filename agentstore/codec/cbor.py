"""CBOR for what agents hold: lossless, exact types only, and nothing runs while decoding.

What goes through, and comes back as the same type: None, bool, int of any size, float, str (lone surrogates
included), bytes, list, tuple, dict (order kept), set, datetime (naive, or with a `datetime.timezone`), date, Decimal,
UUID. Keys of a dict are any of these but the containers; elements of a set are those and tuples of them. Everything
else raises UnencodableState, subclasses too: an IntEnum that comes back as an int after a crash
is a fault that shows only after a crash.

JSON-like values are RFC 8949 as any decoder reads it. For the rest there are these tags and no others (tags.py):

    2, 3   byte string                            int outside of -2**64 .. 2**64 - 1
    37     16 bytes                               UUID
    258    array, sorted by its items' encodings  set
    1004   text "2026-11-30"                      date
    44900  byte string, UTF-8 with surrogates     str that holds lone surrogates
    44901  array                                  tuple
    44902  array k1, v1, k2, v2 …                 dict with a key that is neither bytes nor a str without surrogates
    44903  array [text, fold, offset?, name?]     datetime: isoformat() without zone; the zone's offset in µs if aware;
                                                  its name where it is another than Python gives to that offset
    44904  text as str() writes it                Decimal

Not kept: payload and sign of a NaN, `UUID.is_safe`, the identity of objects that are reached twice.

The common case does its work in cbor2's native code. What lost: cbor2's hook `encoders=` for the exact types (three
times the time of a plain `dumps`), and marshal as a native check of exact types (it takes anything that has a
buffer).

Decoding refuses indefinite lengths, duplicate keys (also after decoding: 1 and True), simple values, unknown tags and
trailing bytes. It accepts, unlike a canonical decoder, numbers and lengths that are not written in the shortest
way: they are unambiguous, and finding them costs a second encoding.

Limits: `DEPTH_MAX` levels, `ENCODED_BYTES_MAX` bytes. Memory: the objects of a decoded chat transcript take 1.4 to 5
bytes per encoded byte (5 where messages are short); the worst case, one-entry dicts inside each other, takes 112. A
length that the bytes do not back up allocates nothing. Time is linear, except that the keys of pairs and the elements
of sets are hashed by values that whoever wrote the bytes can choose.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from sys import getrefcount
from typing import Any, Final

import cbor2

from agentstore.codec.shape import (
    ATOMS,
    DEPTH_MAX,
    ENCODED_BYTES_MAX,
    PLAIN,
    TAGGED,
    TOO_DEEP,
    Path,
    format_path,
    is_plain,
    refusal,
    survey,
    too_deep,
    too_large,
)
from agentstore.codec.tags import DECODERS, ForeignZoneError, lower
from agentstore.errors import CorruptionError, LimitExceeded

__all__ = [
    "DEPTH_MAX",
    "ENCODED_BYTES_MAX",
    "MEMORY_FACTOR_MAX",
    "Path",
    "array_header",
    "canonical",
    "decode",
    "decode_joined",
    "encode",
    "format_path",
    "map_header",
]

MEMORY_FACTOR_MAX: Final = 128
"""Most bytes of Python objects that one encoded byte can become; tests/test_codec_decode.py measures it."""

_dumps = cbor2.dumps
_loads = cbor2.loads
_SimpleValue = cbor2.CBORSimpleValue
_undefined = cbor2.undefined


def encode(value: Any, path: Path = ()) -> bytes:
    """The CBOR of `value`. O(size).

    `path` is where the value stands in the state; only messages use it. Raises UnencodableState
    with the path of the first value of a type that is not kept, LimitExceeded above
    `DEPTH_MAX` levels or `ENCODED_BYTES_MAX` bytes.

    >>> encode({"step": 1}).hex()
    'a1647374657001'
    >>> encode({"content": 1j}, path=("conversation_history", 3))
    Traceback (most recent call last):
    agentstore.errors.UnencodableState: conversation_history[3].content has the type complex, which the store does not \
keep (it keeps None, bool, int, float, str, bytes, list, tuple, dict, set, datetime, date, Decimal and UUID, and no \
subclasses of them); convert it before the commit
    """
    cls = value.__class__
    if cls in ATOMS or ((cls is dict or cls is list) and is_plain(value)):
        verdict = PLAIN
    else:
        verdict = survey(value)
    if verdict == PLAIN:
        try:
            data = _dumps(value)
        except UnicodeEncodeError:
            data = _dumps(lower(value, canonical=False))
    else:
        data = _encode_tagged(value, verdict, path, canonical=False)
    if len(data) > ENCODED_BYTES_MAX:
        raise too_large(path, f"{len(data)} bytes")
    return data


def canonical(value: Any, path: Path = ()) -> bytes:
    """The one encoding of `value` for hashing and comparing, in whatever order its keys are. O(n log n).

    Equal bytes mean the same types and the same values (``1``, ``1.0`` and ``True`` differ, and so do a list and a
    tuple). Three to four times slower than `encode`, whose errors it raises; `decode` reads it too.

    >>> canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
    True
    >>> canonical(1) == canonical(1.0)
    False
    """
    verdict = survey(value)
    if verdict == PLAIN:
        try:
            data = _dumps(value, canonical=True)
        except UnicodeEncodeError:
            data = _dumps(lower(value, canonical=True), canonical=True)
    else:
        data = _encode_tagged(value, verdict, path, canonical=True)
    if len(data) > ENCODED_BYTES_MAX:
        raise too_large(path, f"{len(data)} bytes")
    return data


def _encode_tagged(value: Any, verdict: int, path: Path, *, canonical: bool) -> bytes:
    if verdict == TAGGED:
        try:
            return _dumps(lower(value, canonical=canonical), canonical=canonical)
        except ForeignZoneError:
            pass
    raise refusal(value, verdict, path)


# Stands behind the value while it is decoded: `loads` does not say where it stopped, and a reader from a file
# (which would) has returned wrong data before. Random, or bytes could bring an end of their own.
_END = secrets.token_bytes(12)
_BEFORE = b"\x82"  # an array of 2: the value, and _END
_BEHIND = bytes((0x40 + len(_END),)) + _END
_FRAME_BYTES = len(_BEFORE) + len(_BEHIND)

_TOO_DEEP_TEXT = "maximum container nesting depth"


def decode(data: bytes) -> Any:
    """The value that `data` is the encoding of, all of it. O(size).

    Raises CorruptionError if `data` is not what `encode` writes, LimitExceeded above `DEPTH_MAX` levels or
    `ENCODED_BYTES_MAX` bytes.

    >>> decode(bytes.fromhex("a1647374657001"))
    {'step': 1}
    >>> decode(bytes.fromhex("d8236161"))
    Traceback (most recent call last):
    agentstore.errors.CorruptionError: 4 bytes are not a value's encoding: error decoding semantic tag: the tag 35 is \
not one that a store writes
    """
    _check_size(len(data))
    return _decode_framed(b"".join((_BEFORE, data, _BEHIND)))


def decode_joined(parts: Iterable[bytes]) -> Any:
    """``decode(b"".join(parts))`` with one copy of the bytes less; for a list put together from its items. O(size).

    >>> decode_joined([array_header(2), encode("a"), encode(1)])
    ['a', 1]
    """
    framed = b"".join((_BEFORE, *parts, _BEHIND))
    _check_size(len(framed) - _FRAME_BYTES)
    return _decode_framed(framed)


def _check_size(size: int) -> None:
    if size > ENCODED_BYTES_MAX:
        raise LimitExceeded(
            f"an encoded value has {size} bytes, more than the limit of {ENCODED_BYTES_MAX} (ENCODED_BYTES_MAX)"
        )


def _foreign_objects() -> int:
    """A number that grows with every simple value or `undefined` that exists.

    cbor2 decodes those to objects of its own and has no option against it. Each one holds a reference to what is
    counted here, so finding none takes no time; to look at the types of all parts took half of the time of decoding.
    """
    return getrefcount(_SimpleValue) + getrefcount(_undefined)


def _decode_framed(framed: bytes) -> Any:
    size = len(framed) - _FRAME_BYTES
    foreign_before = _foreign_objects()
    try:
        # Spelled out, as in _decode_deep: a ** of a dict takes a third of the time of a small value.
        value, end = _loads(
            framed,
            semantic_decoders=DECODERS,
            max_depth=DEPTH_MAX + 1,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
        )
    except cbor2.CBORDecodeError as error:
        if _TOO_DEEP_TEXT not in str(error):
            raise _undecodable(size, error) from error
        value, end = _decode_deep(framed)
    if end.__class__ is not bytes or end != _END:
        raise CorruptionError(f"{size} bytes hold a value's encoding and something behind it")
    if (_COUNTS_FAIL or _foreign_objects() != foreign_before) and survey(value, tree=True) not in (PLAIN, TAGGED):
        raise CorruptionError(f"{size} bytes hold a CBOR value of a type that no store writes")
    return value


def _decode_deep(framed: bytes) -> list[Any]:
    """Decode again: cbor2 counts a tag as a level, and a datetime as two, so it reaches its limit before ours."""
    try:
        pair: list[Any] = _loads(
            framed,
            semantic_decoders=DECODERS,
            max_depth=2 * DEPTH_MAX + 4,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
        )
    except cbor2.CBORDecodeError as error:
        if _TOO_DEEP_TEXT in str(error):
            raise too_deep("a part of an encoded value") from error
        raise _undecodable(len(framed) - _FRAME_BYTES, error) from error
    if survey(pair[0], tree=True) == TOO_DEEP:
        raise too_deep("a part of an encoded value")
    return pair


def _undecodable(size: int, error: cbor2.CBORDecodeError) -> CorruptionError:
    cause = f": {error.__cause__}" if error.__cause__ is not None else ""
    return CorruptionError(f"{size} bytes are not a value's encoding: {error}{cause}")


def _counts_fail() -> bool:
    """True where `_foreign_objects` does not notice such objects (a Python with other reference counts)."""
    before = _foreign_objects()
    held = _loads(bytes.fromhex("82f7f0"))
    return _foreign_objects() < before + len(held)


_COUNTS_FAIL: Final = _counts_fail()


def array_header(items: int) -> bytes:
    """What stands before the encodings of `items` values in the encoding of their list. O(1).

    >>> array_header(2) + encode("a") + encode(1) == encode(["a", 1])
    True
    """
    return _header(0x80, items)


def map_header(entries: int) -> bytes:
    """What stands before the encodings of `entries` keys, each followed by its value's, in a dict's encoding. O(1).

    Only for keys that are bytes or str without lone surrogates; other dicts are not maps.

    >>> map_header(1) + encode("a") + encode(1) == encode({"a": 1})
    True
    """
    return _header(0xA0, entries)


def _header(major: int, count: int) -> bytes:
    if 0 <= count < 24:
        return bytes((major + count,))
    if not 0 <= count <= ENCODED_BYTES_MAX:
        raise LimitExceeded(f"a container has 0 to {ENCODED_BYTES_MAX} items (ENCODED_BYTES_MAX), not {count}")
    info, size = (24, 1) if count < 1 << 8 else (25, 2) if count < 1 << 16 else (26, 4)
    return bytes((major + info,)) + count.to_bytes(size, "big")
