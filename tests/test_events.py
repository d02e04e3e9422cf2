"""The story of a thread: decisions, intents, receipts, duplicates and recoveries, in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from effects_lab import call, decide, is_sound, message, open_store, other_worker, step

from agentstore import (
    CorruptionError,
    EffectCall,
    EffectDuplicate,
    EffectInDoubt,
    Fenced,
    Store,
    ThreadNotFound,
    clock,
    events,
)
from agentstore.engine import keys
from agentstore.engine.api import Tx
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


def story(thread: Thread) -> list[tuple[str, str, int, int | None]]:
    return [(event.kind, event.tool, event.attempt, event.seq) for event in events.of_thread(thread)]


def test_the_ordinary_story(thread: Thread) -> None:
    arguments = {"amount": 5, "currency": "EUR"}
    thread.commit(step(0), reason="input")
    calls = [EffectCall(0, "charge", arguments, rule="ask"), EffectCall(1, "mail", arguments, rule="ask")]
    decision = decide(thread, intents=calls)
    call(thread, decision, tool="mail", index=1).fail("no address", message("no address"))
    call(thread, decision).receipt("ch_1", message("ch_1"))
    assert story(thread) == [
        ("decision", "", 0, 1),
        ("intent", "charge", 1, None),
        ("intent", "mail", 1, None),
        ("receipt", "mail", 1, 2),
        ("receipt", "charge", 1, 3),
    ]
    told = events.of_thread(thread)
    assert [event.what for event in told] == [
        "decision",
        "rule ask",
        "rule ask",
        "failed (call): no address",
        "result (call)",
    ]
    assert [event.lsn for event in told] == sorted(event.lsn for event in told)
    assert told[1].key == thread.effects()[0].key == told[4].key


def test_the_story_of_a_recovery(store: Store, thread: Thread, machine: ManualClock) -> None:
    me = machine.owner()
    decision = decide(thread)
    thread.lease("worker-1")
    effect = call(thread, decision, rule="replay")
    effect.retry("timeout after 20 s")
    other = other_worker(machine, store, thread)
    machine.kill(me)
    with other.lease("worker-2"):
        events.note(other, "carries on from checkpoint 0: one call in doubt")
        again = call(other, decision, rule="replay")
        again.doubt("connection lost")
        again = call(other, decision, rule="replay")
        again.receipt("ch_1", message("ch_1"))
    told = events.of_thread(store.thread(thread.id))
    assert [(event.kind, event.attempt) for event in told] == [
        ("decision", 0),
        ("retry", 2),
        ("lease", 0),
        ("recovery", 0),
        ("takeover", 3),
        ("doubt", 3),
        ("intent", 4),
        ("takeover", 4),
        ("receipt", 4),
    ]
    what = {event.kind: event.what for event in told}
    assert what["retry"] == "timeout after 20 s"
    assert what["lease"] == f"taken from 'worker-1': its owner (pid {me.pid}) is dead"
    assert what["doubt"] == "connection lost"
    assert what["recovery"].startswith("carries on")
    first, second = (event.what for event in told if event.kind == "takeover")
    assert first.startswith(f"its caller (pid {me.pid}) is dead; started without a receipt; rule 'replay'")
    assert second.startswith("connection lost; started without a receipt; rule 'replay'")


def test_the_story_of_an_answer(store: Store, thread: Thread, machine: ManualClock) -> None:
    decision = decide(thread)
    call(thread, decision)
    machine.reboot()
    other = store.thread(thread.id)
    with pytest.raises(EffectInDoubt) as caught:
        call(other, decision)
    caught.value.effect.not_done("the bank knows nothing")
    call(other, decision).receipt("ch_1", message("ch_1"))
    assert [event.kind for event in events.of_thread(thread)] == [
        "decision",
        "answer",
        "intent",
        "takeover",
        "receipt",
    ]


def test_duplicates_are_told(store: Store, thread: Thread, machine: ManualClock) -> None:
    me = machine.owner()
    decision = decide(thread)
    slow = call(thread, decision, rule="replay")
    other = other_worker(machine, store, thread)
    machine.advance(25)
    call(other, decision, rule="replay").receipt("ch_1", message("ch_1"))
    machine.be(me)
    with pytest.raises(EffectDuplicate):
        slow.receipt("ch_2", message("ch_2"))
    last = events.of_thread(thread)[-1]
    assert (last.kind, last.tool, last.attempt, last.seq) == ("duplicate", "charge", 1, None)


def test_what_is_not_committed_is_not_told(store: Store, thread: Thread, machine: ManualClock) -> None:
    """An event stands in the transaction of its deed."""
    decision = decide(thread)
    thread.lease("worker-1", ttl_s=10)
    effect = call(thread, decision, rule="replay")
    machine.advance(10)
    store.thread(thread.id).lease("worker-2")
    before = len(events.of_thread(thread))
    with pytest.raises(Fenced):
        effect.retry("timeout")
    with pytest.raises(Fenced):
        effect.doubt("timeout")
    with pytest.raises(Fenced):
        events.note(thread, "carries on")
    assert len(events.of_thread(thread)) == before


def test_many_events_of_one_transaction_are_kept_apart(store: Store, thread: Thread) -> None:
    decide(thread)

    def write(tx: Tx) -> None:
        for n in range(20):
            events.record(tx, thread._prefix(thread._number(tx)), "recovery", f"{n}")

    store._engine.transact(write)
    told = [event.what for event in events.of_thread(thread) if event.kind == "recovery"]
    assert told == [str(n) for n in range(20)]


def test_kinds_are_closed(store: Store, thread: Thread) -> None:
    decide(thread)
    with pytest.raises(ValueError, match="kind"):
        store._engine.transact(lambda tx: events.record(tx, b"\x11\x01", "surprise", ""))


def test_threads_that_are_not_there(store: Store, thread: Thread) -> None:
    with pytest.raises(ThreadNotFound):
        events.of_thread(thread)
    with pytest.raises(ThreadNotFound):
        events.note(thread, "nothing")


def test_damage_is_named(store: Store, thread: Thread) -> None:
    decide(thread)
    events.note(thread, "fine")
    with store._engine.read() as snap:
        prefix = thread._prefix(thread._number(snap))
        space = prefix + keys.encode("v")
        key, data = next(iter(snap.scan(space, keys.end_of(space))))
    for damage in (data[:-1], b"\x80", data.replace(b"fine", b"fin")):
        store._engine.transact(lambda tx, damage=damage: tx.put(key, damage))  # type: ignore[misc]  # defaults of a lambda have no types
        with pytest.raises(CorruptionError):
            events.of_thread(thread)
        assert len(store.check()) == 1
    store._engine.transact(lambda tx: tx.put(key, data))
