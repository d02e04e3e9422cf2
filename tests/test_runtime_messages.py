"""Calls of messages in every shape that recorded transcripts hold, and what a model is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentstore.runtime.messages import (
    INTERRUPTED,
    ToolCall,
    arguments_of,
    calls_of,
    result_message,
    short,
    text_of,
    window,
)
from agentstore.runtime.reply import MalformedReplyError, Reply, Usage, read_reply

OPEN = Path(__file__).resolve().parents[2] / "shared" / "data" / "open"


def asks(*ids: str | None, name: str = "f") -> dict[str, Any]:
    calls = [{"id": i, "type": "function", "function": {"name": name, "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answer(call_id: str | None, content: str = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_calls_keep_their_place_whatever_their_ids_are() -> None:
    calls = calls_of(asks("a", "a", None))
    assert [(call.index, call.id, call.problem) for call in calls] == [(0, "a", None), (1, "a", None), (2, None, None)]


@pytest.mark.parametrize("nothing", [None, [], (), "", 0, False])
def test_a_message_without_calls(nothing: Any) -> None:
    assert calls_of({"role": "assistant", "tool_calls": nothing}) == []
    assert calls_of({"role": "assistant", "content": "x", "tool_calls": nothing, "function_call": None}) == []


def test_a_legacy_call_is_answered_by_a_function_message() -> None:
    (call,) = calls_of({"role": "assistant", "function_call": {"name": "old", "arguments": '{"a": 1}'}})
    assert call.legacy and call.name == "old" and arguments_of(call) == {"a": 1}
    assert result_message(call, "x") == {"role": "function", "name": "old", "content": "x"}


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("text", "is a str"),
        (None, "is a NoneType"),
        ({"id": "a"}, "no function object"),
        ({"id": "a", "function": None}, "no function object"),
        ({"id": "a", "function": {"arguments": "{}"}}, "does not name a function"),
        ({"id": "a", "function": {"name": 7}}, "does not name a function"),
        ({"id": "a", "function": {"name": ""}}, "does not name a function"),
    ],
)
def test_a_misshapen_call_is_listed_with_its_problem(entry: Any, says: str) -> None:
    calls = calls_of({"role": "assistant", "tool_calls": [entry, asks("b")["tool_calls"][0]]})
    assert [call.index for call in calls] == [0, 1]
    assert calls[0].problem is not None and says in calls[0].problem
    assert calls[1].problem is None


def test_calls_that_are_no_list() -> None:
    (call,) = calls_of({"role": "assistant", "tool_calls": {"id": "a"}})
    assert call.problem == "tool_calls is a dict, not a list"


@pytest.mark.parametrize("text", [None, "", "  \n"])
def test_no_arguments_are_an_empty_object(text: Any) -> None:
    assert arguments_of(ToolCall(0, "a", "f", text, {})) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not valid JSON"), ("[1]", "not list"), ("7", "not int"), (7, "not int"), ("[" * 100_000, "not valid JSON")],
)
def test_bad_arguments_say_what_is_wrong(text: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        arguments_of(ToolCall(0, "a", "f", text, {}))


def test_arguments_that_are_an_object_already() -> None:
    assert arguments_of(ToolCall(0, "a", "f", {"x": 1}, {})) == {"x": 1}


def test_a_call_without_id_is_answered_without_one() -> None:
    assert result_message(calls_of(asks(None))[0], "x") == {"role": "tool", "content": "x"}


def test_results_as_text() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert text_of("é") == "é"
    assert text_of({"é": [1, None]}) == '{"é": [1, null]}'
    assert text_of({(1, 2): 3}) == "{(1, 2): 3}"
    assert text_of(circle) == "[[...]]"
    assert text_of("\ud800") == "\ud800"
    assert len(short("x" * 1_000_000)) < 2_100


# --- what a model is shown -----------------------------------------------------------


def test_a_whole_conversation_is_shown_as_it_is() -> None:
    messages = [{"role": "user", "content": "x"}, asks("a", "b"), answer("b"), answer("a"), asks("a"), answer("a")]
    assert window(messages) == messages
    assert window(messages)[0] is not messages[0]  # the model may put keys in without touching the state


def test_calls_without_a_result_are_shown_interrupted_in_their_place() -> None:
    messages = [asks("a", "b", "c"), answer("b"), {"role": "user", "content": "stop"}, asks("d")]
    shown = window(messages)
    assert [m.get("tool_call_id", m["role"]) for m in shown] == ["assistant", "b", "a", "c", "user", "assistant", "d"]
    assert shown[2]["content"] == INTERRUPTED == shown[3]["content"]


def test_calls_with_one_id_are_paired_by_number() -> None:
    shown = window([asks("a", "a", "a"), answer("a"), {"role": "user", "content": "go on"}])
    assert [m["role"] for m in shown] == ["assistant", "tool", "tool", "tool", "user"]
    assert [m["content"] for m in shown[1:4]] == ["ok", INTERRUPTED, INTERRUPTED]


def test_every_call_of_the_recorded_transcripts_is_answered_in_the_window() -> None:
    if not OPEN.is_dir():
        pytest.skip("the recorded transcripts of ../shared are not here")
    orphans = calls_seen = 0
    for path in sorted(OPEN.glob("*.jsonl")):
        messages = [json.loads(line) for line in path.open(encoding="utf-8")]
        shown = window(messages)
        orphans += len(shown) - len(messages)
        assert [m for m in shown if m.get("content") != INTERRUPTED] == messages
        for at, message in enumerate(shown):
            calls = calls_of(message)
            calls_seen += len(calls)
            assert all(call.problem is None for call in calls)
            assert all(m["role"] == "tool" for m in shown[at + 1 : at + 1 + len(calls)])
    assert orphans == 21
    assert calls_seen > 1_600


# --- what a model says ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (None, (0, 0)),
        (Usage(3, 4), (3, 4)),
        ({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}, (3, 4)),
        ({"input_tokens": 3, "output_tokens": 4}, (3, 4)),
        ({"prompt": 3}, (3, 0)),
        ({"prompt_tokens": None, "completion_tokens": "4"}, (0, 0)),
        ({"prompt_tokens": -3, "completion_tokens": True}, (0, 0)),
    ],
)
def test_usage_in_the_words_of_others(usage: Any, counts: tuple[int, int]) -> None:
    read = Usage.of(usage)
    assert (read.prompt, read.completion) == counts
    assert read.total == sum(counts)


def test_a_bare_message_is_a_reply() -> None:
    message = {"role": "assistant", "tool_calls": [], "x-extra": {"y": 1}}
    assert read_reply(message).message is message
    assert read_reply(Reply(message, plan=["a"])).plan == ["a"]
    assert read_reply(Reply(None)).message is None


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (None, "is a NoneType"),
        ("hello", "is a str"),
        ({"content": "no role"}, "is a dict, not a message"),
        (Reply("hello"), "the message is a str"),  # type: ignore[arg-type]  # what an untyped caller does
        (Reply({"role": "tool", "content": "x"}), "role of the message must be assistant"),
        (Reply({"content": "x"}), "role of the message must be assistant"),
    ],
)
def test_what_is_no_message_is_malformed(output: Any, says: str) -> None:
    with pytest.raises(MalformedReplyError, match=says):
        read_reply(output)
