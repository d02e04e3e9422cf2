"""Disks that are really full: a short run.

The long run is ``python -m fuzz fulldisk --seconds 300``.
"""

from __future__ import annotations

import errno
import os

import pytest

from fuzz.campaign import Case, Counts, drive
from fuzz.fulldisk import CAMPAIGN
from fuzz.smalldisk import DISKS, small_disk
from fuzz.story import Step

missing = CAMPAIGN.missing()
pytestmark = pytest.mark.skipif(missing is not None, reason=f"no small disks here: {missing}")

STEPS: list[Step] = [["commit", "a", 9000, "round"]] * 12 + [["fold"], ["reopen"], ["commit", "b", 40, "final"]]


def case(disk: str, room: int, *, patience: int = 2, kill: int = 0, fill_at: int = 2) -> Case:
    if why := CAMPAIGN._why_not(disk):
        pytest.skip(why)
    made: Case = {"disk": disk, "steps": STEPS, "fill_at": fill_at, "room": room}
    return made | {"patience": patience, "kill": kill, "when": "inside"}


def test_full_disks_lose_nothing() -> None:
    counts, failure = drive(CAMPAIGN, 1, cases=12)
    assert failure is None, failure
    assert counts.outcomes["went on to the end"] == 12
    assert counts.outcomes["confirmed"] > 100
    assert sum(count for kind, count in counts.faults.items() if kind.endswith("filled")) >= 9


@pytest.mark.parametrize("disk", ["ext4", "tmpfs"])
def test_steps_are_refused_and_taken_once_there_is_room(disk: str) -> None:
    counts = Counts()
    CAMPAIGN.run(case(disk, 4096), counts)
    assert counts.faults[f"{disk} filled"] == 1
    assert counts.outcomes["refused"] + counts.outcomes["CommitUnknown"] >= 1
    assert counts.outcomes["went on to the end"] == 1


def test_a_thin_disk_puts_the_store_out_of_use_until_it_is_opened_again() -> None:
    counts = Counts()
    CAMPAIGN.run(case("thin", 0), counts)
    assert counts.faults["thin out of use"] == 1
    assert counts.outcomes["went on to the end"] == 1


def test_a_process_killed_on_a_full_disk() -> None:
    counts = Counts()
    CAMPAIGN.run(case("ext4", 36_864, patience=8, kill=2), counts)
    assert counts.faults["ext4 killed"] == 1
    assert counts.outcomes["went on to the end"] == 1


@pytest.mark.parametrize("kind", DISKS)
def test_the_disk_is_full(kind: str) -> None:
    """The instrument itself: without this the runs above could pass on a disk with room."""
    if why := CAMPAIGN._why_not(kind):
        pytest.skip(why)
    with small_disk(kind) as disk:
        disk.fill(0)
        path = os.path.join(disk.directory, "more")

        def write() -> None:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT)
            try:
                os.write(fd, bytes(1 << 20))
                os.write(fd, bytes(1 << 20))
                os.fsync(fd)
            finally:
                os.close(fd)

        with pytest.raises(OSError) as caught:
            write()
        assert caught.value.errno in (errno.ENOSPC, errno.EIO, errno.EROFS)
        disk.free()
        write()
