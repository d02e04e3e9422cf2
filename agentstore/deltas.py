"""From changes to ops: what a commit stores, and the checksums of the state after it.

A `Plan` is made outside of all locks and changes nothing; the handle adopts it once the commit is confirmed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from agentstore import patches
from agentstore.changes import Append, Change, Delete, Set, Splice
from agentstore.codec import cbor
from agentstore.codec.crc import crc32c, extend
from agentstore.errors import InvalidChange, UnencodableState
from agentstore.fields import Field, Op, State, apply, name_crc, split, sums_of, unsplit
from agentstore.records import NO_COUNT, OP_APPEND, OP_DELETE, OP_ORDER, OP_PATCH, OP_SET, OP_SPLICE

FETCH_BYTES_MIN: Final = 64 * 1024
"""A Set of a value this large, in bytes, reads what stood there before to store only what changed."""

Fetch: TypeAlias = "Callable[[str], bytes]"
"""Reads the body of a field that is not in memory."""

_encode = cbor.encode


def sums_after(state: State, made: Plan) -> list[Any]:
    """`sums_of` what `made` leads to. O(fields)."""
    shadow: State = {
        name: Field(field.name_crc, field.count, field.crc, field.size, None) for name, field in state.items()
    }
    apply(shadow, made.ops)
    return sums_of(shadow)


def adopt(state: State, made: Plan, body_bytes_max: int) -> None:
    """Move `state` to what `made` leads to: `apply` of its ops, without computing what the plan knows. O(change).

    Bytes of fields larger than `body_bytes_max` are forgotten.
    """
    after = made.after
    for op in made.ops:
        kind = op[0]
        new = after.get(op[1]) if kind in _KNOWN_OUTCOME else None
        if new is None:
            apply(state, [op])
            continue
        if kind == OP_SET:
            new.parts = [op[2]]
        else:
            new.parts = parts = state[op[1]].parts
            if parts is not None:
                parts.append(op[2])
        if new.size > body_bytes_max:
            new.parts = None
        state[op[1]] = new


_KNOWN_OUTCOME = frozenset({OP_SET, OP_APPEND})


class Plan:
    """The ops of one commit and the checksums after it. Made by `plan` and `plan_state`, then only read."""

    __slots__ = ("after", "grown", "ops")

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.after: dict[str, Field | None] = {}
        """Fields that differ afterwards, without their bytes; None: deleted."""
        self.grown = 0
        """By how many bytes the state is larger afterwards."""

    def sum_after(self, before: int, state: State) -> int:
        """The state's checksum afterwards, from the one before. O(changed fields)."""
        for name, field in self.after.items():
            old = state.get(name)
            if old is not None:
                before -= old.digest
            if field is not None:
                before += field.digest
        return before & 0xFFFFFFFF


def plan(state: State, changes: tuple[Change, ...], fetch: Fetch) -> Plan:
    """The ops of `changes` on top of `state`, which stays as it is.

    O(change) for Append to a field, Set and Delete of a field; others decode and encode their field once.
    `fetch` is called for fields whose bytes are needed and not in memory. Raises InvalidChange,
    UnencodableState, LimitExceeded; then nothing was changed anywhere.
    """
    made = Plan()
    after = made.after
    deep: set[str] = set()
    try:
        for change in changes:
            if change.rest or change.__class__ is Splice:
                deep.add(change.field)
    except AttributeError:
        raise TypeError(f"a commit takes Set, Delete, Append and Splice, not {change!r}") from None
    editors: dict[str, _Editor] = {}
    for change in changes:
        kind = change.__class__
        name = change.field
        if deep and name in deep:
            if name not in editors:
                editors[name] = _Editor(made, name, state.get(name), fetch)
            editors[name].change(change)
            continue
        again = name in after
        old = after[name] if again else state.get(name)
        if kind is Append:
            _append(made, name, old, change.items)  # type: ignore[attr-defined]  # kind is Append
        elif kind is Set:
            _set(made, name, old, change.value, None if again else fetch)  # type: ignore[attr-defined]  # kind is Set
        elif kind is Delete:
            _delete(made, name, old)
        else:
            raise TypeError(f"a commit takes Set, Delete, Append and Splice, not {change!r}")
    if editors:
        for editor in editors.values():
            editor.finish()
        made.ops = [op for op in made.ops if op]
    return made


def _new_name_crc(name: str) -> int:
    try:
        return name_crc(name)
    except UnicodeEncodeError:
        raise InvalidChange(f"the field name {name!r} has a lone surrogate, which UTF-8 cannot hold") from None


def _append(made: Plan, name: str, old: Field | None, items: tuple[Any, ...]) -> None:
    first = 0 if old is None else old.count
    if first == NO_COUNT:
        raise InvalidChange(f"Append to {name!r}: the field is not a list")
    if len(items) == 1:
        body = _encode(items[0], (name, first))
    else:
        body = b"".join([_encode(item, (name, first + index)) for index, item in enumerate(items)])
    count = first + len(items)
    if old is None:
        _put_whole(made, name, None, count, body)
        return
    crc = extend(old.crc, body)
    made.ops.append([OP_APPEND, name, body, crc, count])
    made.after[name] = Field(old.name_crc, count, crc, old.size + len(body), None)
    made.grown += len(body)


def _set(made: Plan, name: str, old: Field | None, value: Any, fetch: Fetch | None) -> None:
    encoded = _encode(value, (name,))
    first = encoded[0]
    count, body = (NO_COUNT, encoded) if not 0x80 <= first <= 0x9B else split(encoded)
    if len(body) >= patches.PATCH_BYTES_MIN and old is not None and fetch is not None:
        if old.parts is not None:
            _replace(made, name, old, old.body(), count, body)
            return
        if len(body) >= FETCH_BYTES_MIN and old.size >= FETCH_BYTES_MIN:
            _replace(made, name, old, fetch(name), count, body)
            return
    _put_whole(made, name, old, count, body)


def _put_whole(made: Plan, name: str, old: Field | None, count: int, body: bytes) -> None:
    crc = extend(0, body)
    made.ops.append([OP_SET, name, body, crc, count])
    made.after[name] = Field(_new_name_crc(name) if old is None else old.name_crc, count, crc, len(body), None)
    made.grown += len(body) - (0 if old is None else old.size)


def _delete(made: Plan, name: str, old: Field | None) -> None:
    if old is None:
        raise InvalidChange(f"Delete of {name!r}: there is no such field")
    made.ops.append([OP_DELETE, name])
    made.after[name] = None
    made.grown -= old.size


def _replace(made: Plan, name: str, old: Field, before: bytes, count: int, body: bytes) -> None:
    """The shortest op that turns the bytes `before` of a field into `body`; none when they are equal."""
    if count == old.count and body == before:
        return
    crc = crc32c(body)
    made.after[name] = Field(old.name_crc, count, crc, len(body), None)
    made.grown += len(body) - old.size
    start = patches.common_prefix(before, body)
    if start == len(before) and count >= old.count >= 0:
        # Encodings end by themselves: what begins with all of the old items has them as its first ones.
        made.ops.append([OP_APPEND, name, body[start:], crc, count])
        return
    suffix = patches.common_suffix(before, body, min(len(before), len(body)) - start)
    removed = len(before) - start - suffix
    data = body[start : len(body) - suffix]
    if (pieces := patches.smaller(before[start : start + removed], data)) is not None:
        made.ops.append([OP_PATCH, name, start, removed, pieces, crc, count])
    elif len(data) + 16 < len(body):
        made.ops.append([OP_SPLICE, name, start, removed, data, crc, count])
    else:
        made.ops.append([OP_SET, name, body, crc, count])


def plan_state(state: State, new: dict[str, Any], fetch: Fetch) -> Plan:
    """The ops that turn `state` into `new`, compared by encoded bytes. O(size of the state)."""
    if new.__class__ is not dict:
        raise UnencodableState(f"a state is a dict, not {type(new).__name__}")
    made = Plan()
    for name, value in new.items():
        if name.__class__ is not str:
            raise UnencodableState(f"the name of a field is a str, not {name!r}")
        old = state.get(name)
        count, body = split(_encode(value, (name,)))
        if old is None:
            _put_whole(made, name, None, count, body)
        else:
            _replace(made, name, old, old.body() if old.parts is not None else fetch(name), count, body)
    for name, old in state.items():
        if name not in new:
            _delete(made, name, old)
    order = [name for name in state if name in new] + [name for name in new if name not in state]
    if order != list(new):
        made.ops.append([OP_ORDER, list(new)])
    return made


def plan_between(old: State, new: State) -> Plan:
    """The ops that turn one state into another, both with their bytes. O(size of the fields that differ)."""
    made = Plan()
    for name, field in new.items():
        before = old.get(name)
        if before is None:
            _put_whole(made, name, None, field.count, field.body())
        elif (before.count, before.crc, before.size) != (field.count, field.crc, field.size):
            _replace(made, name, before, before.body(), field.count, field.body())
    for name, field in old.items():
        if name not in new:
            _delete(made, name, field)
    order = [name for name in old if name in new] + [name for name in new if name not in old]
    if order != list(new):
        made.ops.append([OP_ORDER, list(new)])
    return made


def plan_copy(state: State) -> Plan:
    """The ops that make `state` out of nothing. O(size)."""
    made = Plan()
    for name, field in state.items():
        made.ops.append([OP_SET, name, field.body(), field.crc, field.count])
        made.after[name] = Field(field.name_crc, field.count, field.crc, field.size, None)
        made.grown += field.size
    return made


class _Editor:
    """The changes of one commit to one field that some of them reach into: one decode, one encode, one op."""

    def __init__(self, made: Plan, name: str, old: Field | None, fetch: Fetch) -> None:
        self._made = made
        self._name = name
        self._old = old
        self._fetch = fetch
        self._there = old is not None
        self._decoded = False
        self._value: Any = None
        self._slot: int | None = None  # place of the op that creates the field, so that fields keep their order

    def change(self, change: Change) -> None:
        """Take one more change; InvalidChange if it does not fit what the ones before left."""
        if isinstance(change, Delete) and not change.rest:
            self._delete()
        elif isinstance(change, Set) and not change.rest:
            self._create()
            self._value = own(change.value, change.path)
        elif isinstance(change, (Set, Delete, Append, Splice)):
            if not self._there and isinstance(change, Append) and not change.rest:
                self._create()
                self._value = []
            self._read(change)
            root = [self._value]
            edit_value(root, (0, *change.rest), change)
        else:
            raise TypeError(f"a commit takes Set, Delete, Append and Splice, not {change!r}")

    def _read(self, change: Change) -> None:
        if not self._there:
            raise InvalidChange(f"{change!r}: there is no field {self._name!r}")
        if not self._decoded:
            assert self._old is not None
            self._value = cbor.decode(unsplit(self._old.count, self._before(self._old)))
            self._decoded = True

    def _before(self, old: Field) -> bytes:
        return old.body() if old.parts is not None else self._fetch(self._name)

    def _create(self) -> None:
        self._decoded = True
        if not self._there:
            self._there = True
            self._slot = len(self._made.ops)
            self._made.ops.append([])

    def _delete(self) -> None:
        if not self._there:
            raise InvalidChange(f"Delete of {self._name!r}: there is no such field")
        self._there = self._decoded = False
        if self._slot is not None:
            self._slot = None  # the empty op is dropped with the others
        elif self._old is not None:
            _delete(self._made, self._name, self._old)
            self._old = None

    def finish(self) -> None:
        """Add the op for what the field is now."""
        made, name = self._made, self._name
        if not self._there:
            return
        count, body = split(_encode(self._value, (name,)))
        if self._slot is None:
            assert self._old is not None
            _replace(made, name, self._old, self._before(self._old), count, body)
        else:
            _put_whole(made, name, None, count, body)
            made.ops[self._slot] = made.ops.pop()


_ATOMS = frozenset({str, int, float, bool, type(None), bytes})


def own(value: Any, path: tuple[Any, ...]) -> Any:
    """`value`, or a copy of it if it can be changed: a later change may reach into what an earlier one set."""
    return value if value.__class__ in _ATOMS else cbor.decode(_encode(value, path))


def edit_value(root: Any, path: tuple[Any, ...], change: Change) -> None:
    """Apply `change` to decoded values in place; `path` leads from `root` to its target, else InvalidChange."""
    target = root
    for part in path[:-1]:
        target = _step(target, part, change)
    last = path[-1]
    if isinstance(change, Set):
        _put(target, last, own(change.value, change.path), change)
    elif isinstance(change, Delete):
        _step(target, last, change)
        del target[last]
    elif isinstance(change, Append):
        if target.__class__ is dict and last not in target:
            target[last] = []
        found = _step(target, last, change)
        if found.__class__ is not list:
            raise InvalidChange(f"{change!r}: there is no list, but a value of type {type(found).__name__}")
        found.extend([own(item, change.path) for item in change.items])
    elif isinstance(change, Splice):
        found = _step(target, last, change)
        if found.__class__ is not list:
            raise InvalidChange(f"{change!r}: there is no list, but a value of type {type(found).__name__}")
        if change.start + change.delete > len(found):
            raise InvalidChange(f"{change!r}: the list has {len(found)} items")
        found[change.start : change.start + change.delete] = [own(item, change.path) for item in change.items]


def _step(target: Any, part: Any, change: Change) -> Any:
    """What stands at `part` of a dict or a list."""
    if target.__class__ is dict:
        try:
            return target[part]
        except (KeyError, TypeError):
            raise InvalidChange(f"{change!r}: there is no key {part!r}") from None
    if target.__class__ is list:
        if part.__class__ is not int or not -len(target) <= part < len(target):
            raise InvalidChange(f"{change!r}: {part!r} is no index of a list of {len(target)} items")
        return target[part]
    raise InvalidChange(f"{change!r}: {part!r} would be inside a value of type {type(target).__name__}")


def _put(target: Any, part: Any, value: Any, change: Change) -> None:
    if target.__class__ is dict:
        try:
            target[part] = value
        except TypeError:
            raise InvalidChange(f"{change!r}: {part!r} cannot be a key") from None
        return
    _step(target, part, change)
    target[part] = value
