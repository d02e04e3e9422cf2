"""Faults that were found in retention and compaction: others who prune, pack, fork and commit meanwhile, and damage."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from agentstore import (
    Append,
    CheckpointExpired,
    EffectCall,
    Retention,
    Set,
    Splice,
    StaleThread,
    Store,
    Thread,
    ThreadNotFound,
    clock,
    compaction,
    dictionaries,
    fields,
    lines,
    loading,
    packing,
    pruning,
    records,
)
from agentstore.codec import zstd
from agentstore.compaction import compact
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.pruning import Plan
from agentstore.records import ThreadKeys
from agentstore.testing.manual_clock import ManualClock

ROOT = Path(__file__).resolve().parent.parent
KEYS = ThreadKeys(1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", background=False) as opened:
        yield opened


def grow(thread: Thread, count: int, reasons: dict[int, str] | None = None) -> dict[int, dict[str, Any]]:
    """Commits that append and set; the state at each."""
    state: dict[str, Any] = thread.load() if thread.head is not None else {"log": [], "n": -1}
    found = {}
    for _ in range(count):
        n = state["n"] + 1
        state = {"log": [*state["log"], f"line {n}"], "n": n}
        cp = thread.commit(Append("log", f"line {n}"), Set("n", n), step=n, reason=(reasons or {}).get(n, "round"))
        found[cp.seq] = state
    return found


def seqs(thread: Thread) -> list[int]:
    return sorted(one.seq for one in thread.history())


def assert_equal(store: Store, states: dict[int, dict[str, Any]], *, name: str = "t") -> None:
    thread = store.thread(name)
    for seq in seqs(thread):
        assert thread.load(at=seq) == states[seq], seq
    assert store.check() == []


def planned(store: Store, rule: Retention) -> Plan:
    with store._engine.read() as snap:
        made = pruning.plan(snap, KEYS, "t", rule)
    assert made is not None
    return made


# --- others meanwhile --------------------------------------------------------------------


def test_a_pack_made_after_the_plan_lost_the_checkpoints_that_the_plan_did_not_know(store: Store) -> None:
    """Another process committed 28 more and packed them with 36 of the planned ones: what the plan did not name as
    kept, the head among it, was left out when the pack was written anew."""
    thread = store.thread("t")
    states = grow(thread, 50)
    made = planned(store, Retention(keep_last=20, keep=()))
    states |= grow(thread, 28)
    packing.pack_full(store._engine, 1)
    with store._engine.read() as snap:
        assert any(pack < made.next_seq <= last for pack, last in spans(snap)), "no pack reaches over the plan's end"
    pruning._carry_out(store._engine, made, set())
    assert seqs(thread)[-48:] == list(range(30, 78))
    assert_equal(store, states)


def spans(snap: Any) -> list[tuple[int, int]]:
    return [(lines.pack_of(snap, last, raw, "").first, last) for last, raw in lines.scan_packs(snap, KEYS.prefix)]


def test_two_plans_at_once_left_a_checkpoint_without_its_parent(store: Store) -> None:
    """One pruner moved 30 onto 20, which another one, by a rule that lets 20 go, had taken it off before."""
    thread = store.thread("t")
    states = grow(thread, 40, reasons={20: "final", 25: "approval", 30: "plan"})
    slow = planned(store, Retention(keep_last=1, keep={"final", "plan"}))
    other = planned(store, Retention(keep_last=1, keep={"approval", "plan"}))
    once = first_transactions(store, 11)
    assert not pruning._carry_out(once, other, set())  # as far as 30, which stands on 25 now
    assert store.thread("t").checkpoint(30).parent == 25
    pruning._carry_out(store._engine, slow, set())
    pruning._carry_out(store._engine, other, set())
    assert_equal(store, states)


def first_transactions(store: Store, count: int) -> EmbeddedEngine:
    """The store's engine, which makes so many transactions; all later ones find that nothing holds any more."""

    class Few:
        def __init__(self) -> None:
            self.left = count

        def read(self) -> Any:
            return store._engine.read()

        def transact(self, fn: Callable[[Any], Any]) -> Any:
            self.left -= 1
            if self.left < 0:
                raise pruning._Again
            return store._engine.transact(fn)

    return Few()  # type: ignore[return-value]


def test_a_branch_from_a_kept_checkpoint_lost_the_decision_it_stands_on(store: Store) -> None:
    """The head moved, after the plan was made, to a line whose newest decision was not the one that the plan held."""
    thread = store.thread("t")
    states = grow(thread, 40, reasons={10: "decision", 15: "final", 30: "decision"})
    made = planned(store, Retention(keep_last=1, keep={"final"}))
    assert 10 not in made.kept
    cp = thread.commit(Set("n", 99), parent=15)
    states[cp.seq] = states[15] | {"n": 99}
    decision = thread.decision
    assert decision is not None and decision[1] == 10
    pruning._carry_out(store._engine, made, set())
    assert store.thread("t").decision == decision
    assert_equal(store, states)


def test_a_fork_of_a_checkpoint_that_went_meanwhile_was_called_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CorruptionError, "run agentstore verify", where it is CheckpointExpired."""
    thread = store.thread("t")
    grow(thread, 10)
    verify = loading.verify

    def between(*arguments: Any) -> None:
        monkeypatch.setattr(loading, "verify", verify)
        verify(*arguments)
        store.apply_retention(Retention(keep_last=1))

    monkeypatch.setattr(loading, "verify", between)
    with pytest.raises(CheckpointExpired):
        thread.fork(5, into="fork")
    with pytest.raises(ThreadNotFound):
        store.thread("fork").load()
    assert store.check() == []


def test_a_handle_whose_checkpoint_went_is_stale_and_not_lost(store: Store) -> None:
    """Its next commit had to read the state it stands on: CheckpointNotFound, where somebody moved the head."""
    grow(store.thread("t"), 5)
    mine = store.thread("t")
    assert mine.head is not None
    grow(store.thread("t"), 5)
    store.apply_retention(Retention(keep_last=1))
    with pytest.raises(StaleThread):
        mine.commit(Splice("log", 0, 1, ["x"]))
    with pytest.raises(StaleThread):
        mine.commit_state({"log": []})
    assert len(mine.load()["log"]) == 10


def test_the_decision_of_a_stale_handle_whose_checkpoint_went_is_not_called_damage(store: Store) -> None:
    grow(store.thread("t"), 5)
    mine = store.thread("t")
    assert mine.head is not None
    grow(store.thread("t"), 5)
    store.apply_retention(Retention(keep_last=1))
    with pytest.raises(CheckpointExpired):
        _ = mine.decision


def test_the_first_of_a_fork_stays_while_a_call_of_its_decision_is_open(store: Store) -> None:
    """It carries the decision: without it the call was on no line, and the head could not be moved any more."""
    source = store.thread("source")
    cp = source.commit(Set("n", 0), reason="decision", intents=[EffectCall(0, "pay", {}, rule="query")])
    fork = source.fork(into="fork")
    grown = grow_only(fork, 5)
    fork.commit(Set("n", 9), reason="decision")
    store.apply_retention(Retention(keep_last=1, keep={"final"}))
    assert 0 in seqs(fork)
    assert seqs(source) == [cp.seq]
    fork.commit(Set("n", 7), parent=0)  # not refused: the call is on this line
    assert grown and store.check() == []


def grow_only(thread: Thread, count: int) -> list[int]:
    return [thread.commit(Set("n", n), reason="round").seq for n in range(1, count)]


# --- finished threads ----------------------------------------------------------------------


def test_a_dry_run_said_that_a_finished_thread_with_an_open_call_would_go_and_it_was_never_pruned(store: Store) -> None:
    thread = store.thread("t")
    states = grow(thread, 10)
    cp = thread.commit(
        Set("n", 10), reason="decision", status="COMPLETED", intents=[EffectCall(0, "pay", {}, rule="ask")]
    )
    states[cp.seq] = states[9] | {"n": 10}
    with clock.using(later(timedelta(days=2))):
        rule = Retention(keep_last=2, keep=(), finished_after=timedelta(days=1))
        [would] = store.apply_retention(rule, dry_run=True)
        [went] = store.apply_retention(rule)
    assert would == went
    assert not went.whole and sorted(went.kept) == [9, 10] == seqs(thread)
    assert_equal(store, states)


def test_a_finished_thread_with_a_pin_stays(store: Store) -> None:
    """`Thread.pin` keeps a checkpoint whatever retention says."""
    thread = store.thread("t")
    grow(thread, 10)
    thread.commit(Set("n", 10), status="FAILED")
    thread.pin(3)
    rule = Retention(keep_last=1, keep=(), finished_after=timedelta(days=1))
    with clock.using(later(timedelta(days=2))):
        [went] = store.apply_retention(rule)
        assert went.kept == {3: "pinned", 10: "head"} and seqs(thread) == [3, 10]
        thread.unpin(3)
        [went] = store.apply_retention(rule)
        assert went.whole and list(store.threads()) == []
    assert store.check() == []


def later(time: timedelta) -> ManualClock:
    machine = ManualClock()
    machine.advance(time.total_seconds())
    return machine


# --- what is said ----------------------------------------------------------------------------


def test_what_was_pinned_meanwhile_was_said_to_have_gone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = store.thread("t")
    grow(thread, 10)
    carry_out = pruning._carry_out

    def between(*arguments: Any) -> bool:
        monkeypatch.setattr(pruning, "_carry_out", carry_out)
        store.thread("t").pin(4)
        return carry_out(*arguments)

    monkeypatch.setattr(pruning, "_carry_out", between)
    [went] = store.apply_retention(Retention(keep_last=1))
    assert sorted(went.removed) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert sorted(went.kept) == [4, 9] == seqs(thread)


# --- damage ------------------------------------------------------------------------------------


def damage(store: Store, key: bytes, value: bytes = b"\xff") -> None:
    store._engine.transact(lambda tx: tx.put(key, value))


@pytest.mark.parametrize("what", ["rule", "head's step and status", "checkpoint"])
def test_one_damaged_thread_kept_retention_from_all_others(store: Store, what: str) -> None:
    grow(store.thread("damaged"), 5)
    grow(store.thread("t"), 5)
    thread = store.thread("damaged")
    if what == "rule":
        damage(store, pruning.rule_key(KEYS))
    elif what == "checkpoint":
        damage(store, KEYS.checkpoints + records.int_part(2))
    else:
        cp = thread.commit(Set("n", 0), status="COMPLETED")
        key = KEYS.checkpoints + records.int_part(cp.seq)
        with store._engine.read() as snap:
            raw = snap.get(key)
        assert raw is not None
        end = records.CHECKPOINT.size
        damage(store, key, raw[:end] + b"\xff" + raw[end + 1 :])
    rule = Retention(keep_last=1, finished_after=timedelta(0))
    assert [one.thread for one in store.apply_retention(rule)] == ["t"]
    store.close()
    assert "damaged" in "".join(compact(store.path, retention=rule, level=1).damaged)


def text(rng: random.Random) -> str:
    """Words of few letters: there is something to learn from."""
    return " ".join("".join(rng.choices("abcd", k=5)) for _ in range(30))


@pytest.fixture
def learnt(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A closed store of four threads with cold packs, all made with one dictionary."""
    monkeypatch.setattr(compaction, "CONTENT_BYTES_MIN", 10_000)
    rng = random.Random(1)
    for name in ("a", "b", "c", "d"):
        thread = store.thread(name)
        for n in range(60):
            thread.commit(Append("log", text(rng)), Set("draft", text(rng)), step=n)
    store.close()
    assert compact(store.path, level=3).dictionary is not None
    return store


def test_a_damaged_dictionary_is_said_and_does_not_end_the_job(learnt: Store) -> None:
    with Store.open(learnt.path, background=False) as store:
        with store._engine.read() as snap:
            [number] = dictionaries.ids(snap)
        for piece in (1, 2):
            damage(store, dictionaries._key(number, piece))
        grow(store.thread("new"), 20)
    done = compact(learnt.path, level=3)
    assert any(f"dictionary {number}" in each for each in done.damaged)
    with Store.open(learnt.path, background=False) as store:
        assert store.thread("new").load()["n"] == 19


def test_a_stale_dictionary_stayed_for_cold_packs_that_follow_each_other(learnt: Store) -> None:
    """Two cold packs that came to stand in one run were not due, so that they kept the dictionary, and what a deleted
    thread had taught it, for ever."""
    with Store.open(learnt.path, background=False) as store:
        a = store.thread("a")
        rng = random.Random(2)
        a.commit(Set("draft", "a branch"), parent=50)
        a.commit(Set("draft", "on the line again"), parent=59)
        for n in range(20):
            a.commit(Append("log", text(rng)), step=n)
    compact(learnt.path, level=19)
    with Store.open(learnt.path, background=False) as store:
        with store._engine.read() as snap:
            packs = [lines.pack_of(snap, last, raw, "") for last, raw in lines.scan_packs(snap, KEYS.prefix)]
            assert [(pack.is_cold, pack.parent) for pack in packs] == [(True, -1), (True, 59)]
            before = dictionaries.ids(snap)
        # The branch between them goes.
        key = KEYS.checkpoints + records.int_part(60)
        store._engine.transact(lambda tx: tx.delete(key))
        assert store.check() == []
        store.thread("d").delete()
    compact(learnt.path, level=3)
    with Store.open(learnt.path, background=False) as store:
        with store._engine.read() as snap:
            assert not set(before) & set(dictionaries.ids(snap))
        assert store.check() == []


def test_a_dictionary_knew_what_was_forgotten_while_it_was_trained(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Online, a thread forgot something after its samples were taken and before the dictionary was stored, which then
    was newer than that, and stayed."""
    monkeypatch.setattr(compaction, "CONTENT_BYTES_MIN", 10_000)
    rng = random.Random(1)
    for name in ("t", "b", "c"):
        for n in range(60):
            store.thread(name).commit(Append("log", text(rng)), Set("draft", text(rng)), step=n)
    train = zstd.train

    def between(*arguments: Any) -> Any:
        made = train(*arguments)
        store.thread("t").set_retention(Retention(keep_last=1))
        store.apply_retention()
        return made

    monkeypatch.setattr(zstd, "train", between)
    done = compact(store.path, level=3, online=True)
    monkeypatch.setattr(zstd, "train", train)
    assert done.dictionary is not None
    again = compact(store.path, level=3, online=True)
    with store._engine.read() as snap:
        assert done.dictionary not in dictionaries.ids(snap) and again.dictionary is not None
    assert store.check() == []


# --- sizes -------------------------------------------------------------------------------------


def test_differences_that_are_larger_than_what_they_replace_do_not_make_a_pack_that_nobody_can_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kept checkpoint of a run may need a difference as large as the state: together more than a pack may have."""
    monkeypatch.setattr(packing, "CONTENT_BYTES_MAX", 100_000)
    thread = store.thread("t")

    def blob(n: int) -> bytes:
        return random.Random(n).randbytes(8_000)

    states = {}
    for n in range(70):
        thread.commit(Set("blob", blob(n)), step=n)
        states[n] = {"blob": blob(n)}
    packing.pack_full(store._engine, 1)
    store.apply_retention(Retention(keep_last=1, keep=(), keep_every=2))
    assert seqs(thread) == [*range(0, 70, 2), 69]
    with store._engine.read() as snap:
        for last, raw in lines.scan_packs(snap, KEYS.prefix):
            assert lines.pack_of(snap, last, raw, "").content_bytes < 2 * packing.CONTENT_BYTES_MAX
    assert_equal(store, states)


def test_a_root_too_large_for_a_pack_between_two_that_follow_each_other(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out of the run that reached across it."""
    thread = store.thread("t")
    states = {0: {"log": [], "n": 0}}
    thread.commit_state(states[0])
    states[1] = {"log": [], "n": 1}
    thread.commit_state(states[1], reason="final")
    big = {"log": ["x" * 9_000_000], "n": 2}
    thread.commit_state(big, parent=0, reason="final")
    states[2] = big
    for n in range(3, 12):
        states[n] = {"log": [], "n": n}
        thread.commit_state(states[n], parent=1 if n == 3 else None, reason="final")
    store.apply_retention(Retention(keep_last=1, keep={"final"}))
    assert seqs(thread) == list(range(1, 12))
    assert {one.seq: one.parent for one in thread.history()}[2] is None
    store.close()
    assert compact(store.path, level=1).damaged == []
    with Store.open(store.path, background=False) as again:
        assert_equal(again, states)


# --- many at once --------------------------------------------------------------------------------

PRUNER = """
import sys
from agentstore import Retention, Store, StaleThread, Set, Append, packing
directory, kind, last = sys.argv[1:]
with Store.open(directory) as store:
    thread = store.thread("t")
    print("ready", flush=True)
    sys.stdin.readline()
    for n in range(40):
        if kind == "prune":
            store.apply_retention(Retention(keep_last=int(last), keep_every=int(last)))
        else:
            packing.pack_full(store._engine, 1)
    print("done", flush=True)
"""


def test_two_processes_prune_by_different_rules_and_one_packs_while_another_commits(store: Store) -> None:
    thread = store.thread("t")
    states = grow(thread, 100)
    others = [
        subprocess.Popen(
            [sys.executable, "-c", PRUNER, store.path, kind, last],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for kind, last in (("prune", "30"), ("prune", "20"), ("pack", "0"))
    ]
    for other in others:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "ready\n"
        other.stdin.write("go\n")
        other.stdin.flush()
    while any(other.poll() is None for other in others):
        states |= grow(thread, 10)  # never StaleThread: nobody moves the head
        for seq in seqs(thread)[-20:]:
            assert thread.load(at=seq) == states[seq]
        if len(states) > 3000:
            break
    assert [other.communicate()[0] for other in others] == ["done\n"] * 3
    assert len(seqs(thread)) < len(states)
    assert seqs(thread)[-20:] == list(range(len(states) - 20, len(states)))
    assert_equal(store, states)


def test_a_state_that_is_empty_may_be_a_root(store: Store) -> None:
    thread = store.thread("t")
    thread.commit_state({"a": 1})
    thread.commit_state({})
    thread.commit_state({"b": 2})
    store.apply_retention(Retention(keep_last=2))
    assert (thread.load(at=1), thread.load(at=2)) == ({}, {"b": 2})
    assert store.check() == []
    store.close()
    assert compact(store.path, level=1).damaged == []
    with Store.open(store.path, background=False) as again:
        assert_equal(again, {1: {}, 2: {"b": 2}})
        with again._engine.read() as snap:
            assert fields.decode(loading.load(snap, KEYS.prefix, 1, "t").state) == {}


def test_the_longest_age_that_there_is_is_read_again(store: Store) -> None:
    rule = Retention(max_age=timedelta.max, finished_after=timedelta.max)
    store.set_retention(rule)
    assert store.retention == rule
    grow(store.thread("t"), 3)
    assert store.apply_retention() == []
