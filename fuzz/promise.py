"""What a story had been promised by some moment, and a store held to it after a crash."""

from __future__ import annotations

from dataclasses import dataclass

from agentstore import Set, Store
from agentstore.engine.files import default_files, set_default_files
from agentstore.errors import CorruptionError
from agentstore.testing.crashsim import UnsyncedFiles
from agentstore.testing.faults import abandon
from fuzz.campaign import Violation
from fuzz.story import Step, Told, differences


@dataclass
class Promised:
    """What a story had said by some moment: numbers of steps, -1 before the first."""

    confirmed: int = -1
    begun: int = -1
    called: int = -1
    """The world outside was called."""

    def hear(self, line: str) -> None:
        """One line of a `fuzz.story.Teller`."""
        kind, _, rest = line.partition(" ")
        if kind == "a":
            self.begun = int(rest)
        elif kind == "c":
            self.confirmed = int(rest)
        elif kind == "x":
            self.called = int(rest)


def examine(root: str, steps: list[Step], states: list[Told], promised: Promised, *, lies: bool) -> str:
    """Open the store at `root` and hold it to what was promised; what came of it. Raises for what must not be.

    It is opened, written, killed, opened and checked again. `states`: what is told before the first step, and after
    each. `lies`: the disk confirmed what it did not keep, so damage and lost steps are right, and wrong data are not.
    """
    before = default_files()
    set_default_files(UnsyncedFiles())
    try:
        return _examine(root, steps, states, promised, lies=lies)
    except CorruptionError as error:
        if lies:
            return "refused"
        raise Violation(f"damaged: {error}") from error
    finally:
        set_default_files(before)


def _examine(root: str, steps: list[Step], states: list[Told], promised: Promised, *, lies: bool) -> str:
    store = Store.open(root, background=False)
    try:
        there, begun = _held(store, steps, states, promised, lies=lies)
        store.thread("after").commit(Set("there", there))
        abandon(store._engine)
        store = Store.open(root, background=False)
        after = store.thread("after")
        if after.load() != {"there": there}:
            raise Violation("a commit after the crash is gone after a kill")
        after.delete()
        if wrong := differences(store, states[there], begun):
            raise Violation("after a commit and a kill: " + "; ".join(wrong[:3]))
        if problems := store.check():
            raise Violation("check: " + "; ".join(problems[:3]))
        store.close()
    finally:
        abandon(store._engine)
    if there == promised.begun + 1:
        return "all there"
    return "the step under way lost" if there > promised.confirmed else "confirmed steps lost"


def _held(
    store: Store, steps: list[Step], states: list[Told], promised: Promised, *, lies: bool
) -> tuple[int, Step | None]:
    """How many steps the store holds, and the step that is half there, if one may be. Raises Violation."""
    under_way = steps[promised.begun] if promised.begun > promised.confirmed else None
    wrong: list[str] = []
    for there in range(promised.begun + 1, (0 if lies else promised.confirmed + 1) - 1, -1):
        begun = under_way if there == promised.begun else None
        if lies and there <= promised.begun:
            begun = steps[there]  # any step may be half lost, and a call without its intent
        called = begun is not None and promised.called > promised.confirmed and not lies
        wrong = differences(store, states[there], begun, called=called)
        if not wrong:
            return there, begun
    raise Violation("; ".join(wrong[:3]))
