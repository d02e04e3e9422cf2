"""The demo: its world, its scripted model, its kills, and that its verdict can be no."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentstore.tools.demo import script
from agentstore.tools.demo.crash import Death
from agentstore.tools.demo.plan import deaths
from agentstore.tools.demo.world import OutsideWorld


def play(world: OutsideWorld, trips: int, *, again: str = "") -> list[dict[str, Any]]:
    """The whole story without a store; calls of the tool `again` are made twice."""

    def run(name: str, arguments: dict[str, Any]) -> Any:
        if name == "search_flights":
            return world.search_flights(**arguments)
        if name == "send_confirmation":
            return world.send_mail(**arguments)
        key = json.dumps(arguments)
        return (world.reserve_seat if name == "reserve_seat" else world.charge_card)(key, **arguments)

    messages: list[dict[str, Any]] = []
    for trip in range(1, trips + 1):
        messages.append(script.trip_input(trip))
        while True:
            said = script.next_message(messages)
            messages.append(said)
            if "tool_calls" not in said:
                break
            for call in said["tool_calls"]:
                name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                if name == again:
                    run(name, arguments)
                content = json.dumps(run(name, arguments))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return messages


def test_script_wants_what_it_says() -> None:
    with OutsideWorld(":memory:") as world:
        messages = play(world, 2)
        counts = world.count(script.wanted(2))
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert len(calls) == 34, "at least 12 calls a trip"
    assert [(c.wanted, c.executed, c.duplicated, c.lost, c.unwanted) for c in counts.values()] == [
        (10, 10, 0, 0, 0)
    ] * 3
    assert messages[-1]["content"] == "Trip 2 is booked: 495.00 EUR, 5 confirmations sent."


def test_world_counts_duplicates_losses_and_what_nobody_wanted() -> None:
    for again, duplicated in (("reserve_seat", 0), ("charge_card", 5), ("send_confirmation", 5)):
        with OutsideWorld(":memory:") as world:
            play(world, 1, again=again)
            count = world.count(script.wanted(1))[again]
        assert (count.executed, count.duplicated, count.requests) == (5 + duplicated, duplicated, 10), again
    with OutsideWorld(":memory:") as world:
        play(world, 1)
        assert [count.lost for count in world.count(script.wanted(2)).values()] == [5, 5, 5]
        assert [count.unwanted for count in world.count([]).values()] == [5, 5, 5]


def test_world_counts_the_same_seat_under_another_key_as_duplicate() -> None:
    with OutsideWorld(":memory:") as world:
        world.reserve_seat("k1", "FR 1142", "12A", "Ada")
        world.reserve_seat("k2", "FR 1142", "12A", "Ada")
        assert world.count([("reserve_seat", "Ada on FR 1142")])["reserve_seat"].duplicated == 1


def test_world_survives_its_process(tmp_path: Path) -> None:
    path = str(tmp_path / "world.sqlite")
    program = """
import os, signal, sys
from agentstore.tools.demo.world import OutsideWorld
world = OutsideWorld(sys.argv[1])
world.charge_card("k1", "card", 5, "once")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program, path], check=False).returncode == -9
    with OutsideWorld(path) as world:
        assert world.find_charge("k1") == {"charged": "once", "amount_cents": 5}
        assert world.find_charge("k2") is None
    assert sqlite3.connect(path).execute("SELECT COUNT(*) FROM requests").fetchone() == (1,)


def test_every_kind_of_kill_is_planned_from_eight_on() -> None:
    for seed in range(50):
        planned = deaths(8, random.Random(seed))
        assert len(planned) == 8
        kinds = {(death.kind, death.tool) for death in planned}
        assert {("tool-after", "reserve_seat"), ("tool-after", "charge_card"), ("wal", "")} <= kinds
        assert {("tool-after", "send_confirmation"), ("tool-before", "send_confirmation"), ("outside", "")} <= kinds
        assert all(Death.parse(str(death)) == death and death.label for death in planned)
    assert [len(deaths(kills, random.Random(1))) for kills in (0, 1, 7, 40)] == [0, 1, 7, 40]
    assert deaths(40, random.Random(1)) != deaths(40, random.Random(2))


def demo(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "agentstore.tools.cli", "demo", "--json", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_demo_survives_eight_kills() -> None:
    status, report = demo("--kills", "8", "--seed", "1")
    assert (status, report["ok"], report["kills"]) == (0, True, 8), report
    assert (report["duplicated"], report["lost"], report["same_conversation"]) == (0, 0, True)
    assert (
        report["effects"]["charge_card"]["executed"]
        == report["effects"]["charge_card"]["wanted"]
        == 5 * report["trips"]
    )
    assert any("between effect and receipt" in moment for moment in report["killed_at"])
    assert any("inside the WAL write" in moment for moment in report["killed_at"])
    assert report["recoveries"]["asked"] >= 2, "nobody was asked about a mail that may have been sent"
    assert report["recoveries"]["query"] >= 1
    assert report["recoveries"]["replay"] >= 1


def test_demo_without_kills_is_quiet() -> None:
    status, report = demo("--kills", "0")
    assert (status, report["trips"], sum(report["recoveries"].values())) == (0, 1, 0)


@pytest.mark.parametrize("seed", [3, 4])
def test_without_the_ledger_the_same_demo_finds_duplicates(seed: int) -> None:
    status, report = demo("--kills", "8", "--seed", str(seed), "--no-ledger")
    assert status == 1
    assert report["duplicated"] >= 2, "a charge and a mail were cut off between effect and checkpoint"
    assert report["effects"]["charge_card"]["duplicated"] >= 1
    assert report["effects"]["send_confirmation"]["duplicated"] >= 1
    assert report["ok"] is False


def test_demo_tells_its_story(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "agentstore.tools.cli", "demo", "--kills", "3", "--keep", str(kept)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kill  ") == 3
    assert "Nothing was done twice, nothing was lost." in done.stdout
    listed = subprocess.run(
        [sys.executable, "-m", "agentstore.tools.cli", "ls", "--json", "--store", str(kept / "store")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert [thread["id"] for thread in json.loads(listed.stdout)] == ["travel-desk:team-trip"]
    again = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (again.returncode, "not empty" in again.stderr) == (2, True)


def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentstore.tools.cli", "demo", "--kills", "100000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    demo_process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert demo_process.stdout is not None
    with demo_process.stdout as lines:
        assert "killed 100000 times" in lines.readline()
        while "kill " not in lines.readline():
            pass
        demo_process.send_signal(signal.SIGTERM)
        lines.read()
    assert demo_process.wait() == 143
    assert os.listdir(tmp_path) == []
