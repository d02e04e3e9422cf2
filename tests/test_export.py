"""What is exported says all, exactly; a file is there whole or as it was."""

from __future__ import annotations

import io
import json
import os
import shlex
import sqlite3
import subprocess
import sys
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from ops_lab import ODD_IDS, fill
from test_codec_cbor import ANYTHING, VALUES, same

from agentstore import Append, Set, Store
from agentstore.tools import lines
from agentstore.tools.cli import app
from agentstore.tools.export import export
from agentstore.tools.replacement import OutputFailed, replacing
from agentstore.tools.tagged import TagError, decode, encode


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
def filled(tmp_path: Path) -> str:
    path = str(tmp_path / "agents")
    with Store.open(path, background=False) as store:
        fill(store)
    return path


def exported(path: str, *options: str) -> list[dict[str, Any]]:
    status, out, err = run("export", *options, "--", path)
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


# --- values -----------------------------------------------------------------------------


@given(ANYTHING)
@example({"$bytes": 1})
@example({"$x": {"$y": 1}})
@example({"\ud800": 1, "b": 2})
@example([{}, {"": 1}, {"$": 1}])
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    text = lines.dump(encode(value))
    assert same(decode(json.loads(text.encode().decode())), value)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_the_values_of_the_codecs_tests_come_back_too(value: Any) -> None:
    assert same(decode(json.loads(lines.dump(encode(value)))), value)


def test_the_deepest_values_come_back() -> None:
    for wrap in (lambda v: [v], lambda v: (v,), lambda v: {1: v}, lambda v: {"$a": v}, lambda v: {"a": v}):
        value: Any = 7
        for _ in range(99):
            value = wrap(value)
        assert same(decode(json.loads(lines.dump(encode(value)))), value)


@pytest.mark.parametrize(
    "malformed",
    [
        {"$nothing": 1},
        {"$bytes": "no base64!"},
        {"$bytes": 1},
        {"$int": "12x"},
        {"$float": "1.5"},
        {"$set": [1, 1]},
        {"$set": [[1]]},
        {"$dict": [[1]]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[[1], 2]]},
        {"$dict": 5},
        {"$tuple": "ab"},
        {"$datetime": "yesterday"},
        {"$datetime": ["2026-01-01", 0]},
        {"$datetime": ["2026-01-01T00:00:00", 0, 10**15, None]},
        {"$decimal": "a lot"},
        {"$uuid": "1"},
        {"$date": 5},
        {"$str": "/w=="},
    ],
    ids=json.dumps,
)
def test_malformed_tags_are_refused(malformed: Any) -> None:
    with pytest.raises(TagError):
        decode([malformed])


# --- lines --------------------------------------------------------------------------------


def test_lines_say_what_there_is(filled: str) -> None:
    everything = exported(filled, "--all")
    assert everything[0]["record"] == "export" and everything[0]["all"] is True
    assert everything[-1] == {"record": "end", "threads": 5 + len(ODD_IDS) - 1}
    threads = {line["thread"]: line for line in everything if line["record"] == "thread"}
    assert {*ODD_IDS, "main", "branches", "main/fork"} <= {*threads}
    for name, thread in threads.items():
        mine = [line for line in everything if line.get("thread") == name]
        kinds = [line["record"] for line in mine]
        counts = [(kind, thread[f"{kind}s"]) for kind in ("checkpoint", "effect", "pin")]
        assert kinds == ["thread", *(kind for kind, count in counts for _ in range(count))]
    branch = next(line for line in everything if line.get("thread") == "branches" and line.get("seq") == 4)
    assert (branch["parent"], branch["metadata"]) == (1, {"rewind": True})
    assert branch["changes"] == [["append", "notes", ["again"]]]
    done = next(line for line in everything if line["record"] == "effect" and line["tool"] == "tool-0")
    assert (done["outcome"], done["result"]) == ("result", {"ok": [1, {"$tuple": [2]}]})


def test_without_all_only_heads_have_states(filled: str) -> None:
    heads = {line["thread"]: line["head"] for line in exported(filled) if line["record"] == "thread"}
    with_state = [line for line in exported(filled, "--jsonl") if "state" in line]
    assert {line["thread"]: line["seq"] for line in with_state} == heads
    assert not any("changes" in line for line in exported(filled))


def test_changes_are_smaller_than_states(tmp_path: Path) -> None:
    """A line of a checkpoint says what was new, so that the file does not grow with the square of the steps."""
    with Store.open(tmp_path / "agents", background=False) as store:
        for n in range(200):
            store.thread("t").commit(Append("history", f"message {n} " * 5))
        written: list[str] = []
        export(store, written.append, everything=True)
    assert max(map(len, written)) < 600


def test_a_thread_that_is_deleted_meanwhile_is_said_to_be_gone(tmp_path: Path) -> None:
    with Store.open(tmp_path / "agents", background=False) as store:
        for name in ("a", "b"):
            for n in range(3):
                store.thread(name).commit(Set("n", n))
        written: list[dict[str, Any]] = []

        def write(line: str) -> None:
            written.append(json.loads(line))
            if written[-1].get("thread") == "a" and written[-1].get("seq") == 0:
                store.thread("a").delete()

        done = export(store, write, everything=True)
    assert done.threads == 1
    assert [line["record"] for line in written if line.get("thread") == "a"] == ["thread", "checkpoint", "gone"]
    assert written[-1] == {"record": "end", "threads": 1}


def test_what_is_not_written_is_said(filled: str) -> None:
    with Store.open(filled, background=False) as store:
        store.once("invoice-1", lambda: "charged")
    status, _, err = run("export", filled)
    assert status == 0 and "Not written: 1 records of Store.once" in err


# --- files ----------------------------------------------------------------------------------


def test_a_file_is_private_and_replaced_at_the_end(filled: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("before")
    assert run("export", filled, str(out))[0] == 0
    assert out.stat().st_mode & 0o777 == 0o600
    assert out.read_text().splitlines()[-1].startswith('{"record":"end"')
    assert sorted(os.listdir(tmp_path)) == ["agents", "out.jsonl"]


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("before")
    with (
        pytest.raises(OutputFailed, match="No space left"),
        replacing(str(out), str(tmp_path / "agents")) as partial,
        open(partial, "w") as file,
    ):
        file.write("half")
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == ["out"] and out.read_text() == "before"


@pytest.mark.parametrize("option", ["jsonl", "sqlite"])
def test_places_that_are_refused(filled: str, tmp_path: Path, option: str) -> None:
    for out, why in [
        (tmp_path, "is a directory"),
        (tmp_path / "agents" / "base.mdb", "inside the store"),
        (tmp_path / "no" / "out", "could not be written"),
    ]:
        arguments = [filled, str(out)] if option == "jsonl" else ["--sqlite", str(out), filled]
        status, _, err = run("export", *arguments)
        assert status == 2 and why in err and "Traceback" not in err
    with Store.open(filled, create=False) as store:
        assert store.check() == []


@pytest.mark.parametrize("link", [False, True])
def test_a_device_or_pipe_is_not_replaced_by_a_file(filled: str, tmp_path: Path, link: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    out = pipe
    if link:
        out = tmp_path / "link"
        out.symlink_to(pipe)
    status, _, err = run("export", "--sqlite", str(out), filled)
    assert status == 2 and "no file can take the place of" in err
    assert pipe.is_fifo()


def test_to_a_full_device() -> None:
    command = [sys.executable, "-m", "agentstore.tools.cli", "export"]
    done = subprocess.run([*command, "/nonexistent", "/dev/full"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no store" in done.stderr


def test_a_device_that_is_full(filled: str) -> None:
    status, _, err = run("export", filled, "/dev/full")
    assert status == 2 and "No space left" in err


def test_to_a_pipe_that_nobody_reads(filled: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m agentstore.tools.cli export --all {shlex.quote(filled)} | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.startswith('{"record":"export"') and "Traceback" not in done.stderr


# --- SQLite -----------------------------------------------------------------------------------


def test_sqlite_can_be_queried(filled: str, tmp_path: Path) -> None:
    out = tmp_path / "audit.db"
    status, _, err = run("export", "--sqlite", str(out), filled)
    assert status == 0, err
    assert out.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(out)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        ids = {name for (name,) in db.execute("SELECT id FROM threads")}
        assert {*ODD_IDS} <= ids
        query = (
            "SELECT c.seq, c.parent, c.reason FROM checkpoints c JOIN threads t ON t.number = c.thread WHERE t.id = ?"
        )
        assert (4, 1, "manual") in db.execute(query, ("branches",)).fetchall()
        effects = db.execute("SELECT tool, outcome, error, json_extract(result, '$.ok[0]') FROM effects").fetchall()
        assert ("tool-0", "result", None, 1) in effects and ("tool-1", "failed", "no such card", None) in effects
        assert db.execute("SELECT note FROM pins").fetchall() == [("the \\ud800 first",)]
        assert db.execute("SELECT count(*) FROM events WHERE kind = 'receipt'").fetchone()[0] >= 2
        state = db.execute("SELECT json_extract(state, '$.notes[2]') FROM threads WHERE id = 'branches'").fetchone()
        assert state == ("again",)
        plan = str(db.execute("EXPLAIN QUERY PLAN SELECT * FROM effects WHERE tool = 'x'").fetchall())
        assert "effects_by_tool" in plan


def test_sqlite_replaces_the_file_of_before(filled: str, tmp_path: Path) -> None:
    out = tmp_path / "audit.db"
    for _ in range(2):
        assert run("export", "--sqlite", str(out), filled)[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["agents", "audit.db"]


def test_sqlite_goes_without_the_options_of_lines(filled: str, tmp_path: Path) -> None:
    assert run("export", "--sqlite", str(tmp_path / "x.db"), "--all", filled)[0] == 2
