"""The ledger against a model: workers that call, store, die, fall behind, lose their lease and come back, at random.

The model is the world outside (how often was each key really used?) and what the design promises:

- a call begins only if nobody may be at it: before it, or after its caller is dead or its deadline has passed;
- the recorded result is the first one that was stored, for ever, for everybody;
- under the rule `query`, with callers that keep to their deadlines, the world sees every key exactly once;
- every call more than that is known: as an attempt, a duplicate, or both.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from effects_lab import is_sound, open_store

from agentstore import (
    Append,
    Effect,
    EffectClosed,
    EffectDuplicate,
    EffectInDoubt,
    EffectInFlight,
    Fenced,
    LeaseHeld,
    StaleThread,
    clock,
)
from agentstore.clock import Owner
from agentstore.leases import Lease
from agentstore.ledger import DEADLINE_MARGIN_S
from agentstore.testing.manual_clock import ManualClock
from agentstore.thread import Thread

TIMEOUT_S = 20.0
CALLS = 6
WORKERS = 2

RUNS = 25
STEPS = 80
WEIGHTS = {
    "begin_and_call": 12,
    "begin": 4,
    "call_the_tool": 4,
    "store_it": 6,
    "time_passes": 6,
    "take_lease": 4,
    "give_lease_back": 2,
    "give_up": 2,
    "die": 1,
    "reboot": 1,
}
"""What happens next, and how often of 42 times."""


@dataclass
class Worker:
    process: Owner
    thread: Thread
    lease: Lease | None = None
    begun: dict[int, Effect] = field(default_factory=dict)
    """Calls that it may make or has made, and whose receipt it has not stored."""
    made: dict[int, Any] = field(default_factory=dict)
    """What its tools returned."""


@dataclass
class Attempt:
    """A call that somebody was allowed to make."""

    process: Owner
    until_ns: int
    over: bool = False


class Ledger:
    tools_rule = "replay"
    late_calls = True
    """Whether a tool may be called after its deadline: a worker that stood still after it was allowed to."""

    def __init__(self, directory: Path, seed: int, machine: ManualClock) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.machine = machine
        self.store = open_store(directory)
        self.decision = self.store.thread("trip-1").commit(Append("history", "decision"), reason="decision")
        self.world: dict[str, int] = {}
        self.attempts: dict[int, Attempt] = {}
        self.results: dict[int, Any] = {}
        self.extra = 0
        self.seen: Counter[str] = Counter()
        self.workers = [self.new_worker() for _ in range(WORKERS)]

    def new_worker(self) -> Worker:
        return Worker(self.machine.start_process(), self.store.thread("trip-1"))

    def be(self, who: int) -> Worker:
        worker = self.workers[who]
        self.machine.be(worker.process)
        return worker

    def go(self) -> None:
        acts = [act for act, weight in WEIGHTS.items() for _ in range(weight)]
        for _ in range(STEPS):
            act, who = self.random.choice(acts), self.random.randrange(WORKERS)
            worker = self.workers[who]
            candidates = {"call_the_tool": worker.begun, "give_up": worker.begun, "store_it": worker.made}
            index = self.random.choice([*candidates.get(act, range(CALLS))] or [0])
            print(act, who, index)
            match act:
                case "time_passes":
                    self.time_passes(self.random.choice([10.0, 25.0, 40.0]))
                case "reboot":
                    self.reboot()
                case "take_lease" | "give_lease_back" | "die":
                    getattr(self, act)(who)
                case _:
                    getattr(self, act)(who, index)
            self.compare()
        assert is_sound(self.store)
        self.store.close()

    # --- what workers do ---------------------------------------------------------------

    def take_lease(self, who: int) -> None:
        worker = self.be(who)
        try:
            worker.lease = worker.thread.lease(f"worker-{who}", ttl_s=30)
        except LeaseHeld:
            return
        worker.thread.load()

    def give_lease_back(self, who: int) -> None:
        worker = self.be(who)
        if worker.lease is not None:
            worker.lease.release()

    def begin(self, who: int, index: int) -> None:
        worker = self.be(who)
        try:
            effect = worker.thread.effect(
                decision=self.decision, index=index, tool="charge", arguments={"n": index}, rule=self.tools_rule,
                timeout_s=TIMEOUT_S,
            )  # fmt: skip
        except EffectInFlight:
            assert self.is_at_it(index)
            return
        except Fenced:
            return
        except EffectInDoubt as error:
            assert not self.is_at_it(index)
            self.ask_the_world(worker, index, error.effect)
            return
        if effect.done:
            assert effect.result == self.results[index]
            return
        assert index not in self.results
        self.may_call(worker, index, effect)

    def ask_the_world(self, worker: Worker, index: int, effect: Effect) -> None:
        """The rule `query`."""
        self.seen["asked"] += 1
        if self.world.get(effect.key):
            self.store_receipt(worker, index, effect, "answer", "query")
            return
        try:
            effect.retry("the world knows nothing about it")
        except Fenced:
            return
        self.may_call(worker, index, effect)

    def may_call(self, worker: Worker, index: int, effect: Effect) -> None:
        assert not self.is_at_it(index), "two callers at once"
        until_ns = self.machine.boottime_ns() + int((TIMEOUT_S + DEADLINE_MARGIN_S) * 1e9)
        self.attempts[index] = Attempt(worker.process, until_ns)
        worker.begun[index] = effect
        worker.made.pop(index, None)
        self.seen["taken over"] += effect.attempt > 1

    def is_at_it(self, index: int) -> bool:
        attempt = self.attempts.get(index)
        return (
            attempt is not None
            and not attempt.over
            and not self.machine.provably_dead(attempt.process)
            and self.machine.boottime_ns() < attempt.until_ns
        )

    def begin_and_call(self, who: int, index: int) -> None:
        self.begin(who, index)
        self.call_the_tool(who, index)

    def call_the_tool(self, who: int, index: int) -> None:
        worker = self.be(who)
        effect = worker.begun.get(index)
        if effect is None or index in worker.made or (effect.remaining_s <= 0 and not self.late_calls):
            return
        times = self.world.get(effect.key, 0) + 1
        self.world[effect.key] = times
        worker.made[index] = times

    def store_it(self, who: int, index: int) -> None:
        worker = self.be(who)
        if index in worker.made:
            self.store_receipt(worker, index, worker.begun[index], worker.made.pop(index), "call")

    def store_receipt(self, worker: Worker, index: int, effect: Effect, result: Any, source: str) -> None:
        worker.begun.pop(index, None)
        worker.made.pop(index, None)
        first = index not in self.results
        try:
            effect.receipt(result, Append("history", [index, result]), source=source)
        except EffectDuplicate as error:
            assert error.result == self.results[index] != result
            self.seen["another result"] += 1
        except (StaleThread, Fenced) as error:
            worker.thread.load()  # the receipt is stored all the same
            self.seen[f"alone after {type(error).__name__}"] += first
        if first:
            self.results[index] = result
        else:
            self.extra += 1
            self.seen["duplicate"] += 1
        assert effect.result == self.results[index]
        assert effect.duplicate is not first

    def give_up(self, who: int, index: int) -> None:
        """The caller says that it does not know; it will not store anything any more."""
        worker = self.be(who)
        effect = worker.begun.get(index)
        if effect is None:
            return
        mine = self.attempts[index].process == worker.process and index not in self.results
        try:
            effect.doubt("timeout")
        except EffectClosed:
            assert not mine
            return
        except Fenced:
            return
        assert mine
        del worker.begun[index]
        worker.made.pop(index, None)
        self.attempts[index].over = True

    # --- what happens to them ----------------------------------------------------------------

    def time_passes(self, seconds: float) -> None:
        self.machine.advance(seconds)

    def die(self, who: int) -> None:
        self.machine.kill(self.workers[who].process)
        self.workers[who] = self.new_worker()

    def reboot(self) -> None:
        self.machine.reboot()
        self.store.close()
        self.store = open_store(self.directory)
        self.workers = [self.new_worker() for _ in range(WORKERS)]

    # --- what always holds --------------------------------------------------------------------

    def compare(self) -> None:
        views = self.store.thread("trip-1").effects()
        assert {view.index: view.result for view in views if view.status == "done"} == self.results
        assert sum(view.duplicates for view in views) == self.extra
        for view in views:
            times = self.world.get(view.key, 0)
            assert view.attempt + view.duplicates >= times
            if self.tools_rule == "query" and not self.late_calls:
                assert times <= 1


class Queried(Ledger):
    """Under `query`, with callers that call before their deadline or not at all, nothing is ever done twice."""

    tools_rule = "query"
    late_calls = False


@pytest.mark.parametrize("model", [Ledger, Queried])
def test_the_ledger_does_what_the_model_promises(model: type[Ledger], tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(RUNS):
        print(f"seed {seed}")
        machine = ManualClock()
        with clock.using(machine):
            run = model(tmp_path / f"{seed}", seed, machine)
            run.go()
            seen += run.seen
    # A run in which nothing goes wrong shows nothing.
    expected = {"taken over", "duplicate", "alone after StaleThread", "alone after Fenced"}
    expected |= {"another result"} if model is Ledger else {"asked"}
    assert expected <= set(seen), seen
