"""Orders of short programs of several processes: short runs of each, that they repeat, and that a failure plays again.

The long run is ``python -m fuzz interleave --seconds 3600``.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from fuzz import driving, mutants
from fuzz.campaign import Case, Counts, drive, failing
from fuzz.interleave import InterleaveCampaign
from fuzz.patches import Patches
from fuzz.programs import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_orders_of_a_program(name: str) -> None:
    counts, failure = drive(InterleaveCampaign({name: PROGRAMS[name]}), 1, cases=12)
    assert failure is None, failure
    assert counts.outcomes[name] == 12
    assert counts.faults["points"] > 12


def order_of(case: Case) -> list[tuple[int, list[str]]]:
    return [(each.actor, each.points) for each in InterleaveCampaign().play(case).stretches]


def test_a_case_does_the_same_again() -> None:
    for case in itertools.islice(InterleaveCampaign().orders("two writers", 3), 40, 44):
        assert order_of(case) == order_of(case)


def test_a_failure_is_made_smaller_and_plays_again(tmp_path: Path) -> None:
    program = {"two writers": PROGRAMS["two writers"]}
    with Patches() as patches:
        mutants.target_after_sync(patches)
        _, failure = drive(InterleaveCampaign(program), 1, cases=500)
        assert failure is not None
        path = failure.write(str(tmp_path))
        kept = json.loads(Path(path).read_text())
        assert len(json.dumps(kept["case"])) <= len(json.dumps(kept["first"]))
        assert driving.play_again(path) == 1
    assert failing(InterleaveCampaign(), kept["case"], Counts()) is None
    assert driving.play_again(path) == 0
