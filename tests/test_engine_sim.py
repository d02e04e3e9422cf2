"""Power cuts on a simulated disk: a sample of each workload here, more by ``python -m agentstore.testing.crashsim``."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentstore.testing.crashsim import WORKLOADS, Lost, Simulation, in_memory
from agentstore.testing.simdisk import SECTOR, Event, Image, Platter, SimDisk


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=in_memory(), prefix="agentstore-") as path:
        yield Path(path)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_power_cut_is_survived(name: str, directory: Path) -> None:
    tally = Simulation(name, directory, random.Random(name), limit=3, deeper=0.01).run()
    assert tally.points >= 40
    assert tally.images >= 50
    assert tally.torn >= 10


def test_a_recovery_is_cut_off_too(directory: Path) -> None:
    tally = Simulation("kills", directory, random.Random(5), limit=1, deeper=0.05).run()
    assert tally.deeper >= 20


@pytest.mark.parametrize(
    ("liar", "lies"),
    [
        ("segments", lambda path: path.endswith(".seg")),
        ("the directory of the log", lambda path: path == "wal"),
        ("the directory of the store", lambda path: path == ""),
        ("the directory above", lambda path: path == ".."),
        ("FORMAT", lambda path: path.startswith("FORMAT")),
    ],
)
def test_the_check_fails_on_a_disk_that_does_not_sync(liar: str, lies: Callable[[str], bool], directory: Path) -> None:
    """Every one of these syncs is needed, and is missed when it is not made."""
    with pytest.raises(Lost):
        Simulation("create", directory, random.Random(liar), limit=24, lies=lies).run()


# --- the disk itself ----------------------------------------------------------------------


def platter(*events: Event) -> Platter:
    made = Platter(Image([""], {}))
    for event in events:
        made.apply(event)
    return made


def found(disk: Platter, path: str = "a") -> set[bytes | None]:
    return {image.files.get(path) for image in disk.images(1000, random.Random(1))}


CREATE, NAMED = Event("create", "a", 1), Event("sync_directory", "")


def test_an_unsynced_write_is_torn_at_every_sector() -> None:
    data = b"x" * SECTOR + b"y" * SECTOR
    zeros = Event("write", file=1, offset=0, data=bytes(2 * SECTOR))
    disk = platter(CREATE, NAMED, zeros, Event("sync", file=1, offset=1), Event("write", file=1, offset=0, data=data))
    zero = bytes(SECTOR)
    assert found(disk) == {zero + zero, b"x" * SECTOR + zero, zero + b"y" * SECTOR, data}


def test_a_file_that_grew_may_be_short_or_end_in_zeros() -> None:
    disk = platter(CREATE, NAMED, Event("write", file=1, offset=0, data=b"x" * SECTOR))
    assert found(disk) == {b"", b"x" * SECTOR, bytes(SECTOR)}


def test_what_was_synced_stays_and_a_sync_covers_what_was_written_before_it_began() -> None:
    one, two = (Event("write", file=1, offset=0, data=data * SECTOR) for data in (b"1", b"2"))
    assert found(platter(CREATE, NAMED, one, Event("sync", file=1, offset=1))) == {b"1" * SECTOR}
    during = platter(CREATE, NAMED, one, two, Event("sync", file=1, offset=1))
    assert found(during) == {b"1" * SECTOR, b"2" * SECTOR}


def test_names_are_lost_one_by_one_until_their_directory_is_synced() -> None:
    rename = Event("rename", "a", 1, target="b")
    assert found(platter(CREATE)) == {None, b""}
    assert found(platter(CREATE, NAMED)) == {b""}
    assert found(platter(CREATE, NAMED, rename)) == {None, b""}
    assert found(platter(CREATE, NAMED, rename, NAMED)) == {None}
    assert found(platter(CREATE, NAMED, rename, NAMED), "b") == {b""}
    assert found(platter(CREATE, NAMED, Event("unlink", "a", 1))) == {None, b""}


def test_the_journal_has_what_was_done(directory: Path) -> None:
    disk = SimDisk(str(directory / "store"))
    disk.make_directory(disk.root)
    fd = disk.open(f"{disk.root}/FORMAT.new", 0o102)
    disk.pwrite(fd, b"abc", 0)
    disk.fdatasync(fd)
    disk.close(fd)
    disk.rename(f"{disk.root}/FORMAT.new", f"{disk.root}/FORMAT")
    disk.sync_directory(disk.root)
    disk.sync_directory(str(directory))
    disk.end()
    names = [event.name for event in disk.journal]
    assert names == ["make_directory", "create", "write", "sync", "rename", "sync_directory", "sync_directory"]
    (last,) = disk.platter(len(disk.journal)).images(10, random.Random(1))
    assert (last.directories, last.files) == ([""], {"FORMAT": b"abc"})
    again = directory / "again"
    last.write_to(str(again))
    assert Image.read_from(str(again)).digest() == last.digest()
