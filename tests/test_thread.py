"""A thread's handle: where it stands, what moves it, what it does when the store or somebody else gets in the way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from agentstore import (
    REASONS,
    Append,
    Checkpoint,
    CheckpointNotFound,
    CommitUnknown,
    Delete,
    DiskFull,
    EffectCall,
    EffectInDoubt,
    Fenced,
    InvalidChange,
    LimitExceeded,
    ReadOnlyStore,
    Set,
    StaleThread,
    Store,
    StoreFailed,
    Thread,
    ThreadExists,
    ThreadGone,
    ThreadNotFound,
    UnencodableState,
    clock,
    deltas,
    fields,
    lines,
    loading,
    position,
)
from agentstore.engine.api import Tx
from agentstore.records import FLAG_SUMS, ThreadKeys


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", background=False) as opened:
        yield opened


def lsn(store: Store) -> int:
    return store.stats()["lsn"]


# --- standing ----------------------------------------------------------------------------------


def test_a_handle_writes_nothing_before_its_first_commit(store: Store) -> None:
    before = lsn(store)
    thread = store.thread("t")
    assert thread.head is None and thread.history() == [] and thread.pins() == {}
    with pytest.raises(ThreadNotFound, match="'t'"):
        thread.load()
    with pytest.raises(ThreadNotFound):
        thread.load(at=0)
    with pytest.raises(ThreadNotFound):
        thread.checkpoint(0)
    with pytest.raises(ThreadNotFound):
        thread.fork(into="u")
    with pytest.raises(ThreadNotFound):
        thread.pin(0)
    with pytest.raises(ThreadNotFound):
        thread.delete()
    assert lsn(store) == before and list(store.threads()) == []


def test_a_checkpoint_says_what_it_is(store: Store) -> None:
    thread = store.thread("t")
    before = datetime.now(UTC)
    first = thread.commit(Set("step", 1))
    metadata = {"k": ["v", (1, 2)]}
    second = thread.commit(reason="plan", step=7, status="RUNNING", metadata=metadata)
    metadata["k"].append("later")
    assert (first.seq, first.parent, first.reason, first.step, first.status, first.metadata) == (
        (0, None, "manual", None, None, {})
    )
    assert (second.seq, second.parent, second.reason, second.step, second.status) == (1, 0, "plan", 7, "RUNNING")
    assert second.metadata == {"k": ["v", (1, 2)]}
    assert second.lsn == first.lsn + 1 == lsn(store)
    assert before - timedelta(seconds=1) < first.created_at <= second.created_at
    assert first.thread_uuid == second.thread_uuid and len(first.thread_uuid) == 16 and first.thread_id == "t"
    assert first.commit_id != second.commit_id
    # And the same when it is read back, by another handle.
    for mine, read in zip((second, first), store.thread("t").history(), strict=True):
        assert mine == read and hash(mine) == hash(read)
        for name in Checkpoint.__slots__:
            assert getattr(mine, name) == getattr(read, name), name
        assert mine.created_at == read.created_at
    assert first not in (second, "x")


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_kept(store: Store, reason: str) -> None:
    assert store.thread("t").commit(reason=reason).reason == reason
    assert store.thread("t").checkpoint(0).reason == reason


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"reason": "because"}, ValueError),
        ({"step": "1"}, TypeError),
        ({"step": True}, TypeError),
        ({"status": 1}, TypeError),
        ({"metadata": [1]}, TypeError),
        ({"metadata": {"a": {"b": 1j}}}, UnencodableState),
    ],
)
def test_what_does_not_fit_beside_a_state_is_refused(store: Store, options: dict[str, Any], error: type) -> None:
    thread = store.thread("t")
    with pytest.raises(error):
        thread.commit(Set("step", 1), **options)
    assert thread.commit(Set("step", 1)).seq == 0


def test_metadata_and_status_are_any_text(store: Store) -> None:
    thread = store.thread("t")
    for status in ("", "läuft", "\ud800", "x" * 10_000):
        assert thread.commit(status=status, metadata={status: status}).status == status
        assert store.thread("t").history(limit=1)[0].status == status
        assert store.thread("t").history(limit=1)[0].metadata == {status: status}


def test_load_gives_a_fresh_dict_each_time(store: Store) -> None:
    thread = store.thread("t")
    message = {"role": "user", "content": ["hi"]}
    thread.commit(Append("history", message), Set("step", 1))
    message["content"] = "changed by the caller"
    one, two = thread.load(), thread.load()
    one["history"][0]["content"].append("x")
    assert two == {"history": [{"role": "user", "content": ["hi"]}], "step": 1}
    assert thread.load() == two


def test_fields_keep_their_order_and_values_their_types(store: Store) -> None:
    thread = store.thread("t")
    state = {"z": (1, 2), "a": {"y": 1, "b": {3}}, "m": 1.0, "k": True, "empty": [], "none": None, "\0": b"\0"}
    thread.commit_state(state)
    read = store.thread("t").load()
    assert repr(read) == repr(state)
    thread.commit(Delete("a"), Set("a", 1), Set("m", 2))
    assert list(store.thread("t").load()) == ["z", "m", "k", "empty", "none", "\0", "a"]


def test_an_empty_commit_is_a_checkpoint(store: Store) -> None:
    thread = store.thread("t")
    assert thread.commit().seq == 0
    assert thread.load() == {}
    assert thread.commit(status="WAITING").seq == 1
    assert thread.commit_state({}).seq == 2


# --- others ----------------------------------------------------------------------------------


def test_of_two_handles_one_is_stale_and_writes_nothing(store: Store) -> None:
    one, two = store.thread("t"), store.thread("t")
    one.commit(Set("n", 1))
    assert two.head == one.head
    two.commit(Set("n", 2))
    before = lsn(store)
    for _ in range(2):
        with pytest.raises(StaleThread, match="load"):
            one.commit(Set("n", 3))
        with pytest.raises(StaleThread):
            one.commit(Set("n", 3), parent=0)
        with pytest.raises(StaleThread):
            one.commit_state({"n": 3})
    assert lsn(store) == before
    assert one.load() == {"n": 2} and one.head == two.head and one.recovered is None
    assert one.commit(Set("n", 3)).seq == 2


def test_two_who_create_the_same_thread(store: Store) -> None:
    one, two = store.thread("t"), store.thread("t")
    assert one.head is None and two.head is None
    one.commit(Set("by", "one"))
    with pytest.raises(StaleThread, match="created it"):
        two.commit(Set("by", "two"))
    assert two.load() == {"by": "one"}
    assert two.commit(Set("by", "two")).seq == 1
    assert store.check() == []


def assert_gone(thread: Thread) -> None:
    for call in (
        lambda: thread.commit(Set("n", 2)),
        thread.load,
        lambda: thread.load(at=0),
        thread.history,
        thread.pins,
        lambda: thread.pin(0),
        thread.delete,
        lambda: thread.fork(into="u"),
        lambda: thread.checkpoint(0),
    ):
        with pytest.raises(ThreadGone, match="new handle"):
            call()


def test_a_deleted_thread_is_gone_for_its_handles_for_ever(store: Store) -> None:
    one, two, fresh = store.thread("t"), store.thread("t"), store.thread("t")
    old = one.commit(Set("n", 1))
    one.pin(0, "note")
    assert two.head is not None
    two.delete()
    store.thread("t").commit(Set("n", "of another thread"))
    assert_gone(one)
    assert_gone(two)
    assert fresh.load() == {"n": "of another thread"}
    head = fresh.head
    assert head is not None and head.thread_uuid != old.thread_uuid and head.seq == 0 and fresh.pins() == {}
    assert fresh._keys is not None and one._keys is not None and fresh._keys.number > one._keys.number
    assert store.check() == []


def test_fencing_tokens_do_not_go_back_when_a_thread_is_created_anew(store: Store) -> None:
    thread = store.thread("t")
    thread.commit()
    tokens = []
    for _ in range(3):
        with thread.lease("w") as lease:
            tokens.append(lease.token)
    thread.delete()
    again = store.thread("t")
    again.commit()
    with again.lease("w") as lease:
        assert lease.token > max(tokens)


def test_a_lost_lease_fences_commits_and_deletion(store: Store) -> None:
    thread, other = store.thread("t"), store.thread("t")
    thread.commit(Set("n", 1))
    thread.lease("one").release()
    lease = other.lease("two")
    with pytest.raises(Fenced):
        thread.commit(Set("n", 2))
    thread.load()
    with pytest.raises(Fenced):
        thread.commit(Set("n", 2))
    with pytest.raises(Fenced):
        thread.delete()
    assert other.commit(Set("n", 3)).seq == 1
    lease.release()


def test_a_lease_before_the_first_commit_counts_from_there(store: Store) -> None:
    deleted = store.thread("deleted")
    deleted.commit()
    deleted.lease("w")
    thread = store.thread("t")
    lease = thread.lease("one")
    deleted.delete()  # raises the token that new threads begin with
    for n in range(3):
        thread.commit(Set("n", n))
    lease.renew()
    thread.commit(Set("n", 3))
    other = store.thread("t")
    assert other.load() == {"n": 3}
    lease.release()
    other.lease("two")
    with pytest.raises(Fenced):
        thread.commit(Set("n", 4))


# --- time travel ------------------------------------------------------------------------------


def test_a_commit_on_an_earlier_parent_moves_the_head_and_keeps_both_lines(store: Store) -> None:
    thread = store.thread("t")
    for n in range(5):
        thread.commit(Append("notes", n), Set("step", n))
    branch = thread.commit(Append("notes", "b"), Set("only", "here"), parent=1)
    assert (branch.seq, branch.parent) == (5, 1)
    assert thread.load() == {"notes": [0, 1, "b"], "step": 1, "only": "here"}
    assert thread.load(at=4) == {"notes": [0, 1, 2, 3, 4], "step": 4}
    assert thread.commit(Append("notes", "c")).parent == 5
    assert thread.commit(Append("notes", 5), parent=4).seq == 7
    assert thread.load()["notes"] == [0, 1, 2, 3, 4, 5]
    assert thread.commit_state({"notes": [0]}, parent=0).parent == 0
    assert [cp.parent for cp in thread.history()] == [0, 4, 5, 1, 3, 2, 1, 0, None]
    assert store.thread("t").head == thread.head
    assert store.check() == []


def test_loading_an_earlier_state_does_not_move_the_handle(store: Store) -> None:
    thread = store.thread("t")
    for n in range(3):
        thread.commit(Set("n", n))
    assert thread.load(at=0) == {"n": 0}
    assert thread.head is not None and thread.head.seq == 2
    assert thread.commit(Set("n", 3)).parent == 2


@pytest.mark.parametrize("seq", [3, -1, 2**64, True, "0", 1.0])
def test_a_checkpoint_that_is_not_there(store: Store, seq: Any) -> None:
    thread = store.thread("t")
    for n in range(3):
        thread.commit(Set("n", n))
    for call in (
        lambda: thread.load(at=seq),
        lambda: thread.commit(parent=seq),
        lambda: thread.commit_state({}, parent=seq),
        lambda: thread.fork(at=seq, into="u"),
        lambda: thread.pin(seq),
        lambda: thread.checkpoint(seq),
    ):
        with pytest.raises(CheckpointNotFound, match="'t'"):
            call()
    assert list(store.threads()) == ["t"]


def test_history_is_newest_first_limited_and_paged(store: Store) -> None:
    thread = store.thread("t")
    for n in range(300):
        thread.commit(Set("n", n), step=n)
    assert [cp.step for cp in thread.history()] == list(range(299, -1, -1))
    assert [cp.step for cp in thread.history(limit=2)] == [299, 298]
    assert [cp.step for cp in thread.history(2, before=257)] == [256, 255]
    assert thread.history(limit=0) == [] and thread.history(before=0) == []
    assert thread.checkpoint(17).step == 17


def test_a_fork_is_independent(store: Store) -> None:
    thread = store.thread("t")
    for n in range(5):
        thread.commit(Append("notes", n), step=n, status="RUNNING")
    fork = thread.fork(at=2, into="t/alt")
    head = fork.head
    assert head is not None and (head.seq, head.parent, head.reason, head.step, head.status) == (
        (0, None, "fork", 2, "RUNNING")
    )
    assert head.metadata == {"fork": {"thread": "t", "seq": 2}} and head.thread_id == "t/alt"
    assert fork.load() == {"notes": [0, 1, 2]}
    fork.commit(Append("notes", "x"))
    assert thread.load() == {"notes": [0, 1, 2, 3, 4]}
    with pytest.raises(ThreadExists, match="t/alt"):
        thread.fork(into="t/alt")
    with pytest.raises(ThreadExists):
        thread.fork(into="t")
    newest = thread.fork(into="newest")
    thread.delete()
    assert fork.load() == {"notes": [0, 1, 2, "x"]} and newest.load() == {"notes": [0, 1, 2, 3, 4]}
    newest.delete()
    assert fork.fork(into="t").load() == fork.load()
    assert store.check() == []


def test_pins_can_be_replaced_and_taken_away(store: Store) -> None:
    thread = store.thread("t")
    thread.commit()
    thread.commit()
    thread.pin(0, "before the refund")
    thread.pin(1)
    thread.pin(0, "ünd \ud800")
    assert thread.pins() == {0: "ünd \ud800", 1: ""}
    thread.unpin(0)
    thread.unpin(0)
    assert store.thread("t").pins() == {1: ""}
    with pytest.raises(ValueError, match="4096"):
        thread.pin(0, "x" * 4097)


def test_the_head_does_not_move_away_from_a_call_in_doubt(store: Store) -> None:
    thread = store.thread("t")
    thread.commit(Set("n", 0))
    decision = thread.commit(Set("n", 1), reason="decision", intents=[EffectCall(0, "charge", {"amount": 5})])
    assert [view.tool for view in thread.effects(open=True)] == ["charge"]
    with pytest.raises(EffectInDoubt, match="charge"):
        thread.commit(Set("n", 2), parent=0)
    thread.effect(decision=decision, index=0, tool="charge", arguments={"amount": 5}).receipt("done")
    assert thread.commit(Set("n", 2), parent=0).parent == 0
    assert store.check() == []


def test_a_commit_that_fails_leaves_no_intents(store: Store) -> None:
    thread = store.thread("t")
    thread.commit(Set("n", 0))
    store.thread("t").commit(Set("n", 1))
    with pytest.raises(StaleThread):
        thread.commit(reason="decision", intents=[EffectCall(0, "charge", {})])
    assert thread.effects() == []


# --- errors in between -------------------------------------------------------------------------


class Interrupting:
    """Lets the engine commit, or not, and then raises."""

    def __init__(self, store: Store, error: BaseException, *, written: bool) -> None:
        self.engine = store._engine
        self.real = self.engine.transact
        self.error = error
        self.written = written

    def __enter__(self) -> None:
        def transact(fn: Callable[[Tx], Any]) -> Any:
            if self.written:
                self.real(fn)
            else:

                def fail(tx: Tx) -> Any:
                    fn(tx)
                    raise Rollback

                try:
                    self.real(fail)
                except Rollback:
                    pass
            raise self.error

        self.engine.transact = transact  # type: ignore[method-assign]  # the seam of the engine, for these tests

    def __exit__(self, *args: object) -> None:
        self.engine.transact = self.real  # type: ignore[method-assign]  # back


class Rollback(Exception):
    pass


UNKNOWN = [CommitUnknown("?"), StoreFailed("?"), KeyboardInterrupt(), MemoryError()]


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("error", UNKNOWN, ids=lambda error: type(error).__name__)
def test_after_an_unknown_outcome_load_says_what_happened(store: Store, error: BaseException, written: bool) -> None:
    thread = store.thread("t")
    thread.commit(Set("n", 0))
    with Interrupting(store, error, written=written), pytest.raises(type(error)):
        thread.commit(Set("n", 1))
    assert thread.load() == {"n": int(written)}
    if written:
        assert thread.recovered is not None and thread.recovered == thread.head and thread.recovered.seq == 1
    else:
        assert thread.recovered is None
    assert thread.commit(Set("n", 2)).seq == 1 + written
    thread.load()
    assert thread.recovered is None


@pytest.mark.parametrize("written", [True, False])
def test_the_first_commit_may_be_the_unknown_one(store: Store, written: bool) -> None:
    thread = store.thread("t")
    with Interrupting(store, CommitUnknown("?"), written=written), pytest.raises(CommitUnknown):
        thread.commit(Set("n", 1))
    if written:
        assert thread.load() == {"n": 1} and thread.recovered == thread.head
    else:
        with pytest.raises(ThreadNotFound):
            thread.load()
    assert thread.commit(Set("n", 2)).seq == int(written)


def test_a_commit_without_load_after_an_unknown_outcome_is_never_doubled(store: Store) -> None:
    thread = store.thread("t")
    thread.commit(Set("n", 0))
    with Interrupting(store, CommitUnknown("?"), written=False), pytest.raises(CommitUnknown):
        thread.commit(Append("notes", 1))
    assert thread.commit(Append("notes", 1)).seq == 1  # it was not written: the handle found out by itself
    with Interrupting(store, CommitUnknown("?"), written=True), pytest.raises(CommitUnknown):
        thread.commit(Append("notes", 2))
    with pytest.raises(StaleThread, match="recovered"):
        thread.commit(Append("notes", 2))
    assert thread.load() == {"n": 0, "notes": [1, 2]} and thread.recovered is not None


def test_the_own_commit_is_recognised_behind_those_of_others(store: Store) -> None:
    thread = store.thread("t")
    thread.commit(Set("n", 0))
    with Interrupting(store, CommitUnknown("?"), written=True), pytest.raises(CommitUnknown):
        thread.commit(Set("n", 1))
    store.thread("t").commit(Set("n", 2))
    assert thread.load() == {"n": 2}
    assert thread.recovered is not None and thread.recovered.seq == 1


def test_another_commit_with_the_same_seq_is_not_taken_for_the_own(store: Store) -> None:
    thread = store.thread("t")
    thread.commit(Set("n", 0))
    with Interrupting(store, CommitUnknown("?"), written=False), pytest.raises(CommitUnknown):
        thread.commit(Set("n", 1))
    store.thread("t").commit(Set("n", 2))
    assert thread.load() == {"n": 2} and thread.recovered is None


def test_a_full_disk_leaves_the_handle_as_it_was(store: Store) -> None:
    thread = store.thread("t")
    for created in (False, True):
        with Interrupting(store, DiskFull("?"), written=False), pytest.raises(DiskFull):
            thread.commit(Append("notes", 1))
        assert thread.commit(Append("notes", 1)).seq == int(created)
    assert thread.load() == {"notes": [1, 1]}
    with Interrupting(store, DiskFull("?"), written=False), pytest.raises(DiskFull):
        thread.fork(into="u")
    assert thread.fork(into="u").load() == thread.load()


def test_a_transaction_may_run_more_than_once(store: Store) -> None:
    thread = store.thread("t")
    real = store._engine.transact

    def twice(fn: Callable[[Tx], Any]) -> Any:
        def first(tx: Tx) -> Any:
            fn(tx)
            raise Rollback

        with pytest.raises(Rollback):
            real(first)
        return real(fn)

    store._engine.transact = twice  # type: ignore[method-assign]  # an engine that rolls at every commit
    for n in range(3):
        assert thread.commit(Append("notes", n)).seq == n
    thread.fork(into="u").delete()
    thread.pin(0)
    assert thread.load() == {"notes": [0, 1, 2]}
    thread.delete()
    assert store.check() == []


def test_readonly_reads_and_does_not_write(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        store.thread("t").commit(Set("n", 1))
    with Store.open(tmp_path / "s", readonly=True) as store:
        thread = store.thread("t")
        assert thread.load() == {"n": 1} and list(store.threads()) == ["t"] and store.check() == []
        for call in (
            lambda: thread.commit(Set("n", 2)),
            lambda: thread.pin(0),
            thread.delete,
            lambda: thread.fork(into="u"),
        ):
            with pytest.raises(ReadOnlyStore):
                call()
        assert thread.load() == {"n": 1}


# --- what is cheap -------------------------------------------------------------------------------


def test_a_fresh_handle_appends_without_reading_the_conversation(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = store.thread("t")
    for n in range(300):
        writer.commit(Append("history", {"n": n}), Set("step", n))
    read: list[int] = []
    line_get = lines.Line.get
    monkeypatch.setattr(loading, "load", lambda *args, **options: pytest.fail("the state was read"))

    def counted(line: lines.Line, seq: int) -> Any:
        read.append(seq)
        return line_get(line, seq)

    monkeypatch.setattr(lines.Line, "get", counted)
    fresh = store.thread("t")
    fresh.commit(Append("history", {"n": 300}), Set("step", 300))
    assert len(set(read)) <= position.SUMS_EVERY + 1
    monkeypatch.undo()
    assert store.thread("t").load()["history"] == [{"n": n} for n in range(301)]


def test_many_fields_do_not_make_every_commit_large(store: Store) -> None:
    thread = store.thread("t")
    thread.commit_state({f"field {n}": n for n in range(2000)})
    sizes: list[int] = []
    with_sums = 0
    for n in range(600):
        staged = thread._stage((Set("field 7", n),))
        sizes.append(len(staged.body))
        with_sums += bool(staged.flags & FLAG_SUMS)
        staged.commit()
    assert sorted(sizes)[300] < 60 and 1 <= with_sums <= 3
    assert store.thread("t").commit(Set("field 8", 0)).seq == 601
    assert store.check() == []


def test_a_handle_forgets_the_bytes_of_large_fields(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position, "BODY_BYTES_MAX", 1000)
    monkeypatch.setattr("agentstore.thread.BODY_BYTES_MAX", 1000)
    thread = store.thread("t")
    for n in range(50):
        thread.commit(Append("history", "x" * 100), Set("step", n))
    assert thread._state["history"].parts is None and thread._state["step"].parts is not None
    thread.commit(Set(("history", 3), "edited"))  # reads them again
    state = thread.load()
    assert state["history"][3] == "edited" and thread._state["history"].parts is None
    state["history"][4] = "by value"
    thread.commit_state(state)
    assert store.thread("t").load() == state


def test_a_state_above_the_limit_is_refused_before_it_is_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (deltas, fields):
        if hasattr(module, "STATE_BYTES_MAX"):
            monkeypatch.setattr(module, "STATE_BYTES_MAX", 10_000)
    thread = store.thread("t")
    with pytest.raises(LimitExceeded, match="summarize"):
        for _ in range(100):
            thread.commit(Append("history", "x" * 1000))
    assert thread.head is not None and 7 <= thread.head.seq <= 9
    assert len(thread.load()["history"]) == thread.head.seq + 1


def test_commit_state_compares_values_and_not_objects(store: Store) -> None:
    thread = store.thread("t")
    state: dict[str, Any] = {"history": [{"content": "a"}], "usage": {"prompt": 1}}
    thread.commit_state(state)
    state["history"][0]["content"] = "changed in place"
    state["usage"]["prompt"] = 2
    thread.commit_state(state)
    assert store.thread("t").load() == state
    same = thread._stage(())
    assert deltas.plan_state(thread._state, copy.deepcopy(state), thread._fetch).ops == [] == same.plan.ops


def test_time_comes_from_the_clock_of_the_library(store: Store) -> None:
    class Noon:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def wall_ns(self) -> int:
            return 1_700_000_000_123_456_789

    real = clock.current()
    with clock.using(Noon()):
        assert store.thread("t").commit().created_at == datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)


def test_keys_of_a_thread_share_a_prefix() -> None:
    keys = ThreadKeys(7)
    assert keys.head.startswith(keys.prefix) and keys.checkpoints.startswith(keys.prefix)


def test_changes_must_be_changes(store: Store) -> None:
    with pytest.raises(TypeError):
        store.thread("t").commit({"step": 1})  # type: ignore[arg-type]  # the point
    with pytest.raises(InvalidChange):
        store.thread("t").commit(Set("a", 1), Append("a", 1))
    assert isinstance(store.thread("t"), Thread) and list(store.threads()) == []
