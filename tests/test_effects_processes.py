"""Effects between real processes: killed between intent and receipt, stopped, racing, forked, of another boot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import effects_worker
import pytest
from effects_lab import call, decide, is_sound, message, open_store
from effects_worker import World

from agentstore import EffectCall, EffectInDoubt, EffectInFlight, LeaseHeld, Store, leases
from agentstore.testing import crashpoints

WORKER = Path(__file__).parent / "effects_worker.py"


class Worker:
    """A process that runs one act of `effects_worker`."""

    def __init__(self, tmp_path: Path, act: str, *more: str) -> None:
        command = [sys.executable, str(WORKER), act, str(tmp_path / "agents"), str(tmp_path / "world"), *more]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait()} and told nothing"
        told: dict[str, Any] = json.loads(line)
        return told

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        self.process.communicate()
        return self.process.returncode


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "agents") as opened:
        yield opened
        assert is_sound(opened)


def test_killed_between_intent_and_receipt(store: Store, tmp_path: Path) -> None:
    worker = Worker(tmp_path, "begin", "query")
    begun = worker.told()
    thread = store.thread("trip-1")
    decision = thread.decision
    assert decision is not None
    with pytest.raises(EffectInFlight, match=f"pid {worker.process.pid}"):
        call(thread, decision, rule="query")
    with pytest.raises(LeaseHeld):
        thread.lease("worker-2")

    worker.process.send_signal(signal.SIGSTOP)  # it can go on at any time
    with pytest.raises(EffectInFlight):
        call(thread, decision, rule="query")

    worker.kill()  # an hour before its deadline, and before its lease expires
    with pytest.raises(EffectInDoubt, match="dead") as caught:
        call(thread, decision, rule="query")
    effect = caught.value.effect
    assert (effect.key, effect.attempt) == (begun["key"], 1)
    with thread.lease("worker-2"):
        effect.receipt("ch_1", message("ch_1"), source="query")
    assert call(thread, decision, rule="query").result == "ch_1"


def test_a_caller_of_another_boot_is_dead(store: Store, tmp_path: Path) -> None:
    """To us; it goes on in truth, which shows that it was the boot id that decided."""
    worker = Worker(tmp_path, "other_boot", "replay")
    begun = worker.told()
    try:
        thread = store.thread("trip-1")
        held = leases.holder(thread)
        assert held is not None
        assert "before the last boot" in held.free
        thread.lease("worker-2")
        decision = thread.decision
        assert decision is not None
        effect = call(thread, decision, rule="replay")
        assert (effect.key, effect.attempt) == (begun["key"], 2)
        assert worker.process.poll() is None
    finally:
        worker.kill()


def forked(place: Path, act: str, *more: str) -> tuple[int, dict[str, Any]]:
    """Run an act of the worker in a fork of this process, which has no store open: exit status and what it told.

    A new interpreter for each of the many would take a minute.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            with open(write, "w") as sys.stdout:
                effects_worker.main(act, str(place / "agents"), str(place / "world"), *more)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write)
    with open(read) as file:
        told = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, json.loads(told) if told else {}


@pytest.mark.parametrize("point", crashpoints.POINTS)
@pytest.mark.parametrize("rule", ["query", "ask"])
def test_killed_at_every_commit(tmp_path: Path, point: str, rule: str) -> None:
    """Whichever commit it dies at, the next process ends with one effect in the world, known once."""
    for nth in range(1, 100):
        place = tmp_path / str(nth)
        place.mkdir()
        status, told = forked(place, "crash", point, str(nth), "carry_on", rule)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        status, told = forked(place, "carry_on", rule)
        assert status == 0
        done = World(str(place / "world")).lines()
        assert len(done) == 1
        assert [message_["content"] for message_ in told["history"][1:]] == [f"ch_{done[0][:8]}"]
        with open_store(place / "agents") as store:
            assert [(view.status, view.duplicates) for view in store.thread("trip-1").effects()] == [("done", 0)]
            assert is_sound(store)
    # Lease, decision, intent, receipt, release: it cannot pass by never being killed.
    assert nth == 6


@pytest.mark.parametrize("act", ["race", "once_race"])
def test_racing_processes_make_every_call_once(store: Store, tmp_path: Path, act: str) -> None:
    count = 30
    decide(store.thread("trip-1"))
    workers = [Worker(tmp_path, act, str(count)) for _ in range(3)]
    for worker in workers:
        worker.told()
    for worker in workers:
        worker.go()
    made = [worker.told()["made"] for worker in workers]
    assert [worker.end() for worker in workers] == [0, 0, 0]
    assert sum(map(len, made)) == len(set().union(*made)) == count
    done = World(str(tmp_path / "world")).lines()
    assert len(done) == len(set(done)) == count
    if act == "race":
        views = store.thread("trip-1").effects()
        assert {view.key for view in views} == set(done)
        assert [(view.status, view.attempt, view.duplicates) for view in views] == [("done", 1, 0)] * count


def test_racing_threads_claim_an_intent_of_the_decision_once(store: Store) -> None:
    calls = [EffectCall(index, "charge", {"amount": 5, "currency": "EUR"}) for index in range(20)]
    decision = decide(store.thread("trip-1"), intents=calls)
    together = threading.Barrier(8)
    claimed: list[int] = []

    def work() -> None:
        handle = store.thread("trip-1")
        together.wait()
        for index in range(20):
            try:
                call(handle, decision, index=index)
            except EffectInFlight:
                continue
            claimed.append(index)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(20))


def test_a_forked_child_does_not_claim_the_intents_of_its_parent(tmp_path: Path) -> None:
    """It inherits the memory of the parent, not its calls."""
    store = open_store(tmp_path / "agents")
    calls = [EffectCall(0, "charge", {"amount": 5, "currency": "EUR"})]
    decision = decide(store.thread("trip-1"), intents=calls)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = b"an error"
        try:
            with open_store(tmp_path / "agents") as mine:
                try:
                    call(mine.thread("trip-1"), decision)
                    answer = b"claimed"
                except EffectInFlight:
                    answer = b"in flight"
        finally:
            os.write(write, answer)
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        assert file.read() == b"in flight"
    os.waitpid(pid, 0)
    assert call(store.thread("trip-1"), decision).attempt == 1
    store.close()
