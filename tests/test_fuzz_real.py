"""The commands that kill, cut the power and copy, as campaigns: one case each."""

from __future__ import annotations

import os

import pytest

from fuzz import copying, kill, powercut
from fuzz.apart import apart
from fuzz.campaign import Counts, Violation
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
