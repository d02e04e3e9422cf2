"""Crash states from what strace saw: a short run, and that it sees what it must.

The long run is ``python -m fuzz strace --seconds 300``.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator

import pytest

from agentstore.testing.crashsim import in_memory
from agentstore.testing.simdisk import Event
from fuzz.campaign import Case, Counts, drive
from fuzz.story import Step
from fuzz.strace import CAMPAIGN
from fuzz.strace_log import Disk, Watcher, bypasses, calls
from fuzz.witness import record

missing = CAMPAIGN.missing()
pytestmark = pytest.mark.skipif(missing is not None, reason=f"no strace here: {missing}")

STEPS: list[Step] = [
    ["commit", "a", 40, "round"],
    ["decide", "a"],
    ["intend", "a"],
    ["finish", "a"],
    ["once", "x"],
    ["fold"],
    ["commit", "b", 700, "final"],
    ["keep", 1],
    ["kill"],
    ["commit", "b", 3000, "round"],
    ["prune"],
    ["compact"],
    ["commit", "a", 40, "round"],
]


def case(inject: str | None = None, *, steps: list[Step] = STEPS, states: int = 120) -> Case:
    made: Case = {"seed": 1, "steps": steps, "states": states}
    return made if inject is None else made | {"inject": inject}


@pytest.fixture
def home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=in_memory(), prefix="agentstore-") as path:
        yield os.path.realpath(path)


def test_every_state_is_survived() -> None:
    counts, failure = drive(CAMPAIGN, 1, cases=4)
    assert failure is None, failure
    assert sum(counts.outcomes.values()) >= 300
    assert counts.outcomes["all there"]
    assert counts.outcomes["the step under way lost"]
    assert not counts.outcomes["confirmed steps lost"]


def test_the_same_case_does_the_same() -> None:
    one, other = Counts(), Counts()
    for counts in (one, other):
        CAMPAIGN.run(case(), counts)
    assert one == other
    assert one.faults["cut at note"] > 20


def test_the_witness_sees_the_calls_of_lmdb_and_of_nobody_else_past_the_seam(home: str) -> None:
    watcher, status = record(home, STEPS, 1, None)
    assert status == 0
    assert bypasses(watcher, Counter()) != [], "nothing went through the seam"
    by_file = Counter(os.path.basename(path) for name, path, _, _ in watcher.seen if name == "pwrite")
    assert by_file["base.mdb"] and by_file["tail.mdb"] and by_file["base.mdb.new"]
    assert any(event.name == "settle" and event.path == "base.mdb" for event in watcher.journal)
    assert "control" in watcher.maps


# --- injections -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inject",
    [
        "fdatasync:error=EIO:when=9",
        "pwrite64:error=ENOSPC:when=30+",
        "writev:error=EIO:when=2",
        "rename:error=EIO:when=2",
        "pwrite64:signal=SIGKILL:when=40",
        "fdatasync:signal=SIGKILL:when=12",
    ],
)
def test_a_call_that_fails_or_kills(inject: str) -> None:
    counts = Counts()
    CAMPAIGN.run(case(inject, states=40), counts)
    assert counts.faults[inject.rpartition(":")[0]] == 1, counts
    assert not counts.outcomes["confirmed steps lost"]


def test_a_sync_that_lies_takes_back_or_is_refused_and_never_makes_up_anything() -> None:
    counts = Counts()
    CAMPAIGN.run(case("fdatasync:retval=0:when=5+", states=200), counts)
    assert counts.faults["fdatasync:retval=0"] == 1
    assert counts.outcomes["confirmed steps lost"] + counts.outcomes["refused"] > 10, counts


# --- the log itself -------------------------------------------------------------------------------


def hexed(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text.encode())


def test_a_call_that_others_ran_beside_counts_when_it_returns_and_a_sync_covers_what_was_there_before() -> None:
    path, inside = hexed("/s"), hexed("/s/f")
    log = "\n".join(
        [
            f'7  mkdir("{path}", 0700)       = 0',
            f'7  openat(AT_FDCWD<{hexed("/")}>, "{inside}", O_RDWR|O_CREAT, 0600) = 3<{inside}>',
            f'7  pwrite64(3<{inside}>, "{hexed("one")}", 3, 0) = 3',
            f"7  fdatasync(3<{inside}> <unfinished ...>",
            f'8  pwrite64(3<{inside}>, "{hexed("two")}", 3, 3 <unfinished ...>',
            "8  <... pwrite64 resumed>) = 3",
            "7  <... fdatasync resumed>) = 0",
            f'8  pwrite64(3<{inside}>, "{hexed("three")}", 5, 6) = -1 EIO (Input/output error) (INJECTED)',
            f"8  lseek(3<{inside}>, 9, SEEK_SET) = 9",
            f'8  writev(3<{inside}>, [{{iov_base="{hexed("x")}", iov_len=1}}, '
            f'{{iov_base="{hexed("y")}", iov_len=1}}], 2) = 2',
            "8  +++ exited with 0 +++",
        ]
    )
    watcher = Watcher("/s", "/told")
    watcher.watch(log)
    names = [(event.name, event.offset, event.data) for event in watcher.journal if event.name != "create"]
    assert names == [
        ("make_directory", 0, b""),
        ("write", 0, b"one"),
        ("sync_begins", 0, b""),
        ("write", 3, b"two"),
        ("sync", 0, b""),
        ("write", 9, b"xy"),
    ]
    assert watcher.injected == 1
    disk = Disk()
    for event in watcher.journal[:-1]:
        disk.apply(event)
    disk.apply(Event("sync_directory", ".."))
    disk.apply(Event("sync_directory", ""))
    assert {image.files["f"] for image in disk.images(10, random.Random(1))} == {b"one", b"onetwo", b"one\0\0\0"}


def test_a_write_that_is_durable_when_it_returns_leaves_others_pending() -> None:
    disk = Disk()
    for event in [
        Event("make_directory", "", 1),
        Event("create", "f", 2),
        Event("sync_directory", ".."),
        Event("sync_directory", ""),
        Event("write", "f", 2, 0, b"a" * 1024),
        Event("write", "f", 2, 512, b"b" * 512),
        Event("settle", "f", 2, 512, b"b" * 512),
    ]:
        disk.apply(event)
    found = {image.files["f"] for image in disk.images(10, random.Random(1))}
    assert found == {b"\0" * 512 + b"b" * 512, b"a" * 512 + b"b" * 512}


def test_what_was_killed_inside_a_call_has_not_made_it() -> None:
    assert list(calls('9  pwrite64(3</a>, "", 0, 0) = ? <unavailable>\n9  +++ killed by SIGKILL +++')) != []
    assert list(calls("9  +++ killed by SIGKILL +++\n")) == []
