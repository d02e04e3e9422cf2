"""Replay of recorded transcripts: reading, cutting into turns, playing under kills, comparing."""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentstore import Store
from agentstore.runtime import ToolContext
from agentstore.tools.replay_player import CallWithoutIntent, Player, ReplayFailed, recorded_calls
from agentstore.tools.replay_turns import plan
from agentstore.tools.replay_world import ReplayWorld
from agentstore.tools.transcript import Transcript, TranscriptError, difference, read_messages, read_transcripts

USER = {"role": "user", "content": "hello"}


def call(call_id: str | None, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}, **more}


def asks(*calls: Any, content: Any = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(call_id: str | None, content: Any = "done") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def says(content: Any = "well") -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def write(path: Path, *messages: Any) -> str:
    path.write_text("".join(json.dumps(message) + "\n" for message in messages), encoding="utf-8")
    return str(path)


# --- reading ---------------------------------------------------------------------------


def test_blank_lines_and_marks_are_skipped(tmp_path: Path) -> None:
    line = json.dumps(USER).encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + line + b"\r\n\r\n  \t\n" + codecs.BOM_UTF8 + line + b"\n\n" + line)
    assert read_messages(str(path)) == [USER, USER, USER]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_other_encodings_are_read_by_their_mark(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.jsonl"
    message = {"role": "user", "content": "ünïcode 🦊"}
    path.write_bytes((json.dumps(message, ensure_ascii=False) + "\n").encode(encoding))
    assert read_messages(str(path)) == [message]


def test_line_separators_inside_a_string_do_not_end_a_line(tmp_path: Path) -> None:
    message = {"role": "user", "content": "a\u2028b\u2029c\x85d"}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(message, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_messages(str(path)) == [message]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "one whole message on every line"),
        (b'{"role": "user"', "not JSON"),
        (b"[]", "this is an array"),
        (b'"user"', "this is a string"),
        (b"null", "this is null"),
        (b"3", "this is a number"),
        (b'{"content": "x"}', 'no "role"'),
        (b'{"role": 7}', 'no "role"'),
        (b'{"role": "user", "content": "\xff"}', "not UTF-8"),
        (b'{"role": "user", "content": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"role": "user", "n": ' + b"9" * 5000 + b"}", "not readable"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(USER).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(TranscriptError, match=r"bad\.jsonl:3: ") as caught:
        read_messages(str(path))
    assert why in str(caught.value)


def test_a_message_that_the_store_does_not_take_gets_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"role": "user", "content": ' + "[" * 150 + "]" * 150 + "}\n")
    command = [sys.executable, "-m", "agentstore.tools.cli", "replay", str(path), "--store", str(tmp_path / "agents")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{path}: LimitExceeded: " in done.stderr and "below 100 levels" in done.stderr
    assert "Traceback" not in done.stderr


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(TranscriptError, match=r"gone\.jsonl: cannot be read"):
        read_messages(str(tmp_path / "gone.jsonl"))
    with pytest.raises(TranscriptError, match="cannot be read"):
        read_messages(str(tmp_path))


def test_thread_ids_are_names_and_paths_where_names_repeat(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    paths = [write(tmp_path / "a.jsonl", USER), write(tmp_path / "x" / "a.jsonl", USER), write(tmp_path / "b.jsonl")]
    ids = [transcript.thread_id for transcript in read_transcripts(paths)]
    assert ids == [paths[0], paths[1], "b"]
    with pytest.raises(TranscriptError, match="given twice"):
        read_transcripts([paths[0], str(tmp_path / "x" / ".." / "a.jsonl")])


def test_difference_sees_what_equality_does_not() -> None:
    assert {"a": 1, "b": 2} == {"b": 2, "a": 1}
    assert difference({"a": 1, "b": 2}, {"b": 2, "a": 1}) is not None
    assert difference([1], [True]) is not None
    assert difference([1], [1.0]) is not None
    assert difference([0.0], [-0.0]) is not None
    assert difference([math.nan], [math.nan]) is None
    assert difference([[1], {"x": [2, "y"]}], [[1], {"x": [2, "z"]}]) == "[1].x[1]: 'y' is recorded, 'z' is stored"
    assert difference([1, 2], [1]) == "2 items are recorded, 1 are stored"


# --- turns -----------------------------------------------------------------------------


def shape(*messages: dict[str, Any]) -> list[tuple[int, list[list[int | None]]]]:
    """Every turn as (number of inputs, [results of each decision])."""
    turns = plan(messages, recorded_calls)
    covered: list[int] = []
    for turn in turns:
        covered += range(turn.position, turn.position + len(turn.inputs))
        for decision in turn.decisions:
            covered += [decision.position, *(call.result for call in decision.calls if call.result is not None)]
    assert covered == list(range(len(messages))), "every message once, in order"
    return [
        (len(turn.inputs), [[call.result for call in decision.calls] for decision in turn.decisions]) for turn in turns
    ]


def test_turns_of_an_ordinary_conversation() -> None:
    messages = [{"role": "system", "content": "s"}, USER, asks(call("1")), result("1"), says(), USER, says()]
    assert shape(*messages) == [(2, [[3], []]), (1, [[]])]


def test_turns_without_input() -> None:
    assert shape() == [(0, [])]
    assert shape(USER) == [(1, [])]
    assert shape(says(), says()) == [(0, [[]]), (0, [[]])]


def test_parallel_calls_and_repeated_ids() -> None:
    assert shape(asks(call("1"), call("2")), result("1"), result("2"), says()) == [(0, [[1, 2], []])]
    assert shape(asks(call("1"), call("1")), result("1"), result("1")) == [(0, [[1, 2]])]
    assert shape(asks(call("1")), result("1"), asks(call("1")), result("1")) == [(0, [[1], [3]])]
    assert shape(asks(call(None), call(None)), result(None), result(None)) == [(0, [[1, 2]])]


def test_calls_without_results_end_the_turn() -> None:
    assert shape(asks(call("1")), USER, says()) == [(0, [[None]]), (1, [[]])]
    assert shape(asks(call("1"), call("2")), result("1"), USER) == [(0, [[1, None]]), (1, [])]
    assert shape(asks(call("1")), says()) == [(0, [[None]]), (0, [[]])]
    assert shape(USER, asks(call("1"))) == [(1, [[None]])]


def test_results_out_of_order_or_of_no_call_are_inputs() -> None:
    assert shape(asks(call("1"), call("2")), result("2"), result("1"), says()) == [(0, [[None, 1]]), (1, [[]])]
    assert shape(asks(call("1")), result("1"), result("1")) == [(0, [[1]]), (1, [])]
    assert shape(USER, result("9"), says()) == [(2, [[]])]
    user_calls = {"role": "user", "content": None, "tool_calls": [call("u")]}
    assert shape(user_calls, result("u"), says()) == [(2, [[]])]


def test_legacy_function_calls_are_answered_by_name() -> None:
    asked = {"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": "{}"}}
    answered = {"role": "function", "name": "old", "content": "1"}
    assert shape(asked, answered, says()) == [(0, [[1], []])]
    assert shape(asked, {**answered, "name": "other"}) == [(0, [[None]]), (1, [])]


def test_malformed_calls_are_calls() -> None:
    assert shape(asks("nonsense", {"id": "2"}), result("2")) == [(0, [[None, 1]])]
    assert shape({"role": "assistant", "content": "x", "tool_calls": []}, USER) == [(0, [[]]), (1, [])]


def test_every_open_transcript_is_cut_without_loss(transcripts: list[Path]) -> None:
    read = read_transcripts(list(map(str, transcripts)))
    assert len(read) == 60
    for transcript in read:
        shape(*transcript.messages)


# --- playing ---------------------------------------------------------------------------

ODD: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "part"}], "cache": {"z": 1, "a": [None, 0.5, -0.0]}},
    {"role": "system", "content": "two of them"},
    {"content": None, "role": "user", "tool_calls": [call("u1")]},
    {"role": "tool", "tool_call_id": "u1", "content": "the user's own", "requestor": "user"},
    asks(call("1", "f", index=0), call("1", "g"), call("3", "f"), content=""),
    {"role": "tool", "content": "", "tool_call_id": "1", "name": "f", "extra": {"b": 1, "a": 2}},
    {"role": "tool", "content": [{"type": "text", "text": "x" * 320_000}], "tool_call_id": "1"},
    {"role": "user", "content": "stop!"},
    result("3", "late news"),
    says(""),
    says("\ud800 lone"),
    {"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": "{not json"}},
    {"role": "function", "name": "old", "content": "1"},
    {"role": "assistant"},
    {"role": "assistant", "content": None, "refusal": "no", "audio": {"id": "a"}},
    {"role": "developer", "content": "be brief"},
    asks({"id": "7", "type": "custom", "custom": {"name": "c", "input": "i"}}, {"function": {"name": 7}}, "nonsense"),
    result("7"),
    USER,
    asks(call(None), call(None)),
    result(None, "first"),
    {"role": "tool", "content": "second"},
    {"role": "assistant", "content": "text protocol: <tool>f()</tool>", "tool_calls": []},
    USER,
    asks(call("1", "f")),
]


def played(store: Store, transcript: Transcript, tmp_path: Path) -> list[Any]:
    with ReplayWorld(str(tmp_path / "world.sqlite")) as world:
        player = Player(transcript, store, world)
        player.run()
        assert player.finished()
    loaded: list[Any] = store.thread(transcript.thread_id).load()["conversation_history"]
    return loaded


def test_odd_transcripts_survive_whole(tmp_path: Path) -> None:
    transcript = Transcript("odd.jsonl", "odd", ODD)
    with Store.open(str(tmp_path / "store")) as store:
        assert difference(ODD, played(store, transcript, tmp_path)) is None
        effects = store.thread("odd").effects()
        assert len(effects) == sum(len(recorded_calls(m)) for m in ODD if m["role"] == "assistant") == 10
        assert all(effect.status == "done" and effect.attempt == 1 for effect in effects)
        assert store.check() == []


@pytest.mark.parametrize("cut", range(len(ODD) + 1))
def test_every_beginning_of_a_transcript_is_a_transcript(tmp_path: Path, cut: int) -> None:
    transcript = Transcript("odd.jsonl", "odd", ODD[:cut])
    with Store.open(str(tmp_path / "store")) as store:
        assert difference(ODD[:cut], played(store, transcript, tmp_path)) is None


def test_playing_again_changes_nothing(tmp_path: Path) -> None:
    transcript = Transcript("odd.jsonl", "odd", ODD)
    with Store.open(str(tmp_path / "store")) as store:
        played(store, transcript, tmp_path)
        seq = store.thread("odd").head.seq  # type: ignore[union-attr]  # it was just played
        assert difference(ODD, played(store, transcript, tmp_path)) is None
        assert store.thread("odd").head.seq == seq  # type: ignore[union-attr]


def test_another_file_of_the_same_name_is_refused(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "store")) as store:
        played(store, Transcript("odd.jsonl", "odd", ODD), tmp_path)
        other = Transcript("odd.jsonl", "odd", [USER, says("something else")])
        with pytest.raises(ReplayFailed, match="does not begin like its file"):
            played(store, other, tmp_path)


def test_a_tool_double_that_is_called_without_an_intent_raises(tmp_path: Path) -> None:
    transcript = Transcript("a.jsonl", "a", [USER, asks(call("1")), result("1")])
    context = ToolContext(
        key="00" * 32, attempt=1, deadline=0.0, thread_id="a", decision=1, index=0, tool="f", call=call("1")
    )
    with Store.open(str(tmp_path / "store")) as store, ReplayWorld(":memory:") as world:
        player = Player(transcript, store, world)
        player.run()
        with pytest.raises(CallWithoutIntent, match="has no intent"):
            asyncio.run(player.call_tool({}, context))
        assert world.totals() == {"executions": 1, "requests": 1, "calls": 1}


def test_a_loop_without_intents_cannot_play(tmp_path: Path) -> None:
    """The doubles' check has teeth: declared as reads, the same tools are called without intents."""
    transcript = Transcript("a.jsonl", "a", [USER, asks(call("1")), result("1")])
    with Store.open(str(tmp_path / "store")) as store, ReplayWorld(":memory:") as world:
        player = Player(transcript, store, world)
        for double in player.tools:
            double.rule, double.query, double.retries = "read", None, 0
        with pytest.raises(CallWithoutIntent):
            player.run()
        assert world.totals()["requests"] == 0


# --- the command -------------------------------------------------------------------------


def replay(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "agentstore.tools.cli", "replay", "--json", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_replay_with_kills_equals_the_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"odd-{n}.jsonl", *ODD * 8) for n in range(3)]
    status, summary = replay(*paths, "--store", tmp_path / "store", "--kills", "5", "--workers", "2", "--seed", "1")
    assert (status, summary["ok"], summary["equal"], summary["transcripts"]) == (0, True, 3, 3), summary
    assert summary["intents"] == summary["receipts"] == summary["calls"] == 3 * 8 * 10
    assert (summary["kills"], summary["starts"], summary["duplicated"]) == (5, 7, 0)
    again, repeated = replay(*paths, "--store", tmp_path / "store", "--workers", "2")
    assert (again, repeated["ok"], repeated["requests"]) == (0, True, 0)


def test_replay_of_the_open_transcripts(transcripts: list[Path], tmp_path: Path) -> None:
    """A sample of every source; all 60 with 30 kills are a job of minutes for `agentstore replay` itself."""
    sample = {path.name.split("--")[0]: path for path in transcripts}
    status, summary = replay(
        *sample.values(), "--store", tmp_path / "store", "--kills", "6", "--workers", "3", "--seed", "2"
    )
    assert (status, summary["equal"], summary["kills"]) == (0, len(sample), 6), summary
    assert summary["intents"] == summary["receipts"] == summary["calls"] > 0


def test_replay_says_which_line_is_bad(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", USER)
    with open(path, "a", encoding="utf-8") as file:
        file.write("{oops\n")
    command = [sys.executable, "-m", "agentstore.tools.cli", "replay", path, "--store", str(tmp_path / "store")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{path}:2: not JSON" in done.stderr
    assert not (tmp_path / "store").exists()


def test_replay_shows_progress_and_a_summary(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", USER, asks(call("1")), result("1"), says())
    command = [sys.executable, "-m", "agentstore.tools.cli", "replay", path, "--store", str(tmp_path / "store")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4/4" in done.stderr
    assert "1 of 1" in done.stdout
    assert "intents / receipts" in done.stdout


def test_a_replay_whose_supervisor_was_killed_is_carried_on(tmp_path: Path) -> None:
    path = write(tmp_path / "odd.jsonl", *ODD * 20)
    store = tmp_path / "store"
    command = [sys.executable, "-m", "agentstore.tools.cli", "replay", path, "--store", str(store), "--workers", "2"]
    supervisor = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while supervisor.poll() is None and not list(store.glob("wal/*")):
            time.sleep(0.01)
    finally:
        supervisor.kill()
        supervisor.wait()
    # Its workers may live a moment longer; they hold their leases until they notice that nobody listens.
    status, summary = replay(path, "--store", store, "--workers", "2")
    assert (status, summary["ok"], summary["intents"]) == (0, True, 200), summary
