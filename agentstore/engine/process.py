"""The engines of this process: one per directory, counted; and what a fork does to them."""

from __future__ import annotations

import os
import threading
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


def _before() -> None:
    opening.acquire()
    _forking[:] = engines.values()
    for engine in _forking:
        engine.before_fork()


def _after_in_parent() -> None:
    for engine in _forking:
        engine.after_fork_in_parent()
    _forking.clear()
    opening.release()


def _after_in_child() -> None:
    _inherited.extend(_forking)
    for engine in _forking:
        engine.after_fork_in_child()
    _forking.clear()
    engines.clear()
    opening.release()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
