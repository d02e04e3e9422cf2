"""A short life of a store, told step by step: what real crashes happen to.

A story is a list of steps, plain JSON. Each is written down outside the store when it begins and when it is confirmed
(`Teller`), so what a store must hold after a crash is what `Told` holds after the steps up to one between the last
confirmed and the last begun. `differences` compares the two.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agentstore import Append, Checkpoint, Effect, Retention, Set, Store, Thread, leases, ledger, once
from agentstore.compaction import compact
from agentstore.testing.faults import abandon

Step = list[Any]
"""A name of `STEPS` and its arguments."""

STEPS = {
    "commit": 34,
    "decide": 12,
    "once": 6,
    "fork": 4,
    "pin": 4,
    "delete": 3,
    "keep": 3,
    "prune": 4,
    "fold": 9,
    "reopen": 6,
    "kill": 8,
    "compact": 4,
}
"""How often each is drawn; "intend" and "finish" follow a "decide"."""

THREADS = ("a", "b", "c")
CALLS = "xyz"
SIZES = (1, 40, 200, 700, 3000, 9000)
RESULT = "paid"


def draw(rng: random.Random, count: int) -> list[Step]:
    """So many steps; those that mean nothing where they stand are skipped by whoever takes them."""
    steps: list[Step] = []
    while len(steps) < count:
        name = rng.choices(list(STEPS), list(STEPS.values()))[0]
        thread = rng.choice(THREADS)
        if name == "commit":
            steps.append([name, thread, rng.choice(SIZES), rng.choice(["round", "round", "final"])])
        elif name == "decide":
            steps.append([name, thread])
            if rng.random() < 0.9:
                steps.append(["intend", thread])
                if rng.random() < 0.8:
                    steps.append(["finish", thread])
        elif name == "once":
            steps.append([name, rng.choice(CALLS)])
        elif name == "fork":
            steps.append([name, thread, rng.choice(THREADS)])
        elif name in ("pin", "delete"):
            steps.append([name, thread])
        elif name == "keep":
            steps.append([name, rng.randint(1, 4)])
        else:
            steps.append([name])
    return steps


def fewer_steps(steps: list[Step]) -> Iterator[list[Step]]:
    """The story with a part left out: halves first, single steps last."""
    size = len(steps)
    while size := size // 2:
        for at in range(0, len(steps), size):
            yield steps[:at] + steps[at + size :]
    if len(steps) == 1:
        yield []


def text_of(number: int, size: int) -> str:
    """What step `number` appends: no two are alike, and they do not compress to nothing."""
    return f"{number} {random.Random(number).randbytes(size).hex()[:size]}"


# --- what must be there ------------------------------------------------------------------


@dataclass
class Line:
    """One thread."""

    states: list[dict[str, Any]] = field(default_factory=list)
    """By seq."""
    finals: set[int] = field(default_factory=set)
    pins: set[int] = field(default_factory=set)
    effects: list[tuple[int, str | None]] = field(default_factory=list)
    """The seq of the decision and the result, by intent."""
    decided: int | None = None
    """The newest decision, while its effect may be opened."""
    opened: bool = False
    forked: bool = False

    free: set[int] = field(default_factory=set)
    """Checkpoints that retention may have taken by now: what it let go of once does not come back."""

    @property
    def required(self) -> set[int]:
        """The checkpoints that must be there."""
        return set(range(len(self.states))) - self.free

    def let_go(self, keep_last: int) -> None:
        """What retention lets go of now is free. It may keep more: we do not say here what is held by what."""
        open_ones = {seq for seq, result in self.effects if result is None}
        kept = set(range(len(self.states))[-keep_last:]) | self.finals | self.pins | open_ones
        self.free |= self.required - kept


@dataclass
class Told:
    """What a store holds after some steps."""

    lines: dict[str, Line] = field(default_factory=dict)
    once: dict[str, int] = field(default_factory=dict)
    """By name the step that called it."""
    keep_last: int | None = None
    doubtful: set[str] = field(default_factory=set)
    """Calls that were begun and not finished: their intent may be there, or even their receipt."""

    def allows(self, step: Step) -> bool:
        """Whether the step means anything here."""
        name = step[0]
        line = self.lines.get(step[1]) if len(step) > 1 and isinstance(step[1], str) else None
        if name == "intend":
            return line is not None and line.decided is not None and not line.opened
        if name == "finish":
            return line is not None and line.opened
        if name == "fork":
            return line is not None and step[2] not in self.lines
        if name in ("pin", "delete"):
            return line is not None
        if name == "once":
            return step[1] not in self.once and step[1] not in self.doubtful
        return True

    def take(self, number: int, step: Step) -> None:
        """Take one step that is allowed."""
        name = step[0]
        if name == "commit":
            self._append(step[1], number, step[2])
            if step[3] == "final":
                self.lines[step[1]].finals.add(len(self.lines[step[1]].states) - 1)
        elif name == "decide":
            self._append(step[1], number, 30)
            self.lines[step[1]].decided = len(self.lines[step[1]].states) - 1
        elif name == "intend":
            line = self.lines[step[1]]
            assert line.decided is not None
            line.effects.append((line.decided, None))
            line.opened = True
        elif name == "finish":
            line = self.lines[step[1]]
            decision = line.effects[-1][0]
            self._append(step[1], number, 30)
            line.effects[-1] = (decision, f"{RESULT} {number}")
        elif name == "fork":
            self.lines[step[2]] = Line([copy.deepcopy(self.lines[step[1]].states[-1])], forked=True)
        elif name == "pin":
            self.lines[step[1]].pins.add(len(self.lines[step[1]].states) - 1)
        elif name == "delete":
            del self.lines[step[1]]
        elif name == "once":
            self.once[step[1]] = number
        elif name == "keep":
            self.keep_last = step[1]
        elif name in ("reopen", "kill", "compact"):
            for line in self.lines.values():
                line.decided, line.opened = None, False
        if self.keep_last is not None:
            for line in self.lines.values():
                line.let_go(self.keep_last)

    def _append(self, thread: str, number: int, size: int) -> None:
        line = self.lines.setdefault(thread, Line())
        state = {"history": [*(line.states[-1]["history"] if line.states else []), text_of(number, size)]}
        line.states.append(state | {"step": number})
        line.decided, line.opened = None, False


def told(steps: Iterable[Step]) -> Iterator[Told]:
    """What is told before the first step, and after each."""
    now = Told()
    yield copy.deepcopy(now)
    for number, step in enumerate(steps):
        if now.allows(step):
            now.take(number, step)
        yield copy.deepcopy(now)


# --- telling it ---------------------------------------------------------------------------


class Teller:
    """Takes the steps of a story on a real store. `say` writes a line down outside of it."""

    def __init__(self, path: str, say: Callable[[str], object]) -> None:
        self._path = path
        self._say = say
        self._threads: dict[str, Thread] = {}
        self._decisions: dict[str, Checkpoint] = {}
        self._effects: dict[str, Effect] = {}
        self.store = Store.open(path, background=False)

    def tell(self, steps: list[Step]) -> None:
        """Take all steps that mean something where they stand."""
        now = Told()
        for number, step in enumerate(steps):
            if now.allows(step):
                self._say(f"a {number}")
                self.take(number, step)
                self._say(f"c {number}")
                now.take(number, step)

    def take(self, number: int, step: Step) -> None:
        """Take one step."""
        getattr(self, f"_{step[0]}")(number, *step[1:])

    def close(self) -> None:
        self.store.close()

    def _thread(self, name: str) -> Thread:
        if name not in self._threads:
            self._threads[name] = self.store.thread(name)
        return self._threads[name]

    def _commit(self, number: int, thread: str, size: int, reason: str) -> None:
        changes = Append("history", text_of(number, size)), Set("step", number)
        self._thread(thread).commit(*changes, reason=reason, step=number)

    def _decide(self, number: int, thread: str) -> None:
        changes = Append("history", text_of(number, 30)), Set("step", number)
        self._decisions[thread] = self._thread(thread).commit(*changes, reason="decision", step=number)

    def _intend(self, number: int, thread: str) -> None:
        self._effects[thread] = self._thread(thread).effect(
            decision=self._decisions[thread], index=0, tool="pay", arguments={"step": number}, rule="replay"
        )

    def _finish(self, number: int, thread: str) -> None:
        changes = Append("history", text_of(number, 30)), Set("step", number)
        self._effects[thread].receipt(f"{RESULT} {number}", *changes, step=number)

    def _once(self, number: int, name: str) -> None:
        def fn() -> str:
            self._say(f"x {number}")
            return f"{RESULT} {number}"

        self.store.once(name, fn, rule="ask")

    def _fork(self, number: int, thread: str, into: str) -> None:
        self._threads[into] = self._thread(thread).fork(into=into)

    def _pin(self, number: int, thread: str) -> None:
        head = self._thread(thread).head
        assert head is not None
        self._thread(thread).pin(head.seq, "kept")

    def _delete(self, number: int, thread: str) -> None:
        self._thread(thread).delete()
        del self._threads[thread]

    def _keep(self, number: int, keep_last: int) -> None:
        self.store.set_retention(Retention(keep_last=keep_last, keep={"final"}))

    def _prune(self, number: int) -> None:
        self.store.apply_retention()

    def _fold(self, number: int) -> None:
        self.store._engine.fold()

    def _reopen(self, number: int) -> None:
        self.store.close()
        self.reopen()

    def _kill(self, number: int) -> None:
        abandon(self.store._engine)
        self.reopen()

    def _compact(self, number: int) -> None:
        self.store.close()
        compact(self._path)
        self.reopen()

    def reopen(self) -> None:
        """Open a store that was closed, or that let go of everything."""
        self._threads.clear()
        self.store = Store.open(self._path, background=False)


@contextmanager
def certain(seed: int) -> Iterator[None]:
    """Random numbers of this process are the same for the same seed, so that the same story writes the same."""
    numbers = random.Random(seed).randbytes
    places = [(os, "urandom"), (ledger, "urandom"), (leases, "urandom"), (random, "_urandom")]
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, numbers)
    try:
        yield
    finally:
        for (module, name), real in zip(places, before, strict=True):
            setattr(module, name, real)


# --- comparing ------------------------------------------------------------------------------


def differences(store: Store, now: Told, begun: Step | None, *, called: bool = False) -> list[str]:
    """What in the store is not as told, as sentences. `begun`: a step of several transactions that is under way;
    `called`: it called the world outside."""
    found: list[str] = []
    names = sorted(store.threads())
    if names != sorted(now.lines):
        return [f"the threads are {names}, told were {sorted(now.lines)}"]
    for name in names:
        found += _of_line(store.thread(name), now.lines[name])
    rule = store.retention
    if (None if rule is None else rule.keep_last) != now.keep_last:
        found.append(f"the retention is {rule}, told was keep_last={now.keep_last}")
    return [*found, *_of_once(store, now, begun, called=called)]


def _of_line(thread: Thread, line: Line) -> Iterator[str]:
    there = {each.seq for each in thread.history()}
    if not line.required <= there <= set(range(len(line.states))):
        wanted = f"{sorted(line.required)} of {len(line.states)}"
        yield f"thread {thread.id} has checkpoints {sorted(there)}, told were {wanted}"
        return
    for seq in there:
        state = thread.load(at=seq)
        if state != line.states[seq]:
            yield f"thread {thread.id}, checkpoint {seq} is {str(state)[:80]}, told was {str(line.states[seq])[:80]}"
    if thread.load() != line.states[-1]:
        yield f"thread {thread.id} has another head than was told"
    if set(thread.pins()) != line.pins:
        yield f"thread {thread.id} has pins {thread.pins()}, told were {line.pins}"
    if not line.forked:
        effects = [(view.decision[1], view.result if view.status == "done" else None) for view in thread.effects()]
        kept = line.required
        wanted_effects = [each for each in line.effects if each[0] in kept]
        if len(set(effects)) != len(effects) or not set(wanted_effects) <= set(effects) <= set(line.effects):
            yield f"thread {thread.id} has effects {effects}, told were {line.effects}"


def _of_once(store: Store, now: Told, begun: Step | None, *, called: bool) -> Iterator[str]:
    for name in set(CALLS) - now.doubtful:
        with store._engine.read() as snap:
            found = ledger.find(snap, once._slot(name))
        if name in now.once:
            result = (
                None
                if found.receipt is None
                else once._recorded(once._call(store, name, {}, "ask", 60)[0], found.receipt)
            )
            if result != f"{RESULT} {now.once[name]}":
                yield f"the call {name} has the result {result!r}, told was {RESULT} {now.once[name]}"
        elif begun is not None and begun[:2] == ["once", name]:
            if called and found.intent is None:
                yield f"the call {name} was made and its intent is gone"
        elif found.intent is not None:
            yield f"the call {name} is there, and was never asked for"
