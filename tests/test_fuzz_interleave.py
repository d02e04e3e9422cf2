"""Orders of short programs: that they are run as they say, and that each finds the fault that it is there for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from agentstore.engine import embedded, fold, opening, roll, segments, sync, tail, view, writer
from agentstore.engine.base import Base, Position
from agentstore.engine.control import DURABLE_LSN, LAST_SEGMENT, READY, SYNCING
from agentstore.engine.tail import ENTRY, ENTRY_BYTES, POSITION_KEY
from fuzz.campaign import Counts, Failure, drive, failing
from fuzz.interleave import InterleaveCampaign
from fuzz.programs import PROGRAMS

Patch = pytest.MonkeyPatch


def edited(function: Any, *edits: tuple[str, str]) -> Any:
    """The function with some of its lines changed, as a developer might have written it."""
    source = inspect.getsource(function)
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} is not once in {function.__qualname__}"
        source = source.replace(old, new)
    names: dict[str, Any] = {}
    lines = source.splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    code = "from __future__ import annotations\n" + "\n".join(line[indent:] for line in lines)
    exec(code, inspect.unwrap(function).__globals__, names)
    return names[function.__name__]


def change(patch: Patch, owner: Any, name: str, *edits: tuple[str, str]) -> None:
    patch.setattr(owner, name, edited(getattr(owner, name), *edits))


def stale_list(patch: Patch) -> None:
    """A segment that became active just now is taken for a retired one."""
    change(patch, segments.Segments, "live_bytes", ("if found.header.number > position.segment:", "if False:"))


def fold_from_tail(patch: Patch) -> None:
    def replay(self: fold.Folder) -> None:
        parts = self._parts
        with parts.tail.env.begin() as txn:
            position = tail.decode_position(txn.get(POSITION_KEY))
            entries = [(key, raw) for key, raw in txn.cursor() if key != POSITION_KEY]
        base = parts.base.settled_position()
        writes = {
            key: raw[ENTRY_BYTES:] if raw[8] else None
            for key, raw in entries
            if ENTRY.unpack_from(raw)[0] > base.applied_lsn
        }
        reached = Position(position.lsn, position.segment, position.epoch, position.offset, position.crc)
        if position.lsn > base.applied_lsn:
            parts.base.apply(writes, reached, base.applied_lsn + 1)

    patch.setattr(fold.Folder, "_replay", replay)


def tail_by_key_only(patch: Patch) -> None:
    change(patch, tail.Tail, "drop_folded", ("ENTRY.unpack_from(cursor.value())[0] <= applied_lsn", "applied_lsn"))


def target_after_sync(patch: Patch) -> None:
    """What was written while the disk synced is told to be durable."""
    change(
        patch,
        sync.Syncer,
        "_lead",
        ("self._flush(position.file, position.offset)\n", "self._flush(position.file, position.offset)\n"
         "        position = self._position()\n"),
    )


def base_before_tail(patch: Patch) -> None:
    change(
        patch,
        view.View,
        "__init__",
        ("tail = parts.tail.env.begin()\n            base = self._base.begin()",
         "base = self._base.begin()\n            tail = parts.tail.env.begin()"),
    )


def base_not_looked_at_again(patch: Patch) -> None:
    change(patch, view.View, "__init__", ("if self._base.meta(base)[1].applied_lsn <= self.lsn:", "if True:"))


def roll_without_sync(patch: Patch) -> None:
    patch.setattr(sync.Syncer, "sync_retired", lambda self, file, end: None)


def reuse_unfolded(patch: Patch) -> None:
    change(patch, segments.Segments, "reusable", (" and self.last_lsn(found) <= applied_lsn", ""))


def close_clears_unseen(patch: Patch) -> None:
    """What was committed after the fold of who closes last is cleared away."""
    change(patch, opening, "_clear", ("for _ in reader:\n            return False", "for _ in ():\n            return False"))


def control_not_cleared(patch: Patch) -> None:
    """A recovery that is cut off leaves the page saying that others may join."""
    change(patch, opening.Opening, "_recover", ("control.words[READY] = 0", "pass"))


def conversion_unchecked(patch: Patch) -> None:
    """Who recovered does not look again whether it is still its own recovery, once its lock is converted."""
    change(patch, opening.Opening, "_try", ("self._recover()\n", "self._recover() * 0\n"))


def number_given_twice(patch: Patch) -> None:
    change(patch, roll.Roller, "_enter_segment", ("words[LAST_SEGMENT] = number\n", "\n"),
           ("max(words[LAST_SEGMENT], position.segment)", "position.segment"))


def guard_skipped(patch: Patch) -> None:
    """A roller does not look whether somebody has rolled since."""
    change(patch, roll.Roller, "_try_roll", ("if not full and not self.due(position):", "if False:"))


def dead_not_finished(patch: Patch) -> None:
    patch.setattr(writer.Writer, "_finish_dead", lambda self, txn, position: False)


def syncing_ignored(patch: Patch) -> None:
    change(patch, sync.Syncer, "_flush", ("if words[SYNCING]:", "if False:"))


def fold_unlocked(patch: Patch) -> None:
    """Two folds at once."""
    change(patch, fold.Folder, "fold", ("if not lock.acquire(wait=wait):\n                return False", "pass"),
           ("lock.release()", "pass"))


MUTANTS: dict[Callable[[Patch], None], str] = {
    stale_list: "stale list",
    fold_from_tail: "fold",
    tail_by_key_only: "fold",
    target_after_sync: "two writers",
    base_before_tail: "reader",
    base_not_looked_at_again: "reader",
    roll_without_sync: "rolls",
    reuse_unfolded: "stale list",
    close_clears_unseen: "close",
    control_not_cleared: "recovery",
    conversion_unchecked: "recovery",
    number_given_twice: "rolls",
    guard_skipped: "rolls",
    dead_not_finished: "two writers",
    syncing_ignored: "two writers",
    fold_unlocked: "two folds",
}
