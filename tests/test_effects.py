"""Effects: intent, call, receipt; what a second caller is told; what happens when the commit of a receipt cannot be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from effects_lab import (
    ARGUMENTS,
    Interrupted,
    InterruptingFiles,
    call,
    decide,
    is_sound,
    message,
    open_store,
    other_worker,
    step,
)

from agentstore import (
    Append,
    EffectCall,
    EffectClosed,
    EffectConflict,
    EffectDuplicate,
    EffectFailed,
    EffectInDoubt,
    EffectInFlight,
    Fenced,
    InvalidChange,
    Set,
    StaleThread,
    Store,
    ThreadGone,
    ThreadNotFound,
    UnencodableState,
    Unknown,
    UnsupportedRule,
    clock,
    effect_views,
    effects,
)
from agentstore.codec.cbor import canonical
from agentstore.engine import keys
from agentstore.engine.api import Reader, Tx
from agentstore.ledger import DEADLINE_MARGIN_S
from agentstore.testing.manual_clock import ManualClock
from agentstore.thread import Thread


@pytest.fixture
def machine() -> Iterator[ManualClock]:
    with clock.using(ManualClock()) as manual:
        assert isinstance(manual, ManualClock)
        yield manual


@pytest.fixture
def store(tmp_path: Path, machine: ManualClock) -> Iterator[Store]:
    with open_store(tmp_path / "agents") as opened:
        yield opened
        assert is_sound(opened)


@pytest.fixture
def thread(store: Store) -> Thread:
    return store.thread("trip-1")


def lsn(store: Store) -> int:
    return store.stats()["lsn"]


# --- the ordinary way ---------------------------------------------------------------------


def test_intent_then_receipt_each_in_one_transaction(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    effect = call(thread, decision)
    assert lsn(store) == decision.lsn + 1
    assert (effect.done, effect.attempt, effect.outcome, effect.seq) == (False, 1, None, None)
    assert effect.arguments == ARGUMENTS
    checkpoint = effect.receipt({"id": "ch_1"}, message("paid"), step(2), step=2, status="RUNNING", metadata={"a": 1})
    assert lsn(store) == checkpoint.lsn == decision.lsn + 2
    assert (checkpoint.seq, checkpoint.parent, checkpoint.reason, checkpoint.step) == (1, 0, "tool_result", 2)
    assert (checkpoint.status, checkpoint.metadata) == ("RUNNING", {"a": 1})
    assert (effect.done, effect.result, effect.outcome, effect.seq) == (True, {"id": "ch_1"}, "result", 1)
    assert thread.load()["step"] == 2


def test_the_receipt_that_is_there_costs_no_transaction(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    call(thread, decision).receipt([1, (2, 3)], message("paid"))
    before = lsn(store)
    again = call(store.thread(thread.id), decision)
    assert (again.done, again.result, again.seq, again.source) == (True, [1, (2, 3)], 1, "call")
    assert again.result is not again.result
    assert lsn(store) == before


def test_the_key_is_sha256_of_identity_tool_and_canonical_arguments(thread: Thread) -> None:
    decision = decide(thread)
    effect = call(thread, decision, index=7)
    identity = keys.encode(decision.thread_uuid, 0, 7, 0, "charge")
    assert effect.key == hashlib.sha256(identity + canonical(ARGUMENTS)).hexdigest()
    reordered = dict(reversed(ARGUMENTS.items()))
    assert list(reordered) != list(ARGUMENTS)
    effect.receipt(1)
    assert call(thread, decision, index=7, arguments=reordered).done


def test_the_deadline_is_timeout_plus_margin_on_the_boot_clock(thread: Thread, machine: ManualClock) -> None:
    effect = call(thread, decide(thread), timeout_s=20)
    assert effect.deadline == machine.boottime_ns() / 1e9 + 20 + DEADLINE_MARGIN_S
    machine.set_wall(0)
    machine.advance(10)
    assert effect.remaining_s == pytest.approx(10 + DEADLINE_MARGIN_S)
    assert effect.timeout_s == 20


def test_intents_of_a_decision_are_in_its_own_transaction(store: Store, thread: Thread) -> None:
    calls = [EffectCall(index, "charge", ARGUMENTS, rule="ask", timeout_s=20) for index in range(3)]
    decision = decide(thread, intents=calls)
    assert [view.index for view in thread.effects(open=True)] == [0, 1, 2]
    for index in range(3):
        effect = call(thread, decision, index=index)
        assert (effect.done, effect.attempt) == (False, 1)
    assert lsn(store) == decision.lsn
    assert len({view.key for view in thread.effects()}) == 3


def test_a_decision_that_is_not_committed_leaves_no_intents(store: Store, thread: Thread) -> None:
    decide(thread)
    stale = store.thread(thread.id)
    assert stale.head is not None
    thread.commit(step(1))
    with pytest.raises(StaleThread):
        decide(stale, intents=[EffectCall(0, "charge", ARGUMENTS)])
    assert thread.effects() == []


def test_an_intent_of_the_decision_is_claimed_once(store: Store, thread: Thread) -> None:
    decision = decide(thread, intents=[EffectCall(0, "charge", ARGUMENTS)])
    call(thread, decision)
    for handle in (thread, store.thread(thread.id)):
        with pytest.raises(EffectInFlight):
            call(handle, decision)


def test_an_intent_that_nobody_began_can_be_claimed_through_another_handle(store: Store, thread: Thread) -> None:
    """The run that committed the decision was cancelled before the call; the next run of this process makes it."""
    decision = decide(thread, intents=[EffectCall(0, "charge", ARGUMENTS)])
    assert call(store.thread(thread.id), decision).attempt == 1


@pytest.mark.parametrize("late_s", [DEADLINE_MARGIN_S + 1, 1000])
def test_a_late_claim_begins_a_new_deadline(store: Store, thread: Thread, machine: ManualClock, late_s: float) -> None:
    """Nobody has called the tool, and this process knows it: no person is to be asked about it."""
    decision = decide(thread, intents=[EffectCall(0, "charge", ARGUMENTS, rule="ask", timeout_s=20)])
    machine.advance(late_s)
    effect = call(thread, decision)
    assert effect.attempt == 1
    assert effect.remaining_s == pytest.approx(25)
    with pytest.raises(EffectInFlight):
        call(store.thread(thread.id), decision)
    effect.receipt("ch_1", message("ch_1"))


def test_a_late_claim_of_what_somebody_else_took_over(store: Store, thread: Thread, machine: ManualClock) -> None:
    me = machine.owner()
    decision = decide(thread, intents=[EffectCall(0, "charge", ARGUMENTS, rule="replay", timeout_s=20)])
    other = other_worker(machine, store, thread)
    machine.advance(25)
    forget = effects._unclaimed.copy()
    effects._unclaimed.clear()  # what is true in another process
    taken = call(other, decision, rule="replay")
    effects._unclaimed.update(forget)
    machine.be(me)
    with pytest.raises(EffectInFlight):
        call(thread, decision, rule="replay")
    taken.receipt("ch_1", message("ch_1"))
    assert call(thread, decision, rule="replay").result == "ch_1"


def test_a_late_claim_by_a_fenced_worker_is_given_back(store: Store, thread: Thread, machine: ManualClock) -> None:
    decision = decide(thread, intents=[EffectCall(0, "charge", ARGUMENTS, timeout_s=20)])
    thread.lease("worker-1", ttl_s=10)
    machine.advance(30)
    other = store.thread(thread.id)
    other.lease("worker-2")
    with pytest.raises(Fenced):
        call(thread, decision)
    assert call(other, decision).attempt == 1


def test_two_calls_of_one_decision_cannot_have_one_index(thread: Thread) -> None:
    with pytest.raises(ValueError, match="index 0"):
        decide(thread, intents=[EffectCall(0, "a", {}), EffectCall(0, "b", {})])
    assert thread.head is None


def test_a_read_writes_no_intent_and_is_called_as_often_as_one_likes(store: Store, thread: Thread) -> None:
    decision = decide(thread, intents=[EffectCall(0, "search", ARGUMENTS, rule="read")])
    assert thread.effects() == []
    first, second = (
        call(thread, decision, tool="search", rule="read"),
        call(thread, decision, tool="search", rule="read"),
    )
    assert (first.attempt, second.attempt, lsn(store)) == (1, 1, decision.lsn)
    second.retry("it timed out")
    second.doubt("it timed out again")
    second.retry("it timed out")
    assert (second.attempt, lsn(store)) == (3, decision.lsn)
    second.receipt("LIS", message("LIS"))
    assert first.key == second.key
    assert call(thread, decision, tool="search", rule="read").result == "LIS"
    assert [(view.status, view.attempt) for view in thread.effects()] == [("done", 3)]


def test_a_final_failure_is_a_result(thread: Thread) -> None:
    decision = decide(thread)
    call(thread, decision).fail(RuntimeError("card declined"), message("declined"))
    again = call(thread, decision)
    assert (again.done, again.outcome, again.error) == (True, "failed", "RuntimeError: card declined")
    with pytest.raises(EffectFailed, match="card declined"):
        _ = again.result


def test_skip_records_that_the_outcome_is_unknown(thread: Thread) -> None:
    decision = decide(thread)
    call(thread, decision).skip(message("nobody knows"))
    again = call(thread, decision)
    assert (again.done, again.outcome, again.source, again.error) == (True, "unknown", "rule", None)
    assert again.result is Unknown


def test_large_arguments_and_results_come_back(thread: Thread) -> None:
    decision = decide(thread)
    arguments = {"text": "wort " * 5000, "noise": bytes(range(256)) * 10}
    effect = call(thread, decision, arguments=arguments)
    effect.receipt(arguments)
    again = call(thread, decision, arguments=arguments)
    assert (again.arguments, again.result) == (arguments, arguments)


# --- what is refused ----------------------------------------------------------------------


def test_conflict_of_arguments_and_of_tools(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    effect = call(thread, decision)
    for other in ({"arguments": {**ARGUMENTS, "amount": 6}}, {"tool": "refund"}):
        for state in ("open", "done"):
            with pytest.raises(EffectConflict, match="generation"):
                call(thread, decision, **other)
            if state == "open":
                continue
    effect.receipt(1)
    with pytest.raises(EffectConflict, match="trip-1"):
        call(thread, decision, arguments={})
    assert len(thread.effects()) == 1


def test_an_approval_that_edits_the_arguments_raises_the_generation(thread: Thread) -> None:
    decision = decide(thread)
    first = call(thread, decision)
    with pytest.raises(EffectInDoubt, match="resolve it before generation 1"):
        call(thread, decision, arguments={"amount": 4}, generation=1)
    first.not_done("the person wanted another amount")
    second = call(thread, decision, arguments={"amount": 4}, generation=1)
    assert second.key != first.key
    second.receipt("paid 4")
    assert call(thread, decision, arguments={"amount": 4}).result == "paid 4"  # the newest generation is meant
    with pytest.raises(EffectConflict):
        call(thread, decision)
    assert [view.generation for view in thread.effects()] == [0, 1]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rule": "compensate"}, UnsupportedRule),
        ({"rule": "retry"}, ValueError),
        ({"index": -1}, ValueError),
        ({"index": True}, ValueError),
        ({"tool": ""}, ValueError),
        ({"tool": "x" * 201}, ValueError),
        ({"timeout_s": 0}, ValueError),
        ({"timeout_s": float("nan")}, ValueError),
        ({"timeout_s": float("inf")}, ValueError),
        ({"generation": -1}, ValueError),
        ({"arguments": {"a": object()}}, UnencodableState),
    ],
)
def test_parts_out_of_their_limits_are_refused_before_anything_is_written(
    store: Store, thread: Thread, options: dict[str, Any], error: type[Exception]
) -> None:
    decision = decide(thread)
    with pytest.raises(error):
        call(thread, decision, **options)
    given = {"index": 0, "tool": "charge", "arguments": ARGUMENTS, **options}
    with pytest.raises(error):
        EffectCall(**given)
    assert lsn(store) == decision.lsn


def test_a_decision_must_be_confirmed(store: Store, thread: Thread) -> None:
    with pytest.raises(ThreadNotFound, match="committed before"):
        call(thread, (bytes(16), 0))
    decision = decide(thread)
    with pytest.raises(ValueError, match="confirmed before its calls"):
        call(thread, (decision.thread_uuid, 1))
    assert call(thread, (decision.thread_uuid, 0)).identity.decision_seq == 0


def test_a_deleted_thread_takes_no_effects(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    effect = call(thread, decision)
    store.thread(thread.id).delete()
    with pytest.raises(ThreadGone):
        effect.receipt(1)
    with pytest.raises(ThreadGone):
        call(thread, decision)
    decide(store.thread(thread.id))
    assert store.thread(thread.id).effects() == []


def test_a_result_that_cannot_be_kept_leaves_the_effect_open(thread: Thread) -> None:
    decision = decide(thread)
    effect = call(thread, decision)
    with pytest.raises(UnencodableState, match="result"):
        effect.receipt({"socket": object()})
    assert not effect.done
    effect.receipt("as text: <socket>")
    assert call(thread, decision).result == "as text: <socket>"


# --- another caller -----------------------------------------------------------------------


def test_in_flight_elsewhere_until_the_deadline(store: Store, thread: Thread, machine: ManualClock) -> None:
    decision = decide(thread)
    call(thread, decision, rule="replay")
    other = other_worker(machine, store, thread)
    machine.advance(24.9)
    for rule in ("read", "replay", "query", "skip", "ask"):
        with pytest.raises(EffectInFlight) as caught:
            call(other, decision, rule=rule)
        assert caught.value.wait_s == pytest.approx(0.1)
    machine.advance(0.1)
    assert call(other, decision, rule="replay").attempt == 2


@pytest.mark.parametrize("end", ["killed", "rebooted", "late"])
@pytest.mark.parametrize("rule", ["replay", "query", "skip", "ask"])
def test_in_doubt_by_rule(store: Store, thread: Thread, machine: ManualClock, rule: str, end: str) -> None:
    caller = machine.owner()
    decision = decide(thread)
    first = call(thread, decision, rule=rule)
    if end == "rebooted":
        machine.reboot()
    other = store.thread(thread.id) if end == "rebooted" else other_worker(machine, store, thread)
    if end == "killed":
        machine.kill(caller)
    elif end == "late":
        machine.advance(25)
    before = lsn(store)
    if rule == "replay":
        again = call(other, decision, rule=rule)
        assert (again.key, again.attempt, again.done) == (first.key, 2, False)
        with pytest.raises(EffectInFlight):
            call(store.thread(thread.id), decision, rule=rule)
        return
    with pytest.raises(EffectInDoubt) as caught:
        call(other, decision, rule=rule)
    assert (caught.value.rule, lsn(store)) == (rule, before)
    doubtful = caught.value.effect
    assert (doubtful.key, doubtful.done, doubtful.arguments) == (first.key, False, ARGUMENTS)
    assert [view.status for view in other.effects(open=True)] == ["in_doubt"]


def test_the_answer_of_a_query_is_the_result(store: Store, thread: Thread, machine: ManualClock) -> None:
    decision = decide(thread)
    call(thread, decision, rule="query")
    machine.reboot()
    other = store.thread(thread.id)
    with pytest.raises(EffectInDoubt) as caught:
        call(other, decision, rule="query")
    caught.value.effect.receipt("ch_1", message("ch_1"), source="query")
    again = call(other, decision, rule="query")
    assert (again.result, again.source, again.attempt) == ("ch_1", "query", 1)


def test_not_done_and_then_called_again_with_the_same_key(store: Store, thread: Thread, machine: ManualClock) -> None:
    decision = decide(thread)
    first = call(thread, decision, rule="query")
    machine.reboot()
    other = store.thread(thread.id)
    with pytest.raises(EffectInDoubt) as caught:
        call(other, decision, rule="query")
    effect = caught.value.effect
    effect.retry("the tool says that it did not happen")
    assert (effect.key, effect.attempt) == (first.key, 2)
    with pytest.raises(EffectInFlight):
        call(store.thread(thread.id), decision, rule="query")
    effect.receipt("ch_2")
    assert call(other, decision, rule="query").result == "ch_2"


def test_an_answer_of_a_person_that_it_did_not_happen(store: Store, thread: Thread, machine: ManualClock) -> None:
    decision = decide(thread)
    call(thread, decision)
    machine.reboot()
    other = store.thread(thread.id)
    with pytest.raises(EffectInDoubt) as caught:
        call(other, decision)
    checkpoint = caught.value.effect.not_done("the bank knows nothing", reason="approval", status="RUNNING")
    assert (checkpoint.reason, checkpoint.status, checkpoint.seq) == ("approval", "RUNNING", 1)
    assert [view.status for view in other.effects()] == ["not_started"]
    assert call(other, decision).attempt == 2


def test_the_wall_clock_decides_nothing(store: Store, thread: Thread, machine: ManualClock) -> None:
    decision = decide(thread)
    call(thread, decision, rule="replay")
    other = other_worker(machine, store, thread)
    machine.set_wall(machine.wall_ns() + 10**18)
    with pytest.raises(EffectInFlight):
        call(other, decision, rule="replay")
    machine.set_wall(0)
    machine.advance(25)
    assert call(other, decision, rule="replay").attempt == 2


def test_a_caller_in_another_pid_namespace_is_waited_for(store: Store, thread: Thread, machine: ManualClock) -> None:
    caller = machine.start_process(pid_namespace=7)
    decision = decide(thread)
    call(thread, decision, rule="replay")
    machine.start_process(pid_namespace=8)
    machine.kill(caller)  # which nobody in another namespace can see
    with pytest.raises(EffectInFlight):
        call(store.thread(thread.id), decision, rule="replay")
    machine.advance(25)
    assert call(store.thread(thread.id), decision, rule="replay").attempt == 2


def test_the_rule_of_the_tool_as_it_is_declared_now_is_followed(
    store: Store, thread: Thread, machine: ManualClock
) -> None:
    """Whoever deploys a tool that can be asked by now wants the old calls to be asked about, too."""
    decision = decide(thread)
    call(thread, decision, rule="ask")
    machine.reboot()
    assert call(store.thread(thread.id), decision, rule="replay").rule == "replay"


# --- the caller itself --------------------------------------------------------------------


def test_the_caller_says_that_it_does_not_know(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    effect = call(thread, decision)
    assert effect.doubt("it took longer than 20 s") is None
    with pytest.raises(EffectInDoubt, match="longer than 20 s") as caught:
        call(thread, decision)
    assert caught.value.rule == "ask"
    checkpoint = caught.value.effect.receipt("ch_1", message("it did happen"), source="person", reason="approval")
    assert checkpoint.reason == "approval"


def test_doubt_and_what_follows_from_it_are_one_transaction(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    effect = call(thread, decision)
    before = lsn(store)
    checkpoint = effect.doubt("timeout", step(5), status="WAITING", reason="round")
    assert checkpoint is not None
    assert (checkpoint.status, thread.load()["step"], lsn(store)) == ("WAITING", 5, before + 1)


def test_a_block_that_ends_in_an_exception_leaves_it_in_doubt_at_once(thread: Thread) -> None:
    decision = decide(thread)
    with pytest.raises(OSError, match="gone"), call(thread, decision):
        raise OSError("gone")
    with pytest.raises(EffectInDoubt, match="OSError: gone"):
        call(thread, decision)
    with pytest.raises(OSError, match="later"), call(thread, decision, index=1) as effect:
        effect.receipt(1)
        raise OSError("later")
    assert call(thread, decision, index=1).done


def test_retry_keeps_the_key_and_begins_a_new_deadline(store: Store, thread: Thread, machine: ManualClock) -> None:
    decision = decide(thread)
    effect = call(thread, decision, rule="replay")
    key = effect.key
    machine.advance(20)
    effect.retry("timeout")
    assert (effect.key, effect.attempt) == (key, 2)
    assert effect.remaining_s == pytest.approx(25)
    effect.retry("timeout", timeout_s=40)
    assert effect.attempt == 3
    assert effect.remaining_s == pytest.approx(45)
    other = other_worker(machine, store, thread)
    machine.advance(44)
    with pytest.raises(EffectInFlight):
        call(other, decision, rule="replay")


def test_a_call_that_was_taken_over_is_not_the_old_callers_any_more(
    store: Store, thread: Thread, machine: ManualClock
) -> None:
    me = machine.owner()
    decision = decide(thread)
    slow = call(thread, decision, rule="replay")
    other = other_worker(machine, store, thread)
    machine.advance(25)
    call(other, decision, rule="replay")
    machine.be(me)
    with pytest.raises(EffectClosed, match="taken over"):
        slow.retry("again")
    with pytest.raises(EffectClosed, match="taken over"):
        slow.doubt("lost")
    with pytest.raises(EffectClosed, match="taken over"):
        slow.not_done("no")
    slow.receipt("from the slow one")  # but what it knows counts, since it is the first to know
    assert call(other, decision, rule="replay").result == "from the slow one"
    with pytest.raises(EffectClosed, match="has a receipt"):
        slow.retry("again")


# --- a receipt whose checkpoint cannot be ------------------------------------------------------


def test_stale_head_stores_the_receipt_alone(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    effect = call(thread, decision)
    store.thread(thread.id).commit(Set("by somebody else", True))
    with pytest.raises(StaleThread):
        effect.receipt("ch_1", message("ch_1"))
    assert (effect.done, effect.result, effect.seq) == (True, "ch_1", None)
    assert thread.load() == {"history": [{"role": "assistant"}], "by somebody else": True}
    assert call(thread, decision).result == "ch_1"
    checkpoint = effect.receipt("ch_1", message("ch_1"))  # on top of the head as it is now
    assert (checkpoint.seq, effect.seq, effect.duplicate) == (2, 2, False)
    assert thread.effects()[0].duplicates == 0
    assert len(thread.load()["history"]) == 2


def test_stale_token_stores_the_receipt_alone(store: Store, thread: Thread, machine: ManualClock) -> None:
    decision = decide(thread)
    thread.lease("slow", ttl_s=10)
    effect = call(thread, decision)
    me = machine.owner()
    machine.advance(10)
    other = other_worker(machine, store, thread)
    other.lease("fast", ttl_s=100)
    with pytest.raises(EffectInFlight):  # the lease is gone, the call may still be running
        call(other, decision)
    machine.be(me)
    with pytest.raises(Fenced):
        call(thread, decision, index=1)
    with pytest.raises(Fenced):
        effect.receipt("ch_1", message("ch_1"))
    assert (other.head == decision, call(other, decision).result) == (True, "ch_1")
    with pytest.raises(Fenced):
        effect.receipt("ch_1", message("ch_1"))
    assert [(view.seq, view.duplicates) for view in other.effects()] == [(None, 0)]


def test_changes_that_do_not_fit_store_the_receipt_alone(thread: Thread) -> None:
    decision = decide(thread)
    for index, (change, error) in enumerate(
        [
            (Append("history", object()), UnencodableState),
            (Append(("history", "x"), 1), InvalidChange),
        ]
    ):
        effect = call(thread, decision, index=index)
        with pytest.raises(error):
            effect.receipt(index, change)
        assert call(thread, decision, index=index).result == index
    effect = call(thread, decision, index=2)
    with pytest.raises(ValueError, match="no reason"):
        effect.receipt(2, reason="because")
    assert call(thread, decision, index=2).result == 2
    assert thread.head == decision


def test_a_second_receipt_with_an_equal_result_is_a_duplicate_and_goes_on(
    store: Store, thread: Thread, machine: ManualClock
) -> None:
    me = machine.owner()
    decision = decide(thread)
    slow = call(thread, decision, rule="replay")
    other = other_worker(machine, store, thread)
    machine.advance(25)
    fast = call(other, decision, rule="replay")
    fast.receipt("ch_1", message("ch_1"))
    machine.be(me)
    with pytest.raises(StaleThread):
        slow.receipt("ch_1", message("ch_1"))
    assert slow.duplicate
    assert not fast.duplicate
    assert [view.duplicates for view in thread.effects()] == [1]
    with pytest.raises(StaleThread):
        slow.receipt("ch_1", message("ch_1"))  # again: still one duplicate
    assert [view.duplicates for view in thread.effects()] == [1]


def test_a_second_receipt_with_another_result_does_not_count(
    store: Store, thread: Thread, machine: ManualClock
) -> None:
    me = machine.owner()
    decision = decide(thread)
    slow = call(thread, decision, rule="replay")
    other = other_worker(machine, store, thread)
    machine.advance(25)
    fast = call(other, decision, rule="replay")
    machine.be(me)
    store.thread(thread.id).commit(step(1))
    with pytest.raises(StaleThread):
        slow.receipt("from the first caller", message("1"))  # alone: evidence
    other.load()
    head = other.head
    with pytest.raises(EffectDuplicate) as caught:
        fast.receipt("from the second caller", message("2"))
    assert caught.value.result == "from the first caller"
    assert (other.head, fast.done, fast.duplicate, fast.result) == (head, True, True, "from the first caller")
    assert [(view.result, view.duplicates) for view in thread.effects()] == [("from the first caller", 1)]
    other.commit(message(fast.result))  # the handle is fine


def test_an_equal_duplicate_commits_its_changes(store: Store, thread: Thread, machine: ManualClock) -> None:
    me = machine.owner()
    decision = decide(thread)
    slow = call(thread, decision, rule="replay")
    other = other_worker(machine, store, thread)
    machine.advance(25)
    fast = call(other, decision, rule="replay")
    machine.be(me)
    with pytest.raises(InvalidChange):
        slow.receipt("ch_1", Append(("history", "x"), 1))
    checkpoint = fast.receipt("ch_1", message("ch_1"))
    assert (fast.duplicate, checkpoint.seq, len(other.load()["history"])) == (True, 1, 2)


def test_a_receipt_that_was_committed_without_its_caller_knowing(tmp_path: Path) -> None:
    """Interrupted right after the sync: the retry must find its own receipt, and append nothing twice."""
    files = InterruptingFiles()
    with open_store(tmp_path / "agents", files) as store:
        thread = store.thread("trip-1")
        decision = decide(thread)
        effect = call(thread, decision)
        files.armed = True
        with pytest.raises(Interrupted):
            effect.receipt("ch_1", message("ch_1"))
        with pytest.raises(StaleThread, match="interrupted"):
            effect.receipt("ch_1", message("ch_1"))
        assert len(thread.load()["history"]) == 2
        assert thread.recovered is not None
        assert effect.receipt("ch_1", message("ch_1")) == thread.recovered == thread.head
        assert len(thread.load()["history"]) == 2
        assert (effect.duplicate, effect.seq) == (False, 1)
        assert [view.duplicates for view in thread.effects()] == [0]
        assert is_sound(store)


def test_an_intent_that_was_committed_without_its_caller_knowing(tmp_path: Path) -> None:
    """It cannot be known whether somebody acted on it: in flight like any other, until the deadline."""
    files = InterruptingFiles()
    with clock.using(ManualClock()) as machine, open_store(tmp_path / "agents", files) as store:
        assert isinstance(machine, ManualClock)
        thread = store.thread("trip-1")
        decision = decide(thread)
        files.armed = True
        with pytest.raises(Interrupted):
            call(thread, decision, rule="replay")
        with pytest.raises(EffectInFlight):
            call(thread, decision, rule="replay")
        machine.advance(25)
        assert call(thread, decision, rule="replay").attempt == 2


# --- looking ------------------------------------------------------------------------------


def test_lists_in_the_order_of_beginning(thread: Thread) -> None:
    decision = decide(thread)
    handles = [call(thread, decision, index=index) for index in (3, 1, 2)]
    handles[1].receipt("one", message("one"))
    assert [view.index for view in thread.effects()] == [3, 1, 2]
    assert [view.index for view in thread.effects(open=True)] == [3, 2]
    assert [view.index for view in thread.effects(open=False)] == [1]
    done = thread.effects(open=False)[0]
    assert (done.key, done.tool, done.arguments, done.result) == (handles[1].key, "charge", ARGUMENTS, "one")
    assert (done.status, done.outcome, done.seq, done.attempt, done.rule) == ("done", "result", 1, 1, "ask")
    assert done.decision == (decision.thread_uuid, decision.seq)
    assert done.finished_at is not None
    assert done.started_at <= done.finished_at
    with pytest.raises(EffectClosed, match="may be alive"):
        _ = thread.effects(open=True)[0].result


def test_open_effects_are_found_without_reading_the_finished_ones(store: Store, thread: Thread) -> None:
    """A damaged record of a finished call does not keep recovery from finding the open ones."""
    decision = decide(thread)
    for index in range(50):
        call(thread, decision, index=index).receipt(index)
    call(thread, decision, index=50)
    reads = []

    class Counting:
        def __init__(self, reader: Reader) -> None:
            self._reader = reader
            self.get = reader.get

        def scan(self, lo: bytes, hi: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
            for pair in self._reader.scan(lo, hi, reverse=reverse):
                reads.append(pair)
                yield pair

    with store._engine.read() as snap:
        prefix = thread._prefix(thread._number(snap))
        assert len([*effect_views.open_effects(Counting(snap), prefix)]) == 1
    assert len(reads) == 1


def test_receipts_are_found_by_tool_and_arguments(store: Store, thread: Thread) -> None:
    """After a rewind the model may ask again for what was done on the line that was left."""
    first = decide(thread)
    call(thread, first).receipt("ch_1", message("ch_1"))
    second = decide(thread, parent=first.seq)
    call(thread, second).receipt("ch_2", message("ch_2"))
    call(thread, second, index=1, arguments={"amount": 6}).receipt("ch_3", message("ch_3"))
    call(thread, second, index=2, tool="refund").receipt("re_1", message("re_1"))
    call(thread, second, index=3)
    found = effects.find_receipts(thread, "charge", dict(reversed(ARGUMENTS.items())))
    assert [view.result for view in found] == ["ch_1", "ch_2"]
    assert effects.find_receipts(thread, "charge", {}) == []


def test_the_checker_sees_what_is_wrong(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    call(thread, decision).receipt(1)
    call(thread, decision, index=1)
    engine = store._engine
    with engine.read() as snap:
        prefix = thread._prefix(thread._number(snap))
        pairs = dict(snap.scan(prefix, keys.end_of(prefix)))
    index_key = next(key for key in pairs if key.startswith(prefix + keys.encode("r")))
    open_key = next(key for key in pairs if key.startswith(prefix + keys.encode("i")))
    done_key = next(key for key in pairs if key.startswith(prefix + keys.encode("e")))
    damages: list[tuple[dict[bytes, bytes | None], str]] = [
        ({index_key: None}, "missing in the index"),
        ({done_key: None}, "which has none"),
        ({prefix + keys.encode("i") + done_key[len(prefix) + 3 :]: pairs[open_key]}, "and an open intent"),
        ({done_key: pairs[done_key].replace(b"charge", b"refund")}, "is not that of its arguments"),
        ({done_key: None, done_key + keys.encode(b"12345678"): pairs[done_key]}, "no first receipt"),
        ({open_key: pairs[open_key][:-1]}, "the intent of call 1 of decision 0 cannot be read"),
        ({done_key: b"\x80"}, "not a pair"),
    ]
    for damage, sentence in damages:
        _put(store, damage)
        assert any(sentence in problem for problem in store.check()), sentence
        _put(store, {key: pairs.get(key) for key in damage})
        assert store.check() == []


def _put(store: Store, values: dict[bytes, bytes | None]) -> None:
    def write(tx: Tx) -> None:
        for key, value in values.items():
            if value is None:
                tx.delete(key)
            else:
                tx.put(key, value)

    store._engine.transact(write)


def test_what_is_no_decision_is_said_so(store: Store) -> None:
    thread = store.thread("t")
    thread.commit(Set("step", 1))
    for wrong in (thread.decision, ("a", 1), (b"short", 1), (bytes(16), -1), 7):
        with pytest.raises(TypeError, match="decision"):
            thread.effect(decision=wrong, index=0, tool="f", arguments={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"called as query\(key\)"):
        store.once("x", lambda: 1, rule="query", query=lambda: None)  # type: ignore[arg-type,misc]
