"""Threads and processes at once: no update is lost, a transaction sees all of those before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from crash.remote import Remote

from agentstore.engine import keys
from agentstore.engine.api import Tx
from agentstore.engine.embedded import EmbeddedEngine

COUNTER = keys.encode("counter")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine.open(tmp_path / "store")
    yield engine
    assert engine.verify() == []
    engine.close()


def add_one(tx: Tx) -> int:
    value = int(tx.get(COUNTER) or b"0") + 1
    tx.put(COUNTER, b"%d" % value)
    return value


@pytest.mark.parametrize(("threads", "times"), [(2, 400), (32, 40)])
def test_no_update_of_threads_is_lost(engine: EmbeddedEngine, threads: int, times: int) -> None:
    got: list[tuple[int, int]] = []
    failed: list[BaseException] = []

    def life() -> None:
        try:
            for _ in range(times):
                done = engine.transact(add_one)
                got.append((done.lsn, done.value))
        except BaseException as error:
            failed.append(error)

    crew = [threading.Thread(target=life) for _ in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    assert failed == []
    # Every value once, in the order of the LSNs: the transactions happened one after the other.
    assert sorted(got) == [(number, number) for number in range(1, threads * times + 1)]
    assert engine.transact(lambda tx: tx.get(COUNTER)).value == b"%d" % (threads * times)


@pytest.mark.parametrize(("processes", "threads"), [(2, 1), (4, 1), (3, 4)])
def test_no_update_of_processes_is_lost(tmp_path: Path, processes: int, threads: int) -> None:
    times = 60
    with ExitStack() as stack:
        others = [stack.enter_context(Remote()) for _ in range(processes)]
        for other in others:
            other.open(tmp_path / "store")
        for other in others:
            other.begin("add", times, threads)
        for other in others:
            other.finish()
        for other in others:
            assert other.get(COUNTER) == b"%d" % (times * threads * processes)
            assert other.stats()["lsn"] == times * threads * processes
        assert others[0].verify() == []
        for other in others:
            other.close()
    engine = EmbeddedEngine.open(tmp_path / "store")
    assert engine.transact(add_one).value == times * threads * processes + 1
    engine.close()


def test_no_update_is_lost_while_processes_come_and_go(tmp_path: Path) -> None:
    """Some open, add and close in turn, while one stays: joins, recoveries and clean closes in the middle of it."""
    with ExitStack() as stack:
        others = [stack.enter_context(Remote()) for _ in range(3)]
        rounds = 12
        for _ in range(rounds):
            for other in others:
                other.begin("open", str(tmp_path / "store"), {})
            for other in others:
                other.finish()
            for other in others:
                other.begin("add", 5)
            for other in others:
                other.finish()
            for other in others:
                other.begin("close")
            for other in others:
                other.finish()
    engine = EmbeddedEngine.open(tmp_path / "store")
    assert engine.transact(add_one).value == rounds * 3 * 5 + 1
    assert engine.verify() == []
    engine.close()


def test_a_function_that_raises_has_written_nothing_and_the_others_of_its_group_have(engine: EmbeddedEngine) -> None:
    """Threads that commit at once share a group: one that gives up takes nobody with it."""
    outcomes: dict[int, str] = {}

    def life(number: int) -> None:
        def fn(tx: Tx) -> None:
            tx.put(keys.encode("n", number), b"value")
            add_one(tx)
            if number % 3 == 0:
                raise LookupError(number)

        try:
            engine.transact(fn)
            outcomes[number] = "confirmed"
        except LookupError as error:
            assert error.args == (number,)
            outcomes[number] = "raised"

    crew = [threading.Thread(target=life, args=(number,)) for number in range(48)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    assert outcomes == {number: "raised" if number % 3 == 0 else "confirmed" for number in range(48)}
    with engine.read() as view:
        there = {keys.decode(key)[1] for key, _ in view.scan(keys.encode("n"), keys.end_of(keys.encode("n")))}
        assert there == {number for number in range(48) if number % 3}
        assert view.get(COUNTER) == b"32"
