"""The commands that kill, cut the power and copy, as campaigns: one case each, and that broken code is found."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from agentstore.engine import sync
from agentstore.engine.files import Files
from fuzz import copying, kill, powercut
from fuzz.apart import apart
from fuzz.campaign import Counts, Violation, drive
from fuzz.crew import Wrong

no_cuts = powercut.CAMPAIGN.missing()
cuts = pytest.mark.skipif(no_cuts is not None, reason=f"no power cuts here: {no_cuts}")


def test_some_kills() -> None:
    counts = Counts()
    kill.CAMPAIGN.run({"kills": 3, "procs": 2, "seed": 1}, counts)
    assert sum(counts.faults.values()) == 3
    assert counts.outcomes["commits confirmed"] > 0


def test_some_copies() -> None:
    counts = Counts()
    copying.CAMPAIGN.run({"copies": 2, "seed": 1}, counts)
    assert counts.outcomes["opened as it was"] + counts.outcomes["refused as damaged"] == 2


@cuts
def test_some_power_cuts() -> None:
    counts = Counts()
    powercut.CAMPAIGN.run({"fs": "ext4", "cycles": 2, "seed": 1}, counts)
    assert sum(counts.faults.values()) >= 4
    assert counts.outcomes["commits confirmed"] > 0


def no_sync_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync.Syncer, "_flush", lambda self, file, end: None)


def acknowledged_before_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    flush = sync.Syncer._flush
    commits = itertools.count()

    def late(self: sync.Syncer, file: int, end: int) -> None:
        if next(commits) % 3 == 2:
            flush(self, file, end)  # for those before it, too, which were told already

    monkeypatch.setattr(sync.Syncer, "_flush", late)


def no_sync_of_directories_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Files, "sync_directory", lambda self, path: None)
    monkeypatch.setattr(Files, "fdatasync", lambda self, fd: None)


@cuts
@pytest.mark.parametrize("breaks", [no_sync_of_the_log, acknowledged_before_the_sync, no_sync_of_directories_and_files])
def test_broken_code_is_found_by_power_cuts(
    breaks: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the copy of a disk that lost something is left
    breaks(monkeypatch)
    # The moments of the cuts are not decided by the case: one is enough nearly always, so many always are.
    _, failure = drive(powercut.CAMPAIGN, 1, cases=40)
    assert failure is not None
    assert failure.case == failure.first, "what does not repeat is not shrunk"
    capfd.readouterr()  # what a checker said


def test_a_run_of_its_own_hands_over_what_it_found_and_what_went_wrong() -> None:
    def wrong() -> dict[str, int]:
        raise Wrong("a step is gone")

    def broken() -> dict[str, int]:
        raise ValueError("no such thing")

    def dies() -> dict[str, int]:
        os.kill(os.getpid(), 9)
        return {}

    assert apart(lambda: {"pid": os.getppid()}) == {"pid": os.getpid()}
    for run, says in ((wrong, "^a step is gone$"), (broken, "ValueError: no such thing"), (dies, "status -9")):
        with pytest.raises(Violation, match=says):
            apart(run)
