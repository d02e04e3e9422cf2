"""The engines of this process: one per directory, counted; and what a fork does to them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Protocol


class Forkable(Protocol):
    def before_fork(self) -> None: ...
    def after_fork_in_parent(self) -> None: ...
    def after_fork_in_child(self) -> None: ...


Identity = tuple[int, int]

opening = threading.RLock()
"""Held while an engine of this process is opened or closed, so that there is never a second one of a directory."""

engines: dict[Identity, Forkable] = {}
"""By (device, inode) of the directory."""

_inherited: list[Forkable] = []
"""In a forked child: what the parent had open, kept for ever, since its environments must not be closed here."""

_forking: list[Forkable] = []


def _insist(*steps: Callable[[], object]) -> None:
    """Every step, whole, whatever a signal's handler or another step raises; that is raised at the end.

    Python prints what is raised in a function that it calls at a fork and goes on with the fork: then an engine must
    not be left closed in the parent, or usable in the child. A step may be begun again.
    """
    interrupted: BaseException | None = None
    for step in steps:
        while True:
            try:
                step()
                break
            except Exception as error:
                interrupted = error
                break
            except BaseException as error:
                interrupted = error  # of a signal: begin again
    if interrupted is not None:
        raise interrupted


def _before() -> None:
    _insist(opening.acquire, _gather, lambda: _insist(*[engine.before_fork for engine in _forking]))


def _gather() -> None:
    _forking[:] = engines.values()


def _after_in_parent() -> None:
    _insist(*[engine.after_fork_in_parent for engine in _forking], _forking.clear, opening.release)


def _after_in_child() -> None:
    # Not those of `_forking`: whatever happened before the fork, the child may use none of them.
    there = [*engines.values()]
    _inherited.extend(there)
    _insist(*[engine.after_fork_in_child for engine in there], _forking.clear, engines.clear, opening.release)


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
