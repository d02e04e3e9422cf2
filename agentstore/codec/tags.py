"""The allow-list of CBOR tags: how the types that CBOR does not have itself are written and read.

`lower` turns a value into one that cbor2 writes natively, with a `CBORTag` in place of what needs one. `DECODERS`
is what cbor2 asks at every tag. It answers for the tags below and raises for all others *before* their content is
decoded: left alone, cbor2 compiles regular expressions, follows shared and string references (which
turn a kilobyte into gigabytes) and builds addresses and MIME messages from data.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from decimal import Context, Decimal, InvalidOperation
from itertools import chain
from typing import Any, Final, NoReturn
from uuid import UUID

import cbor2

from agentstore.codec.shape import ATOMS, NATIVE_KEYS, SCALARS, has_foreign_zone

BIGNUM: Final = 2
BIGNUM_NEGATIVE: Final = 3
UUID_BYTES: Final = 37
SET: Final = 258
DATE: Final = 1004
# From the IANA registry's range "first come, first served", where these were free. The standard tags for the same
# types lose something: 0 has no naive time and no fold, 4 no sNaN and no -0, 259 (a map of any keys) has no cbor2 side.
STR_SURROGATES: Final = 44900
TUPLE: Final = 44901
PAIRS: Final = 44902
DATETIME: Final = 44903
DECIMAL: Final = 44904

_Tag = cbor2.CBORTag
_dumps = cbor2.dumps
_NO_OFFSET = timedelta(0)
_MICROSECOND = timedelta(microseconds=1)

# A context of our own: the user's may have capitals=0, or not trap a malformed number.
_DECIMALS = Context(prec=1, capitals=1, traps=[InvalidOperation])


class ForeignZoneError(ValueError):
    """A datetime whose tzinfo is not a `datetime.timezone` came to `lower`."""


# --- writing -------------------------------------------------------------------------


def lower(value: Any, *, canonical: bool) -> Any:
    """`value` (surveyed, so: only kept types, not too deep) as cbor2 writes it natively. O(size).

    `canonical` sorts the pairs of dicts whose keys are not native; of the others cbor2 itself takes care.
    """
    cls = value.__class__
    if cls is str:
        return value if _is_utf8(value) else _Tag(STR_SURROGATES, value.encode("utf-8", "surrogatepass"))
    if cls in ATOMS:
        return value
    if cls is dict:
        return _lower_dict(value, canonical=canonical)
    if cls is list:
        return [lower(item, canonical=canonical) for item in value]
    if cls is tuple:
        return _Tag(TUPLE, [lower(item, canonical=canonical) for item in value])
    if cls is set:
        # Sorted: a set's order differs from process to process, and states are compared as bytes.
        return _Tag(SET, sorted([lower(item, canonical=canonical) for item in value], key=_order))
    if cls is datetime:
        return _Tag(DATETIME, _lower_datetime(value))
    if cls is date:
        return _Tag(DATE, value.isoformat())
    if cls is Decimal:
        return _Tag(DECIMAL, _DECIMALS.to_sci_string(value))
    if cls is UUID:
        return _Tag(UUID_BYTES, value.bytes)
    raise TypeError(f"not surveyed: {cls!r}")


def _lower_dict(value: dict[Any, Any], *, canonical: bool) -> Any:
    pairs = [(lower(key, canonical=canonical), lower(item, canonical=canonical)) for key, item in value.items()]
    if all(key.__class__ in NATIVE_KEYS for key, _ in pairs):
        return dict(pairs)
    if canonical:
        pairs.sort(key=lambda pair: _order(pair[0]))
    return _Tag(PAIRS, [*chain.from_iterable(pairs)])


def _lower_datetime(value: datetime) -> list[Any]:
    # The offset stands by itself: fromisoformat() of Python 3.11 reads "+00:00:00.000001" as UTC.
    parts: list[Any] = [value.replace(tzinfo=None).isoformat(), value.fold]
    zone = value.tzinfo
    if zone is not None:
        if has_foreign_zone(value):
            raise ForeignZoneError
        offset = zone.utcoffset(value) or _NO_OFFSET
        parts.append(offset // _MICROSECOND)
        name = zone.tzname(value)
        if name is not None and name != timezone(offset).tzname(value):
            parts.append(lower(name, canonical=False))
    return parts


def _order(lowered: object) -> bytes:
    return _dumps(lowered, canonical=True)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- reading -------------------------------------------------------------------------
# Each takes cbor2's decoded content and its flag "in a key" (unused: what may be a key is checked by type).
# Each accepts only what `lower` writes; cbor2 turns any exception into a CBORDecodeError.


def _content(item: Any, cls: type, what: str) -> Any:
    if item.__class__ is not cls:
        raise ValueError(f"the content of a {what} is {item.__class__.__name__}, not {cls.__name__}")
    return item


def _read_bignum(item: Any, _in_key: bool) -> int:
    raw = _content(item, bytes, "bignum")
    if len(raw) < 9 or raw[0] == 0:
        raise ValueError("a bignum is not written in the shortest way")
    return int.from_bytes(raw, "big")


def _read_bignum_negative(item: Any, in_key: bool) -> int:
    return -1 - _read_bignum(item, in_key)


def _read_uuid(item: Any, _in_key: bool) -> UUID:
    return UUID(bytes=_content(item, bytes, "UUID"))


def _read_surrogates(item: Any, _in_key: bool) -> str:
    text: str = _content(item, bytes, "str with surrogates").decode("utf-8", "surrogatepass")
    if _is_utf8(text):
        raise ValueError("a str without surrogates has the tag for those with")
    return text


def _read_tuple(item: Any, _in_key: bool) -> tuple[Any, ...]:
    return tuple(_content(item, list, "tuple"))


def _read_set(item: Any, _in_key: bool) -> set[Any]:
    items = _content(item, list, "set")
    if not all(x.__class__ in SCALARS or x.__class__ is tuple for x in items):
        raise ValueError("a set has an element that sets do not have here")
    result = set(items)
    if len(result) != len(items):
        raise ValueError("a set has an element twice")
    return result


def _read_pairs(item: Any, _in_key: bool) -> dict[Any, Any]:
    items = _content(item, list, "dict of pairs")
    keys = items[::2]
    if len(items) != 2 * len(keys):
        raise ValueError("a dict of pairs has a key without a value")
    if not SCALARS.issuperset(map(type, keys)):
        raise ValueError("a dict of pairs has a key that dicts do not have here")
    if all(key.__class__ is bytes or (key.__class__ is str and _is_utf8(key)) for key in keys):
        raise ValueError("a dict of pairs has only keys that belong into a map")
    result = dict(zip(keys, items[1::2], strict=True))
    if len(result) != len(keys):
        raise ValueError("a dict of pairs has a key twice (True, 1 and 1.0 are one key)")
    return result


def _read_datetime(item: Any, _in_key: bool) -> datetime:
    parts = _content(item, list, "datetime")
    if len(parts) not in (2, 3, 4):
        raise ValueError("a datetime is not [text, fold], with an offset and a name of the zone or without")
    text = _content(parts[0], str, "time")
    fold = _content(parts[1], int, "fold")
    value = datetime.fromisoformat(text).replace(fold=fold)
    if value.tzinfo is not None or value.isoformat() != text:
        raise ValueError(f"a datetime is not written as isoformat() does: {text!r:.60}")
    if len(parts) == 2:
        return value
    offset = timedelta(microseconds=_content(parts[2], int, "offset"))
    if len(parts) == 3:
        return value.replace(tzinfo=timezone(offset))
    name = _content(parts[3], str, "zone name")
    if name == timezone(offset).tzname(None):
        raise ValueError("a zone's own name is written out")
    return value.replace(tzinfo=timezone(offset, name))


def _read_date(item: Any, _in_key: bool) -> date:
    text = _content(item, str, "date")
    value = date.fromisoformat(text)
    if value.isoformat() != text:
        raise ValueError(f"a date is not written as isoformat() does: {text!r:.60}")
    return value


def _read_decimal(item: Any, _in_key: bool) -> Decimal:
    text = _content(item, str, "Decimal")
    value = Decimal(text, _DECIMALS)
    if _DECIMALS.to_sci_string(value) != text:
        raise ValueError(f"a Decimal is not written as str() does: {text!r:.60}")
    return value


class _Decoders(dict[int, Callable[[Any, bool], Any]]):
    """Tag number → reader. A missing tag raises, where a plain dict's KeyError would let cbor2 use its own reader."""

    def __missing__(self, tag: int) -> NoReturn:
        raise ValueError(f"the tag {tag} is not one that a store writes")


DECODERS: Final = _Decoders(
    {
        BIGNUM: _read_bignum,
        BIGNUM_NEGATIVE: _read_bignum_negative,
        UUID_BYTES: _read_uuid,
        SET: _read_set,
        DATE: _read_date,
        STR_SURROGATES: _read_surrogates,
        TUPLE: _read_tuple,
        PAIRS: _read_pairs,
        DATETIME: _read_datetime,
        DECIMAL: _read_decimal,
    }
)
