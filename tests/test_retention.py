"""Retention: which checkpoints stay, that they stay what they were, and that the others are gone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import zstandard

from agentstore import (
    Append,
    CheckpointExpired,
    CheckpointNotFound,
    CorruptionError,
    EffectCall,
    Retention,
    Set,
    Splice,
    Store,
    Thread,
    ThreadGone,
    clock,
    compaction,
    dictionaries,
    lines,
    packing,
    pruning,
    receipts,
    records,
    retention,
    snapshots,
)
from agentstore.records import ThreadKeys


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Without a background thread: what is asked for happens in the commit that asks."""
    with Store.open(tmp_path / "store", background=False) as opened:
        yield opened


def noise(n: int, size: int = 60) -> str:
    return random.Random(n).randbytes(size).hex()


def grow(
    thread: Thread, count: int, start: int = 0, reasons: dict[int, str] | None = None
) -> dict[int, dict[str, Any]]:
    """Commits that append, set and now and then splice; the state at every seq."""
    states = {}
    state: dict[str, Any] = thread.load() if thread.head is not None else {"history": [], "draft": "", "step": -1}
    for n in range(start, start + count):
        reason = (reasons or {}).get(n, "round")
        if n % 50 == 49 and len(state["history"]) > 30:
            cp = thread.commit(Splice("history", 0, 20, [f"summary {n}"]), Set("step", n), reason=reason, step=n)
            state = state | {"history": [f"summary {n}", *state["history"][20:]], "step": n}
        else:
            cp = thread.commit(
                Append("history", {"n": n, "text": noise(n)}),
                Set("draft", noise(-n)),
                Set("step", n),
                reason=reason,
                step=n,
            )
            state = {"history": [*state["history"], {"n": n, "text": noise(n)}], "draft": noise(-n), "step": n}
        states[cp.seq] = state
    return states


def raw(store: Store) -> dict[bytes, bytes]:
    with store._engine.read() as snap:
        return dict(snap.scan(b"\x00", b"\xff\xff"))


def seqs(thread: Thread) -> list[int]:
    return sorted(cp.seq for cp in thread.history())


def same_as(thread: Thread, states: dict[int, dict[str, Any]]) -> None:
    """Every kept checkpoint has exactly the state it had, the others are said to be gone, parents are kept ones."""
    kept = seqs(thread)
    for seq, state in states.items():
        if seq in kept:
            assert thread.load(at=seq) == state, seq
        else:
            with pytest.raises(CheckpointExpired):
                thread.load(at=seq)
    for cp in thread.history():
        assert cp.parent is None or cp.parent in kept


# --- the rule ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"keep_last": 0}, ValueError),
        ({"keep_last": True}, ValueError),
        ({"keep_last": "20"}, ValueError),
        ({"keep_every": 0}, ValueError),
        ({"keep": {"nonsense"}}, ValueError),
        ({"keep": "plan"}, TypeError),
        ({"max_age": 30}, ValueError),
        ({"max_age": timedelta(seconds=-1)}, ValueError),
        ({"finished_after": "7d"}, ValueError),
    ],
)
def test_a_rule_that_cannot_be_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Retention(**arguments)


def test_a_rule_is_read_as_it_was_written_and_damage_is_said() -> None:
    for rule in (
        Retention(),
        Retention(keep_last=None, keep=(), keep_every=7),
        Retention(1, {"plan"}, None, timedelta(days=400), timedelta(microseconds=1)),
    ):
        assert Retention.decode(rule.encode(), "t") == rule
        for at in range(len(rule.encode())):
            damaged = bytearray(rule.encode())
            damaged[at] ^= 0x40
            try:
                Retention.decode(bytes(damaged), "t")
            except CorruptionError:
                continue


@pytest.mark.parametrize("code", [-1, 99, True, "plan", None])
def test_a_reason_that_there_is_not_is_damage(code: Any) -> None:
    with pytest.raises(CorruptionError, match="retention rule is damaged"):
        Retention.decode(records.pack([records.VERSION, 20, [code], None, None, None]), "t")


def test_ages_of_commands() -> None:
    assert retention.age_of("90s") == timedelta(seconds=90) and retention.age_of("2w") == timedelta(days=14)
    for text in ("", "d", "1", "1y", "-1d", "1.5h", "999999999999w"):
        with pytest.raises(ValueError):
            retention.age_of(text)


def test_why_each_checkpoint_stays(store: Store) -> None:
    """head, held, pinned, the last N, reason, step; each in its own words."""
    thread = store.thread("t")
    grow(thread, 40, reasons={3: "approval", 5: "decision", 30: "decision", 20: "final"})
    thread.pin(7)
    [found] = store.apply_retention(Retention(keep_last=3, keep={"approval"}, keep_every=16), dry_run=True)
    assert found.kept == {
        0: "step 0",
        3: "reason approval",
        7: "pinned",
        16: "step 16",
        30: "the newest decision",
        32: "step 32",
        37: "one of the last 3",
        38: "one of the last 3",
        39: "head",
    }
    assert sorted(found.removed) == sorted(set(range(40)) - found.kept.keys())
    assert found.bytes > 0 and not found.whole


def test_the_decision_of_an_open_call_is_held(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 10)
    decision = thread.commit(
        Append("history", "call"),
        reason="decision",
        intents=[EffectCall(index=0, tool="pay", arguments={}, rule="ask")],
    )
    grow(thread, 10, start=10, reasons={15: "decision"})
    rule = Retention(keep_last=2, keep=())
    [found] = store.apply_retention(rule)
    assert found.kept[decision.seq] == "the decision of an open call" and 16 in found.kept
    thread.load()
    thread.effect(decision=decision, index=0, tool="pay", arguments={}, rule="ask").receipt("paid")
    [found] = store.apply_retention(rule)
    assert set(found.removed) == {decision.seq, 19}  # the receipt is a checkpoint, so 19 is no longer of the last two
    assert store.check() == []


def test_age_takes_only_what_stays_by_reason_or_step(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = store.thread("t")
    states = grow(thread, 10, reasons={2: "final", 4: "final"})
    thread.pin(4)
    rule = Retention(keep_last=3, keep={"final"}, keep_every=6, max_age=timedelta(days=30))
    [found] = store.apply_retention(rule, dry_run=True)
    assert sorted(found.kept) == [0, 2, 4, 6, 7, 8, 9]
    later(monkeypatch, timedelta(days=31))
    [found] = store.apply_retention(rule)
    assert sorted(found.kept) == [4, 7, 8, 9]
    same_as(thread, states)


def later(monkeypatch: pytest.MonkeyPatch, by: timedelta) -> None:
    now = clock.current().wall_ns() + by // timedelta(microseconds=1) * 1000
    monkeypatch.setattr(clock, "current", type("Later", (), {"wall_ns": lambda self: now}))


def test_finished_threads_go_whole_but_not_with_an_open_call(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, status in (("done", "COMPLETED"), ("failed", "FAILED"), ("running", "RUNNING")):
        store.thread(name).commit(Set("step", 1), status=status)
    waiting = store.thread("waiting")
    decision = waiting.commit(
        Set("step", 1), reason="decision", intents=[EffectCall(index=0, tool="pay", arguments={}, rule="ask")]
    )
    waiting.commit(Set("step", 2), status="COMPLETED")
    rule = Retention(keep_last=None, finished_after=timedelta(days=7))
    assert store.apply_retention(rule) == []
    later(monkeypatch, timedelta(days=8))
    assert sorted(one.thread for one in store.apply_retention(rule, dry_run=True) if one.whole) == ["done", "failed"]
    assert sorted(one.thread for one in store.apply_retention(rule) if one.whole) == ["done", "failed"]
    assert sorted(store.threads()) == ["running", "waiting"]
    assert decision.seq in seqs(waiting) and store.check() == []


def test_a_threads_own_rule_goes_before_the_default_and_that_before_the_stores(store: Store) -> None:
    for name in ("own", "other"):
        grow(store.thread(name), 20)
    assert store.apply_retention() == [] and store.retention is None
    store.set_retention(Retention(keep_last=9))
    store.thread("own").set_retention(Retention(keep_last=3))
    assert store.thread("own").retention == Retention(keep_last=3) and store.thread("other").retention is None
    kept = {one.thread: len(one.kept) for one in store.apply_retention(Retention(keep_last=5), dry_run=True)}
    assert kept == {"own": 3, "other": 5}
    kept = {one.thread: len(one.kept) for one in store.apply_retention()}
    assert kept == {"own": 3, "other": 9}
    store.thread("own").set_retention(None)
    store.set_retention(None)
    assert store.apply_retention() == [] and store.thread("own").retention is None
    with pytest.raises(ThreadGone):
        gone = store.thread("gone")
        gone.commit(Set("a", 1))
        store.thread("gone").delete()
        gone.set_retention(None)


# --- removing ------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing(store: Store) -> None:
    grow(store.thread("t"), 100)
    before = raw(store)
    assert store.apply_retention(Retention(keep_last=2), dry_run=True)
    assert raw(store) == before


def test_what_is_gone_says_by_which_rule_and_what_never_was_does_not(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 100)
    store.apply_retention(Retention(keep_last=5, keep={"final"}))
    for ask in (
        lambda: thread.load(at=50),
        lambda: thread.checkpoint(50),
        lambda: thread.commit(Set("a", 1), parent=50),
        lambda: thread.fork(at=50, into="other"),
        lambda: thread.pin(50),
    ):
        with pytest.raises(
            CheckpointExpired, match=r"checkpoint 50 was removed by Retention\(keep_last=5, keep=\{'final'\}\)"
        ):
            ask()
    for ask in (lambda: thread.load(at=100), lambda: thread.checkpoint(100), lambda: thread.commit(parent=100)):
        with pytest.raises(CheckpointNotFound) as caught:
            ask()
        assert not isinstance(caught.value, CheckpointExpired)
    assert "other" not in store.threads()


def test_5000_checkpoints_to_the_last_20_and_30_key_nodes(store: Store) -> None:
    thread = store.thread("t")
    nodes = random.Random(3).sample(range(4900), 30)
    states = grow(thread, 5000, reasons=dict.fromkeys(nodes, "approval"))
    store._upkeep.close()
    before = store.sizes(0).bytes
    [found] = store.apply_retention(Retention(keep_last=20))
    assert seqs(thread) == sorted({*nodes, *range(4980, 5000)}) and len(found.kept) == 50
    for seq in seqs(thread):
        assert thread.load(at=seq) == states[seq]
    assert store.check() == []
    assert store.sizes(0).bytes < 0.6 * before  # drafts, and what summaries replaced; not what the last state has
    assert found.bytes > before / 2


def test_a_branch_a_fork_and_what_stands_on_them(store: Store) -> None:
    thread = store.thread("t")
    states = grow(thread, 150)
    other = thread.fork(at=70, into="other")
    forked = other.load()
    thread.commit(Append("history", "branch"), parent=100)
    branch = states[100] | {"history": [*states[100]["history"], "branch"]}
    states[150] = branch
    for n in range(151, 250):
        thread.commit(Set("step", n), step=n)
        states[n] = branch | {"step": n}
    thread.pin(40)
    thread.pin(145)
    store.apply_retention(Retention(keep_last=10, keep=()))
    assert seqs(thread) == [40, 145, *range(240, 250)]
    same_as(thread, states)
    assert {cp.seq: cp.parent for cp in thread.history()} == {40: None, 145: 40, 240: 40} | {
        n: n - 1 for n in range(241, 250)
    }
    assert other.load() == forked and store.check() == []
    thread.load()
    thread.commit(Append("history", "on"), parent=145)
    assert thread.load()["history"] == [*states[145]["history"], "on"]


def test_again_and_again_while_the_thread_grows(store: Store) -> None:
    """Roots on roots: each time the oldest that stays gets its state from a snapshot."""
    thread = store.thread("t")
    states: dict[int, dict[str, Any]] = {}
    for part in range(8):
        states |= grow(thread, 70, start=70 * part, reasons={70 * part + 5: "final"})
        store.apply_retention(Retention(keep_last=4, keep={"final"}, keep_every=100))
        same_as(thread, states)
        assert store.check() == []
    root = min(seqs(thread))
    with store._engine.read() as snap:
        entry = lines.find(snap, ThreadKeys(1).prefix, root, "t")
    assert entry is not None
    assert thread.checkpoint(root).parent is None


def test_a_root_is_never_thinned_away(store: Store) -> None:
    thread = store.thread("t")
    states = grow(thread, 200)
    store.apply_retention(Retention(keep_last=30))
    assert not snapshots.drop(store._engine, 1, 170)
    same_as(thread, states)


def test_the_background_prunes_while_the_store_is_in_use(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        store.set_retention(Retention(keep_last=20))
        thread = store.thread("t")
        states = grow(thread, 400)
        while store._upkeep.run():
            pass
    with Store.open(tmp_path / "store", background=False) as store:
        thread = store.thread("t")
        kept = seqs(thread)
        assert kept[-20:] == list(range(380, 400)) and len(kept) < 20 + 2 * 64
        same_as(thread, states)
        assert store.check() == []


def test_close_prunes_threads_of_programs_that_each_commit_little(tmp_path: Path) -> None:
    states: dict[int, dict[str, Any]] = {}
    with Store.open(tmp_path / "store") as store:
        store.set_retention(Retention(keep_last=5))
    for run in range(40):
        with Store.open(tmp_path / "store") as store:
            states |= grow(store.thread("t"), 3, start=3 * run)
    with Store.open(tmp_path / "store", background=False) as store:
        kept = seqs(store.thread("t"))
        assert kept[-5:] == list(range(115, 120)) and len(kept) < 5 + 2 * packing.REST_MEMBERS_MIN
        same_as(store.thread("t"), states)
        assert store.check() == []


# --- what happens between the plan and the transaction ---------------------------------------


@pytest.mark.parametrize("between", ["pin", "branch", "call", "delete"])
def test_what_begins_meanwhile_is_not_pulled_away(store: Store, between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = store.thread("t")
    states = grow(thread, 100, reasons={50: "decision"})
    with store._engine.read() as snap:
        made = pruning.plan(snap, ThreadKeys(1), "t", Retention(keep_last=3, keep=()))
    assert made is not None and 50 in made.kept
    made.kept.pop(50)  # as if the decision had not been the newest
    made.parents.update(retention.kept_parents(made.entries, made.kept))
    if between == "pin":
        thread.pin(60)
    elif between == "branch":
        thread.commit(Append("history", "branch"), parent=60)
        states[100] = states[60] | {"history": [*states[60]["history"], "branch"]}
    elif between == "call":
        thread.effect(decision=thread.checkpoint(50), index=0, tool="pay", arguments={}, rule="ask")
    else:
        store.thread("t").delete()
    removed: set[int] = set()
    done = pruning._carry_out(store._engine, made, removed)
    assert store.check() == []
    if between == "delete":
        assert not removed and list(store.threads()) == []
        return
    assert not done
    assert {"pin": 60, "branch": 60, "call": 50}[between] in seqs(thread)
    same_as(thread, {seq: state for seq, state in states.items() if seq in seqs(thread)})


def test_a_commit_on_a_checkpoint_that_goes_meanwhile_is_refused(store: Store) -> None:
    thread = store.thread("t")
    states = grow(thread, 100)
    staged = thread._stage((Append("history", "late"),), parent=50)
    store.apply_retention(Retention(keep_last=3))
    with pytest.raises(CheckpointExpired):
        staged.commit()
    assert thread.load() == states[99] and store.check() == []


# --- receipts ------------------------------------------------------------------------------


def test_receipts_stay_until_their_decision_is_gone_and_they_are_old(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = store.thread("t")
    for n in range(3):
        decision = thread.commit(Append("history", n), reason="decision")
        thread.effect(decision=decision, index=0, tool="pay", arguments={"n": n}, rule="ask").receipt(f"paid {n}")
    grow(thread, 5, start=10)
    store.apply_retention(Retention(keep_last=2, keep=()))
    assert len(thread.effects()) == 3  # gone, and too young
    assert receipts.expire(store._engine, 1, timedelta(0)) == 2
    assert [effect.arguments for effect in thread.effects()] == [{"n": 2}]
    assert store.check() == []


# --- what is gone is gone ------------------------------------------------------------------

SECRET = "the-secret-of-thread-77-" + noise(77)
THREADS = 1000


def found_in(directory: Path, needle: str) -> set[str]:
    """Where a text stands: raw bytes of files, records, inflated frames, dictionaries."""
    wanted = needle.encode()
    found = {f"file {path.name}" for path in directory.rglob("*") if path.is_file() and wanted in path.read_bytes()}
    with Store.open(directory, background=False) as store, store._engine.read() as snap:
        for key, value in snap.scan(b"\x00", b"\xff\xff"):
            found |= {f"record {key.hex()}"} if wanted in value else set()
            at = value.find(b"\x28\xb5\x2f\xfd")
            while at >= 0:
                try:
                    inside = zstandard.ZstdDecompressor().decompress(value[at:], allow_extra_data=True)
                    found |= {f"frame of {key.hex()}"} if wanted in inside else set()
                except zstandard.ZstdError:
                    pass  # with a dictionary: below
                at = value.find(b"\x28\xb5\x2f\xfd", at + 1)
        for number in dictionaries.ids(snap):
            found |= {"dictionary"} if wanted in dictionaries.find(snap, number).data else set()
        for number in {records.seq_of(key, records.CREATED) for key, _ in scan(snap, records.CREATED)}:
            for piece in packing.pieces(snap, ThreadKeys(number), "t"):
                if not isinstance(piece, packing.Single) and wanted in piece._content:
                    found.add(f"pack of {number}")
    return found


def scan(snap: Any, low: bytes) -> Any:
    return snap.scan(low, records.end_of(low))


@pytest.mark.parametrize("how", ["deleted", "overwritten"])
def test_what_was_forgotten_is_nowhere_after_compaction(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread of many; its words are in the dictionary too, since it has them often."""
    monkeypatch.setattr(compaction, "CONTENT_BYTES_MIN", 1000)
    with Store.open(tmp_path / "store", background=False) as store:
        for n in range(THREADS):
            thread = store.thread(f"thread {n}")
            for step in range(6):
                secret = n == 77 and (how == "deleted" or step < 3)
                words = f"{SECRET} " * 40 if secret else noise(n, 100)
                thread.commit(Append("history", {"n": step, "text": words}), Set("draft", words), step=step)
    path = tmp_path / "store"
    assert compaction.compact(path).dictionary is not None
    before = found_in(path, SECRET)
    assert "dictionary" in before and "pack of 78" in before
    with Store.open(path, background=False) as store:
        thread = store.thread("thread 77")
        if how == "deleted":
            thread.delete()
        else:
            thread.load()
            thread.commit(Splice("history", 0, 3, ["a summary"]), reason="summary")
            store.apply_retention(Retention(keep_last=1))
    done = compaction.compact(path)
    assert done.shrunk and done.dictionary is not None
    assert found_in(path, SECRET) == set()
    with Store.open(path) as store:
        assert store.check() == []
        assert len(list(store.threads())) == THREADS - (how == "deleted")
