"""Opening: who may, what is refused and how, and that a refusal leaves everything as it was."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash.remote import Died, Remote
from one_value import KEY, get, put

from agentstore.codec.crc import crc32c
from agentstore.engine import keys, process
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.files import Files
from agentstore.engine.lmdbfile import damage_of
from agentstore.engine.segment import FORMAT_VERSION
from agentstore.errors import (
    CorruptionError,
    FormatTooNew,
    NotAStore,
    StoreAlreadyOpen,
    StoreClosed,
    StoreInUse,
    StoreNotFound,
    StorePermissionError,
    UnsupportedPlatform,
)


def open_with(path: Path, options: dict[str, bool]) -> EmbeddedEngine:
    return EmbeddedEngine.open(
        path,
        create=options.get("create", True),
        readonly=options.get("readonly", False),
        background=options.get("background", True),
    )


def contents(directory: Path) -> dict[str, bytes | None]:
    """Every path in `directory` and what it holds."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A store that was closed, with one value in it."""
    path = tmp_path / "store"
    engine = EmbeddedEngine.open(path)
    put(engine, KEY, b"value")
    engine.close()
    return path


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A store whose process was killed: one value is in base, 20 more are in two segments of its log only."""
    path = tmp_path / "store"
    with Remote() as other:
        other.open(path, background=False)
        other.put(KEY, b"value")
        other.close()
        other.open(path, background=False)
        other.call("fill", "n", 400_000, 20)
        other.kill()
    assert len(list((path / "wal").glob("*.seg"))) >= 2
    return path


# --- a second open in the same process ---------------------------------------------------


def test_a_second_open_in_a_process_shares_the_first(tmp_path: Path) -> None:
    first = EmbeddedEngine.open(tmp_path / "store")
    second = EmbeddedEngine.open(tmp_path / "store")
    assert second is first
    first.close()
    assert put(second, KEY, b"value") == 1  # one of two users has closed it
    second.close()
    with pytest.raises(StoreClosed):
        put(second, KEY, b"value")
    first.close()  # idempotent


@pytest.mark.parametrize("options", [{"readonly": True}, {"background": False}])
def test_a_second_open_with_other_options_is_refused(tmp_path: Path, options: dict[str, bool]) -> None:
    first = EmbeddedEngine.open(tmp_path / "store")
    with pytest.raises(StoreAlreadyOpen, match="close it first"):
        open_with(tmp_path / "store", options)
    put(first, KEY, b"value")
    first.close()
    last = open_with(tmp_path / "store", options)
    assert get(last, KEY) == b"value"
    last.close()


def test_another_name_of_the_same_directory_is_the_same_store(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = closed.parent / "link"
    link.symlink_to(closed)
    first = EmbeddedEngine.open(closed)
    assert EmbeddedEngine.open(link) is first
    monkeypatch.chdir(closed.parent)
    assert EmbeddedEngine.open("store") is first
    for _ in range(3):
        first.close()


# --- what is not ours ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["notes.txt", "FORMAT", "base.mdb.bak", ".hidden"])
def test_a_foreign_directory_is_refused_and_nothing_is_created_in_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"somebody else's")
    before = contents(tmp_path)
    with pytest.raises(NotAStore, match="another directory"):
        EmbeddedEngine.open(tmp_path)
    with pytest.raises(NotAStore, match="another directory"):
        EmbeddedEngine.open(tmp_path, readonly=True)
    assert contents(tmp_path) == before


def test_a_file_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotAStore, match="not a directory"):
        EmbeddedEngine.open(tmp_path / "file")


@pytest.mark.parametrize("options", [{"create": False}, {"readonly": True}])
def test_nothing_is_created_if_that_was_not_asked_for(tmp_path: Path, options: dict[str, bool]) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing", tmp_path / "empty"):
        with pytest.raises(StoreNotFound):
            open_with(path, options)
    assert contents(tmp_path) == {"empty": None}


def test_a_network_file_system_is_refused_and_nothing_is_created_on_it(tmp_path: Path) -> None:
    class Network(Files):
        def file_system(self, path: str) -> str:
            return "nfs4"

    with pytest.raises(UnsupportedPlatform, match="nfs4"):
        EmbeddedEngine.open(tmp_path / "a" / "store", files=Network())
    assert contents(tmp_path) == {}


def test_the_file_system_is_known_by_the_mount_that_holds_the_path(tmp_path: Path) -> None:
    reported = subprocess.run(
        ["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.strip()
    known = Files().file_system(str(tmp_path))
    assert known
    assert reported.startswith(known[:3]) or known in reported or (known, reported) == ("overlay", "overlayfs")
    assert Files().file_system(str(tmp_path / "not" / "there")) == known
    assert Files().file_system("/proc/self") == "proc"


# --- formats ---------------------------------------------------------------------------------


def test_a_newer_format_is_refused_with_what_to_do(closed: Path) -> None:
    raw = struct.pack("<16sI16s", b"agentstore store", FORMAT_VERSION + 1, bytes(16))
    (closed / "FORMAT").write_bytes(raw + struct.pack("<I", crc32c(raw)))
    before = contents(closed)
    for options in ({}, {"readonly": True}):
        with pytest.raises(FormatTooNew, match="install a newer agentstore"):
            open_with(closed, options)
    assert contents(closed) == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[:20],
        lambda raw: raw[:17] + bytes([raw[17] ^ 1]) + raw[18:],
        lambda raw: raw[:-1] + bytes([raw[-1] ^ 128]),
    ],
)
def test_a_damaged_format_is_damage(closed: Path, spoil: Callable[[bytes], bytes]) -> None:
    (closed / "FORMAT").write_bytes(spoil((closed / "FORMAT").read_bytes()))
    before = contents(closed)
    with pytest.raises(CorruptionError, match="FORMAT"):
        EmbeddedEngine.open(closed)
    assert contents(closed) == before


@pytest.mark.parametrize("garbage", [b"", b"garbage", bytes(40), b"agentstore!store" + bytes(24)])
def test_garbage_in_format_is_refused_and_touches_nothing(closed: Path, garbage: bytes) -> None:
    (closed / "FORMAT").write_bytes(garbage)
    before = contents(closed)
    with pytest.raises((NotAStore, CorruptionError), match="FORMAT"):
        EmbeddedEngine.open(closed)
    assert contents(closed) == before


def test_a_store_without_format_is_damage_and_is_not_made_again(closed: Path) -> None:
    format_file = (closed / "FORMAT").read_bytes()
    (closed / "FORMAT").unlink()
    # Who does not ask for a new store is not told that there is none: somebody might clear the directory.
    for options in ({}, {"create": False}, {"readonly": True}):
        with pytest.raises(CorruptionError, match="FORMAT is missing"):
            open_with(closed, options)
    (closed / "FORMAT").write_bytes(format_file)
    engine = EmbeddedEngine.open(closed)
    assert get(engine, KEY) == b"value"
    engine.close()


# --- missing files ------------------------------------------------------------------------------


def refused_until_put_back(store: Path, name: str, match: str) -> None:
    """Without `name` the store is damaged, with it all is there."""
    away = store.parent / "away"
    (store / name).rename(away)
    for options in ({}, {"readonly": True}):
        with pytest.raises(CorruptionError, match=match):
            open_with(store, options)
        assert not (store / name).exists()
    away.rename(store / name)
    engine = EmbeddedEngine.open(store)
    assert get(engine, KEY) == b"value"
    assert engine.verify() == []
    engine.close()


def test_base_gone_from_a_closed_store(closed: Path) -> None:
    refused_until_put_back(closed, "base.mdb", "base.mdb is missing")


def test_base_gone_from_a_killed_store(killed: Path) -> None:
    refused_until_put_back(killed, "base.mdb", "base.mdb is missing")


def test_the_wal_directory_gone_from_a_closed_store(closed: Path) -> None:
    refused_until_put_back(closed, "wal", "wal is missing")


def test_the_wal_directory_gone_from_a_killed_store(killed: Path) -> None:
    refused_until_put_back(killed, "wal", "wal is missing")


def test_any_one_segment_gone_from_a_killed_store(killed: Path) -> None:
    for segment in sorted((killed / "wal").glob("*.seg")):
        with_all = contents(killed)
        away = killed.parent / "away"
        segment.rename(away)
        with pytest.raises(CorruptionError, match=r"segment|the log"):
            EmbeddedEngine.open(killed)
        away.rename(segment)
        assert set(contents(killed)) == set(with_all)
    engine = EmbeddedEngine.open(killed)
    with engine.read() as view:
        assert len(list(view.scan(keys.encode("n"), keys.end_of(keys.encode("n"))))) == 20
    engine.close()


def test_a_segment_gone_that_base_holds_already_is_not_missed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Remote() as other:
        other.open(store, background=False)
        other.call("fill", "n", 400_000, 30)
        other.call("fold")
        other.put(KEY, b"value")
        other.kill()
    segments = sorted((store / "wal").glob("*.seg"), key=lambda path: path.stat().st_mtime_ns)
    assert len(segments) >= 2
    segments[0].unlink()
    engine = EmbeddedEngine.open(store)
    assert get(engine, KEY) == b"value"
    assert engine.verify() == []
    engine.close()


@pytest.mark.parametrize("name", ["tail.mdb", "tail.mdb-lock", "base.mdb-lock", "control", "lock", "lock.sync"])
def test_files_that_hold_no_data_may_be_gone_from_a_killed_store(killed: Path, name: str) -> None:
    (killed / name).unlink()
    engine = EmbeddedEngine.open(killed)
    assert get(engine, KEY) == b"value"
    assert get(engine, keys.encode("n", 19)) is not None
    assert engine.verify() == []
    engine.close()


def test_the_base_of_another_store_is_refused(closed: Path, tmp_path: Path) -> None:
    engine = EmbeddedEngine.open(tmp_path / "other")
    put(engine, KEY, b"another value")
    engine.close()
    shutil.copy(tmp_path / "other" / "base.mdb", closed / "base.mdb")
    with pytest.raises(CorruptionError, match="another store"):
        EmbeddedEngine.open(closed)


# --- rights ---------------------------------------------------------------------------------------

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def nobody(tmp_path: Path) -> Iterator[Remote]:
    """A process of a user who owns nothing here but may look into `tmp_path`."""
    uid = NOBODY if os.geteuid() == 0 else None
    temporary = Path(tempfile.gettempdir()).resolve()
    for parent in [tmp_path, *tmp_path.parents]:
        if uid is not None and temporary in parent.parents:
            parent.chmod(0o755)
    with Remote(uid=uid) as other:
        yield other


def give(path: Path, uid: int) -> None:
    if os.geteuid() == 0:
        for each in [path, *path.rglob("*")]:
            os.chown(each, uid, uid)


@as_root
def test_the_store_of_somebody_else(closed: Path, nobody: Remote) -> None:
    for options in ({}, {"create": False}, {"readonly": True}):
        with pytest.raises(StorePermissionError, match="no permission"):
            nobody.open(closed, **options)


@as_root
def test_a_store_behind_a_directory_that_may_not_be_entered(closed: Path, nobody: Remote) -> None:
    """`exists` took "may not look" for "is not there": StoreNotFound, for a store that is there."""
    outer = closed.parent / "outer"
    outer.mkdir(mode=0o700)
    closed.rename(outer / "store")
    for options in ({}, {"create": False}, {"readonly": True}):
        with pytest.raises(StorePermissionError, match="no permission"):
            nobody.open(outer / "store", **options)


def test_a_directory_in_which_nothing_may_be_created(tmp_path: Path, nobody: Remote) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    outer.chmod(0o555)
    with pytest.raises(StorePermissionError, match="no permission"):
        nobody.open(outer / "store")
    assert list(outer.iterdir()) == []


@pytest.mark.parametrize("options", [{}, {"readonly": True}])
def test_a_read_only_directory(closed: Path, nobody: Remote, options: dict[str, bool]) -> None:
    """It needs write access also to read: for the locks."""
    give(closed, NOBODY)
    before = contents(closed)
    (closed / "wal").chmod(0o555)
    for path in closed.iterdir():
        path.chmod(0o555 if path.is_dir() else 0o444)
    closed.chmod(0o555)
    with pytest.raises(StorePermissionError, match="no permission"):
        nobody.open(closed, **options)
    closed.chmod(0o700)
    for path in closed.iterdir():
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert contents(closed) == before
    nobody.open(closed, **options)
    assert nobody.get(KEY) == b"value"
    nobody.close()


@pytest.mark.parametrize("name", ["FORMAT", "base.mdb", "wal", "control", "lock", "lock.sync"])
def test_one_file_without_permission(closed: Path, nobody: Remote, name: str) -> None:
    """It is a question of rights, not of damage."""
    give(closed, NOBODY)
    (closed / name).chmod(0)
    with pytest.raises(StorePermissionError, match="no permission"):
        nobody.open(closed)
    (closed / name).chmod(0o700 if name == "wal" else 0o600)
    nobody.open(closed)
    assert nobody.get(KEY) == b"value"
    nobody.close()


def test_a_store_is_its_owners_alone(closed: Path) -> None:
    assert closed.stat().st_mode & 0o777 == 0o700
    engine = EmbeddedEngine.open(closed)
    put(engine, KEY, b"value")
    modes = {path.name: path.stat().st_mode & 0o777 for path in closed.rglob("*")}
    assert {name: oct(mode) for name, mode in modes.items() if mode != (0o700 if name == "wal" else 0o600)} == {}
    engine.close()


def test_a_disk_that_cannot_be_read_is_not_damage() -> None:
    """An EIO while base was walked at an open was reported as CorruptionError: "keep a copy of the directory"."""
    with pytest.raises(OSError, match="Invalid argument"):
        damage_of("/proc/self/mem")  # a file that no read at this place succeeds on


# --- an interrupted creation -------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after", "inside"])
def test_creation_killed_at_every_call(tmp_path: Path, when: str) -> None:
    """Whatever a killed creation left, the next open makes a store of it."""
    for nth in range(1, 1000):
        path = tmp_path / str(nth)
        with Remote() as other:
            other.call("use", "kill", nth, when)
            try:
                other.open(path, background=False)
            except Died as died:
                assert died.status == -signal.SIGKILL
            else:
                if not other.call("struck"):
                    break
                other.kill()  # the call that it was to die after failed by itself
        engine = EmbeddedEngine.open(path, background=False)
        assert put(engine, KEY, b"value") == 1
        engine.close()
        engine = EmbeddedEngine.open(path, background=False)
        assert get(engine, KEY) == b"value"
        assert engine.verify() == []
        engine.close()
    assert nth > 40


def test_creation_by_several_processes_at_once(tmp_path: Path) -> None:
    """One makes it, the others join; all of them commit to the same store."""
    others = [Remote() for _ in range(4)]
    try:
        for round_number in range(5):
            for other in others:
                other.begin("open", str(tmp_path / str(round_number)), {})
            for other in others:
                other.finish()
            for number, other in enumerate(others):
                other.put(keys.encode(number), b"value")
            for other in others:
                assert [other.get(keys.encode(number)) for number in range(4)] == [b"value"] * 4
            for other in others:
                other.close()
    finally:
        for other in others:
            other.__exit__(None, None, None)


# --- another pid namespace ---------------------------------------------------------------------

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def _can_unshare() -> bool:
    try:
        return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


in_containers = pytest.mark.skipif(not _can_unshare(), reason="unshare --pid needs root here")


@in_containers
def test_a_process_of_another_pid_namespace_is_refused_while_the_store_is_open(closed: Path) -> None:
    engine = EmbeddedEngine.open(closed)
    with Remote(*CONTAINER) as other:
        for options in ({}, {"readonly": True}):
            with pytest.raises(StoreInUse, match="another pid namespace"):
                other.open(closed, **options)
        put(engine, KEY, b"newer")  # the refusal hurt nobody
        engine.close()
        other.open(closed)
        assert other.get(KEY) == b"newer"
        with pytest.raises(StoreInUse, match="another pid namespace"):
            EmbeddedEngine.open(closed)
        other.put(KEY, b"newest")
    engine = EmbeddedEngine.open(closed)
    assert get(engine, KEY) == b"newest"
    engine.close()


@in_containers
def test_two_containers_cannot_share_a_store_and_can_take_turns(closed: Path) -> None:
    with Remote(*CONTAINER) as first, Remote(*CONTAINER) as second:
        first.open(closed)
        with pytest.raises(StoreInUse, match="another pid namespace"):
            second.open(closed)
        first.put(KEY, b"by the first")
        first.kill()
        second.open(closed)
        assert second.get(KEY) == b"by the first"
        second.close()


@in_containers
def test_two_processes_of_one_container_share_a_store(closed: Path) -> None:
    with Remote(*CONTAINER) as first:
        first.open(closed)
        answers = first.call(
            "fork_and", ["open", str(closed), {}], ["put", {"bytes": KEY.hex()}, {"bytes": b"2".hex()}]
        )
        assert "error" not in answers[0]
        assert first.get(KEY) == b"2"
        first.close()


def test_an_engine_can_be_closed_while_its_background_drops_it(tmp_path: Path) -> None:
    """The background saw that another process had poisoned the store and waited for `process.opening`, which a thread
    held that closed the store and waited for the background: both for ever. A fork at that moment likewise."""
    engine = EmbeddedEngine.open(tmp_path / "store")
    put(engine, KEY, b"1")
    with process.opening:
        engine._parts.poison(OSError(5, "another process"), "its disk")
        engine.poke()
        # Time for the background to get where it waited; with the fault gone it waits nowhere.
        signal.sigtimedwait([], 1.5)
        assert engine._background is not None
        stopping = threading.Thread(target=engine._background.stop)
        stopping.start()
        stopping.join(30)
        assert not stopping.is_alive()
    engine.close()
    engine = EmbeddedEngine.open(tmp_path / "store")
    assert get(engine, KEY) == b"1"
    engine.close()


def test_what_cannot_be_looked_at_is_not_taken_for_missing(tmp_path: Path) -> None:
    """An EIO when FORMAT was looked for read as "there is no FORMAT": the store would have been made anew."""
    assert not Files().exists(str(tmp_path / "missing"))
    assert not Files().exists(str(tmp_path / "missing" / "below"))
    with pytest.raises(OSError, match="too long"):
        Files().exists(str(tmp_path / ("x" * 300)))
