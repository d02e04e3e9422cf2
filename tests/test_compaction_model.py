"""Everything that moves checkpoints about, in any order, against plain dicts: retention, packs, cold packs, snapshots,
dictionaries, branches, forks, pins, deletions, reopenings.

The limits are so small that a store of some dozen checkpoints has packs, roots, snapshots and dictionaries. A long run:
``AGENTSTORE_MODEL_EXAMPLES=500 pytest -n 0 tests/test_compaction_model.py`` (other ones every time, of 100 steps).
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_thread_model import apply, changes, same, values

from agentstore import (
    Append,
    CheckpointExpired,
    CheckpointNotFound,
    InvalidChange,
    Retention,
    Set,
    Splice,
    Store,
    Thread,
    clock,
    compaction,
    loading,
    packing,
    position,
    records,
    snapshots,
)
from agentstore.changes import Change
from agentstore.compaction import compact
from agentstore.pruning import Expiry
from agentstore.records import ThreadKeys
from agentstore.testing.manual_clock import ManualClock

SOAK = "AGENTSTORE_MODEL_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("AGENTSTORE_MODEL_EXAMPLES", "40"))
NAMES = ("a", "b", "c")
LIMITS = [
    (packing, "PACK_MEMBERS", 8),
    (position, "PACK_MEMBERS", 8),
    (snapshots, "PACK_MEMBERS", 8),
    (packing, "REST_MEMBERS_MIN", 3),
    (packing, "REST_BYTES_MIN", 200),
    (packing, "CONTENT_BYTES_MAX", 3000),
    (position, "ASK_EVERY", 4),
    (position, "SUMS_EVERY", 4),
    (compaction, "CONTENT_BYTES_MIN", 4000),
    (compaction, "COLD_MEMBERS", 40),
    (snapshots, "LOAD_US_MIN", 100),
    (snapshots, "CHUNK_BYTES_MIN", 64),
    (snapshots, "CHUNK_BYTES_MAX", 160),
    (snapshots, "THIN_EVERY", 2),
    (snapshots, "DENSE_SNAPSHOTS", 2),
    (snapshots, "GAP_MIN", 4),
]

reasons = st.sampled_from(["manual", "round", "plan", "decision", "approval", "final", "summary"])
ages = st.none() | st.builds(timedelta, hours=st.integers(0, 60))
rules = st.builds(
    Retention,
    keep_last=st.none() | st.sampled_from([1, 1, 2, 3, 5, 9, 20]),
    keep=st.sets(reasons, max_size=3),
    keep_every=st.none() | st.integers(1, 6),
    max_age=ages,
    finished_after=ages,
)


@dataclass
class Node:
    """One checkpoint."""

    state: dict[str, Any]
    parent: int | None
    reason: str
    step: int | None
    status: str | None
    created_us: int


@dataclass
class Model:
    """What one thread should be."""

    nodes: dict[int, Node] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)
    head: int = -1
    pins: set[int] = field(default_factory=set)
    carried: bool = False
    """Whether its first checkpoint, the first of a fork, carries a decision."""

    def add(
        self, state: dict[str, Any], parent: int | None, reason: str, step: int | None = None, status: str | None = None
    ) -> None:
        self.head = len(self.nodes) + len(self.removed)
        self.nodes[self.head] = Node(state, parent, reason, step, status, clock.current().wall_ns() // 1000)

    def state(self, seq: int) -> dict[str, Any]:
        return copy.deepcopy(self.nodes[seq].state) if seq >= 0 else {}

    def decision(self, seq: int) -> int | None:
        """The checkpoint on the line of `seq` that has or carries its newest decision."""
        at: int | None = seq
        while at is not None:
            if self.nodes[at].reason in ("plan", "decision") or (at == 0 and self.carried):
                return at
            at = self.nodes[at].parent
        return None

    def is_over(self, rule: Retention) -> bool:
        node = self.nodes[self.head]
        age = timedelta(microseconds=clock.current().wall_ns() // 1000 - node.created_us)
        finished = node.status in ("COMPLETED", "FAILED")
        return rule.finished_after is not None and finished and age > rule.finished_after and not self.pins

    def why(self, seq: int, rule: Retention) -> str | None:
        """Why a checkpoint stays."""
        node = self.nodes[seq]
        if seq == self.head:
            return "head"
        if seq in self.pins:
            return "pinned"
        if seq == self.decision(self.head):
            return "the newest decision"
        if rule.keep_last is None:
            return "every one stays"
        if seq in sorted(self.nodes)[-rule.keep_last :]:
            return f"one of the last {rule.keep_last}"
        age = timedelta(microseconds=clock.current().wall_ns() // 1000 - node.created_us)
        if rule.max_age is not None and age > rule.max_age:
            return None
        if node.reason in rule.keep:
            return f"reason {node.reason}"
        if rule.keep_every is not None and node.step is not None and node.step % rule.keep_every == 0:
            return f"step {node.step}"
        return None

    def apply(self, kept: dict[int, str]) -> None:
        """Remove what is not kept; parents become the nearest kept ancestor."""
        for node in self.nodes.values():
            while node.parent is not None and node.parent not in kept:
                node.parent = self.nodes[node.parent].parent
        self.removed |= self.nodes.keys() - kept.keys()
        self.nodes = {seq: node for seq, node in self.nodes.items() if seq in kept}
        if 0 not in self.nodes:
            self.carried = False


class CompactionMachine(RuleBasedStateMachine):
    """All rules keep `models` equal to the store."""

    @initialize()
    def start(self) -> None:
        self.exits = ExitStack()
        self.directory = tempfile.mkdtemp(prefix="agentstore-model-")
        self.exits.callback(shutil.rmtree, self.directory)
        patch = pytest.MonkeyPatch()
        self.exits.callback(patch.undo)
        for module, name, value in LIMITS:
            patch.setattr(module, name, value)
        self.clock = ManualClock()
        self.exits.enter_context(clock.using(self.clock))
        self.models: dict[str, Model] = {}
        self.handles: dict[str, Thread] = {}
        self.touched: set[str] = set()
        self.open()

    def open(self) -> None:
        self.handles.clear()
        self.store = Store.open(self.directory + "/store", background=False)

    def teardown(self) -> None:
        self.store.close()
        self.exits.close()

    def handle(self, name: str) -> Thread:
        self.touched.add(name)
        if name not in self.handles:
            self.handles[name] = self.store.thread(name)
        return self.handles[name]

    def number(self, name: str) -> int:
        with self.store._engine.read() as snap:
            named = snap.get(records.name_key(name.encode()))
        assert named is not None
        return records.name_of(named)[0]

    def seq(self, data: st.DataObject, name: str) -> int:
        return data.draw(st.sampled_from(sorted(self.models[name].nodes)), label="seq")

    def some(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.models)), label="thread")

    # --- writing -----------------------------------------------------------------------

    @rule(
        name=st.sampled_from(NAMES),
        new=st.lists(changes, max_size=4),
        fresh=st.booleans(),
        branch=st.booleans(),
        reason=reasons,
        step=st.none() | st.integers(-3, 30),
        status=st.sampled_from([None, "RUNNING", "COMPLETED"]),
        data=st.data(),
    )
    def commit(
        self,
        name: str,
        new: list[Change],
        fresh: bool,
        branch: bool,
        reason: str,
        step: int | None,
        status: str | None,
        data: st.DataObject,
    ) -> None:
        model = self.models.get(name, Model())
        if fresh:
            self.handles.pop(name, None)
        parent = self.seq(data, name) if branch and model.nodes else None
        base = model.head if parent is None else parent
        state = model.state(base)
        try:
            for change in new:
                apply(state, change)
        except InvalidChange:
            with pytest.raises(InvalidChange):
                self.handle(name).commit(*new, parent=parent)
            return
        checkpoint = self.handle(name).commit(*new, parent=parent, reason=reason, step=step, status=status)
        model.add(state, base if base >= 0 else None, reason, step, status)
        self.models[name] = model
        assert (checkpoint.seq, checkpoint.parent) == (model.head, model.nodes[model.head].parent)

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 40), plans=st.integers(2, 15), splices=st.integers(2, 15))
    def grow(self, name: str, count: int, plans: int, splices: int) -> None:
        """Many small commits: enough for packs, snapshots, and their thinning."""
        model = self.models.setdefault(name, Model())
        thread = self.handle(name)
        for number in range(count):
            state = model.state(model.head)
            new: list[Change] = [Append("log", {"n": number, "text": f"line {number} " * 12}), Set("step", number)]
            if number % splices == 0 and isinstance(state.get("log"), list) and len(state["log"]) > 4:
                new.append(Splice("log", 1, 3, [f"a summary of {number}"]))
            try:
                for change in new:
                    apply(state, change)
            except InvalidChange:
                return
            reason = "plan" if number % plans == 0 else "round"
            thread.commit(*new, step=number, reason=reason)
            model.add(state, model.head if model.head >= 0 else None, reason, number)

    @rule(
        name=st.sampled_from(NAMES),
        state=st.dictionaries(st.sampled_from(["history", "plan", "x", "y"]), values, max_size=4),
        branch=st.booleans(),
        turned=st.booleans(),
        data=st.data(),
    )
    def commit_state(self, name: str, state: dict[str, Any], branch: bool, turned: bool, data: st.DataObject) -> None:
        model = self.models.setdefault(name, Model())
        parent = self.seq(data, name) if branch and model.nodes else None
        base = model.head if parent is None else parent
        state = {**model.state(base), **state}
        if turned:
            state = dict(reversed(state.items()))
        self.handle(name).commit_state(state, reason="round", parent=parent)
        model.add(copy.deepcopy(state), base if base >= 0 else None, "round")

    @precondition(lambda self: self.models)
    @rule(name=st.sampled_from(NAMES), data=st.data())
    def fork(self, name: str, data: st.DataObject) -> None:
        source = self.some(data)
        if name in self.models:
            return
        model, at = self.models[source], self.seq(data, source)
        self.handles[name] = self.handle(source).fork(at, into=name)
        forked = Model()
        origin = model.nodes[at]
        forked.add(model.state(at), None, "fork", origin.step, origin.status)
        forked.carried = model.decision(at) is not None
        self.models[name] = forked
        self.touched.add(name)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        name = self.some(data)
        seq = self.seq(data, name)
        self.handle(name).pin(seq)
        self.models[name].pins.add(seq)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = self.some(data)
        for seq in self.models[name].pins:
            self.handle(name).unpin(seq)
        self.models[name].pins = set()

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        name = self.some(data)
        self.handle(name).delete()
        del self.models[name], self.handles[name]

    @rule(hours=st.integers(1, 40))
    def wait(self, hours: int) -> None:
        self.clock.advance(hours * 3600)

    # --- removing and moving -----------------------------------------------------------

    def expected(self, names: list[str], rule: Retention) -> dict[str, tuple[set[int], dict[int, str]]]:
        """What would go and stay of each thread of which something goes."""
        found: dict[str, tuple[set[int], dict[int, str]]] = {}
        for name in names:
            model = self.models[name]
            kept = {seq: why for seq in sorted(model.nodes) if (why := model.why(seq, rule)) is not None}
            if model.is_over(rule):
                kept = {}
            if len(kept) < len(model.nodes):
                found[name] = model.nodes.keys() - kept.keys(), kept
        return found

    def went(self, found: list[Expiry], expected: dict[str, tuple[set[int], dict[int, str]]]) -> None:
        """Compare, and have it done in the model."""
        assert {each.thread: (set(each.removed), each.kept) for each in found} == expected
        for each in found:
            assert each.whole == (not each.kept)
            assert each.bytes > 0

    def carry_out(self, expected: dict[str, tuple[set[int], dict[int, str]]]) -> None:
        for name, (_, kept) in expected.items():
            if kept:
                self.models[name].apply(kept)
            else:
                del self.models[name]
                self.handles.pop(name, None)
        self.touched.update(self.models)

    @precondition(lambda self: self.models)
    @rule(rule=rules)
    def retain(self, rule: Retention) -> None:
        expected = self.expected(sorted(self.models), rule)
        self.went(self.store.apply_retention(rule, dry_run=True), expected)
        self.went(self.store.apply_retention(rule), expected)
        self.carry_out(expected)
        assert self.store.apply_retention(rule) == []

    @precondition(lambda self: self.models)
    @rule(rule=rules, data=st.data())
    def retain_one(self, rule: Retention, data: st.DataObject) -> None:
        """The thread's own rule comes first; the store has none."""
        name = self.some(data)
        self.handle(name).set_retention(rule)
        expected = self.expected([name], rule)
        self.went(self.store.apply_retention(), expected)
        self.carry_out(expected)
        if name in self.models:
            self.handle(name).set_retention(None)

    @precondition(lambda self: self.models)
    @rule(rests=st.booleans())
    def pack(self, rests: bool) -> None:
        engine = self.store._engine
        for name in self.models:
            number = self.number(name)
            packing.pack_full(engine, number)
            if rests:
                with engine.read() as snap:
                    swaps = packing.rest(snap, number)
                for swap in swaps:
                    assert engine.transact(swap.write).value
        self.touched.update(self.models)

    @precondition(lambda self: self.models)
    @rule(rule=st.none() | rules, jobs=st.integers(1, 2))
    def compact(self, rule: Retention | None, jobs: int) -> None:
        self.store.close()
        done = compact(self.store.path, retention=rule, level=3, jobs=jobs)
        assert done.damaged == []
        assert done.shrunk
        expected = {} if rule is None else self.expected(sorted(self.models), rule)
        self.went(done.expired, expected)
        self.carry_out(expected)
        self.open()

    @precondition(lambda self: self.models)
    @rule(data=st.data(), drop=st.booleans())
    def snapshot(self, data: st.DataObject, drop: bool) -> None:
        """One is taken or dropped, anywhere."""
        name = self.some(data)
        seq, engine, number = self.seq(data, name), self.store._engine, self.number(name)
        if drop:
            snapshots.drop(engine, number, seq)
        else:
            keys = ThreadKeys(number)
            with engine.read() as snap:
                if snap.get(records.snapshots(keys.prefix) + records.int_part(seq)) is None:
                    loaded = loading.load(snap, keys.prefix, seq, name)
                    prepared = snapshots.prepare(keys, loaded)
                    assert engine.transact(prepared.write).value
        snapshots.thin(engine, number)
        self.touched.add(name)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()
        self.touched.update(self.models)

    # --- what must hold ----------------------------------------------------------------

    @precondition(lambda self: any(model.removed for model in self.models.values()))
    @rule(data=st.data())
    def ask_for_what_is_gone(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, model in self.models.items() if model.removed)))
        model = self.models[name]
        seq = data.draw(st.sampled_from(sorted(model.removed)))
        for ask in (
            lambda: self.handle(name).load(at=seq),
            lambda: self.handle(name).checkpoint(seq),
            lambda: self.handle(name).pin(seq),
            lambda: self.handle(name).fork(seq, into="never"),
            lambda: self.handle(name).commit(Set("x", 1), parent=seq),
        ):
            with pytest.raises(CheckpointExpired):
                ask()
        with pytest.raises(CheckpointNotFound) as caught:
            self.handle(name).load(at=len(model.nodes) + len(model.removed))
        assert not isinstance(caught.value, CheckpointExpired)

    @invariant()
    def equal(self) -> None:
        assert list(self.store.threads()) == sorted(self.models)
        for name, model in self.models.items():
            history = self.store.thread(name).history()
            assert {one.seq: one.parent for one in history} == {seq: node.parent for seq, node in model.nodes.items()}
            assert [one.seq for one in history] == sorted(model.nodes, reverse=True)
            for one in history:
                node = model.nodes[one.seq]
                assert (one.reason, one.step, one.status) == (node.reason, node.step, node.status)
                assert one._created_us == node.created_us
            if name in self.touched:
                fresh = self.store.thread(name)
                assert same(fresh.load(), model.nodes[model.head].state)
                assert set(fresh.pins()) == model.pins
                for seq, node in model.nodes.items():
                    assert same(fresh.load(at=seq), node.state), (name, seq)
                assert self.store.check() == []
        self.touched.clear()


TestCompactionMachine = CompactionMachine.TestCase
TestCompactionMachine.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=100 if SOAK else 30, deadline=None, derandomize=not SOAK
)
