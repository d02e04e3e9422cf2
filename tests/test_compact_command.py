"""`agentstore compact`: its options, what it prints for people and for scripts, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from test_cli import run

from agentstore import Append, CheckpointExpired, Retention, Set, Store, clock, pruning
from agentstore.engine.job import JobLock
from agentstore.records import ThreadKeys
from agentstore.testing.manual_clock import ManualClock

KEYS = {
    "bytes_before",
    "bytes_after",
    "kinds_before",
    "kinds_after",
    "summarized",
    "packs",
    "dictionary",
    "shrunk",
    "damaged",
    "expired",
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A closed store: two threads of 30 checkpoints, and one that is finished."""
    found = str(tmp_path / "store")
    with Store.open(found, background=False) as store:
        for name in ("a", "b[bold]"):
            for n in range(30):
                store.thread(name).commit(
                    Append("log", f"line {n} " * 20),
                    step=n,
                    reason={3: "plan", 4: "approval", 5: "final"}.get(n, "round"),
                )
        store.thread("done").commit(Set("x", 1), status="COMPLETED")
    return found


def files(path: str) -> dict[str, bytes]:
    """All of a store but the locks, which are empty."""
    return {
        str(file): file.read_bytes()
        for file in sorted(Path(path).rglob("*"))
        if file.is_file() and not file.name.startswith("lock") and not file.name.endswith("-lock")
    }


def stay(path: str, name: str = "a") -> list[int]:
    with Store.open(path, background=False, create=False) as store:
        assert store.check() == []
        return sorted(one.seq for one in store.thread(name).history())


def result(*arguments: str, status: int = 0) -> Any:
    done = run("compact", *arguments, "--json")
    assert done.returncode == status, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == KEYS
    return found


def test_without_options_nothing_goes_and_everything_is_packed(path: str) -> None:
    found = result(path)
    assert found["expired"] == [] and found["damaged"] == [] and found["shrunk"]
    assert stay(path) == list(range(30))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--keep-last", "2"], {3, 4, 5, 28, 29}),
        (["--keep-last", "2", "--keep", "plan,approval"], {3, 4, 28, 29}),
        (["--keep-last", "1", "--keep", ""], {3, 29}),  # 3 is the newest decision
        (["--keep-last", "1", "--keep", "", "--keep-every", "10"], {0, 3, 10, 20, 29}),
        (["--keep-last", "1", "--max-age", "0s"], {3, 29}),
        (["--keep-last", "1", "--max-age", "30d"], {3, 4, 5, 29}),
    ],
)
def test_the_options_make_the_rule(path: str, options: list[str], kept: set[int]) -> None:
    would = result(path, *options, "--dry-run")
    assert stay(path) == list(range(30))
    found = result(path, *options)
    assert found["expired"] == would["expired"]
    for each in found["expired"]:
        assert {int(seq) for seq in each["kept"]} == kept
        assert {int(seq) for seq in each["removed"]} == set(range(30)) - kept
        assert each["bytes"] > 0 and not each["whole"]
    assert sorted(kept) == stay(path) == stay(path, "b[bold]")


def test_finished_threads_go_after_a_time(path: str) -> None:
    assert result(path, "--finished-after", "2d")["expired"] == []
    machine = ManualClock()
    machine.advance(timedelta(days=3).total_seconds())
    with clock.using(machine):
        [each] = result(path, "--finished-after", "2d")["expired"]
    assert (each["thread"], each["whole"], each["kept"]) == ("done", True, {})
    with Store.open(path) as store:
        assert list(store.threads()) == ["a", "b[bold]"]


def test_the_rules_in_the_store_apply_unless_options_give_others(path: str) -> None:
    with Store.open(path, background=False) as store:
        store.set_retention(Retention(keep_last=7, keep=()))
        store.thread("b[bold]").set_retention(Retention(keep_last=5, keep=()))
    result(path)
    assert stay(path) == [3, *range(23, 30)]
    result(path, "--keep-last", "1", "--keep", "")
    assert stay(path) == [3, 29]
    assert stay(path, "b[bold]") == [3, *range(25, 30)], "a thread's own rule comes first"


def test_a_dry_run_changes_no_byte_and_prints_what_would_go(path: str) -> None:
    before = files(path)
    done = run("compact", path, "--keep-last", "2", "--dry-run")
    assert done.returncode == 0 and files(path) == before
    assert "b[bold]" in done.stdout and "25" in done.stdout and "keep_last=2" in done.stdout
    assert "Nothing would go." in run("compact", path, "--dry-run").stdout


def test_people_are_told_what_was_done(path: str) -> None:
    done = run("compact", path, "--keep-last", "2", "--jobs", "2", "--level", "3")
    assert done.returncode == 0 and done.stderr == ""
    assert "Removed 50 checkpoints of 2 threads" in done.stdout and "on disk" in done.stdout
    with Store.open(path) as store, pytest.raises(CheckpointExpired, match="keep_last=2"):
        store.thread("a").load(at=10)


@pytest.mark.parametrize(
    "options",
    [
        ["--keep-last", "0"],
        ["--keep-last", "x"],
        ["--keep-last", "1", "--keep", "nonsense"],
        ["--keep", "plan"],  # nothing would go
        ["--keep-every", "10"],
        ["--max-age", "30d"],
        ["--keep-every", "0"],
        ["--keep-last", "1", "--max-age", "30"],
        ["--keep-last", "1", "--max-age", "-1d"],
        ["--keep-last", "1", "--max-age", "99999999999w"],
        ["--finished-after", "soon"],
        ["--level", "0"],
        ["--level", "20"],
        ["--jobs", "0"],
        ["--summarize-over", "0"],
        ["--summarize-over", "100", "--online"],
    ],
)
def test_a_bad_value_is_refused_before_the_store_is_looked_at(path: str, options: list[str]) -> None:
    before = files(path)
    done = run("compact", path, *options)
    assert done.returncode == 2 and done.stderr
    assert "Traceback" not in done.stderr and files(path) == before


def test_what_is_no_store_is_said_and_not_made_one(tmp_path: Path) -> None:
    for place in (tmp_path / "nothing", tmp_path):
        done = run("compact", str(place))
        assert done.returncode == 2 and "no store" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert run("compact").returncode == 2


def test_another_job_or_another_process_in_the_store_is_status_2(path: str) -> None:
    with JobLock(path):
        done = run("compact", path)
    assert done.returncode == 2 and "another offline job" in done.stderr
    script = "import sys; from agentstore import Store; s = Store.open(sys.argv[1]); print('open', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        done = run("compact", path, "--keep-last", "2")
        assert done.returncode == 2 and "--online" in done.stderr
        found = result(path, "--keep-last", "2", "--online")
        assert not found["shrunk"] and len(found["expired"]) == 2
        assert "Somebody has the store open" in run("compact", path, "--online").stdout
        other.communicate("\n")
    assert stay(path) == [3, 4, 5, 28, 29]


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_damage_is_status_1_and_said(path: str, dry_run: list[str]) -> None:
    with Store.open(path, background=False) as store:
        key = pruning.rule_key(ThreadKeys(1))
        store._engine.transact(lambda tx: tx.put(key, b"\xff"))
    found = result(path, "--keep-last", "2", *dry_run, status=1)
    assert len(found["damaged"]) == 1 and "thread 'a'" in found["damaged"][0]
    assert [each["thread"] for each in found["expired"]] == ["b[bold]"]
    done = run("compact", path, "--keep-last", "2", *dry_run)
    assert done.returncode == 1 and "thread 'a'" in done.stdout
