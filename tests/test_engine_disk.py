"""Disks that are full, and directories that are deleted or copied while the store is open."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from crash.remote import Remote

from agentstore.engine import keys
from agentstore.engine.api import Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.errors import AgentStoreError, CommitUnknown, CorruptionError, DiskFull, StoreFailed, StoreNotFound
from agentstore.testing.loopdisk import LoopDisk, tmpfs, why_no_tmpfs, why_not

KEY = keys.encode("k")

on_a_disk = pytest.mark.skipif(bool(why_not()), reason=f"no loop disk: {why_not()}")
on_tmpfs = pytest.mark.skipif(bool(why_no_tmpfs()), reason=f"no tmpfs: {why_no_tmpfs()}")


class Ledger:
    """Commits numbered values until one is refused, and knows what must be there."""

    def __init__(self, remote: Remote, path: Path) -> None:
        self.remote = remote
        self._path = path
        self.confirmed: dict[int, bytes] = {}
        self.unknown: dict[int, bytes] = {}
        self.next = 0

    def commit(self, size: int) -> None:
        number, value = self.next, b"%d " % self.next * (size // 4)
        self.next += 1
        try:
            self.remote.put(keys.encode("n", number), value)
        except (CommitUnknown, StoreFailed):
            self.unknown[number] = value
            raise
        self.confirmed[number] = value

    def commit_until_full(self, size: int, *, limit: int = 5000) -> AgentStoreError:
        """The error that ended it."""
        for _ in range(limit):
            try:
                self.commit(size)
            except (DiskFull, CommitUnknown, StoreFailed) as error:
                return error
        raise AssertionError(f"{limit} commits of {size} bytes fit on the disk")

    def check(self, by: str = "get_by_transaction") -> None:
        """All that was confirmed is there, nothing that was refused; an unknown one is there whole, or not."""
        for number in range(self.next):
            value = self.remote.call(by, keys.encode("n", number))
            if number in self.confirmed:
                assert value == self.confirmed[number], f"commit {number} was confirmed"
            elif number in self.unknown:
                assert value in (None, self.unknown[number]), f"commit {number}"
            else:
                assert value is None, f"commit {number} was refused"

    def reopen(self) -> None:
        self.remote.close()
        self.remote.open(self._path)


def ballast(directory: str, size: int) -> Path:
    """A file that takes so many bytes of the disk."""
    path = Path(directory, "ballast")
    with path.open("wb") as file:
        file.write(b"\xaa" * size)
        file.flush()
        os.fsync(file.fileno())
    return path


@contextmanager
def small_disk(kind: str) -> Iterator[str]:
    """A directory on a file system of about 64 MiB."""
    if kind == "tmpfs":
        with tmpfs(64) as directory:
            yield directory
    else:
        with LoopDisk(kind, size_mib=64) as disk:
            yield disk.directory


FULL = [pytest.param("ext4", marks=on_a_disk), pytest.param("tmpfs", marks=on_tmpfs)]


@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("size", [2500, 30_000])
def test_a_full_disk_refuses_commits_loses_nothing_and_works_again(kind: str, size: int) -> None:
    """No SIGBUS either: on tmpfs any page of a mapped file that has no block yet would be one."""
    with small_disk(kind) as directory, Remote() as writer:
        path = Path(directory, "store")
        writer.open(path)
        ledger = Ledger(writer, path)
        for _ in range(20):
            ledger.commit(size)
        filler = ballast(directory, _free(directory) - 6 * 1024 * 1024)
        for _ in range(3):
            error = ledger.commit_until_full(size, limit=60_000_000 // size)
            assert isinstance(error, DiskFull | CommitUnknown), error
            ledger.check("get")
        filler.unlink()
        for _ in range(20):
            ledger.commit(size)
        ledger.check()
        assert writer.verify() == []
        ledger.reopen()
        ledger.check()
        ledger.commit(size)
        writer.kill()
        with Remote() as other:
            other.open(path)
            ledger.remote = other
            ledger.check()


@pytest.mark.parametrize("kind", FULL)
def test_a_store_killed_on_a_full_disk_opens_once_there_is_room(kind: str) -> None:
    """It may open before (the log is folded into free pages of base); if not, it says DiskFull and loses nothing."""
    with small_disk(kind) as directory:
        path = Path(directory, "store")
        with Remote() as writer:
            writer.open(path, background=False)
            ledger = Ledger(writer, path)
            for _ in range(200):
                ledger.commit(20_000)
            filler = ballast(directory, _free(directory) - 64 * 1024)
            ledger.commit_until_full(20_000)
            writer.kill()
        with Remote() as other:
            ledger.remote = other
            try:
                other.open(path)
            except DiskFull:
                filler.unlink()
                other.open(path)
            ledger.check()
            filler.unlink(missing_ok=True)
            ledger.commit(20_000)
            ledger.check()
            assert other.verify() == []


@pytest.mark.parametrize("kind", FULL)
def test_a_store_cannot_be_made_on_a_full_disk_and_can_once_there_is_room(kind: str) -> None:
    with small_disk(kind) as directory, Remote() as writer:
        path = Path(directory, "store")
        for left in (0, 4096, 8192, 64 * 1024, 140 * 1024, 280 * 1024, 420 * 1024):
            filler = ballast(directory, max(_free(directory) - left, 0))
            try:
                writer.open(path)
                writer.put(KEY, b"value")
            except DiskFull:
                pass
            else:
                raise AssertionError(f"a segment of 4 MiB fits into {left} bytes")
            writer.call("close_all")
            filler.unlink()
        writer.open(path)
        writer.put(KEY, b"value")
        assert writer.verify() == []


@on_tmpfs
@on_a_disk
def test_a_disk_that_is_full_where_its_file_system_does_not_expect_it() -> None:
    """A thin disk: what was written is refused when it is written back, at a sync. A sync of frames that fails puts
    the store out of use (what of it is on the disk is not known); a new segment that cannot be filled does not."""
    with LoopDisk("ext4", size_mib=256, real_mib=40) as disk:
        path = Path(disk.directory, "store")
        with Remote() as writer:
            writer.open(path)
            ledger = Ledger(writer, path)
            failed = None
            for _ in range(5000):
                try:
                    ledger.commit(60_000)
                except (DiskFull, CommitUnknown, StoreFailed) as error:
                    failed = error
                    break
            assert failed is not None
            writer.kill()
        disk.unplug()
        disk.grow(200)
        disk.plug()
        with Remote() as other:
            other.open(path)
            ledger.remote = other
            ledger.check()
            ledger.commit(60_000)
            ledger.check()
            assert other.verify() == []
            other.close()


def _free(directory: str) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_bsize


# --- a directory that is deleted --------------------------------------------------------------


def test_a_directory_deleted_while_it_is_open(tmp_path: Path) -> None:
    """Nothing crashes, nothing is made again; at the next roll, or at the end, the open store is done with."""
    path = tmp_path / "store"
    engine = EmbeddedEngine.open(path, background=False)
    engine.transact(lambda tx: tx.put(KEY, b"value"))
    shutil.rmtree(path)
    with engine.read() as view:
        assert view.get(KEY) == b"value"
    with pytest.raises(StoreFailed):
        for number in range(40):
            engine.transact(lambda tx, number=number: tx.put(keys.encode("n", number), bytes(300_000)))  # type: ignore[misc]
    engine.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreNotFound):
        EmbeddedEngine.open(path, create=False)


def test_closing_a_store_whose_directory_was_deleted(tmp_path: Path) -> None:
    path = tmp_path / "store"
    engine = EmbeddedEngine.open(path)
    engine.transact(lambda tx: tx.put(KEY, b"value"))
    shutil.rmtree(path)
    engine.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("whole", [True, False])
def test_what_took_the_place_of_a_deleted_store_is_another_store(tmp_path: Path, whole: bool) -> None:
    """It has the directory's inode, or may get it, by which a process knew what it has open: commits to the new store
    went into the deleted files of the old one, and were confirmed."""
    path = tmp_path / "store"
    old = EmbeddedEngine.open(path)
    old.transact(lambda tx: tx.put(KEY, b"old"))
    shutil.rmtree(path)
    if not whole:
        path.mkdir()
    new = EmbeddedEngine.open(path)
    assert new is not old
    assert new.transact(lambda tx: tx.get(KEY)).value is None
    new.transact(lambda tx: tx.put(KEY, b"new"))
    old.close()
    assert EmbeddedEngine.open(path) is new  # the end of the old one has not unlisted it
    new.close()
    new.close()
    last = EmbeddedEngine.open(path)
    assert last.transact(lambda tx: tx.get(KEY)).value == b"new"
    last.close()


def test_a_directory_emptied_while_it_is_open_is_free_for_another_store(tmp_path: Path) -> None:
    """As where the directory itself is a mount point: its inode stays the same."""
    path = tmp_path / "store"
    old = EmbeddedEngine.open(path)
    old.transact(lambda tx: tx.put(KEY, b"old"))
    for each in path.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    new = EmbeddedEngine.open(path)
    assert new is not old
    new.transact(lambda tx: tx.put(KEY, b"new"))
    with pytest.raises(StoreFailed, match="were deleted"):
        old.transact(lambda tx: tx.put(KEY, b"into deleted files"))
    old.close()
    assert EmbeddedEngine.open(path) is new
    new.close()
    new.close()
    with Remote() as other:
        other.open(path)
        assert other.get(KEY) == b"new"


# --- a directory that is copied -----------------------------------------------------------------

KEYS = 60


class Copied:
    """A store of which every state is known, and copies of it that are not of one moment."""

    def __init__(self, home: Path, rng: random.Random) -> None:
        self.store, self.copy = home / "store", home / "copy"
        self.rng = rng
        self.states: list[dict[bytes, bytes]] = [{}]
        self.engine = EmbeddedEngine.open(self.store, background=False)

    def write(self, *, fold: bool) -> None:
        """Change some keys, all of them together."""
        number = len(self.states)
        writes = {keys.encode("k", key): b"%d " % number * 20 for key in self.rng.sample(range(KEYS), 12)}
        writes[keys.encode("k", "number")] = b"%d" % number

        def fn(tx: Tx) -> None:
            for key, value in writes.items():
                tx.put(key, value)

        self.engine.transact(fn)
        self.states.append(self.states[-1] | writes)
        if fold:
            self.engine.fold()

    def copy_while_it_is_written(self, order: Sequence[str]) -> None:
        self.copy.mkdir()
        for name in order:
            source, target = self.store / name, self.copy / name
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                self._copy_in_pieces(source, target)
            self.write(fold=self.rng.random() < 0.5)

    def _copy_in_pieces(self, source: Path, target: Path) -> None:
        """With folds in between: the new content of pages that are used again is copied with the old meta page."""
        with source.open("rb") as reading, target.open("wb") as writing:
            writing.write(reading.read(8192))
            for _ in range(self.rng.randint(0, 3)):
                writing.write(reading.read(self.rng.randrange(1, 20) * 4096))
                for _ in range(self.rng.randint(0, 3)):
                    self.write(fold=True)
            writing.write(reading.read())

    def outcome(self, at_least: int) -> str:
        try:
            engine = EmbeddedEngine.open(self.copy, background=False)
        except CorruptionError:
            return "refused"
        try:
            with engine.read() as view:
                there = dict(view.scan(keys.encode("k"), keys.end_of(keys.encode("k"))))
        except CorruptionError:
            return "refused"
        finally:
            engine.close()
        number = int(there[keys.encode("k", "number")])
        assert there == self.states[number], f"a copy opened as a mixture of states around {number}"
        assert number >= at_least, f"a copy lost what was confirmed before it began: {number} of {at_least}"
        return "right"


@pytest.mark.parametrize("order", list(itertools.permutations(["base.mdb", "control", "wal"])))
def test_a_store_copied_while_it_is_open(tmp_path: Path, order: tuple[str, ...]) -> None:
    """It opens as the store was, or is refused as damaged; it never opens as anything else."""
    copied = Copied(tmp_path, random.Random(repr(order)))
    for _ in range(30):
        copied.write(fold=True)
    outcomes = Counter[str]()
    for _ in range(30):
        at_least = len(copied.states) - 1
        copied.copy_while_it_is_written(["FORMAT", *order])
        outcomes[copied.outcome(at_least)] += 1
        shutil.rmtree(copied.copy)
    copied.engine.close()
    assert outcomes["right"] + outcomes["refused"] == 30
    assert outcomes["right"] or order[-1] != "wal"
