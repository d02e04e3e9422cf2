"""What the tests of effects and leases share: a store, a machine whose time and processes the test decides, a world."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from agentstore import Append, Checkpoint, Effect, Set, Store
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.testing.faults import Call, FaultyFiles
from agentstore.testing.manual_clock import ManualClock
from agentstore.thread import Thread

T = TypeVar("T")

ARGUMENTS = {"amount": 5, "currency": "EUR"}


class Interrupted(BaseException):
    """What the interrupting files raise: like KeyboardInterrupt, and not mistaken for one."""


class InterruptingFiles(FaultyFiles):
    """The next sync after `armed` was set is made, and then its caller is interrupted: it cannot know."""

    armed = False

    def around(self, call: Call, run: Callable[[], T], partly: Callable[[float], object]) -> T:
        result = super().around(call, run, partly)
        if self.armed and call.name == "fdatasync":
            self.armed = False
            raise Interrupted
        return result


def open_store(path: Path, files: FaultyFiles | None = None) -> Store:
    """A store without a background thread, so that nothing happens that the test did not ask for."""
    if files is None:
        return Store.open(path, background=False)
    return Store(EmbeddedEngine.open(str(path), background=False, files=files))


def decide(thread: Thread, **options: Any) -> Checkpoint:
    """Commit a decision."""
    return thread.commit(Append("history", {"role": "assistant"}), reason="decision", **options)


def call(thread: Thread, decision: Checkpoint | tuple[bytes, int], **options: Any) -> Effect:
    """Open the effect that most tests are about."""
    given: dict[str, Any] = {"index": 0, "tool": "charge", "arguments": ARGUMENTS, "rule": "ask", "timeout_s": 20.0}
    return thread.effect(decision=decision, **{**given, **options})


def message(text: str) -> Append:
    """The change that most receipts come with."""
    return Append("history", {"role": "tool", "content": text})


def step(n: int) -> Set:
    return Set("step", n)


def is_sound(store: Store) -> bool:
    """Whether all invariants hold; shows those that do not."""
    problems = store.check()
    print("\n".join(problems))
    return not problems


def other_worker(machine: ManualClock, store: Store, thread: Thread) -> Thread:
    """A handle of the same thread in another process, which is the one that acts from now on."""
    machine.start_process()
    handle = store.thread(thread.id)
    assert handle.head is not None
    return handle
