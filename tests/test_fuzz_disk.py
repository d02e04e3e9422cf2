"""Power cuts of a simulated disk under the whole store: short runs, that they repeat, and that broken code is found.

The long runs are ``python -m fuzz disk --seconds 3600`` and ``python -m fuzz states --seconds 7200``.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentstore.engine import sync
from agentstore.engine.files import Files, default_files
from agentstore.testing.simdisk import SimDisk
from fuzz import disk, driving, states, story
from fuzz.campaign import Campaign, Case, Counts, Violation, drive, failing
from fuzz.promise import Promised

ROOT = Path(__file__).resolve().parent.parent

LOST_SYNC: Case = {"seed": 1, "steps": [["commit", "a", 40, "round"], ["commit", "a", 40, "round"]]}


@pytest.mark.parametrize("running", [disk.CAMPAIGN, states.CAMPAIGN], ids=["disk", "states"])
def test_every_state_is_survived(running: Campaign) -> None:
    counts, failure = drive(running, 1, cases=6)
    assert failure is None, failure
    assert counts.outcomes["all there"] > 100
    assert counts.outcomes["the step under way lost"] > 50
    assert not counts.outcomes["confirmed steps lost"] or counts.faults["a disk that lies"]
    assert counts.moments["with all states made"] > 100
    assert default_files().__class__ is Files, "the disk was left in the engine"


def test_a_disk_that_lies_gives_no_wrong_data() -> None:
    lying = [case for case in itertools.islice(disk.CAMPAIGN.cases(5), 22) if "lies" in case]
    counts = Counts()
    for case in lying:
        disk.CAMPAIGN.run(case, counts)
    assert counts.outcomes["refused"] + counts.outcomes["confirmed steps lost"] > 0


def test_a_call_whose_intent_a_lying_disk_lost_is_a_lost_step() -> None:
    """The checker wanted the intent of a call that was made, although the disk lied about the sync before it."""
    disk.CAMPAIGN.run({"seed": 1248461747, "steps": [["once", "y"]], "lies": "wal/"}, Counts())


def test_a_step_that_a_lying_disk_lost_half_of_is_a_lost_step() -> None:
    """The checker knew the newest step only to be half there: here it is the finish of a decision behind a delete."""
    steps = [["commit", "a", 9000, "round"], ["delete", "a"], ["decide", "a"], ["intend", "a"], ["finish", "a"]]
    steps += [["once", "y"], ["commit", "c", 700, "round"]]
    disk.CAMPAIGN.run({"seed": 986377293, "steps": steps, "lies": "wal/"}, Counts())


@pytest.mark.parametrize("nth", range(1, 9))
def test_a_name_whose_sync_failed_is_synced_by_who_relies_on_it(nth: int) -> None:
    """Compaction's copy of base took its place, the sync of that failed, and the next process folded into it and gave
    up the log: after a power cut the old base was back, without what had been folded."""
    small = ["commit", "a", 40, "round"]
    fault = {"nth": nth, "errno": "EIO", "for_ever": False, "part": 0.0, "calls": ["sync_directory"]}
    disk.CAMPAIGN.run({"seed": 1, "steps": [small, ["compact"], small], "fault": fault}, Counts())


def test_a_disk_that_has_no_room_for_the_stores_directory() -> None:
    """The checker wanted to clear away a directory that was never made."""
    fault = {"nth": 1, "errno": "ENOSPC", "for_ever": True, "part": 0.9}
    counts = Counts()
    disk.CAMPAIGN.run({"seed": 1, "steps": [], "fault": fault}, counts)
    assert counts.faults["ENOSPC of a call"] == 1


@pytest.mark.parametrize("running", [disk.CAMPAIGN, states.CAMPAIGN], ids=["disk", "states"])
def test_the_same_case_does_the_same(running: Campaign) -> None:
    case = next(itertools.islice(running.cases(9), 2, None))
    one, other = Counts(), Counts()
    for counts in (one, other):
        running.run(case, counts)
    assert one == other


def test_all_short_stories_are_told_at_every_phase() -> None:
    short = list(itertools.islice(states.CAMPAIGN.cases(1), len(states.PHASES) * len(states.STEPS) * 15))
    told = {(case["phase"], str(case["steps"][len(states.PHASES[case["phase"]]) :])) for case in short}
    assert len(told) == len(states.PHASES) * (len(states.STEPS) + len(states.STEPS) ** 2)
    assert len(next(itertools.islice(states.CAMPAIGN.cases(1), len(short), None))["steps"]) >= 3


@pytest.fixture
def no_log_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sync of the log is left out."""
    monkeypatch.setattr(sync.Syncer, "_flush", lambda self, file, end: None)
    yield


@pytest.mark.usefixtures("no_log_sync")
def test_a_failure_is_made_small_and_plays_again(tmp_path: Path) -> None:
    case = LOST_SYNC | {"steps": [["keep", 2], *LOST_SYNC["steps"], ["fold"], ["pin", "a"]]}

    class OneCase(disk.DiskCampaign):
        def cases(self, seed: int) -> Iterator[Case]:
            yield case

    _, failure = drive(OneCase(), 1)
    assert failure is not None
    assert "power cut after" in failure.message
    assert len(failure.case["steps"]) == 1
    path = failure.write(os.fspath(tmp_path))
    assert driving.play_again(path) == 1


def test_the_command_plays_a_file_again(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    record = {"version": 1, "campaign": "disk", "seed": 1, "case": LOST_SYNC, "message": "", "first": LOST_SYNC}
    path.write_text(json.dumps(record))
    command = [sys.executable, "-m", "fuzz", "repro", os.fspath(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "does not fail" in done.stdout
    path.write_text('{"version": 2}')
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "not a failing case" in done.stderr) == (2, True)


def test_the_command_counts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fuzz", "disk", "--cases", "2", "--seed", "3", "--json", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["cases"] == 2
    assert said["failure"] is None
    assert sum(said["outcomes"].values()) > 50


def test_every_campaign_is_found_by_its_name() -> None:
    for name in driving.CAMPAIGNS:
        assert driving.campaign(name).name == name.removesuffix("-xfs")


@pytest.mark.usefixtures("no_log_sync")
def test_a_sync_that_is_left_out_is_found() -> None:
    message = failing(disk.CAMPAIGN, LOST_SYNC, Counts())
    assert message is not None


def test_a_directory_that_is_not_synced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimDisk, "sync_directory", lambda self, path: None)
    assert failing(disk.CAMPAIGN, LOST_SYNC, Counts()) is not None


def test_what_was_promised_is_heard() -> None:
    promised = Promised()
    for line in ("a 0", "x 0", "c 0", "a 1"):
        promised.hear(line)
    assert promised == Promised(confirmed=0, begun=1, called=0)


def test_a_store_that_says_too_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker itself: a story whose telling leaves a step out must not pass."""
    monkeypatch.setattr(story.Teller, "_pin", lambda self, number, thread: None)
    with pytest.raises(Violation, match="has pins"):
        disk.CAMPAIGN.run(LOST_SYNC | {"steps": [["commit", "a", 40, "round"], ["pin", "a"]]}, Counts())
