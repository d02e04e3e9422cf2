"""Stored values as JSON, without losing what they are.

JSON has no bytes, tuples, dates or nan, and only strings as keys. What it cannot say is
written as an object with one key that begins with ``$``; an object of the user's that
looks like that (or has other keys than strings) is written as ``{"$dict": [[key, value], …]}``,
so what is printed can always be told apart.

>>> to_json({"at": (1, 2.5), "raw": b"\\x00", 7: None})
{'$dict': [['at', {'$tuple': [1, 2.5]}], ['raw', {'$bytes': 'AA=='}], [7, None]]}
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from uuid import UUID


def to_json(value: object) -> object:
    """`value`, any that a store can hold, as something that `json.dumps` writes without losing its type. O(size)."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not _looks_tagged(value):
            return {key: to_json(item) for key, item in value.items()}
        return {"$dict": [[to_json(key), to_json(item)] for key, item in value.items()]}
    return _tagged(value)


def _looks_tagged(value: Mapping[str, object]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")


def _tagged(value: object) -> object:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, tuple):
        return {"$tuple": [to_json(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {"$set": sorted((to_json(item) for item in value), key=repr)}
    if isinstance(value, datetime):  # before date: a datetime is one
        return {"$datetime": value.isoformat()}
    if isinstance(value, date):
        return {"$date": value.isoformat()}
    if isinstance(value, Decimal):
        return {"$decimal": str(value)}
    if isinstance(value, UUID):
        return {"$uuid": str(value)}
    raise TypeError(f"no store holds a {type(value).__name__}")
