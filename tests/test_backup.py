"""A backup holds everything that was confirmed before it began, or does not exist; a restore is the same store."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from ops_lab import content, fill, in_child

from agentstore import Append, BackupFailed, Set, Store
from agentstore.backup import restore
from agentstore.engine.files import Files, default_files, set_default_files
from agentstore.errors import (
    AgentStoreError,
    CorruptionError,
    DiskFull,
    NotAStore,
    StoreNotFound,
    UnsupportedPlatform,
)
from agentstore.testing.faults import CALLS, WRITING_CALLS, Error, Fault, FaultyFiles, Kill
from agentstore.tools.cli import app

WRITER = Path(__file__).parent / "backup_writer.py"


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    path = tmp_path / "agents"
    with Store.open(path, background=False) as store:
        fill(store)
    return path


@pytest.fixture
def real_files() -> Iterator[None]:
    """Whatever a test puts in the place of the system calls is taken away again."""
    before = default_files()
    yield
    set_default_files(before)


def opened(path: Path) -> Store:
    return Store.open(path, create=False, background=False)


def copy(source: Path, dest: Path) -> None:
    with Store.open(source, create=False, readonly=True, background=False) as store:
        store.backup(dest)


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


# --- what is in it --------------------------------------------------------------------


def test_a_backup_is_the_store(filled: Path, tmp_path: Path) -> None:
    with opened(filled) as store:
        copied = store.backup(tmp_path / "copy")
        wanted = content(store)
    assert (copied.path, copied.threads) == (str(tmp_path / "copy"), len(wanted))
    assert copied.bytes == (tmp_path / "copy" / "base.mdb").stat().st_size
    assert names(tmp_path / "copy") == ["FORMAT", "base.mdb", "wal"]
    assert (filled / "FORMAT").read_bytes() == (tmp_path / "copy" / "FORMAT").read_bytes()  # the uuid, too
    with opened(tmp_path / "copy") as store:
        assert store.check() == []
        assert content(store) == wanted
        assert store.thread("main").commit(Set("after", 1)).lsn == copied.lsn + 1


def test_it_is_private(filled: Path, tmp_path: Path) -> None:
    copy(filled, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700
    for name in ("FORMAT", "base.mdb"):
        assert (tmp_path / "copy" / name).stat().st_mode & 0o777 == 0o600


def test_an_empty_store_and_an_empty_destination(tmp_path: Path) -> None:
    Store.open(tmp_path / "agents").close()
    (tmp_path / "copy").mkdir()
    copy(tmp_path / "agents", tmp_path / "copy")
    with opened(tmp_path / "copy") as store:
        assert list(store.threads()) == []


def test_a_store_that_was_not_closed(tmp_path: Path) -> None:
    path = tmp_path / "agents"

    def victim() -> None:
        store = Store.open(path, background=False)
        store.thread("t").commit(Set("step", 1))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(victim) == -9
    copy(path, tmp_path / "copy")
    with opened(tmp_path / "copy") as store:
        assert store.thread("t").load() == {"step": 1}


def test_everything_confirmed_before_is_there_while_processes_write(tmp_path: Path) -> None:
    path = tmp_path / "agents"
    Store.open(path).close()
    writers = [
        subprocess.Popen([sys.executable, str(WRITER), str(path), name], stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    newest = [-1, -1]

    def listen(which: int) -> None:
        out = writers[which].stdout
        assert out is not None
        for line in out:
            newest[which] = int(line)

    listeners = [threading.Thread(target=listen, args=(which,)) for which in (0, 1)]
    try:
        for each in listeners:
            each.start()
        for number in range(5):
            while min(newest) < 50 * (number + 1):
                assert all(writer.poll() is None for writer in writers)
            confirmed = [*newest]
            copy(path, tmp_path / f"copy-{number}")
            with opened(tmp_path / f"copy-{number}") as store:
                assert store.check() == []
                for name, least in zip(("one", "two"), confirmed, strict=True):
                    numbers = store.thread(name).load()["numbers"]
                    assert numbers == [*range(len(numbers))] and len(numbers) > least
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
        for each in listeners:
            each.join()
    with opened(path) as store:
        assert store.check() == []


def test_commits_go_on_in_the_same_process(filled: Path, tmp_path: Path) -> None:
    """A backup holds no lock that a commit waits for."""
    with opened(filled) as store:
        steps: list[str] = []

        def on_step(step: str) -> None:
            steps.append(step)
            store.thread("main").commit(Append("steps", step))

        store.backup(tmp_path / "copy", on_step=on_step)
        assert store.thread("main").load()["steps"] == steps
    with opened(tmp_path / "copy") as store:
        assert store.thread("main").load()["steps"] == ["copying"]


def test_a_source_on_a_read_only_file_system(filled: Path, tmp_path: Path, real_files: None) -> None:
    class Frozen(Files):
        def read_only_file_system(self, path: str) -> bool:
            return path == str(filled)

    set_default_files(Frozen())
    copy(filled, tmp_path / "copy")
    set_default_files(Files())
    with opened(filled) as store, opened(tmp_path / "copy") as other:
        assert content(store) == content(other)


# --- dying and failing ----------------------------------------------------------------


def test_a_backup_killed_at_any_system_call_leaves_nothing_or_all(filled: Path, tmp_path: Path) -> None:
    with opened(filled) as store:
        wanted = content(store)
    parent = tmp_path / "backups"
    parent.mkdir()
    dest = parent / "copy"
    whole = n = 0
    while True:
        n += 1
        files = FaultyFiles(Fault(n, Kill("inside" if n % 2 else "before"), calls=CALLS))
        status = in_child(lambda: copy(filled, dest), files)
        if dest.exists():
            with opened(dest) as store:
                assert store.check() == []
                assert content(store) == wanted
            shutil.rmtree(dest)
            whole += 1
        if status == 0:
            break
        assert status == -9
        assert set(names(parent)) <= {".copy.partial"}
        if n % 10 == 0:
            copy(filled, dest)
            assert names(parent) == ["copy"]
            shutil.rmtree(dest)
    assert n > 80 and whole > 1
    copy(filled, dest)
    assert names(parent) == ["copy"]
    with opened(filled) as store:
        assert store.check() == [] and content(store) == wanted


@pytest.mark.parametrize(("code", "calls"), [(errno.ENOSPC, WRITING_CALLS), (errno.EIO, CALLS)])
def test_an_error_at_any_system_call_is_typed_and_leaves_nothing(
    filled: Path, tmp_path: Path, code: int, calls: frozenset[str], real_files: None
) -> None:
    parent = tmp_path / "backups"
    parent.mkdir()
    dest = parent / "copy"
    failed = n = 0
    while True:
        n += 1
        with opened(filled) as store:
            files = FaultyFiles(Fault(n, Error(code, 0.5), calls=calls))
            set_default_files(files)
            try:
                store.backup(dest)
            except AgentStoreError:
                failed += 1
            finally:
                struck = files.struck
                files.arm(None)
                set_default_files(Files())
        if struck is None:
            break
        if dest.exists():  # only the last sync of the directory comes behind the rename, and what the check cleans up
            with opened(dest) as copied:
                assert copied.check() == []
            shutil.rmtree(dest)
        copy(filled, dest)
        assert names(parent) == ["copy"]
        shutil.rmtree(dest)
    assert failed > 15 and n > failed


def test_a_full_disk_inside_the_copy_of_the_data_file(filled: Path, tmp_path: Path) -> None:
    """LMDB writes that file itself, past the seam: here the kernel refuses its bytes."""
    parent = tmp_path / "backups"
    parent.mkdir()
    with opened(filled) as store:
        store.thread("big").commit(Set("data", os.urandom(1_000_000)))

    def victim() -> None:
        with opened(filled) as store:
            store.backup(parent / "first")
            shutil.rmtree(parent / "first")
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
            with pytest.raises(BackupFailed, match="File too large"):
                store.backup(parent / "copy")

    assert in_child(victim) == 0
    assert names(parent) == []


def test_too_little_room_is_said_before_anything_is_written(filled: Path, tmp_path: Path) -> None:
    class Full(Files):
        def free_bytes(self, path: str) -> int:
            return 1000

    with opened(filled) as store:
        store._engine._files = Full()
        with pytest.raises(DiskFull, match=r"needs [\d,]+ bytes and 1,000 are free"):
            store.backup(tmp_path / "copy")
        assert names(tmp_path) == ["agents"]


# --- where it may go --------------------------------------------------------------------


def test_destinations_that_are_refused(filled: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "a file").touch()
    before = names(tmp_path)
    with opened(filled) as store:
        for dest, why in [
            (tmp_path / "full", "not empty"),
            (tmp_path / "a file", "not a directory"),
            (filled, "inside the store"),
            (filled / "copy", "inside the store"),
            (tmp_path / "no" / "copy", "there is no directory"),
            (tmp_path / ("n" * 255), "name too long"),
            (tmp_path / "a file" / "copy", "there is no directory"),
        ]:
            with pytest.raises(BackupFailed, match=f"(?i){why}"):
                store.backup(dest)
    assert names(tmp_path) == before


def test_a_link_to_an_empty_directory(filled: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    copy(filled, tmp_path / "link")
    assert names(tmp_path / "real") == ["FORMAT", "base.mdb", "wal"] and (tmp_path / "link").is_symlink()


def test_somebody_elses_directory_of_the_partials_name_is_left_alone(filled: Path, tmp_path: Path) -> None:
    (tmp_path / ".copy.partial").mkdir()
    (tmp_path / ".copy.partial" / "thesis.txt").touch()
    with pytest.raises(BackupFailed, match=r"thesis\.txt"):
        copy(filled, tmp_path / "copy")
    assert names(tmp_path / ".copy.partial") == ["thesis.txt"]


def test_two_backups_to_one_place_at_once(filled: Path, tmp_path: Path) -> None:
    with opened(filled) as store:
        failures: list[str] = []

        def on_step(step: str) -> None:
            if step == "checking the copy":
                with pytest.raises(BackupFailed, match="another process makes a copy") as failure:
                    store.backup(tmp_path / "copy")
                failures.append(str(failure.value))

        store.backup(tmp_path / "copy", on_step=on_step)
        assert len(failures) == 1
    with opened(tmp_path / "copy") as store:
        assert store.check() == []


def test_a_destination_that_is_taken_meanwhile_is_left_alone(filled: Path, tmp_path: Path) -> None:
    with opened(filled) as store:

        def on_step(step: str) -> None:
            if step == "giving it its name":
                (tmp_path / "copy").mkdir()
                (tmp_path / "copy" / "mine").touch()

        with pytest.raises(BackupFailed, match="made by somebody else meanwhile"):
            store.backup(tmp_path / "copy", on_step=on_step)
    assert names(tmp_path) == ["agents", "copy"]


def test_a_network_file_system_is_refused(filled: Path, tmp_path: Path, real_files: None) -> None:
    class Remote(Files):
        def file_system(self, path: str) -> str:
            return "nfs4"

    with opened(filled) as store:
        set_default_files(Remote())
        with pytest.raises(UnsupportedPlatform, match="nfs4"):
            store.backup(tmp_path / "copy")
    assert names(tmp_path) == ["agents"]


def test_a_damaged_store_gives_no_backup(filled: Path, tmp_path: Path) -> None:
    with opened(filled) as store:
        from agentstore import records

        key = records.ThreadKeys(1).checkpoints + records.int_part(0)
        store._engine.transact(lambda tx: tx.put(key, tx.get(key)[:-1] + b"\x00"))  # type: ignore[index]  # it is there
        with pytest.raises(BackupFailed, match=r"the copy does not pass its check: .*main"):
            store.backup(tmp_path / "copy")
    assert names(tmp_path) == ["agents"]


# --- restoring --------------------------------------------------------------------------


def test_a_restored_store_is_the_store_at_the_time_of_the_backup(filled: Path, tmp_path: Path) -> None:
    with opened(filled) as store:
        wanted = content(store)
        store.backup(tmp_path / "backup")
        store.thread("main").commit(Set("later", True))
    restored = restore(tmp_path / "backup", tmp_path / "restored")
    with opened(tmp_path / "restored") as store:
        assert store.check() == []
        assert content(store) == wanted and restored.threads == len(wanted)
        decision = store.thread("main").decision
        assert decision is not None
        effect = store.thread("main").effect(
            decision=decision, index=0, tool="tool-0", arguments={"n": 0}, rule="query"
        )
        assert effect.done  # the same key: the tool is not called again
    restore(tmp_path / "backup", tmp_path / "once more")


def test_a_damaged_backup_is_not_restored(filled: Path, tmp_path: Path) -> None:
    copy(filled, tmp_path / "backup")
    data = (tmp_path / "backup" / "base.mdb").read_bytes()
    refused = 0
    for at in range(8192, len(data), 997):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        (tmp_path / "backup" / "base.mdb").write_bytes(damaged)
        try:
            restore(tmp_path / "backup", tmp_path / "restored")
        except (BackupFailed, CorruptionError):
            refused += 1
            assert not (tmp_path / "restored").exists()
        else:
            shutil.rmtree(tmp_path / "restored")  # a byte that nobody needs: free room in a page
        for name in ("control", "lock", "lock.sync", "lock.fold"):
            (tmp_path / "backup" / name).unlink(missing_ok=True)
    assert refused > 5


def test_what_is_no_backup(filled: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound):
        restore(tmp_path / "nothing", tmp_path / "restored")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(NotAStore):
        restore(tmp_path / "other", tmp_path / "restored")
    copy(filled, tmp_path / "backup")
    (tmp_path / "backup" / "base.mdb").unlink()
    with pytest.raises(CorruptionError, match=r"base\.mdb is missing"):
        restore(tmp_path / "backup", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_sizes_say_where_the_bytes_are(filled: Path) -> None:
    with opened(filled) as store:
        store._engine.fold()
        counted = store.sizes(threads=2)
        assert counted.records == store.stats()["base_records"] - 1  # the engine's own
        assert counted.bytes == sum(kind.bytes for kind in counted.kinds.values())
        assert "other" not in counted.kinds
        assert counted.kinds["heads"].records == len([*store.threads()])
        assert counted.kinds["checkpoints"].records == sum(len(store.thread(t).history()) for t in store.threads())
        assert len(counted.threads) == 2 and counted.threads[0].bytes >= counted.threads[1].bytes
        everything = store.sizes(threads=1000).threads
        assert {each.thread_id for each in everything} == {*store.threads()}


# --- the commands -------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            app(args=list(arguments), prog_name="agentstore")
        except SystemExit as end:
            status = end.code or 0
    return status, out.getvalue(), err.getvalue()


def test_the_commands(filled: Path, tmp_path: Path) -> None:
    status, out, _ = run("backup", str(filled), str(tmp_path / "backup"))
    assert status == 0 and "every invariant holds" in out
    status, out, _ = run("restore", str(tmp_path / "backup"), str(tmp_path / "restored"), "--json")
    told = json.loads(out)
    assert status == 0 and told["ok"] and told["path"] == str(tmp_path / "restored")
    for arguments in (
        ["backup", str(filled), str(tmp_path / "backup")],
        ["restore", str(tmp_path), str(tmp_path / "x")],
    ):
        status, out, err = run(*arguments)
        assert status == 2 and not out and len(err.splitlines()) == 1 and err.startswith("agentstore: ")


def test_stats_tells_where_the_bytes_are(filled: Path) -> None:
    status, out, _ = run("stats", str(filled), "--threads", "2", "--json")
    told = json.loads(out)
    assert status == 0 and told["record_bytes"] == sum(kind["bytes"] for kind in told["kinds"].values())
    assert len(told["largest_threads"]) == 2
    status, out, _ = run("stats", "--store", str(filled), "--threads", "2")
    assert status == 0 and "checkpoints" in out
    assert "kinds" not in json.loads(run("stats", "--store", str(filled), "--json")[1])
