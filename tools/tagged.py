"""Stored values as JSON and back, exactly: every value and type that a store holds comes back as it was.

As `plain.to_json`, whose output is for looking, but what JSON readers mangle is tagged as well: text with lone
surrogates (two of them would come back as one character) and ints beyond 64 bits. Tags:

    {"$bytes": base64}   {"$tuple": […]}   {"$set": […]}    {"$dict": [[key, value], …]}
    {"$int": "0x…"}      {"$float": text}  {"$decimal": text}  {"$uuid": text}
    {"$str": base64 of UTF-8 with surrogates}
    {"$date": ISO}       {"$datetime": ISO}, or [ISO without zone, fold, offset in µs or null, name or null]

A dict with one key that begins with ``$`` is written as ``$dict``, so a tag is always one.

>>> decode(encode({"at": (1, 2**70), b"k": "\\ud83d\\ude00"})) == {"at": (1, 2**70), b"k": "\\ud83d\\ude00"}
True
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

INT_BITS_MAX: Final = 64
"""Ints of more bits are tagged: other readers of JSON make floats of them, and Python limits their digits."""

_MICROSECOND = timedelta(microseconds=1)


class TagError(ValueError):
    """The value is not one that `encode` made."""


# --- writing -----------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """`value`, any that a store can hold, as something that `json.dumps` writes. O(size)."""
    cls = value.__class__
    if cls is str:
        return value if _is_text(value) else {"$str": _base64(value.encode("utf-8", "surrogatepass"))}
    if value is None or cls is bool:
        return value
    if cls is int:
        return value if value.bit_length() <= INT_BITS_MAX else {"$int": hex(value)}
    if cls is list:
        return [encode(item) for item in value]
    if cls is dict:
        if all(key.__class__ is str and _is_text(key) for key in value) and not _looks_tagged(value):
            return {key: encode(item) for key, item in value.items()}
        return {"$dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if cls is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    return _tag(value)


def _tag(value: Any) -> Any:
    cls = value.__class__
    if cls is bytes:
        return {"$bytes": _base64(value)}
    if cls is tuple:
        return {"$tuple": [encode(item) for item in value]}
    if cls is set:
        return {"$set": sorted((encode(item) for item in value), key=repr)}
    if cls is datetime:
        return {"$datetime": _datetime_parts(value)}
    if cls is date:
        return {"$date": value.isoformat()}
    if cls is Decimal:
        return {"$decimal": str(value)}
    if cls is UUID:
        return {"$uuid": str(value)}
    raise TypeError(f"no store holds a {cls.__name__}")


def _looks_tagged(value: dict[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _datetime_parts(value: datetime) -> Any:
    """ISO text where that says it all, which it does not of a fold, a zone's name, or an offset with microseconds."""
    zone = value.tzinfo
    offset = value.utcoffset()
    plain = offset is None or (not offset.microseconds and value.tzname() == timezone(offset).tzname(None))
    if plain and not value.fold:
        return value.isoformat()
    name = None if zone is None or plain else value.tzname()
    return [
        value.replace(tzinfo=None, fold=0).isoformat(),
        value.fold,
        None if offset is None else offset // _MICROSECOND,
        None if name is None else encode(name),
    ]


# --- reading -----------------------------------------------------------------------------


def decode(value: Any) -> Any:
    """The value that `encode` made `value` of. `TagError` if it made it of none. O(size)."""
    cls = value.__class__
    if cls is list:
        return [decode(item) for item in value]
    if cls is dict:
        if _looks_tagged(value):
            return _untag(*next(iter(value.items())))
        return {key: decode(item) for key, item in value.items()}
    return value


def _untag(tag: str, content: Any) -> Any:
    read = _READERS.get(tag)
    if read is None:
        raise TagError(f"there is no tag {tag[:40]!r}")
    try:
        return read(content)
    except TagError:
        raise
    except (ValueError, TypeError, ArithmeticError, binascii.Error) as error:
        raise TagError(f"the content of a {tag} is malformed: {error}") from error


def _text(content: Any) -> str:
    if content.__class__ is not str:
        raise TagError(f"a text was expected, not {type(content).__name__}")
    return str(content)


def _items(content: Any) -> list[Any]:
    if content.__class__ is not list:
        raise TagError(f"an array was expected, not {type(content).__name__}")
    return [decode(item) for item in content]


def _bytes(content: Any) -> bytes:
    return base64.b64decode(_text(content), validate=True)


def _float(content: Any) -> float:
    value = float(_text(content))
    if math.isfinite(value):
        raise TagError("a finite number needs no tag")
    return value


def _set(content: Any) -> set[Any]:
    items = _items(content)
    made = set(items)
    if len(made) != len(items):
        raise TagError("a set has an item twice")
    return made


def _dict(content: Any) -> dict[Any, Any]:
    made = {}
    for pair in _items(content):
        if pair.__class__ is not list or len(pair) != 2:
            raise TagError("a $dict is an array of pairs")
        made[pair[0]] = pair[1]
    if len(made) != len(content):
        raise TagError("a $dict has a key twice")
    return made


def _datetime(content: Any) -> datetime:
    if content.__class__ is str:
        return datetime.fromisoformat(content)
    text, fold, offset, name = content
    zone: timezone | None = None
    if offset is not None:
        delta = timedelta(microseconds=offset)
        zone = timezone(delta) if name is None else timezone(delta, _text(decode(name)))
    return datetime.fromisoformat(_text(text)).replace(fold=fold, tzinfo=zone)


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "$str": lambda content: _bytes(content).decode("utf-8", "surrogatepass"),
    "$int": lambda content: int(_text(content), 16),
    "$float": _float,
    "$bytes": _bytes,
    "$tuple": lambda content: tuple(_items(content)),
    "$set": _set,
    "$dict": _dict,
    "$datetime": _datetime,
    "$date": lambda content: date.fromisoformat(_text(content)),
    "$decimal": lambda content: Decimal(_text(content)),
    "$uuid": lambda content: UUID(_text(content)),
}
