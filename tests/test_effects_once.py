"""`Store.once`: the ledger for code of the user's own, without threads and without our loop."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from effects_lab import Interrupted, InterruptingFiles, is_sound, open_store

from agentstore import (
    EffectClosed,
    EffectConflict,
    EffectInDoubt,
    EffectInFlight,
    NotDone,
    Store,
    UnencodableState,
    Unknown,
    UnsupportedRule,
    clock,
    once,
)
from agentstore.testing.manual_clock import ManualClock

Reopen = Callable[[str], Store]


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


class Bank:
    """The world outside, in a file: what it was asked to do, by key."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def charges(self) -> list[tuple[str, int]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [(key, int(amount)) for key, amount in (line.split() for line in lines)]

    def charge(self, amount: int, key: str) -> dict[str, Any]:
        with self.path.open("a") as file:
            file.write(f"{key} {amount}\n")
        return {"charge": len(self.charges), "amount": amount}

    def find(self, key: str) -> Any:
        for number, (known, amount) in enumerate(self.charges, 1):
            if known == key:
                return {"charge": number, "amount": amount}
        return NotDone


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    return Bank(tmp_path / "bank")


DIES = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from effects_lab import open_store
from test_effects_once import Bank

def charge(amount, key):
    if sys.argv[3] == "after":
        Bank(Path(sys.argv[2])).charge(amount, key)
    os.kill(os.getpid(), signal.SIGKILL)

open_store(Path(sys.argv[1])).once("invoice-991", charge, arguments={"amount": 5}, timeout_s=3600)
"""


def die(path: Path, bank: Bank, when: str) -> None:
    """A process that is killed inside the call: ``before`` or ``after`` the bank did it."""
    here = str(Path(__file__).parent)
    ended = subprocess.run([sys.executable, "-c", DIES, str(path), str(bank.path), when, here], check=False)
    assert ended.returncode == -signal.SIGKILL


@pytest.fixture
def after_death(tmp_path: Path, bank: Bank) -> Iterator[Reopen]:
    """Opens the store as the next process does, by the machine's own clock."""
    stores = []

    def opened(when: str) -> Store:
        die(tmp_path / "agents", bank, when)
        stores.append(open_store(tmp_path / "agents"))
        return stores[0]

    yield opened
    for store in stores:
        assert is_sound(store)
        store.close()


def test_called_once(store: Store, bank: Bank) -> None:
    for _ in range(3):
        result = store.once("invoice-991", bank.charge, arguments={"amount": 5})
        assert result == {"charge": 1, "amount": 5}
    assert len(bank.charges) == 1
    assert len(bank.charges[0][0]) == 64


def test_two_transactions_and_none_for_what_is_there(store: Store) -> None:
    before = store.stats()["lsn"]
    store.once("a", lambda: 1)
    assert store.stats()["lsn"] == before + 2
    store.once("a", lambda: 2)
    assert store.stats()["lsn"] == before + 2


def test_it_survives_close_and_open(tmp_path: Path) -> None:
    for _ in range(2):
        with open_store(tmp_path / "agents") as store:
            assert store.once("a", lambda: [1, (2, None)]) == [1, (2, None)]
    with open_store(tmp_path / "agents") as store:
        assert store.once("a", lambda: _raise(OSError("called"))) == [1, (2, None)]


def test_the_result_none_is_a_result(store: Store) -> None:
    calls: list[int] = []
    for _ in range(2):
        assert store.once("a", lambda: calls.append(1)) is None
    assert calls == [1]


def test_other_arguments_conflict(store: Store, bank: Bank) -> None:
    store.once("invoice-991", bank.charge, arguments={"amount": 5})
    with pytest.raises(EffectConflict, match="invoice-991"):
        store.once("invoice-991", bank.charge, arguments={"amount": 6})
    store.once("invoice-992", bank.charge, arguments={"amount": 6})
    assert [amount for _, amount in bank.charges] == [5, 6]


def test_arguments_that_do_not_fit_are_seen_before_anything_is_written(store: Store, bank: Bank) -> None:
    before = store.stats()["lsn"]
    with pytest.raises(TypeError):
        store.once("a", bank.charge, arguments={"cents": 5})
    with pytest.raises(UnencodableState, match="arguments"):
        store.once("a", lambda a: a, arguments={"a": object()})
    with pytest.raises(UnsupportedRule):
        store.once("a", lambda: 1, rule="compensate")
    with pytest.raises(ValueError, match="query="):
        store.once("a", lambda: 1, rule="query")
    with pytest.raises(ValueError, match="timeout_s"):
        store.once("a", lambda: 1, timeout_s=0)
    for name in ("", "x" * 4097):
        with pytest.raises(ValueError, match="name"):
            store.once(name, lambda: 1)
    assert store.stats()["lsn"] == before


def test_names_of_every_kind_are_kept_apart(store: Store) -> None:
    names = ["a", "a\0", "a\0\0", "ä", "\ud800", "x" * 4096, "x" * 4095 + "y", "x" * 400, "\0" * 300, "\0" * 301]
    for name in names:
        assert store.once(name, lambda name=name: len(name)) == len(name)
    for name in names:
        assert store.once(name, lambda: -1) == len(name)


def test_a_parameter_called_key_gets_the_key_unless_it_is_an_argument(store: Store) -> None:
    assert len(store.once("a", lambda key: key)) == 64
    assert store.once("b", lambda key: key, arguments={"key": "mine"}) == "mine"
    assert store.once("c", lambda **others: sorted(others), arguments={"a": 1}) == ["a"]
    assert store.once("d", dict, arguments={"a": 1}) == {"a": 1}


def test_in_flight_elsewhere(store: Store, machine: ManualClock) -> None:
    def outer() -> str:
        machine.start_process()
        for rule in ("replay", "ask"):
            with pytest.raises(EffectInFlight) as caught:
                store.once("a", lambda: "inner", rule=rule, timeout_s=20)
            assert caught.value.wait_s == 25
        with pytest.raises(EffectInFlight):
            once.resolve(store, "a", "by hand")
        return "outer"

    assert store.once("a", outer, timeout_s=20) == "outer"
    assert store.once("a", lambda: "inner") == "outer"


def test_an_exception_leaves_it_in_doubt_at_once(store: Store) -> None:
    def fails() -> None:
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        store.once("a", fails)
    with pytest.raises(EffectInDoubt, match="OSError: connection lost"):
        store.once("a", lambda: 1)
    assert store.once("a", lambda: 2, rule="replay") == 2


def test_a_result_that_cannot_be_kept_leaves_it_in_doubt(store: Store) -> None:
    with pytest.raises(UnencodableState, match="result"):
        store.once("a", object)
    with pytest.raises(EffectInDoubt, match="could not be stored"):
        store.once("a", object)


@pytest.mark.parametrize("rule", ["read", "replay"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_called_again_with_the_same_key(after_death: Reopen, bank: Bank, rule: str, when: str) -> None:
    store = after_death(when)
    store.once("invoice-991", bank.charge, arguments={"amount": 5}, rule=rule)
    assert len(bank.charges) == 1 + (when == "after")
    assert len({key for key, _ in bank.charges}) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_query_decides(after_death: Reopen, bank: Bank, when: str) -> None:
    store = after_death(when)
    for _ in range(2):
        result = store.once("invoice-991", bank.charge, arguments={"amount": 5}, rule="query", query=bank.find)
        assert result == {"charge": 1, "amount": 5}
    assert len(bank.charges) == 1


def test_a_query_that_does_not_know(after_death: Reopen, bank: Bank) -> None:
    given: dict[str, Any] = {"arguments": {"amount": 5}, "rule": "query"}
    store = after_death("after")
    with pytest.raises(EffectInDoubt):
        store.once("invoice-991", bank.charge, **given, query=lambda key: Unknown("the bank is down"))
    with pytest.raises(OSError, match="down"):
        store.once("invoice-991", bank.charge, **given, query=lambda key: _raise(OSError("down")))
    assert store.once("invoice-991", bank.charge, **given, query=bank.find)["charge"] == 1
    assert len(bank.charges) == 1


@pytest.mark.parametrize("rule", ["skip", "ask"])
def test_a_person_decides(after_death: Reopen, bank: Bank, rule: str) -> None:
    store = after_death("after")
    given: dict[str, Any] = {"arguments": {"amount": 5}, "rule": rule}
    for _ in range(2):
        with pytest.raises(EffectInDoubt, match="happened=") as caught:
            store.once("invoice-991", bank.charge, **given)
        assert caught.value.rule == rule
    assert store.once("invoice-991", bank.charge, **given, happened=None) is None
    assert store.once("invoice-991", bank.charge, **given) is None
    assert len(bank.charges) == 1


def test_a_person_says_that_it_did_not_happen(after_death: Reopen, bank: Bank) -> None:
    store = after_death("before")
    given: dict[str, Any] = {"arguments": {"amount": 5}}
    assert store.once("invoice-991", bank.charge, **given, happened=NotDone)["charge"] == 1
    assert store.once("invoice-991", bank.charge, **given, happened="ignored: the result is there")["charge"] == 1
    assert len(bank.charges) == 1


def test_resolve_without_the_function(after_death: Reopen, bank: Bank) -> None:
    store = after_death("before")
    with pytest.raises(EffectClosed, match="never started"):
        once.resolve(store, "invoice-992", "x")
    once.resolve(store, "invoice-991", NotDone("the bank knows nothing"))
    store.once("invoice-991", bank.charge, arguments={"amount": 5})
    assert len(bank.charges) == 1
    with pytest.raises(EffectClosed, match="has its result"):
        once.resolve(store, "invoice-991", "x")
    with pytest.raises(OSError, match="x"):
        store.once("b", lambda: _raise(OSError("x")))
    once.resolve(store, "b", {"found": 1})
    assert store.once("b", lambda: _raise(OSError("called"))) == {"found": 1}


def _raise(error: Exception) -> Any:
    raise error


def test_the_first_result_counts(store: Store, machine: ManualClock) -> None:
    """A call that ran over its deadline and was made again: who is first to store a result decides for both."""

    def slow() -> str:
        machine.start_process()
        machine.advance(25)
        assert store.once("a", lambda: "fast", rule="replay", timeout_s=20) == "fast"
        return "slow"

    assert store.once("a", slow, rule="replay", timeout_s=20) == "fast"
    assert store.once("a", lambda: "later") == "fast"


def test_an_intent_that_was_committed_without_its_caller_knowing(tmp_path: Path, machine: ManualClock) -> None:
    files = InterruptingFiles()
    with open_store(tmp_path / "agents", files) as store:
        store.once("the first segment is made for this one", lambda: 0)
        files.armed = True
        with pytest.raises(Interrupted):
            store.once("a", lambda: 1, rule="replay", timeout_s=20)
        with pytest.raises(EffectInFlight):
            store.once("a", lambda: 1, rule="replay")
        machine.advance(25)
        assert store.once("a", lambda: 1, rule="replay") == 1
