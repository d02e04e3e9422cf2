"""Effects and the shape of a thread: forks carry decisions along, rewinds do not leave open calls behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from effects_lab import call, decide, is_sound, message, open_store, step

from agentstore import EffectInDoubt, EffectInFlight, Store, clock, effects, events
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


def test_the_fork_of_a_decision_returns_its_receipts(store: Store, thread: Thread) -> None:
    """The charge that the origin made after the fork point is not made again by the fork."""
    decision = decide(thread)
    origin = call(thread, decision)
    origin.receipt("ch_1", message("ch_1"))
    fork = thread.fork(at=decision.seq, into="trip-1/alt")
    assert len(fork.load()["history"]) == 1
    assert fork.decision == (decision.thread_uuid, decision.seq)
    again = call(fork, fork.decision)
    assert (again.done, again.result, again.key, again.seq) == (True, "ch_1", origin.key, None)
    fork.commit(message(again.result), reason="tool_result")


def test_the_first_checkpoint_of_a_fork_stands_for_the_decision(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    call(thread, decision).receipt("ch_1", message("ch_1"))
    fork = thread.fork(at=decision.seq, into="alt")
    assert fork.head is not None
    assert fork.head.reason == "fork"
    assert call(fork, fork.head).result == "ch_1"


def test_a_call_that_had_not_begun_has_the_same_key_in_both(store: Store, thread: Thread) -> None:
    """A tool that honours its key sees one call, whoever makes it first."""
    decision = decide(thread)
    fork = thread.fork(at=decision.seq, into="alt")
    assert fork.decision is not None
    assert call(fork, fork.decision).key == call(thread, decision).key


@pytest.mark.parametrize("rule", ["replay", "query", "skip", "ask"])
def test_an_intent_without_receipt_is_asked_about_in_the_fork(
    store: Store, thread: Thread, rule: str, machine: ManualClock
) -> None:
    decision = decide(thread)
    origin = call(thread, decision, rule=rule)
    fork = thread.fork(at=decision.seq, into="alt")
    assert [(view.status, view.rule) for view in fork.effects(open=True)] == [("in_doubt", "ask")]
    assert fork.decision is not None
    with pytest.raises(EffectInDoubt, match="'trip-1' before the fork") as caught:
        call(fork, fork.decision, rule=rule)
    assert caught.value.rule == "ask"
    caught.value.effect.receipt("ch_1", message("ch_1"), source="person")
    assert call(fork, fork.decision, rule=rule).result == "ch_1"
    with pytest.raises(EffectInFlight):  # nothing has changed for the origin
        call(thread, decision, rule=rule)
    origin.receipt("ch_1", message("ch_1"))


def test_a_person_may_have_it_called_in_the_fork(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    call(thread, decision, rule="replay")
    fork = thread.fork(at=decision.seq, into="alt")
    assert fork.decision is not None
    with pytest.raises(EffectInDoubt) as caught:
        call(fork, fork.decision, rule="replay")
    caught.value.effect.not_done("the origin was stopped before it")
    effect = call(fork, fork.decision, rule="replay")
    assert effect.attempt == 2
    effect.doubt("timeout")
    assert call(fork, fork.decision, rule="replay").attempt == 3  # its own call now: the tool's rule again


def test_what_is_known_not_to_have_happened_is_not_carried(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    call(thread, decision).not_done("no")
    fork = thread.fork(at=decision.seq, into="alt")
    assert fork.effects() == []
    assert fork.decision is not None
    assert call(fork, fork.decision).attempt == 1


def test_a_fork_behind_some_of_the_results(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    first, second = call(thread, decision), call(thread, decision, index=1)
    result = first.receipt("ch_1", message("ch_1"))
    second.receipt("ch_2", message("ch_2"))
    fork = thread.fork(at=result.seq, into="alt")
    assert fork.decision == (decision.thread_uuid, decision.seq)
    assert [call(fork, fork.decision, index=index).result for index in (0, 1)] == ["ch_1", "ch_2"]


def test_older_decisions_and_other_branches_are_not_carried(store: Store, thread: Thread) -> None:
    first = decide(thread)
    call(thread, first).receipt("ch_1", message("ch_1"))
    second = decide(thread)
    call(thread, second).receipt("ch_2", message("ch_2"))
    branch = decide(thread, parent=first.seq)
    call(thread, branch).receipt("ch_3", message("ch_3"))
    fork = thread.fork(at=second.seq, into="alt")
    assert fork.decision == (second.thread_uuid, second.seq)
    assert [view.result for view in fork.effects()] == ["ch_2"]
    assert effects.find_receipts(fork, "charge", fork.effects()[0].arguments)[0].result == "ch_2"
    other = thread.fork(at=branch.seq, into="other")
    assert [view.result for view in other.effects()] == ["ch_3"]


def test_a_fork_of_a_fork_carries_the_first_id(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    fork = thread.fork(at=decision.seq, into="alt")
    assert fork.decision is not None
    call(fork, fork.decision).receipt("ch_1", message("ch_1"))
    again = fork.fork(at=0, into="alt/alt")
    thread.delete()
    fork.delete()
    assert again.decision == (decision.thread_uuid, decision.seq)
    assert call(again, again.decision).result == "ch_1"


def test_a_fork_decides_for_itself_afterwards(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    fork = thread.fork(at=decision.seq, into="alt")
    fork.commit(message("skipped"))
    own = decide(fork)
    assert fork.decision == (own.thread_uuid, own.seq)
    assert own.thread_uuid != decision.thread_uuid
    assert call(fork, own).key != call(thread, decision).key


def test_a_thread_without_decisions(store: Store, thread: Thread) -> None:
    assert thread.decision is None
    thread.commit(step(1))
    thread.commit(step(2))
    assert thread.decision is None
    fork = thread.fork(at=1, into="alt")
    assert fork.decision is None
    assert fork.effects() == []


def test_the_decision_is_that_of_the_line_one_stands_on(store: Store, thread: Thread) -> None:
    first = decide(thread)
    thread.commit(step(1))
    second = decide(thread)
    assert thread.decision == (second.thread_uuid, second.seq)
    thread.commit(step(2), parent=1)
    assert thread.decision == (first.thread_uuid, first.seq)
    assert store.thread(thread.id).decision == thread.decision


def test_a_fork_under_fencing_tokens_keeps_the_invariants(store: Store, thread: Thread) -> None:
    with thread.lease("worker-1"):
        thread.commit(step(1))
    with thread.lease("worker-2"):
        decision = decide(thread)
        call(thread, decision)
        call(thread, decision, index=1).receipt(1, message("1"))
        fork = thread.fork(at=decision.seq, into="alt")
    assert {view.token for view in fork.effects()} == {0}


# --- moving the head ---------------------------------------------------------------------------


def test_a_rewind_away_from_an_open_call_is_refused(store: Store, thread: Thread, machine: ManualClock) -> None:
    before = thread.commit(step(0))
    decision = decide(thread)
    effect = call(thread, decision)
    for _ in range(2):
        with pytest.raises(EffectInDoubt, match=r"cannot move to checkpoint 0.*call 0 of decision 1 \(charge\)"):
            thread.commit(step(1), parent=before.seq)
        machine.advance(1000)
    assert thread.head == decision
    thread.commit(step(2), parent=decision.seq)  # forward is fine
    beside = thread.commit(step(3), parent=decision.seq)  # and so is another line from the decision on
    effect.receipt("ch_1", message("ch_1"))
    assert thread.commit(step(1), parent=before.seq).parent == before.seq
    assert thread.commit(step(1), parent=beside.seq).parent == beside.seq


@pytest.mark.parametrize("how", ["not_done", "skip"])
def test_a_rewind_after_the_call_was_resolved(store: Store, thread: Thread, how: str) -> None:
    before = thread.commit(step(0))
    effect = call(thread, decide(thread))
    if how == "not_done":
        effect.not_done("a person looked")
    else:
        effect.skip()
    thread.commit(step(1), parent=before.seq)


def test_a_rewind_in_a_fork_away_from_what_it_inherited(store: Store, thread: Thread) -> None:
    decision = decide(thread)
    call(thread, decision)
    fork = thread.fork(at=decision.seq, into="alt")
    fork.commit(step(1))
    fork.commit(step(2), parent=0)  # the first checkpoint stands on the decision
    assert [event.kind for event in events.of_thread(fork)] == ["intent"]


def test_the_receipt_of_an_undone_line_is_found_after_the_rewind(store: Store, thread: Thread) -> None:
    before = thread.commit(step(0))
    old = decide(thread)
    call(thread, old).receipt("ch_1", message("ch_1"))
    new = decide(thread, parent=before.seq)
    assert not call(thread, new).done  # another decision: the model asked anew
    found = effects.find_receipts(thread, "charge", {"currency": "EUR", "amount": 5})
    assert [(view.result, view.decision) for view in found] == [("ch_1", (old.thread_uuid, old.seq))]
