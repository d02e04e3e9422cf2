"""Replay of recorded transcripts: reading, cutting into turns, playing under kills, comparing."""

from __future__ import annotations

import codecs
import json
import math
from pathlib import Path
from typing import Any

import pytest
from agentstore.tools.replay_player import recorded_calls
from agentstore.tools.replay_turns import plan
from agentstore.tools.transcript import TranscriptError, difference, read_messages, read_transcripts

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


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(TranscriptError, match="gone.jsonl: cannot be read"):
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
