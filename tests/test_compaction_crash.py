"""The offline job killed, and refused by the disk, at every system call: nothing that stays is lost, and it goes on.

A few random moments here; ``AGENTSTORE_COMPACT_KILLS=200`` makes it so many of each job.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentstore import (
    AgentStoreError,
    Append,
    CheckpointExpired,
    DiskFull,
    Retention,
    Set,
    Splice,
    Store,
    StoreInUse,
    compaction,
    packs,
)
from agentstore.backup import restore
from agentstore.codec import zstd
from agentstore.engine import files as engine_files
from agentstore.engine import job
from agentstore.engine.job import JobLock
from agentstore.testing.faults import CALLS, WRITING_CALLS, Error, Fault, FaultyFiles, Kill
from agentstore.testing.limits import small_limits

KILLS = int(os.environ.get("AGENTSTORE_COMPACT_KILLS", "6"))
RULE = Retention(keep_last=4, keep={"final"})
FINALS = (5, 21)
NAMES = ("a", "b", "gone")

States = dict[str, dict[int, Any]]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compaction, "CONTENT_BYTES_MIN", 1000)
    monkeypatch.setattr(job, "ROOM_BYTES", 1 << 20)
    with small_limits():
        yield


def filled(path: Path, count: int = 30) -> States:
    """A closed store of three threads, one of them deleted."""
    states: States = {}
    with Store.open(path, background=False) as store:
        for name in NAMES:
            thread, state = store.thread(name), {"history": [], "step": -1}
            states[name] = {}
            for n in range(count):
                text = random.Random(f"{name} {n % 7}").randbytes(60).hex()
                thread.commit(
                    Append("history", text), Set("step", n), step=n, reason="final" if n in FINALS else "round"
                )
                state = {"history": [*state["history"], text], "step": n}  # type: ignore[misc]  # a list
                states[name][n] = state
            thread.commit(Splice("history", 0, 10, ["summary"]), reason="summary")
            states[name][count] = state | {"history": ["summary", *state["history"][10:]]}  # type: ignore[index]  # a list
        store.thread("gone").delete()
    del states["gone"]
    return states


def expected(states: States, name: str) -> set[int]:
    return {*FINALS, *sorted(states[name])[-4:]}


def check(path: Path, states: States, *, finished: bool) -> None:
    """Everything that stays is equal, what went is said to be gone, the store is whole."""
    with Store.open(path, background=False) as store:
        assert store.check() == []
        assert list(store.threads()) == sorted(states)
        for name, known in states.items():
            thread = store.thread(name)
            there = {cp.seq for cp in thread.history()}
            assert expected(states, name) <= there <= known.keys()
            assert not finished or there == expected(states, name)
            for seq, state in known.items():
                if seq in there:
                    assert thread.load(at=seq) == state
                else:
                    with pytest.raises(CheckpointExpired):
                        thread.load(at=seq)
    assert {name for name in os.listdir(path) if ".new" in name} == set()


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a fork; its wait status. Exit status 0 if it returned, 1 if it raised one of the store's errors."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            work()
            status = 0
        except (AgentStoreError, OSError) as error:
            status = 1 if isinstance(error, AgentStoreError) else 3
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def job_with(fault: Fault, path: Path) -> Callable[[], object]:
    def work() -> None:
        files = FaultyFiles()
        engine_files.set_default_files(files)
        files.arm(fault)
        compaction.compact(path, retention=RULE, level=3)
        if files.struck is None:
            os._exit(9)  # past the last call

    return work


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, States]:
    path = tmp_path_factory.mktemp("compact") / "store"
    return path, filled(path)


def copy_of(template: Path, path: Path) -> Path:
    """Not with its inode of base: as a store that was copied, it is verified at the first open."""
    shutil.copytree(template, path)
    return path


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_system_call(when: str, template: tuple[Path, States], tmp_path: Path) -> None:
    source, states = template
    for nth in range(1, 2000):
        path = copy_of(source, tmp_path / str(nth))
        status = in_child(job_with(Fault(nth, Kill("before" if when == "before" else "after")), path))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 9
            check(path, states, finished=True)
            break
        check(path, states, finished=False)
        assert compaction.compact(path, retention=RULE, level=3).damaged == []
        check(path, states, finished=True)
        shutil.rmtree(path)
    assert nth > 60


@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize(
    ("number", "calls"), [(errno.ENOSPC, WRITING_CALLS), (errno.EIO, CALLS)], ids=["ENOSPC", "EIO"]
)
def test_refused_at_every_system_call(
    number: int, calls: frozenset[str], for_ever: bool, template: tuple[Path, States], tmp_path: Path
) -> None:
    source, states = template
    refused = 0
    for nth in range(1, 2000):
        path = copy_of(source, tmp_path / str(nth))
        status = in_child(job_with(Fault(nth, Error(number), calls, for_ever), path))
        assert os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, 1, 9), (nth, status)
        refused += os.WEXITSTATUS(status) == 1
        check(path, states, finished=False)
        assert compaction.compact(path, retention=RULE, level=3).damaged == []
        check(path, states, finished=True)
        shutil.rmtree(path)
        if os.WEXITSTATUS(status) == 9:
            break
    assert nth > 20 and refused > 5


def restored(path: Path) -> None:
    """What `backup` made becomes the store that it is a copy of."""
    restore(path.with_name(path.name + ".copy"), path)


def retention_in_use(path: Path) -> None:
    with Store.open(path) as store:
        store.apply_retention(RULE)


def backup(path: Path) -> None:
    with Store.open(path) as store:
        store.backup(path.with_name(path.name + ".copy"))


def killed_at(moment: float, work: Callable[[], object]) -> bool:
    """Run `work` in a fork that is killed after so many seconds; whether it was still at it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(moment)
    os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def duration_of(work: Callable[[], object]) -> float:
    """Seconds that `work` takes in a fork: the moments to die at are taken from these."""
    begin = time.monotonic()
    assert in_child(work) == 0
    return time.monotonic() - begin


def compacted(path: Path) -> None:
    compaction.compact(path, retention=RULE, level=3)


@pytest.mark.parametrize("job_of", [compacted, retention_in_use], ids=lambda each: each.__name__)
def test_killed_at_random_moments(
    job_of: Callable[[Path], None], template: tuple[Path, States], tmp_path: Path
) -> None:
    source, states = template
    longest = duration_of(lambda: job_of(copy_of(source, tmp_path / "first")))
    for kill in range(KILLS):
        path = copy_of(source, tmp_path / str(kill))
        killed_at(random.Random(kill).uniform(0, longest), lambda path=path: job_of(path))  # type: ignore[misc]
        check(path, states, finished=False)
        job_of(path)
        check(path, states, finished=True)
        shutil.rmtree(path)


@pytest.mark.parametrize("job_of", [backup, restored], ids=lambda each: each.__name__)
def test_a_copy_killed_at_random_moments_is_not_there_or_whole(
    job_of: Callable[[Path], None], template: tuple[Path, States], tmp_path: Path
) -> None:
    source, states = template
    ready = copy_of(source, tmp_path / "ready")
    backup(ready)
    copy = tmp_path / "ready.copy"

    def prepared(name: str) -> tuple[Path, Path]:
        """(what the job is given, where its result stands)"""
        path = tmp_path / name
        if job_of is backup:
            return copy_of(source, path), path.with_name(name + ".copy")
        shutil.copytree(copy, path.with_name(name + ".copy"))
        return path, path

    path, _ = prepared("first")
    longest = duration_of(lambda: job_of(path))
    for kill in range(KILLS):
        path, result = prepared(str(kill))
        killed_at(random.Random(kill).uniform(0, longest), lambda path=path: job_of(path))  # type: ignore[misc]
        if not result.exists():
            job_of(path)
        check_unchanged(result, states)
        if job_of is backup:
            check_unchanged(path, states)
        shutil.rmtree(path)
        shutil.rmtree(result, ignore_errors=True)
    assert {each.name for each in tmp_path.iterdir() if "partial" in each.name} == set()


def check_unchanged(path: Path, states: States) -> None:
    """All that there was before any job."""
    with Store.open(path, background=False) as store:
        assert store.check() == []
        for name, known in states.items():
            for seq, state in known.items():
                assert store.thread(name).load(at=seq) == state


def test_packing_at_close_killed_at_every_system_call(tmp_path: Path) -> None:
    source = tmp_path / "source"
    states: dict[str, list[int]] = {name: list(range(20)) for name in NAMES}

    def work(path: Path, fault: Fault) -> Callable[[], object]:
        def run() -> None:
            files = FaultyFiles()
            engine_files.set_default_files(files)
            store = Store.open(path, background=False)
            for name in NAMES:
                for n in states[name]:
                    store.thread(name).commit(Append("history", n))
            files.arm(fault)
            store.close()
            os._exit(9 if files.struck is None else 0)

        return run

    Store.open(source).close()
    for nth in range(1, 2000):
        path = copy_of(source, tmp_path / str(nth))
        status = in_child(work(path, Fault(nth, Kill("after"))))
        for _ in range(2):
            with Store.open(path, background=False) as store:
                assert store.check() == []
                assert {name: store.thread(name).load()["history"] for name in NAMES} == states
        shutil.rmtree(path)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 9
            break
    assert nth > 10


def test_retention_in_use_killed_at_every_system_call(template: tuple[Path, States], tmp_path: Path) -> None:
    source, states = template

    def work(path: Path, fault: Fault) -> Callable[[], object]:
        def run() -> None:
            files = FaultyFiles()
            engine_files.set_default_files(files)
            with Store.open(path, background=False) as store:
                files.arm(fault)
                store.apply_retention(RULE)
                if files.struck is None:
                    os._exit(9)

        return run

    for nth in range(1, 2000):
        path = copy_of(source, tmp_path / str(nth))
        status = in_child(work(path, Fault(nth, Kill("after"))))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 9
            break
        check(path, states, finished=False)
        with Store.open(path, background=False) as store:
            store.apply_retention(RULE)
        check(path, states, finished=True)
        shutil.rmtree(path)
    assert nth > 15


# --- who may run it --------------------------------------------------------------------------

HOLDER = """
import sys
from agentstore import Append, Store
with Store.open(sys.argv[1], create=False) as store:
    thread = store.thread("writer")
    print("open", flush=True)
    for n, line in enumerate(sys.stdin):
        thread.commit(Append("history", n))
        print(n, flush=True)
"""


def test_one_job_at_a_time(template: tuple[Path, States], tmp_path: Path) -> None:
    path = copy_of(template[0], tmp_path / "s")
    with JobLock(str(path)), pytest.raises(StoreInUse, match="another offline job"):
        compaction.compact(path)
    assert compaction.compact(path).damaged == []


def test_not_while_somebody_has_it_open_but_online(template: tuple[Path, States], tmp_path: Path) -> None:
    source, states = template
    path = copy_of(source, tmp_path / "s")
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(StoreInUse, match="--online"):
            compaction.compact(path)
        for n in range(60):
            writer.stdin.write("commit\n")
            writer.stdin.flush()
            if n in (3, 30):
                done = compaction.compact(path, retention=RULE, level=3, online=True)
                assert not done.shrunk and done.damaged == []
        assert [writer.stdout.readline() for _ in range(60)] == [f"{n}\n" for n in range(60)]
        writer.stdin.close()
    assert writer.returncode == 0
    with Store.open(path, background=False) as store:
        assert store.thread("writer").load()["history"] == list(range(60))
        store.thread("writer").delete()
    check(path, states, finished=True)


def test_a_full_disk_is_said_before_anything_is_done(
    template: tuple[Path, States], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of(template[0], tmp_path / "s")
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    monkeypatch.setattr(job, "ROOM_BYTES", 1 << 60)
    with pytest.raises(DiskFull, match="nothing was changed"):
        compaction.compact(path, retention=RULE)
    after = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "lock.job"}
    assert after == before


def test_a_damaged_thread_is_left_and_named_and_the_others_are_done(
    template: tuple[Path, States], tmp_path: Path
) -> None:
    source, states = template
    path = copy_of(source, tmp_path / "s")
    with Store.open(path, background=False) as store:
        with store._engine.read() as snap:
            [(key, raw)] = [(key, raw) for key, raw in snap.scan(b"\x11\x01\x31q", b"\x11\x01\x31r")]
        damaged = raw[: packs.PACK.size + 60] + b"\xff\xff" + raw[packs.PACK.size + 62 :]
        with pytest.raises(AgentStoreError):
            zstd.decompress(damaged[packs.PACK.size :], 1 << 20)
        store._engine.transact(lambda tx: tx.put(key, damaged))
    done = compaction.compact(path, retention=RULE, level=3)
    assert len(done.damaged) == 1 and "pack" in done.damaged[0]
    assert [each.thread for each in done.expired] == ["b"]
    with Store.open(path, background=False) as store:
        assert store._engine.transact(lambda tx: tx.get(key)).value == damaged
        assert store.thread("b").load() == states["b"][30]
