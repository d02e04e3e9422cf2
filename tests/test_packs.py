"""Packs: whatever is packed loads to exactly what it was before, and nothing is lost when packing is disturbed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest
import store_worker
from hypothesis import given, settings
from hypothesis import strategies as st
from test_thread_model import apply, changes, same

from agentstore import (
    Append,
    CheckpointNotFound,
    CorruptionError,
    Delete,
    InvalidChange,
    Set,
    Splice,
    Store,
    Thread,
    ThreadGone,
    dictionaries,
    loading,
    packing,
    packs,
    position,
    records,
    snapshots,
)
from agentstore.changes import Change
from agentstore.checkpoint import Checkpoint
from agentstore.codec import zstd
from agentstore.engine.api import Tx
from agentstore.packing import Swap
from agentstore.records import REASONS, ThreadKeys, int_part

ONE = ThreadKeys(1)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """In which nothing is packed but by the tests."""
    monkeypatch.setattr(position, "PACK_MEMBERS", 10**9)
    with Store.open(tmp_path / "store", background=False) as opened:
        yield opened


def message(n: int) -> dict[str, Any]:
    return {"role": "tool", "n": n, "content": random.Random(n % 50).randbytes(100).hex()}


def grow(thread: Thread, count: int, start: int = 0) -> None:
    for n in range(start, start + count):
        thread.commit(Append("history", message(n)), Set("step", n), step=n)


def swaps_of(
    store: Store, members: int, keys: ThreadKeys = ONE, dictionary: zstd.Dictionary | None = None
) -> list[Swap]:
    """Packs of up to so many members, of everything that stands in the thread: packs go into bigger ones."""
    with store._engine.read() as snap:
        found = packing.runs(packing.pieces(snap, keys, "t"), members)
        made = [packing.make(snap, keys, run, "t", dictionary=dictionary) for run in found if len(run) > 1]
    return [swap for swap in made if swap is not None]


def pack(store: Store, members: int, keys: ThreadKeys = ONE, dictionary: zstd.Dictionary | None = None) -> int:
    """How many packs were made."""
    swaps = swaps_of(store, members, keys, dictionary)
    for swap in swaps:
        assert store._engine.transact(swap.write).value
    return len(swaps)


def kept(store: Store, kind: bytes, keys: ThreadKeys = ONE) -> dict[bytes, bytes]:
    with store._engine.read() as snap:
        return dict(snap.scan(keys.prefix + kind, records.end_of(keys.prefix + kind)))


SINGLES, PACKS = records.checkpoints(b""), records.packs(b"")


def whole(checkpoint: Checkpoint | None) -> Any:
    return checkpoint and {
        name: getattr(checkpoint, name) for name in Checkpoint.__slots__ if not name.startswith("__")
    }


def everything(store: Store, name: str = "t") -> dict[str, Any]:
    """All that a caller can read of a thread."""
    thread = store.thread(name)
    history = thread.history()
    return {
        "states": {cp.seq: thread.load(at=cp.seq) for cp in history},
        "history": [whole(cp) for cp in history],
        "checkpoints": [whole(thread.checkpoint(cp.seq)) for cp in history],
        "pages": [whole(cp) for before in range(len(history) + 2) for cp in thread.history(2, before=before)],
        "head": whole(thread.head),
        "decision": thread.decision,
        "pins": thread.pins(),
    }


# --- any commits, packed in any way ------------------------------------------------------------


class Run:
    """Random commits to one thread: all kinds of ops, several of one field, branches, metadata of all shapes."""

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.states: list[dict[str, Any]] = []

    def commit(self, new: list[Change], back: int | None, meta: dict[str, Any]) -> None:
        parent = None if back is None or back >= len(self.states) else len(self.states) - 1 - back
        state: dict[str, Any] = {}
        if self.states:
            state = self.thread.load() if parent is None else self.thread.load(at=parent)
        try:
            for change in new:
                apply(state, change)
        except InvalidChange:
            return
        self.thread.commit(*new, parent=parent, **meta)
        self.states.append(state)

    def reorder(self, turn: int) -> None:
        """A state with its fields in another order."""
        state = self.thread.load()
        names = list(state)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        self.thread.commit_state({name: state[name] for name in names})
        self.states.append({name: state[name] for name in names})


metas = st.fixed_dictionaries(
    {},
    optional={
        "step": st.integers(-(2**70), 2**70),
        "status": st.text(max_size=5),
        "metadata": st.dictionaries(st.text(max_size=3), st.integers() | st.lists(st.none(), max_size=2), max_size=2),
        "reason": st.sampled_from(REASONS),
    },
)
plain = st.one_of(
    st.builds(lambda n: [Append("history", {"n": n}), Set("step", n)], st.integers(0, 9)),
    st.builds(lambda n: [Set("new", n), Append("new2", n)], st.integers(0, 9)),
    st.just([Set("passing", [1, 2]), Append("passing", 3), Delete("passing"), Set("passing", "again")]),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.one_of(plain, st.lists(changes, max_size=3)), st.none() | st.integers(0, 6), metas),
        st.integers(1, 3),
    ),
    min_size=2,
    max_size=24,
)


@settings(max_examples=60)
@given(steps=steps, sizes=st.lists(st.integers(2, 30), min_size=1, max_size=3), with_dictionary=st.booleans())
def test_what_is_packed_is_what_it_was(steps: list[Any], sizes: list[int], with_dictionary: bool) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patched:
        patched.setattr(position, "PACK_MEMBERS", 10**9)
        with Store.open(directory + "/store", background=False) as store:
            run = Run(store.thread("t"))
            for step in steps:
                if not isinstance(step, int):
                    run.commit(*step)
                elif run.states and run.states[-1] and run.thread.load():
                    run.reorder(step)
            if not run.states:
                return
            before = everything(store)
            assert len(before["states"]) == len(run.states)
            assert all(same(before["states"][seq], state) for seq, state in enumerate(run.states))
            dictionary = trained(store) if with_dictionary else None
            for members in sizes:  # the later ones make packs of packs
                pack(store, members, dictionary=dictionary)
                after = everything(store)
                assert after == before
                assert all(same(after["states"][seq], state) for seq, state in enumerate(run.states))
                assert store.check() == []
            snapshots.take(store._engine, 1, *somewhere(before, len(before["states"]) // 2))
            after = everything(store)
            assert all(same(after["states"][seq], state) for seq, state in enumerate(run.states))
            assert store.check() == []
        with Store.open(directory + "/store", background=False) as store:
            assert everything(store) == before
            assert store.check() == []


def trained(store: Store) -> zstd.Dictionary:
    """A dictionary that the store has."""
    samples = [repr(message(n)).encode() for n in range(40)]
    made = zstd.train(samples, 4096)
    assert made is not None
    store._engine.transact(lambda tx: dictionaries.put(tx, made, [1], tx.lsn))
    return made


def somewhere(found: dict[str, Any], seq: int) -> tuple[int, bytes]:
    (commit_id,) = [cp["commit_id"] for cp in found["history"] if cp["seq"] == seq]
    return seq, commit_id


def lines_of(count: int, changed: Container[int] = ()) -> bytes:
    """A large text with some of its lines changed."""
    return b"".join(b"%d: line%s\n" % (n * n, b" changed" if n in changed else b"") for n in range(count))


def test_a_pack_has_ops_of_all_kinds(store: Store) -> None:
    thread = store.thread("t")
    thread.commit(Set("a", 1), Set("history", [*range(100)]), Set("blob", lines_of(2000)), Set("gone", 1))
    thread.commit(Append("history", 5), Append("history", 6), Set("a", 2), Set("a", 3))
    thread.commit(Splice("history", 50, 2, ["summary"]), Delete("gone"))
    thread.commit(Set("blob", lines_of(2000, changed={100, 1800})))  # in two places: a patch
    thread.commit(Set("gone", "back"))
    state = thread.load()
    thread.commit_state({name: state[name] for name in reversed(state)})
    with store._engine.read() as snap:
        kinds = {op[0] for single in packing.singles(snap, ONE, "t") for op in single.entry.ops()}
    assert kinds == {1, 2, 3, 4, 5, 6}
    before = everything(store)
    assert pack(store, 64) == 1 and not kept(store, SINGLES)
    assert everything(store) == before and list(store.thread("t").load()) == list(reversed(state))
    assert store.check() == []


# --- packs and the rest of the store -----------------------------------------------------------


def test_appends_are_one_slice_and_smaller_than_alone(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 200)
    alone = sum(map(len, kept(store, SINGLES).values()))
    before = everything(store)
    assert pack(store, 50) == 4 and len(kept(store, PACKS)) == 4
    packed = sum(map(len, kept(store, PACKS).values()))
    assert pack(store, 400) == 1
    assert sum(map(len, kept(store, PACKS).values())) < packed * 0.7 < alone * 0.5
    assert everything(store) == before


def test_a_dictionary_makes_packs_smaller_and_is_looked_for(store: Store) -> None:
    thread = store.thread("t")
    for n in range(12):
        thread.commit(Append("history", {"role": "assistant", "content": f"the {n}th answer to the same question"}))
    samples = [f"the {n}th answer to the same question, role, assistant".encode() for n in range(60)]
    dictionary = zstd.train(samples, 2048)
    assert dictionary is not None
    before = everything(store)
    (without,) = swaps_of(store, 64)
    (swap,) = swaps_of(store, 64, dictionary=dictionary)
    assert len(swap.record) < len(without.record)
    store._engine.transact(lambda tx: dictionaries.put(tx, dictionary, [1], tx.lsn))
    assert store._engine.transact(swap.write).value
    assert everything(store) == before and store.check() == []
    store._engine.transact(lambda tx: dictionaries.remove(tx, dictionary.id))
    with pytest.raises(CorruptionError, match=rf"pack 11.*dictionary {dictionary.id} is missing"):
        store.thread("t").load()


def test_a_branch_a_fork_and_a_pin_inside_of_a_pack(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 40)
    pack(store, 64)
    assert not kept(store, SINGLES)
    right = [{"history": [message(k) for k in range(n + 1)], "step": n} for n in range(40)]
    branch = thread.commit(Append("history", "branch"), parent=17)
    assert branch.parent == 17
    history: Any = right[17]["history"]
    assert store.thread("t").load() == {"history": [*history, "branch"], "step": 17}
    fork = thread.fork(at=23, into="fork")
    assert fork.load() == right[23]
    thread.pin(5, "note")
    assert thread.pins() == {5: "note"}
    with pytest.raises(CheckpointNotFound):
        thread.pin(41)
    assert store.check() == []
    thread.delete()
    with store._engine.read() as snap:
        assert not list(snap.scan(ONE.prefix, records.end_of(ONE.prefix)))
    with pytest.raises(ThreadGone):
        thread.load(at=3)
    assert fork.load() == right[23] and store.check() == []


def test_snapshots_in_the_middle_of_a_pack(store: Store) -> None:
    thread = store.thread("t")
    for n in range(60):
        thread.commit(Append("history", message(n)), Set("scratch", message(-n)), Set("step", n))
    before = everything(store)
    for seq in (20, 40):
        assert snapshots.take(store._engine, 1, *somewhere(before, seq))
    pack(store, 64)
    with store._engine.read() as snap:
        assert loading.load(snap, ONE.prefix, 35, "t").snapshot_seq == 20
    assert everything(store) == before and store.check() == []
    assert snapshots.drop(store._engine, 1, 20)
    assert everything(store) == before and store.check() == []


def test_no_pack_reaches_across_another(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line went on from before a full pack: the rest before and the branch behind became one pack around it, in which
    `find_pack` did not find the members before: they were lost."""
    monkeypatch.undo()  # packs are made as they are
    thread = store.thread("t")
    grow(thread, 10)
    thread.commit(Append("history", "b"), parent=5)
    grow(thread, 127, start=100)
    thread.commit(Append("history", "c"), parent=9)
    grow(thread, 60, start=300)
    before = everything(store)
    path = store.path
    store.close()
    with Store.open(path, background=False) as again:
        assert len(kept(again, PACKS)) >= 4
        assert everything(again) == before and again.check() == []


# --- disturbed ---------------------------------------------------------------------------------


def test_a_swap_is_refused_when_a_member_changed(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 20)
    (swap,) = swaps_of(store, 64)
    key = ONE.checkpoints + int_part(7)
    raw = store._engine.transact(lambda tx: tx.get(key)).value
    assert raw is not None
    for other in (raw + b"x", None):
        store._engine.transact(lambda tx, other=other: tx.put(key, other) if other else tx.delete(key))  # type: ignore[misc]  # default
        was = kept(store, b"")
        assert was
        assert not store._engine.transact(swap.write).value
        assert kept(store, b"") == was
    store._engine.transact(lambda tx: tx.put(key, raw))
    assert store._engine.transact(swap.write).value
    assert not store._engine.transact(swap.write).value  # not twice
    assert store.check() == []


def test_no_pack_of_a_thread_that_was_deleted_meanwhile(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 20)
    (swap,) = swaps_of(store, 64)
    thread.delete()
    assert not store._engine.transact(swap.write).value
    assert packing.pack_full(store._engine, 1) == 0 and store.check() == []


def test_an_interrupted_commit_that_was_packed_meanwhile_is_recovered(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = store.thread("t")
    grow(thread, 9)
    transact = store._engine.transact

    def interrupted(fn: Any) -> Any:
        transact(fn)
        raise KeyboardInterrupt

    monkeypatch.setattr(store._engine, "transact", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grow(thread, 1, start=9)
    monkeypatch.setattr(store._engine, "transact", transact)
    grow(store.thread("t"), 5, start=10)
    assert pack(store, 64) == 1
    state = thread.load()
    assert thread.recovered is not None and thread.recovered.seq == 9 and thread.recovered.step == 9
    assert state["step"] == 14
    thread.commit(Set("step", 15))
    assert store.check() == []


def test_a_pack_is_never_made_of_damaged_members(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 20)
    key = ONE.checkpoints + int_part(7)

    def damage(tx: Tx) -> None:
        raw = tx.get(key)
        assert raw is not None
        tx.put(key, raw[:150] + bytes((raw[150] ^ 1,)) + raw[151:])  # inside of the message

    store._engine.transact(damage)
    was = kept(store, b"")
    with pytest.raises(CorruptionError, match="checkpoint 7: field 'history'"):
        swaps_of(store, 64)
    assert kept(store, b"") == was


def test_a_damaged_splice_is_still_noticed_in_a_pack(store: Store) -> None:
    """A splice's bytes can be compared with the field only: its checksum goes into the pack."""
    thread = store.thread("t")
    grow(thread, 10)
    thread.commit(Splice("history", 2, 3, ["summary of what came before"]))
    grow(thread, 10, start=10)
    key = ONE.checkpoints + int_part(10)

    def damage(tx: Tx) -> None:
        raw = tx.get(key)
        assert raw is not None and b"summary of" in raw
        tx.put(key, raw.replace(b"summary of", b"Summary of"))

    store._engine.transact(damage)
    pack(store, 64)
    for seq in range(10):
        assert store.thread("t").load(at=seq)["step"] == seq
    for seq in range(10, 21):
        with pytest.raises(CorruptionError):
            store.thread("t").load(at=seq)
    assert store.check() != []


# --- at close, and by several processes --------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_close_packs_the_rest(tmp_path: Path, background: bool) -> None:
    with Store.open(tmp_path / "s", background=background) as store:
        grow(store.thread("t"), 100)
        grow(store.thread("few"), 2)
        before = [everything(store, name) for name in ("t", "few")]
    with Store.open(tmp_path / "s", background=background) as store:
        assert not kept(store, SINGLES) and len(kept(store, PACKS)) >= 2
        assert len(kept(store, SINGLES, ThreadKeys(2))) == 2  # does not pay
        assert [everything(store, name) for name in ("t", "few")] == before
        assert store.check() == []
        grow(store.thread("t"), 1, start=100)
        assert store.thread("t").load()["step"] == 100


PACKER = """
import sys
from agentstore import Store, packing, records
with Store.open(sys.argv[1], background=False) as store:
    keys = records.ThreadKeys(1)
    for members in (4, 8, 16, 32, 64, 128):
        with store._engine.read() as snap:
            runs = list(packing.runs(packing.pieces(snap, keys, "t"), members))
            swaps = [packing.make(snap, keys, run, "t") for run in runs if len(run) > 1]
        for swap in swaps:
            if swap is not None:
                print(store._engine.transact(swap.write).value, flush=True)
"""


def packer(directory: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PACKER, directory], stdout=subprocess.PIPE, text=True)


def test_two_processes_that_pack_one_thread_at_once(store: Store) -> None:
    grow(store.thread("t"), 120)
    store.thread("t").commit(Append("history", "branch"), parent=30)
    before = everything(store)
    both = [packer(store.path) for _ in range(2)]
    said = [each.communicate()[0].split() for each in both]
    assert [each.returncode for each in both] == [0, 0]
    assert any("True" in each for each in said)
    assert everything(store) == before and store.check() == []


def test_killed_while_packing(store: Store) -> None:
    grow(store.thread("t"), 120)
    before = everything(store)
    killed = 0
    for lines in (0, 3, 11, 20, 33):
        process = packer(store.path)
        assert process.stdout is not None
        for _ in range(lines):
            process.stdout.readline()
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        assert everything(store) == before and store.check() == []
    assert killed
    assert kept(store, PACKS)


def test_the_worker_of_the_other_tests_makes_packs() -> None:
    """`test_store_processes` kills it: its limits must be those that are used."""
    with pytest.MonkeyPatch.context() as patched:
        for module, name in ((packing, "PACK_MEMBERS"), (position, "PACK_MEMBERS"), (position, "ASK_EVERY")):
            patched.setattr(module, name, getattr(module, name))  # put back afterwards
        for name in ("LOAD_US_MIN", "CHUNK_BYTES_MIN", "CHUNK_BYTES_MAX", "THIN_EVERY", "DENSE_SNAPSHOTS", "GAP_MIN"):
            patched.setattr(snapshots, name, getattr(snapshots, name))
        patched.setattr(snapshots, "PACK_MEMBERS", packs.PACK_MEMBERS)
        store_worker.small_limits()
        with tempfile.TemporaryDirectory() as directory, Store.open(directory + "/s", background=False) as store:
            thread = store.thread(store_worker.THREAD_ID)
            for n in range(60):
                store_worker.act(thread, random.Random(n), 1, n)
            assert len(kept(store, PACKS)) >= 3 and kept(store, records.snapshots(b""))
            assert store.check() == []
