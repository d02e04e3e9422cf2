"""Leases: one worker at a time, fencing tokens that never go back, and owners that are gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from effects_lab import Interrupted, InterruptingFiles, decide, is_sound, open_store, step

from agentstore import Fenced, LeaseHeld, StaleThread, Store, ThreadGone, clock, events, leases
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


@pytest.fixture(params=["early", "of a thread that exists"])
def thread(store: Store, request: pytest.FixtureRequest) -> Thread:
    """A handle; most of what holds for leases holds before the first commit, too."""
    if request.param != "early":
        decide(store.thread("trip-1"))
    return store.thread("trip-1")


def other(store: Store) -> Thread:
    return store.thread("trip-1")


def test_one_worker_at_a_time(store: Store, thread: Thread, machine: ManualClock) -> None:
    lease = thread.lease("worker-1", ttl_s=30)
    assert (lease.owner, lease.remaining_s, lease.ttl_s) == ("worker-1", 30, 30)
    machine.start_process()
    machine.advance(10)
    with pytest.raises(LeaseHeld, match="'worker-1'") as caught:
        other(store).lease("worker-2")
    assert (caught.value.owner, caught.value.expires_in_s) == ("worker-1", 20)
    machine.advance(20)
    assert other(store).lease("worker-2").owner == "worker-2"


def test_the_same_process_is_no_exception(store: Store, thread: Thread) -> None:
    """Another task of it may be at work."""
    thread.lease("worker-1")
    with pytest.raises(LeaseHeld):
        other(store).lease("worker-1")
    with pytest.raises(LeaseHeld):
        thread.lease("worker-1")


@pytest.mark.parametrize("end", ["killed", "rebooted", "released", "expired"])
def test_free_again(store: Store, thread: Thread, machine: ManualClock, end: str) -> None:
    me = machine.owner()
    lease = thread.lease("worker-1", ttl_s=1000)
    if end == "released":
        lease.release()
    if end == "rebooted":
        machine.reboot()
    else:
        machine.start_process()
    if end == "killed":
        machine.kill(me)
    if end == "expired":
        machine.advance(1000)
    second = other(store).lease("worker-2")
    assert second.token >= lease.token
    assert leases.holder(thread) is not None


def test_a_dead_owner_in_another_pid_namespace_is_waited_for(
    store: Store, thread: Thread, machine: ManualClock
) -> None:
    me = machine.start_process(pid_namespace=7)
    thread.lease("worker-1", ttl_s=30)
    machine.start_process(pid_namespace=8)
    machine.kill(me)
    with pytest.raises(LeaseHeld):
        other(store).lease("worker-2")
    machine.advance(30)
    other(store).lease("worker-2")


def test_the_wall_clock_decides_nothing(store: Store, thread: Thread, machine: ManualClock) -> None:
    thread.lease("worker-1", ttl_s=30)
    machine.start_process()
    machine.set_wall(machine.wall_ns() + 10**18)
    with pytest.raises(LeaseHeld):
        other(store).lease("worker-2")
    machine.set_wall(0)
    machine.advance(30)
    other(store).lease("worker-2")


def test_who_lost_the_lease_is_fenced(store: Store, thread: Thread, machine: ManualClock) -> None:
    """Also if nobody else has committed anything: the head is the one that the slow worker knows."""
    me = machine.owner()
    slow = thread.lease("slow", ttl_s=30)
    thread.commit(step(1))
    machine.start_process()
    machine.advance(30)
    fast = other(store)
    lease = fast.lease("fast")
    machine.be(me)
    with pytest.raises(Fenced, match="trip-1"):
        thread.commit(step(2))
    with pytest.raises(Fenced):
        slow.renew()
    with pytest.raises(Fenced):
        slow.ensure(100)
    slow.release()  # nothing to give back
    assert fast.load()["step"] == 1
    fast.commit(step(3))
    assert lease.token > slow.token
    holder = leases.holder(thread)
    assert holder is not None
    assert (holder.name, holder.token, holder.free) == ("fast", lease.token, "")


def test_commits_under_a_lease(store: Store, thread: Thread) -> None:
    with thread.lease("worker-1") as lease:
        for n in range(3):
            thread.commit(step(n))
        lease.renew()
        for n in range(3):
            thread.commit(step(n))
    with other(store).lease("worker-2") as second:
        assert second.token > lease.token


def test_an_expired_lease_that_nobody_took_can_be_renewed(thread: Thread, machine: ManualClock) -> None:
    lease = thread.lease("worker-1", ttl_s=30)
    machine.advance(100)
    assert lease.remaining_s == -70
    thread.commit(step(1))
    lease.renew(50)
    assert (lease.remaining_s, lease.ttl_s) == (50, 50)
    thread.commit(step(2))


def test_ensure_costs_a_transaction_only_if_it_must(store: Store, thread: Thread, machine: ManualClock) -> None:
    lease = thread.lease("worker-1", ttl_s=30)
    before = store.stats()["lsn"]
    assert lease.ensure(30) == 30
    assert store.stats()["lsn"] == before
    machine.advance(1)
    assert lease.ensure(30) == 30
    assert lease.ensure(100) == 100
    assert store.stats()["lsn"] == before + 2


def test_a_released_lease_is_over(store: Store, thread: Thread) -> None:
    with thread.lease("worker-1") as lease:
        pass
    lease.release()
    assert lease.remaining_s == 0
    with pytest.raises(Fenced, match="released"):
        lease.renew()
    thread.lease("worker-1").release()


def test_after_release_the_handle_is_fenced_once_somebody_else_has_it(store: Store, thread: Thread) -> None:
    """A tool that returns late must not write into the next worker's run."""
    with thread.lease("worker-1"):
        thread.commit(step(1))
    thread.commit(step(2))
    other(store).lease("worker-2")
    with pytest.raises(Fenced):
        thread.commit(step(3))


def test_the_error_that_ends_the_block_is_not_replaced(store: Store, thread: Thread) -> None:
    decide(thread)
    with pytest.raises(ValueError, match="boom"), thread.lease("worker-1"):
        other(store).delete()
        raise ValueError("boom")


@pytest.mark.parametrize(("owner", "ttl_s"), [("", 30), ("x" * 201, 30), ("w", 0), ("w", -1), ("w", float("inf"))])
def test_limits(thread: Thread, owner: str, ttl_s: float) -> None:
    with pytest.raises(ValueError, match=r"worker|lease"):
        thread.lease(owner, ttl_s=ttl_s)
    assert leases.holder(thread) is None


def test_tokens_never_go_back_when_the_thread_is_made_anew(store: Store, thread: Thread) -> None:
    decide(thread)
    tokens = []
    for round_ in range(3):
        for n in range(3):
            handle = store.thread("trip-1")
            with handle.lease(f"worker-{n}") as lease:
                handle.commit(step(n))
                lease.renew()
                tokens.append(lease.token)
        if round_ < 2:
            store.thread("trip-1").delete()
            tokens.append(
                tokens[-1]
            )  # an early lease has the token that its thread will begin with: not below the last
            with pytest.raises(ThreadGone):
                thread.lease("worker-1")
    assert tokens == sorted(tokens)


def test_takeovers_are_told(store: Store, machine: ManualClock) -> None:
    me = machine.owner()
    decide(store.thread("trip-1"))
    store.thread("trip-1").lease("worker-1")
    machine.start_process()
    machine.kill(me)
    with store.thread("trip-1").lease("worker-2"):
        pass
    with store.thread("trip-1").lease("worker-3"):
        pass
    told = [event for event in events.of_thread(store.thread("trip-1")) if event.kind == "lease"]
    assert [event.what for event in told] == [f"taken from 'worker-1': its owner (pid {me.pid}) is dead"]


def test_an_acquisition_that_was_committed_without_its_caller_knowing(tmp_path: Path) -> None:
    files = InterruptingFiles()
    with open_store(tmp_path / "agents", files) as store, clock.using(ManualClock()) as machine:
        assert isinstance(machine, ManualClock)
        decide(store.thread("trip-1"))
        files.armed = True
        with pytest.raises(Interrupted):
            store.thread("trip-1").lease("worker-1", ttl_s=30)
        with pytest.raises(LeaseHeld):
            store.thread("trip-1").lease("worker-1")
        machine.advance(30)
        assert store.thread("trip-1").lease("worker-1").token == 2


# --- before the first commit ---------------------------------------------------------------------


def test_an_early_lease_makes_no_thread(store: Store) -> None:
    thread = store.thread("trip-1")
    with thread.lease("worker-1"):
        assert list(store.threads()) == []
        assert thread.head is None
        assert store.thread("trip-1").head is None
    assert store.stats()["threads"] == 0


def test_an_early_lease_moves_to_its_thread(store: Store, machine: ManualClock) -> None:
    thread = store.thread("trip-1")
    lease = thread.lease("worker-1", ttl_s=30)
    thread.commit(step(1))
    with pytest.raises(LeaseHeld):
        store.thread("trip-1").lease("worker-2")
    lease.renew(60)
    thread.commit(step(2))
    with pytest.raises(LeaseHeld):
        store.thread("trip-1").lease("worker-2")
    lease.release()
    assert leases.holder(thread) is None
    assert store.thread("trip-1").lease("worker-2").token == lease.token + 1


def test_a_worker_that_died_before_its_first_commit(store: Store, machine: ManualClock) -> None:
    me = machine.owner()
    store.thread("trip-1").lease("worker-1", ttl_s=30)
    machine.start_process()
    machine.kill(me)
    thread = store.thread("trip-1")
    with thread.lease("worker-2") as lease:
        thread.commit(step(1))
        lease.renew()
        thread.commit(step(2))


def test_a_slow_worker_that_commits_first_after_its_early_lease_was_taken(store: Store, machine: ManualClock) -> None:
    """It is fenced before it has made the thread, and who has the lease makes it."""
    me = machine.owner()
    slow = store.thread("trip-1")
    slow.lease("slow", ttl_s=30)
    machine.start_process()
    machine.advance(30)
    fast = store.thread("trip-1")
    lease = fast.lease("fast", ttl_s=30)
    machine.be(me)
    with pytest.raises(Fenced):
        slow.commit(step(1))
    assert list(store.threads()) == []
    fast.commit(step(2))
    lease.renew()
    fast.commit(step(3))
    with pytest.raises(StaleThread):
        slow.commit(step(4))
    assert slow.load() == {"step": 3}
    with pytest.raises(Fenced):
        slow.commit(step(4))


def test_who_makes_the_thread_without_the_lease_does_not_take_it_away(store: Store) -> None:
    """A handle without a lease is not fenced; the holder sees that the head moved, loads, and goes on."""
    thread = store.thread("trip-1")
    lease = thread.lease("worker-1")
    assert thread.head is None
    store.thread("trip-1").commit(step(1))
    with pytest.raises(StaleThread):
        thread.commit(step(2))
    assert thread.load() == {"step": 1}
    thread.commit(step(2))
    lease.renew()
    thread.commit(step(3))
    with pytest.raises(LeaseHeld):
        store.thread("trip-1").lease("worker-2")


def test_another_deletion_between_early_lease_and_first_commit(store: Store) -> None:
    """It raises the token floor, with which the thread begins: the first renewal finds out."""
    doomed = store.thread("doomed")
    decide(doomed)
    for _ in range(5):
        doomed.lease("w").release()
    thread = store.thread("trip-1")
    lease = thread.lease("worker-1")
    doomed.delete()
    thread.commit(step(1))
    lease.renew()
    thread.commit(step(2))
    assert lease.token == 5
