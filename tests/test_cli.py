"""The operator's commands: what they print for people and for scripts, and how they end."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agentstore import Append, Set, Store
from agentstore.codec.crc import crc32c
from agentstore.runtime import Agent, Reply, tool
from agentstore.tools.cli import app
from agentstore.tools.output import printable, shortened, visible
from agentstore.tools.plain import to_json

WILD_IDS = [
    "user-42:report-7",
    "with space",
    "--looks-like-an-option",
    "new\nline\ttab",
    "\x1b[31mred\x1b[0m",
    "[bold]markup[/bold] :smile:",
    "back\\slash",
    "ünï🦊\u202eright-to-left",
    "x" * 1000,
]


@dataclass
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str) -> Done:
    """Run a command in this process: the same code, without a second of imports for each."""
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            app(args=list(arguments), prog_name="agentstore")
        except SystemExit as end:
            status = end.code or 0
    return Done(status, out.getvalue(), err.getvalue())


def run_process(*arguments: str, env: dict[str, str] | None = None) -> Done:
    """Run a command as users do."""
    command = [sys.executable, "-m", "agentstore.tools.cli", *arguments]
    environment = {**os.environ, "NO_COLOR": "1", **(env or {})}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    return Done(done.returncode, done.stdout, done.stderr)


def parsed(*arguments: str) -> Any:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def filled(tmp_path: Path) -> str:
    """A store with one thread of three checkpoints, and one for each wild id."""
    path = str(tmp_path / "store")
    with Store.open(path) as store:
        thread = store.thread("a-thread")
        thread.commit(Set("conversation_history", [{"role": "user", "content": "hi"}]), reason="input", step=0)
        said = {"role": "assistant", "content": "hello [bold]there[/bold]"}
        thread.commit(Append("conversation_history", said), reason="round", step=1, status="RUNNING")
        thread.commit(Set("raw", b"\x00\xff"), reason="final", step=2, status="COMPLETED", metadata={"k": "v"})
        for wild in WILD_IDS:
            store.thread(wild).commit(Set("step", 1))
    return path


# --- values and text ---------------------------------------------------------------------


def test_values_keep_their_types_in_json() -> None:
    values = {
        "bytes": b"\x00",
        "tuple": (1, "a"),
        "set": {2, 1},
        "nan": float("nan"),
        "inf": float("-inf"),
        "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "naive": datetime(2026, 1, 2),
        "day": date(2026, 1, 2),
        "money": Decimal("1.10"),
        "id": UUID(int=7),
        "surrogate": "\ud800",
        "big": 10**40,
    }
    written = json.loads(json.dumps(to_json(values), allow_nan=False))
    assert written["bytes"] == {"$bytes": "AA=="}
    assert written["tuple"] == {"$tuple": [1, "a"]}
    assert written["set"] == {"$set": [1, 2]}
    assert (written["nan"], written["inf"]) == ({"$float": "nan"}, {"$float": "-inf"})
    assert written["at"] == {"$datetime": "2026-01-02T03:04:05+00:00"}
    assert (written["naive"], written["day"]) == ({"$datetime": "2026-01-02T00:00:00"}, {"$date": "2026-01-02"})
    assert (written["money"], written["id"]) == ({"$decimal": "1.10"}, {"$uuid": str(UUID(int=7))})
    assert (written["surrogate"], written["big"]) == ("\ud800", 10**40)


def test_objects_that_look_like_a_tag_are_told_apart() -> None:
    assert to_json({"$bytes": "AA=="}) == {"$dict": [["$bytes", "AA=="]]}
    assert to_json({1: "a"}) == {"$dict": [[1, "a"]]}
    assert to_json({"$a": 1, "b": 2}) == {"$a": 1, "b": 2}


def test_printable_text_is_unambiguous() -> None:
    texts = ["a\nb", "a\\nb", "\x1b", "\\x1b", "é", "\u202e", "\ud800", "\x00"]
    shown = [printable(text) for text in texts]
    assert len(set(shown)) == len(texts)
    assert all(text.isprintable() for text in shown)
    assert visible("a\\b\x07") == "a\\b\\x07"
    assert shortened("a\n" * 100, 10).isprintable()


# --- commands --------------------------------------------------------------------------


def test_version() -> None:
    done = run_process("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "agentstore")


def test_ls_gives_exact_ids_to_scripts_and_safe_ones_to_people(filled: str) -> None:
    listed = parsed("ls", "--store", filled)
    assert [thread["id"] for thread in listed] == sorted([*WILD_IDS, "a-thread"], key=str.encode)
    assert next(thread for thread in listed if thread["id"] == "a-thread")["seq"] == 2
    shown = run("ls", "--store", filled).stdout
    assert all(line.isprintable() for line in shown.split("\n")), "something unprintable reached the terminal"
    assert "[bold]markup[/bold] :smile:" in shown
    assert "new\\nline\\ttab" in shown
    assert [thread["id"] for thread in parsed("ls", "--store", filled, "--prefix", "user-")] == ["user-42:report-7"]
    newest = [thread["id"] for thread in parsed("ls", "--store", filled, "--order", "created", "--limit", "2")]
    assert newest == [WILD_IDS[-1], WILD_IDS[-2]]


def test_store_is_taken_from_the_environment_and_from_here(
    filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTSTORE_DIR", filled)
    assert len(parsed("ls")) == len(WILD_IDS) + 1
    monkeypatch.delenv("AGENTSTORE_DIR")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run("ls").returncode == 2
    shutil.copytree(filled, "agents")
    assert len(parsed("ls")) == len(WILD_IDS) + 1


@pytest.mark.parametrize("wild", WILD_IDS, ids=range(len(WILD_IDS)))
def test_show_takes_any_id(filled: str, wild: str) -> None:
    for arguments in (["--json", "--", wild], ["--json", "--json-id", json.dumps(wild)]):
        done = run("show", "--store", filled, *arguments)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["id"] == wild
    assert all(line.isprintable() for line in run("show", "--store", filled, "--", wild).stdout.split("\n"))


def test_show_newest_and_earlier_states(filled: str) -> None:
    newest = parsed("show", "a-thread", "--store", filled)
    assert newest["state"]["raw"] == {"$bytes": "AP8="}
    assert newest["checkpoint"]["metadata"] == {"k": "v"}
    assert len(newest["state"]["conversation_history"]) == 2
    earlier = parsed("show", "a-thread", "--store", filled, "--at", "0")
    assert (earlier["checkpoint"]["seq"], len(earlier["state"]["conversation_history"])) == (0, 1)
    shown = run("show", "a-thread", "--store", filled).stdout
    assert "checkpoint 2 (final, step 2, COMPLETED)" in shown
    assert "assistant hello [bold]there[/bold]" in shown
    done = run("show", "a-thread", "--store", filled, "--at", "99")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("agentstore: ")
    assert "99" in done.stderr


def test_history_is_newest_first(filled: str) -> None:
    checkpoints = parsed("history", "a-thread", "--store", filled)
    assert [(one["seq"], one["parent"], one["reason"]) for one in checkpoints] == [
        (2, 1, "final"),
        (1, 0, "round"),
        (0, None, "input"),
    ]
    assert len(parsed("history", "a-thread", "--store", filled, "--limit", "1")) == 1
    assert "COMPLETED" in run("history", "a-thread", "--store", filled).stdout


@pytest.mark.parametrize("command", ["show", "history", "events", "resolve"])
def test_a_thread_that_is_not_there(filled: str, command: str) -> None:
    done = run(command, "no\nsuch", "--store", filled)
    assert done.returncode == 1
    assert done.stderr.startswith("agentstore: thread ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_verify_and_stats(filled: str) -> None:
    assert parsed("verify", "--store", filled) == {"ok": True, "problems": []}
    assert run("verify", "--store", filled).stdout == "Every invariant holds.\n"
    assert parsed("stats", "--store", filled)["lsn"] > 0
    assert "lsn" in run("stats", "--store", filled).stdout


def test_verify_finds_damage_and_show_refuses_it(tmp_path: Path) -> None:
    path = tmp_path / "store"
    needle = os.urandom(200)
    with Store.open(str(path)) as store:
        store.thread("t").commit(Set("needle", needle))
        store.thread("other").commit(Set("step", 7))
    raw = (path / "base.mdb").read_bytes()
    assert raw.count(needle[20:180]) == 1
    at = raw.index(needle[20:180])
    (path / "base.mdb").write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    done = run("verify", "--store", str(path), "--json")
    assert done.returncode == 1, done
    report = json.loads(done.stdout)
    assert (report["ok"], len(report["problems"]) >= 1) == (False, True)
    assert run("verify", "--store", str(path)).returncode == 1
    done = run("show", "t", "--store", str(path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert parsed("show", "other", "--store", str(path))["state"] == {"step": 7}


# --- a call that waits for a person ------------------------------------------------------


@pytest.fixture
def waiting(tmp_path: Path) -> str:
    """A store whose thread waits: a mail may or may not have been sent."""
    path = str(tmp_path / "store")

    @tool(recovery="ask")
    def send(to: str) -> str:
        raise OSError("the connection broke")

    with Store.open(path) as store:
        assert _agent(send).run(store, "mail\x07", "send it", input_id="1").status == "WAITING"
    return path


def _agent(send: Any) -> Agent:
    def model(messages: list[dict[str, Any]], _tools: object) -> Reply:
        if messages[-1]["role"] == "tool":
            return Reply({"role": "assistant", "content": f"told: {messages[-1]['content']}"})
        function = {"name": "send", "arguments": '{"to": "ada@example.org"}'}
        return Reply(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            }
        )

    return Agent(model=model, tools=[send])


def test_resolve_lists_and_answers(waiting: str) -> None:
    (call,) = parsed("resolve", "mail\x07", "--store", waiting)
    assert (call["tool"], call["arguments"], call["rule"]) == ("send", {"to": "ada@example.org"}, "ask")
    assert call["key"][:12] in run("resolve", "mail\x07", "--store", waiting).stdout
    done = run("resolve", "mail\x07", call["key"], "--store", waiting, "--happened", '"sent at noon"')
    assert done.returncode == 0, done.stderr
    assert "\x07" not in done.stdout

    @tool(recovery="ask")
    def send(to: str) -> str:
        raise AssertionError("it is known what happened: nobody may call")

    with Store.open(waiting) as store:
        result = _agent(send).run(store, "mail\x07", "send it", input_id="1")
        assert result.status == "COMPLETED"
        assert result.messages[-1]["content"] == "told: sent at noon"
    kinds = {event["kind"] for event in parsed("events", "mail\x07", "--store", waiting)}
    assert {"decision", "intent", "receipt"} <= kinds
    assert "send" in run("events", "mail\x07", "--store", waiting).stdout


def test_resolve_not_done_lets_the_agent_call_again(waiting: str) -> None:
    (call,) = parsed("resolve", "mail\x07", "--store", waiting)
    answered = run("resolve", "mail\x07", call["key"][:16], "--store", waiting, "--not-done", "--json")
    assert answered.returncode == 0, answered.stderr
    sent = []

    @tool(recovery="ask")
    def send(to: str) -> str:
        sent.append(to)
        return "sent"

    with Store.open(waiting) as store:
        assert _agent(send).run(store, "mail\x07", "send it", input_id="1").messages[-1]["content"] == "told: sent"
    assert sent == ["ada@example.org"]


def test_resolve_wants_one_clear_answer(waiting: str) -> None:
    (call,) = parsed("resolve", "mail\x07", "--store", waiting)
    for answer in ([], ["--not-done", "--happened", "1"], ["--happened", "not json"]):
        done = run("resolve", "mail\x07", call["key"], "--store", waiting, *answer)
        assert done.returncode == 2, done.stderr
    done = run("resolve", "mail\x07", "feedbeef", "--store", waiting, "--not-done")
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("agentstore: ")


# --- stores that are none ----------------------------------------------------------------


def not_there(path: Path) -> None:
    pass


def not_a_store(path: Path) -> None:
    path.mkdir()
    (path / "holiday.jpg").write_bytes(b"jpg")


def a_file(path: Path) -> None:
    path.write_text("hello")


def without_base(path: Path) -> None:
    with Store.open(str(path)) as store:
        store.thread("t").commit(Set("a", 1))
    (path / "base.mdb").unlink()


def newer(path: Path) -> None:
    with Store.open(str(path)) as store:
        store.thread("t").commit(Set("a", 1))
    raw = (path / "FORMAT").read_bytes()
    magic, version, uuid = struct.unpack_from("<16sI16s", raw)
    changed = struct.pack("<16sI16s", magic, version + 1, uuid)
    (path / "FORMAT").write_bytes(changed + struct.pack("<I", crc32c(changed)))


BROKEN = [not_there, not_a_store, a_file, without_base, newer]
READING = [
    ["ls"],
    ["show", "t"],
    ["history", "t"],
    ["events", "t"],
    ["resolve", "t"],
    ["resolve", "t", "c1", "--not-done"],
    ["verify"],
    ["stats"],
]


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda breaks: breaks.__name__)
def test_a_store_that_cannot_be_opened_gets_one_sentence(tmp_path: Path, breaks: Any) -> None:
    path = tmp_path / "store"
    breaks(path)
    before = sorted(os.listdir(tmp_path))
    for command in READING:
        for more in ([], ["--json"]):
            done = run(*command, "--store", str(path), *more)
            assert (done.returncode, done.stdout) == (2, ""), (command, done)
            assert done.stderr.startswith("agentstore: "), done.stderr
            assert done.stderr.count("\n") == 1
            assert str(path) in done.stderr
    assert sorted(os.listdir(tmp_path)) == before, "a command that only reads made something"


def test_wrong_usage_ends_with_two() -> None:
    for arguments in (
        ["nonsense"],
        ["ls", "--order", "size"],
        ["show"],
        ["show", "t", "--at", "-1"],
        ["demo", "--kills", "-1"],
    ):
        done = run(*arguments)
        assert done.returncode == 2, arguments
        assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_error(filled: str) -> None:
    command = f"'{sys.executable}' -m agentstore.tools.cli ls --store '{filled}' | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("to", "status"), [(">/dev/full", 2), (">&-", 0)])
def test_output_that_cannot_be_written_is_said_without_a_traceback(filled: str, to: str, status: int) -> None:
    command = f"'{sys.executable}' -m agentstore.tools.cli ls --store '{filled}' {to}"
    done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    assert done.returncode == status
    assert done.stderr == ("agentstore: the output could not be written: No space left on device\n" if status else "")


def test_output_survives_a_terminal_without_unicode(filled: str) -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = run_process("ls", "--store", filled, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
