"""The shape of a value: which types it is made of, how deep it is, and where the first one stands that is not kept.

`is_plain` answers the common case, on every commit; `survey` knows all cases and goes level by level; the slow walk
that knows paths runs only once something was refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime, timezone
from decimal import Decimal
from itertools import chain
from typing import Any, Final
from uuid import UUID

from agentstore.errors import AgentStoreError, LimitExceeded, UnencodableState

DEPTH_MAX: Final = 100
"""Containers inside each other, in levels: ``[[1]]`` has 2."""

ENCODED_BYTES_MAX: Final = 256 * 1024 * 1024
"""Size of one encoded value, in bytes."""

Path = tuple[str | int, ...]
"""Where a value stands: field names and list indexes, e.g. ``("conversation_history", 3, "content")``."""

ATOMS: Final[frozenset[type]] = frozenset({str, int, float, bool, type(None), bytes})
"""Types without parts that CBOR has itself."""
SCALARS: Final[frozenset[type]] = ATOMS | {datetime, date, Decimal, UUID}
"""Types without parts; what a dict may have as keys."""
SEQUENCES: Final[frozenset[type]] = frozenset({list, tuple, set})
NATIVE_KEYS: Final[frozenset[type]] = frozenset({str, bytes})
"""Types of the keys of a CBOR map here."""

_PLAIN: Final[frozenset[type]] = ATOMS | {dict, list}
_KEPT: Final[frozenset[type]] = SCALARS | SEQUENCES | {dict}

# A value with more containers than this (all together, or side by side) is checked for cycles and for shared
# lists that multiply before more time and memory go into it.
_MANY_CONTAINERS = 1 << 18

PLAIN, TAGGED, REFUSED, TOO_DEEP, TOO_WIDE = range(5)
"""Verdicts of `survey`: PLAIN and TAGGED can be encoded (without and with tags), the others cannot."""

_values = dict.values
_are_native_keys = NATIVE_KEYS.issuperset


def is_plain(value: dict[Any, Any] | list[Any]) -> bool:
    """True if `value` is made of dicts with str keys, lists and atoms only. O(size).

    False can also mean: too deep, or too many containers to say so quickly; `survey` knows.
    """
    return _plain(value, DEPTH_MAX, _MANY_CONTAINERS) >= 0


def _plain(container: Any, depth: int, budget: int) -> int:
    """What is left of `budget` (in containers) after `container`, or a negative number if it is not plain.

    Every commit pays for this. Loops over `__class__` beat set operations on `map(type, …)` for small containers
    (1.0 against 1.7 µs for a message) and are as fast for a list of 10,000 messages.
    """
    budget -= 1
    if depth == 0 or budget < 0:
        return -1
    if container.__class__ is dict:
        for key in container:
            if key.__class__ is not str:
                return -1
        container = container.values()
    for part in container:
        cls = part.__class__
        if cls not in ATOMS:
            if cls is not dict and cls is not list:
                return -1
            budget = _plain(part, depth - 1, budget)
            if budget < 0:
                return -1
    return budget


def survey(value: object, *, tree: bool = False) -> int:
    """The verdict on `value`. O(size).

    `tree=True` says that no container can be reached twice (the value was just decoded).
    """
    if value.__class__ in ATOMS:
        return PLAIN
    level: list[Any] = [value]  # all that is no atom, of one depth
    verdict = PLAIN
    for _ in range(DEPTH_MAX):
        below: list[Any] = []
        verdict = max(verdict, _survey_level(level, below))
        if verdict == REFUSED or not below:
            return verdict
        level = below
        if len(level) > _MANY_CONTAINERS and not tree:
            # The levels of a cyclic [a, a] double up to the depth limit: find out before memory ends.
            if _is_too_wide(value):
                return TOO_WIDE
            tree = True
    types = set(map(type, level))
    return TAGGED if types <= SCALARS else TOO_DEEP if types <= _KEPT else REFUSED


def _survey_level(level: list[Any], below: list[Any]) -> int:
    """The verdict on the parts in `level` alone; adds what they hold and is no atom to `below`."""
    types = set(map(type, level))
    if not types <= _KEPT:
        return REFUSED
    verdict = PLAIN if types <= _PLAIN else TAGGED
    if dict in types:
        dicts = [x for x in level if x.__class__ is dict]
        if not _are_native_keys(map(type, chain.from_iterable(dicts))):
            if not SCALARS.issuperset(map(type, chain.from_iterable(dicts))):
                return REFUSED
            verdict = TAGGED
        below += [x for x in chain.from_iterable(map(_values, dicts)) if x.__class__ not in ATOMS]
    if not types.isdisjoint(SEQUENCES):
        sequences: list[Any] = [x for x in level if x.__class__ in SEQUENCES]
        below += [x for x in chain.from_iterable(sequences) if x.__class__ not in ATOMS]
    return verdict


def _is_too_wide(value: object) -> bool:
    """True if `value` is cyclic or, written out, has more items than an encoding has bytes. O(distinct objects)."""
    counts: dict[int, int | None] = {}  # None: being counted, so to reach it again is a cycle

    def count(container: Any, depth: int) -> int:
        known = counts.get(id(container), -1)
        if known is None or depth > DEPTH_MAX + 1:
            return ENCODED_BYTES_MAX + 1
        if known >= 0:
            return known
        counts[id(container)] = None
        total = 1
        for child in _values(container) if container.__class__ is dict else container:
            total += count(child, depth + 1) if child.__class__ is dict or child.__class__ in SEQUENCES else 1
        counts[id(container)] = total
        return total

    return count(value, 1) > ENCODED_BYTES_MAX


def has_foreign_zone(value: Any) -> bool:
    """True for a datetime whose tzinfo is neither None nor exactly a `datetime.timezone`."""
    return value.__class__ is datetime and value.tzinfo.__class__ not in (timezone, type(None))


def format_path(path: Path) -> str:
    """`path` as messages show it; a part that is no plain name stands in brackets, a long path loses its middle.

    >>> format_path(("conversation_history", 3, "tool calls", "id"))
    "conversation_history[3]['tool calls'].id"
    >>> format_path(())
    'the value'
    """
    if not path:
        return "the value"
    parts = [
        (part if index == 0 else f".{part}") if isinstance(part, str) and part.isidentifier() else f"[{_shown(part)}]"
        for index, part in enumerate(path)
    ]
    if len(parts) > 12:
        parts[6:-4] = ["[…]"]
    return "".join(part if len(part) <= 100 else f"{part[:96]}…" for part in parts)


def refusal(value: object, verdict: int, path: Path) -> AgentStoreError:
    """The exception for a value that `survey` (or the encoder) refused, with the path of the first culprit."""
    if verdict == TOO_WIDE:
        return too_large(path, "more items than that, because it is cyclic or holds one object again and again")
    found = _first_refused(value, path, 0)
    if found is not None:
        return found
    return UnencodableState(f"{format_path(path)} changed while it was being encoded; encode a copy of it")


def too_large(path: Path, what: str) -> LimitExceeded:
    """The exception for a value whose encoding would be larger than `ENCODED_BYTES_MAX`."""
    return LimitExceeded(
        f"{format_path(path)} takes {what}, and the limit of one value is {ENCODED_BYTES_MAX} bytes"
        " (ENCODED_BYTES_MAX); keep large contents in files and their names in the state"
    )


def too_deep(where: str) -> LimitExceeded:
    """The exception for a value with more than `DEPTH_MAX` levels."""
    return LimitExceeded(
        f"{where} is below {DEPTH_MAX} levels of containers, the limit (DEPTH_MAX); flatten it (is it cyclic?)"
    )


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # an int of more than 4,300 digits, or anything a __repr__ of the user's raises
        return f"<{_type_name(value)}>"


def _type_name(value: object) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"


def _first_refused(value: Any, path: Path, depth: int) -> AgentStoreError | None:
    cls = value.__class__
    if cls in SCALARS:
        if has_foreign_zone(value):
            return UnencodableState(
                f"{format_path(path)} is a datetime with a {_type_name(value.tzinfo)}, whose zone cannot be kept"
                " exactly; use .astimezone(datetime.timezone.utc), and keep the zone's name in a field of its own"
            )
        return None
    if cls is not dict and cls not in SEQUENCES:
        return UnencodableState(
            f"{format_path(path)} has the type {_type_name(value)}, which the store does not keep (it keeps None, bool,"
            " int, float, str, bytes, list, tuple, dict, set, datetime, date, Decimal and UUID, and no subclasses of"
            " them); convert it before the commit"
        )
    if depth == DEPTH_MAX:
        return too_deep(format_path(path))
    if cls is not dict:
        return _first(_first_refused(item, (*path, index), depth + 1) for index, item in enumerate(value))
    for key in value:
        if key.__class__ not in SCALARS:
            return UnencodableState(
                f"a key of {format_path(path)} has the type {_type_name(key)}: {_shown(key):.80}; keys are str, int,"
                " float, bool, None, bytes, datetime, date, Decimal or UUID, and no subclasses of them"
            )
        if has_foreign_zone(key):
            return _first_refused(key, (*path, _shown(key)), depth + 1)
    return _first(
        _first_refused(item, (*path, key if key.__class__ in (str, int) else _shown(key)), depth + 1)
        for key, item in value.items()
    )


def _first(findings: Iterable[AgentStoreError | None]) -> AgentStoreError | None:
    return next((found for found in findings if found is not None), None)
