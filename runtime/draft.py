"""The changes of one commit, and the same changes to the loop's own copy of the state once they are confirmed.

The loop keeps the state of its thread as plain objects beside the store. A draft collects
changes for both: `changes` goes into the commit, `apply` follows when that is confirmed, so
that what the loop acts on is never ahead of what is stored.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from agentstore import Append, Set, Splice

from .states import INIT, check_transition

State = dict[str, Any]
Change = Append | Set | Splice


class Draft:
    """What one commit is to change. Used once; nothing in it is changed by the caller afterwards."""

    __slots__ = ("_changes", "_state", "_status", "_step")

    def __init__(self, state: State) -> None:
        self._state = state
        self._changes: list[Change] = []
        self._status: str = state.get("state", INIT)
        self._step: int = state.get("step", 0)

    @property
    def status(self) -> str:
        """The state of the run after this commit."""
        return self._status

    @property
    def step(self) -> int:
        """The step of the run after this commit."""
        return self._step

    def set(self, field: str, value: Any) -> None:
        """Set a top-level field."""
        self._changes.append(Set(field, value))
        if field == "step":
            self._step = value

    def append(self, field: str, *items: Any) -> None:
        """Append to a top-level list."""
        if items:
            self._changes.append(Append(field, *items))

    def splice(self, field: str, start: int, delete: int, *items: Any) -> None:
        """Replace a part of a top-level list."""
        self._changes.append(Splice(field, start, delete, items))

    def move(self, to: str) -> None:
        """Take the run to another state; `IllegalTransition` if there is no such way."""
        check_transition(self._state.get("task_id", ""), self._status, to)
        self._status = to
        self._changes.append(Set("state", to))

    def changes(self, at: datetime) -> list[Change]:
        """The changes for the store, with the time of the checkpoint."""
        return [*self._changes, Set(("metadata", "last_checkpoint_at"), at)]

    def apply(self, at: datetime) -> None:
        """Make the changes in the loop's own copy. O(change); a splice O(list)."""
        state = self._state
        for change in self._changes:
            if isinstance(change, Append):
                state.setdefault(change.field, []).extend(change.items)
            elif isinstance(change, Splice):
                state[change.field][change.start : change.start + change.delete] = change.items
            else:
                state[change.field] = change.value
        state["metadata"] = {**state["metadata"], "last_checkpoint_at": at}
