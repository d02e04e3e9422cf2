"""The smoke of its class finds every broken variant of the product, and what was broken is whole again after it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator

import pytest

from agentstore.engine import fold, sync
from fuzz import mutants
from fuzz.driving import campaign
from fuzz.mutants import MUTANTS, Mutant
from fuzz.patches import Patches, edited


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Broken code complains in the log."""
    logger = logging.getLogger("agentstore")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_variant_is_found(
    mutant: Mutant, capfd: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if missing := campaign(mutant.campaign).missing():
        pytest.skip(f"no {mutant.campaign} here: {missing}")
    message, _ = mutant.find()
    capfd.readouterr()  # what processes that broke said
    assert message is not None


def test_every_variant_that_is_written_is_run() -> None:
    written = {
        name
        for name, value in vars(mutants).items()
        if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["patches"]
    }
    assert written == {mutant.name for mutant in MUTANTS}
    assert len(written) == len(MUTANTS) >= 20


def test_what_was_broken_is_whole_again() -> None:
    before = sync.Syncer._flush, fold.Folder.fold
    with Patches() as patches:
        mutants.log_sync_removed(patches)
        mutants.fold_unlocked(patches)
        assert before[0] is not sync.Syncer._flush
        assert before[1] is not fold.Folder.fold
    assert before == (sync.Syncer._flush, fold.Folder.fold)


def test_a_part_that_is_not_in_the_code_any_more_is_said() -> None:
    with pytest.raises(AssertionError, match="is not once in"):
        edited(fold.Folder.fold, ("no such code", "pass"))
