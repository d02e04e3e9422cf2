"""The four changes that a commit is made of.

>>> Append("conversation_history", {"role": "user", "content": "hi"})
Append('conversation_history', {'role': 'user', 'content': 'hi'})
>>> Set(("token_usage", "prompt"), 12).path
('token_usage', 'prompt')
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from agentstore.errors import InvalidChange

Path: TypeAlias = "str | tuple[Any, ...]"
"""A field name, or a tuple that begins with one: then keys of mappings and indexes of lists."""

PATH_PARTS_MAX = 64
"""How deep a path may reach."""


class Change:
    """One edit of a state; use `Set`, `Delete`, `Append` or `Splice`.

    Values are read when the commit is staged, not copied before: do not change them in between.
    Instances are immutable by convention and may be shared by threads.
    """

    __slots__ = ("field", "rest")

    field: str
    """The top-level field that the change is about."""
    rest: tuple[Any, ...]
    """The path below the field; empty for a change of the field itself."""

    def __init__(self, path: Path) -> None:
        if path.__class__ is str:
            self.field = path
            self.rest = ()
        else:
            self._long_path(path)

    def _long_path(self, path: Path) -> None:
        if not isinstance(path, tuple) or not path or path[0].__class__ is not str:
            raise InvalidChange(f"a path is a field name or a tuple that begins with one, not {path!r}")
        if len(path) > PATH_PARTS_MAX:
            raise InvalidChange(f"a path has at most {PATH_PARTS_MAX} parts, this one has {len(path)}")
        self.field = path[0]
        self.rest = path[1:]

    @property
    def path(self) -> tuple[Any, ...]:
        """The whole path as a tuple."""
        return (self.field, *self.rest)

    def _shown(self) -> str:
        return repr(self.path if self.rest else self.field)


class Set(Change):
    """Put `value` at `path`; creates the last part of the path, not what is above it.

    O(size of the value) for a field name; for a longer path one encoding of its field.
    At commit: `InvalidChange` if what is above is not there or takes no such key or index,
    `UnencodableState` if the value has a type that the store does not keep.

    >>> Set("step", 3)
    Set('step', 3)
    """

    __slots__ = ("value",)

    def __init__(self, path: Path, value: Any) -> None:
        if path.__class__ is str:  # as in Append
            self.field = path
            self.rest = ()
        else:
            self._long_path(path)
        self.value = value

    def __repr__(self) -> str:
        return f"Set({self._shown()}, {self.value!r})"


class Delete(Change):
    """Remove what is at `path`: a field, a key of a mapping, or an item of a list. O(1) for a field name.

    At commit: `InvalidChange` if there is nothing.

    >>> Delete("execution_plan")
    Delete('execution_plan')
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Delete({self._shown()})"


class Append(Change):
    """Add `items` to the end of the list at `path`; a missing list is created. O(size of the items) for a field name.

    At commit: `InvalidChange` if there is something else than a list.

    >>> Append("partial_outputs", "a", "b").items
    ('a', 'b')
    """

    __slots__ = ("items",)

    def __init__(self, path: Path, *items: Any) -> None:
        if path.__class__ is str:  # said here once more: every commit makes one
            self.field = path
            self.rest = ()
        else:
            self._long_path(path)
        self.items = items

    def __repr__(self) -> str:
        return f"Append({', '.join([self._shown(), *map(repr, self.items)])})"


class Splice(Change):
    """In the list at `path`, replace `delete` items from index `start` by `items`. One encoding of its field.

    At commit: `InvalidChange` if there is no list, or it has fewer than ``start + delete`` items.

    >>> Splice("conversation_history", 1, 2, [{"role": "system", "content": "summary"}]).delete
    2
    """

    __slots__ = ("delete", "items", "start")

    def __init__(self, path: Path, start: int, delete: int, items: Iterable[Any] = ()) -> None:
        Change.__init__(self, path)
        if start.__class__ is not int or delete.__class__ is not int or start < 0 or delete < 0:
            raise InvalidChange(f"start and delete of a Splice are ints of 0 or more, not {start!r} and {delete!r}")
        self.start = start
        self.delete = delete
        self.items = tuple(items)

    def __repr__(self) -> str:
        return f"Splice({self._shown()}, {self.start}, {self.delete}, {list(self.items)!r})"
