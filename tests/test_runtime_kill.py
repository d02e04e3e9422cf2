"""SIGKILL at every boundary of a run: before, inside and after each commit, before and after each effect.

After each kill the same calls are made again, in a new process, and everything is counted: the
conversation is that of the undisturbed run, every effect happened as often as its rule promises.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime_agents import World
from runtime_victim import THREAD, live

from agentstore import Store

NTH_MAX = 60


def in_process(directory: Path, point: str = "", nth: int = 0) -> bool:
    """Let the victim live in a process of its own; whether it reached its end (False: it was killed)."""
    pid = os.fork()  # a fresh interpreter would spend most of these tests importing
    if pid == 0:
        try:
            live(directory, point, nth)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    exitcode = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert exitcode in (0, -signal.SIGKILL), f"the victim ended with {exitcode}"
    return exitcode == 0


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is room for it: what SIGKILL does is the same there, and syncs cost nothing."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="agentstore-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The conversation of a run that nobody kills."""
    directory = tmp_path_factory.mktemp("undisturbed")
    assert in_process(directory)
    check(directory, None)
    with Store.open(directory / "agents") as store:
        messages: list[dict[str, Any]] = store.thread(THREAD).load()["conversation_history"]
    return messages


def check(directory: Path, undisturbed: list[dict[str, Any]] | None) -> None:
    """What must hold once the victim reached its end; then once more after another opening with a write in it."""
    world = World(directory / "world.db")
    for _ in range(2):
        with Store.open(directory / "agents") as store:
            assert store.check() == []
            state = store.thread(THREAD).load()
            effects = store.thread(THREAD).effects()
            store.thread("another").commit()
        assert state["state"] == "COMPLETED" and state["turn"]["input_id"] == "2"
        assert [(e.status, e.duplicates) for e in effects] == [("done", 0)] * 6
    assert world.done("reserve") == ["seat 1"]  # takes the key
    assert world.done("charge") == ["10", "20"]  # can be asked about its key
    assert world.done("mail") == ["ticket", "bye"]  # a person looked
    assert world.done("note") in ([], ["n"])  # never made again
    assert set(world.done("look")) == {"flights", "weather"}
    if undisturbed is None:
        return
    for mine, other in zip(state["conversation_history"], undisturbed, strict=True):
        if other.get("content") == "note n" and mine["content"].startswith("outcome unknown"):
            continue
        assert mine == other


def kill_everywhere(point: str, memory: Path, undisturbed: list[dict[str, Any]]) -> tuple[int, str]:
    """Kill at the 1st, 2nd, 3rd … moment until a run has none left; how many there were, and what recovery did."""
    recovered = ""
    for nth in range(1, NTH_MAX):
        directory = memory / f"{point}-{nth}"
        directory.mkdir()
        killed = not in_process(directory, point, nth)
        if killed:
            assert in_process(directory)
        check(directory, undisturbed)
        log = directory / "recovered.log"
        recovered += log.read_text(encoding="utf-8") if log.exists() else ""
        shutil.rmtree(directory)
        if not killed:
            return nth - 1, recovered
    raise AssertionError(f"more than {NTH_MAX} moments: the victim does not get on")


@pytest.mark.parametrize("point", ["commit-before", "commit-inside", "commit-after"])
def test_killed_at_every_commit(point: str, memory: Path, undisturbed: list[dict[str, Any]]) -> None:
    moments, recovered = kill_everywhere(point, memory, undisturbed)
    # Leases taken and given back, inputs, decisions, results, ends: 4 + 2 + 4 + 8 + 2.
    assert moments >= 20
    assert "replay" in recovered


@pytest.mark.parametrize("point", ["tool-before", "tool-after"])
def test_killed_around_every_effect(point: str, memory: Path, undisturbed: list[dict[str, Any]]) -> None:
    moments, recovered = kill_everywhere(point, memory, undisturbed)
    assert moments == 8
    happened: Callable[[str], bool] = recovered.__contains__
    assert happened("replay reserve") and happened("asked mail") and happened("skip note never")
    assert happened("query charge happened" if point == "tool-after" else "query charge not done")


def test_killed_again_and_again_it_still_arrives(memory: Path, undisturbed: list[dict[str, Any]]) -> None:
    """Every process dies at its sixth commit, until one has none left to die at."""
    lives = 1
    while not in_process(memory, "commit-after", 6):
        lives += 1
        assert lives < 40, "the victim does not get on"
    assert lives >= 4
    check(memory, undisturbed)
