"""Random changes, branches, forks, pins, deletions and reopenings against plain dicts."""

from __future__ import annotations

import copy
import shutil
import tempfile
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentstore import Append, Delete, InvalidChange, Set, Splice, StaleThread, Store, Thread, ThreadExists
from agentstore.changes import Change
from agentstore.deltas import edit_value

FIELDS = ("history", "plan", "usage", "blob")
NAMES = ("a", "b", "user-42:ü", "n" * 500 + "x", "n" * 500 + "y", "nul\0", "nul")

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20), st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 3)), inner, max_size=4),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)
large = st.builds(lambda seed, n: (f"line {seed} " * n).encode(), st.integers(0, 3), st.integers(500, 2000))
parts = st.one_of(st.integers(-3, 5), st.text(max_size=2), st.sampled_from(["k", "prompt"]))
paths = st.one_of(
    st.sampled_from(FIELDS), st.tuples(st.sampled_from(FIELDS), parts), st.tuples(st.sampled_from(FIELDS), parts, parts)
)
changes = st.one_of(
    st.builds(Set, paths, st.one_of(values, large)),
    st.builds(lambda path, items: Append(path, *items), paths, st.lists(values, max_size=3)),
    st.builds(Delete, paths),
    st.builds(Splice, paths, st.integers(0, 4), st.integers(0, 2), st.lists(values, max_size=2)),
)


def apply(state: dict[str, Any], change: Change) -> None:
    """What a change does to a plain dict; the words of the docs and not the code of the store, at the top level."""
    field = change.field
    if change.rest:
        if field not in state:
            raise InvalidChange("missing")
        edit_value(state, change.path, change)
    elif isinstance(change, Set):
        state[field] = copy.deepcopy(change.value)
    elif isinstance(change, Delete):
        if field not in state:
            raise InvalidChange("missing")
        del state[field]
    elif isinstance(change, Append):
        if not isinstance(state.setdefault(field, []), list):
            raise InvalidChange("no list")
        state[field].extend(copy.deepcopy(change.items))
    elif isinstance(change, Splice):
        found = state.get(field)
        if not isinstance(found, list) or change.start + change.delete > len(found):
            raise InvalidChange("no such items")
        found[change.start : change.start + change.delete] = copy.deepcopy(change.items)


def same(a: Any, b: Any) -> bool:
    """Equal in values, types and the order of keys."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class Model:
    """What one thread should be: its states by seq, its head."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.parents: list[int | None] = []
        self.head = -1
        self.pins: dict[int, str] = {}

    def add(self, state: dict[str, Any], parent: int | None) -> None:
        self.states.append(state)
        self.parents.append(parent)
        self.head = len(self.states) - 1


class StoreMachine(RuleBasedStateMachine):
    """All rules keep `models` equal to the store."""

    threads = Bundle("threads")

    @initialize()
    def start(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="agentstore-model-")
        self.models: dict[str, Model] = {}
        self.handles: dict[str, Thread] = {}
        self.store = Store.open(self.directory + "/store", background=False)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    def handle(self, name: str) -> Thread:
        if name not in self.handles:
            self.handles[name] = self.store.thread(name)
        return self.handles[name]

    @rule(target=threads, name=st.sampled_from(NAMES))
    def thread(self, name: str) -> str:
        return name

    @rule(name=threads, new=st.lists(changes, max_size=4), fresh=st.booleans(), back=st.none() | st.integers(1, 5))
    def commit(self, name: str, new: list[Change], fresh: bool, back: int | None) -> None:
        model = self.models.get(name, Model())
        if fresh:
            self.handles.pop(name, None)
        parent = None if back is None or model.head < back else model.head - back
        base = model.head if parent is None else parent
        state = copy.deepcopy(model.states[base]) if base >= 0 else {}
        try:
            for change in new:
                apply(state, change)
        except InvalidChange:
            with pytest.raises(InvalidChange):
                self.handle(name).commit(*new, parent=parent)
            return
        checkpoint = self.handle(name).commit(*new, parent=parent, step=len(model.states), metadata={"n": len(new)})
        model.add(state, base if base >= 0 else None)
        self.models[name] = model
        assert (checkpoint.seq, checkpoint.parent) == (model.head, model.parents[-1])

    @rule(name=threads, count=st.integers(1, 90), fresh=st.booleans())
    def grow(self, name: str, count: int, fresh: bool) -> None:
        """Many small commits: enough for snapshots, and for their thinning."""
        model = self.models.setdefault(name, Model())
        if fresh:
            self.handles.pop(name, None)
        thread = self.handle(name)
        for number in range(count):
            state = copy.deepcopy(model.states[model.head]) if model.head >= 0 else {}
            state.setdefault("log", []).append({"n": number, "text": "x" * 300})
            state["step"] = number
            thread.commit(Append("log", {"n": number, "text": "x" * 300}), Set("step", number))
            model.add(state, model.head if model.head >= 0 else None)

    @rule(name=threads, state=st.dictionaries(st.sampled_from(FIELDS), values, max_size=4), keep=st.booleans())
    def commit_state(self, name: str, state: dict[str, Any], keep: bool) -> None:
        model = self.models.setdefault(name, Model())
        if keep and model.head >= 0:
            state = {**copy.deepcopy(model.states[model.head]), **state}
        self.handle(name).commit_state(state, reason="round")
        model.add(copy.deepcopy(state), model.head if model.head >= 0 else None)

    @rule(name=threads, source=threads, back=st.integers(0, 5))
    def fork(self, name: str, source: str, back: int) -> None:
        model = self.models.get(source)
        if model is None:
            return
        at = max(0, model.head - back)
        if name in self.models:
            with pytest.raises(ThreadExists):
                self.handle(source).fork(at, into=name)
            return
        self.handles[name] = self.handle(source).fork(at, into=name)
        forked = Model()
        forked.add(copy.deepcopy(model.states[at]), None)
        self.models[name] = forked

    @rule(name=threads, back=st.integers(0, 5), note=st.text(max_size=5))
    def pin(self, name: str, back: int, note: str) -> None:
        if (model := self.models.get(name)) is not None:
            seq = max(0, model.head - back)
            self.handle(name).pin(seq, note)
            model.pins[seq] = note

    @rule(name=threads)
    def delete(self, name: str) -> None:
        if name in self.models:
            self.handle(name).delete()
            del self.models[name], self.handles[name]

    @rule(name=threads)
    def be_overtaken(self, name: str) -> None:
        """Somebody else commits: this handle must notice, write nothing, and go on after a load."""
        if (model := self.models.get(name)) is None:
            return
        mine = self.handle(name)
        assert mine.head is not None
        self.store.thread(name).commit(Set("other", 1))
        model.add({**copy.deepcopy(model.states[model.head]), "other": 1}, model.head)
        with pytest.raises(StaleThread):
            mine.commit(Set("mine", 1))
        assert same(mine.load(), model.states[-1])

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.handles.clear()
        self.store = Store.open(self.directory + "/store", background=False)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def load_any(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.models)))
        model = self.models[name]
        at = data.draw(st.integers(0, len(model.states) - 1))
        assert same(self.handle(name).load(at=at), model.states[at])
        assert same(self.store.thread(name).load(), model.states[model.head])

    @rule()
    def check(self) -> None:
        assert self.store.check() == []

    @invariant()
    def lists(self) -> None:
        assert list(self.store.threads()) == sorted(self.models)
        for name, model in self.models.items():
            head = self.handle(name).head
            assert head is not None and head.seq == model.head
            assert self.handle(name).pins() == model.pins
            assert [cp.parent for cp in reversed(self.handle(name).history())] == model.parents


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
