"""Code of the product changed while a process runs, as a developer might have written it, and changed back."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, TracebackType
from typing import Any

PRODUCT = "agentstore"


class Patches:
    """Changes that are taken back at the end of a ``with``."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Put `value` in the place of an attribute of a class or module."""
        self._before.append((owner, name, inspect.getattr_static(owner, name)))
        setattr(owner, name, value)

    def edit(self, owner: Any, name: str, *edits: tuple[str, str]) -> None:
        """Change parts of the source of a method or function. Each part must be there once.

        A function of a module is changed in every module of the product that imported it.
        """
        changed = edited(getattr(owner, name), *edits)
        if not isinstance(owner, ModuleType):
            self.set(owner, name, changed)
            return
        real = getattr(owner, name)
        for place, module in list(sys.modules.items()):
            if place.partition(".")[0] == PRODUCT and getattr(module, name, None) is real:
                self.set(module, name, changed)

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._before:
            owner, name, value = self._before.pop()
            setattr(owner, name, value)


def edited(function: Any, *edits: tuple[str, str]) -> Any:
    """The function with parts of its source changed."""
    source = inspect.getsource(function)
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} is not once in {function.__qualname__}"
        source = source.replace(old, new)
    lines = source.splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    names: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + "\n".join(line[indent:] for line in lines)
    exec(code, inspect.unwrap(function).__globals__, names)
    return names[function.__name__]
