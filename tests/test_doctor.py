"""The doctor says what is wrong and what to do, and nothing else."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ops_lab import fill, in_child

from agentstore import EffectCall, EffectDuplicate, Set, Store, clock, health
from agentstore.engine.files import Files, set_default_files
from agentstore.testing.manual_clock import ManualClock
from agentstore.tools import doctor
from agentstore.tools.cli import app
from agentstore.tools.doctor import LOOK, OK, PROBLEM, Finding, examine


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            app(args=list(arguments), prog_name="agentstore")
        except SystemExit as end:
            status = end.code or 0
    return status, out.getvalue(), err.getvalue()


@pytest.fixture
def healthy(tmp_path: Path) -> str:
    path = str(tmp_path / "agents")
    with Store.open(path, background=False) as store:
        store.thread("done").commit(Set("step", 1), status="COMPLETED")
    return path


@pytest.fixture
def real_files() -> Iterator[None]:
    yield
    set_default_files(Files())


def findings(path: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(path)}


def store_findings(path: str) -> dict[str, str]:
    """Of the store itself: the disk of whoever runs the tests is their own affair."""
    names = ("store", "threads", "imports", "effects", "duplicates", "tools", "leases", "permissions")
    return {name: finding.level for name, finding in findings(path).items() if name in names}


def test_a_healthy_store(healthy: str) -> None:
    assert set(store_findings(healthy).values()) == {OK}
    found = findings(healthy)
    assert {"versions", "checksum", "file system", "sync", "space"} <= {*found}
    assert "p50" in found["sync"].what and "lmdb 0.9" in found["versions"].what
    before = sorted(os.listdir(healthy))
    run("doctor", healthy)
    assert sorted(os.listdir(healthy)) == before  # the scratch file is gone


def test_the_command(healthy: str) -> None:
    status, out, _ = run("doctor", healthy, "--json")
    told = json.loads(out)
    assert status == (0 if told["ok"] else 1)
    assert {*told["findings"][0]} == {"name", "level", "what", "todo"}
    for finding in told["findings"]:
        assert finding["level"] == OK or finding["todo"]
    status, out, _ = run("doctor", healthy)
    assert "CRC" not in out and out.count("\n") >= 10


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    for path in (tmp_path / "nothing", tmp_path / "other"):
        status, _, err = run("doctor", str(path))
        assert status == 2 and len(err.splitlines()) == 1


def test_permissions(healthy: str) -> None:
    os.chmod(healthy, 0o755)
    assert findings(healthy)["permissions"].level == PROBLEM
    assert run("doctor", healthy)[0] == 1
    os.chmod(healthy, 0o700)
    os.chmod(os.path.join(healthy, "base.mdb"), 0o644)
    found = findings(healthy)["permissions"]
    assert found.level == LOOK and "base.mdb" in found.what


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_another_user(healthy: str) -> None:
    os.chown(os.path.join(healthy, "base.mdb"), 12345, -1)
    found = findings(healthy)["permissions"]
    assert found.level == PROBLEM and "base.mdb" in found.what


@pytest.mark.parametrize(
    ("kind", "level"), [("nfs4", PROBLEM), ("tmpfs", PROBLEM), ("overlay", LOOK), ("", LOOK), ("xfs", OK)]
)
def test_file_systems(healthy: str, kind: str, level: str, real_files: None) -> None:
    class On(Files):
        def file_system(self, path: str) -> str:
            return kind

    set_default_files(On())
    found = findings(healthy)
    assert found["file system"].level == level
    assert found["store"].level == (PROBLEM if kind == "nfs4" else OK)


def test_room(healthy: str, real_files: None) -> None:
    for free, level in ((1000, PROBLEM), (500_000_000, LOOK), (10**12, OK)):

        class With(Files):
            def free_bytes(self, path: str, free: int = free) -> int:
                return free

        set_default_files(With())
        assert findings(healthy)["space"].level == level


def test_slow_checksums(healthy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for speed, name, level in ((8e6, "crcmod without its C extension", PROBLEM), (4e8, "crcmod", LOOK)):
        monkeypatch.setattr(health, "checksum", lambda speed=speed, name=name: health.Checksum(name, speed))
        found = findings(healthy)["checksum"]
        assert found.level == level and "agentstore-wal[fast]" in found.todo


def test_syncs_that_are_too_fast_or_too_slow(healthy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, level in ((1e-6, LOOK), (0.1, LOOK), (1e-4, OK)):
        monkeypatch.setattr(health, "sync_seconds", lambda path, count, seconds=seconds: [seconds] * count)
        assert findings(healthy)["sync"].level == level


def test_a_directory_that_cannot_be_written(healthy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, count: int) -> list[float]:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(health, "sync_seconds", refuse)
    assert findings(healthy)["directory"].level == PROBLEM


def test_a_damaged_store_is_a_problem(healthy: str) -> None:
    (Path(healthy) / "base.mdb").write_bytes(b"nothing")
    found = findings(healthy)
    assert found["store"].level == PROBLEM and "base.mdb" in found["store"].what
    assert "threads" not in found and "sync" in found


def test_effects_and_tools(tmp_path: Path) -> None:
    path = str(tmp_path / "agents")

    def victim() -> None:
        with Store.open(path, background=False) as store:
            call = EffectCall(0, "charge", {})
            store.thread("t").commit(Set("x", 1), reason="decision", status="RUNNING", intents=[call])

    assert in_child(victim) == 0
    found = findings(path)
    assert found["effects"].level == LOOK and "charge of t" in found["effects"].what
    assert found["tools"].level == LOOK and "charge (1 calls)" in found["tools"].what
    assert found["threads"].level == OK and "1 of them unfinished" in found["threads"].what


def test_duplicates_are_a_problem(tmp_path: Path) -> None:
    path = str(tmp_path / "agents")
    with Store.open(path, background=False) as store:
        thread = store.thread("t")
        cp = thread.commit(Set("x", 1), reason="decision")
        effect = thread.effect(decision=cp, index=0, tool="t", arguments={}, rule="replay")
        with clock.using(ManualClock()):  # another boot: the first caller is dead, as far as anybody there knows
            again = store.thread("t").effect(decision=cp, index=0, tool="t", arguments={}, rule="replay")
        again.receipt("b", Set("y", 2))
        with pytest.raises(EffectDuplicate):
            effect.receipt("a", Set("y", 1))
    assert findings(path)["duplicates"].level == PROBLEM


def test_stale_leases(tmp_path: Path) -> None:
    path = str(tmp_path / "agents")

    def victim() -> None:
        with Store.open(path, background=False) as store:
            thread = store.thread("t")
            thread.commit(Set("x", 1))
            thread.lease("worker-1", ttl_s=1000)

    assert in_child(victim) == 0
    found = findings(path)["leases"]
    assert found.level == LOOK and "worker-1" in found.what and "dead" in found.what


def test_threads_that_stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "agents")
    with Store.open(path, background=False) as store:
        fill(store)
    monkeypatch.setattr(doctor, "STILL", timedelta(0))
    found = findings(path)["threads"]
    assert found.level == LOOK and "main (WAITING since" in found.what


def test_an_import_that_did_not_end(tmp_path: Path) -> None:
    from agentstore.transfer import Arrival

    path = str(tmp_path / "agents")
    with Store.open(path, background=False) as store:
        Arrival(store, "t", bytes(16)).commit(0, {})
    assert findings(path)["imports"].level == LOOK


def test_names_cannot_command_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "agents")
    with Store.open(path, background=False) as store:
        store.thread("\x1b[31mred").commit(Set("x", 1), status="WAITING")
    monkeypatch.setattr(doctor, "STILL", timedelta(0))
    _, out, _ = run("doctor", path)
    assert "\x1b" not in out and "\\x1b[31mred" in out
