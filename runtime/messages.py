"""Messages in OpenAI chat format: which calls one asks for, and what answers them.

Nothing here changes a message that it was given: what a model or a person said is
stored as it came, unknown keys and odd shapes included. A call is named by its place in
its message, never by its id: recorded transcripts repeat ids, and some have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

INTERRUPTED = "interrupted: this call has no result"
"""What a window shows as the result of a call that never got one."""

TEXT_CHARS_MAX = 2_000
"""How much of a value an error text quotes, in characters."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a message asks for.

    `index` is its place in the message, `arguments` what the message holds (usually JSON
    text, kept as it came), `raw` the entry itself, `legacy` whether it is a
    ``function_call``, `problem` why it cannot be called (None: it has the right shape).
    """

    index: int
    id: str | None
    name: str
    arguments: Any
    raw: Any
    legacy: bool = False
    problem: str | None = None


class ToolMessage(dict[str, Any]):
    """A whole tool message: a tool that returns one has it stored exactly so.

    >>> ToolMessage(role="tool", tool_call_id="c1", name="search", content="3 flights")["name"]
    'search'
    """


def calls_of(message: Mapping[str, Any]) -> list[ToolCall]:
    """The calls that `message` asks for, whatever its role, in order. O(calls).

    An entry of a wrong shape is listed too, with its `problem`, so that every entry of
    the message has an index and gets an answer.

    >>> calls_of({"role": "assistant", "tool_calls": [{"id": "c1", "type": "function",
    ...           "function": {"name": "search", "arguments": "{}"}}]})[0].name
    'search'
    >>> calls_of({"role": "assistant", "function_call": {"name": "old", "arguments": "{}"}})[0].legacy
    True
    >>> calls_of({"role": "assistant", "content": "hello", "tool_calls": None})
    []
    """
    entries = message.get("tool_calls")
    if isinstance(entries, Sequence) and not isinstance(entries, str | bytes) and entries:
        return [_call(index, entry) for index, entry in enumerate(entries)]
    if entries and not isinstance(entries, Sequence):
        return [ToolCall(0, None, "", None, entries, problem=f"tool_calls is a {type(entries).__name__}, not a list")]
    legacy = message.get("function_call")
    if legacy is None or legacy in ("", {}):
        return []
    return [_function(0, None, legacy, legacy, legacy=True)]


def _call(index: int, entry: Any) -> ToolCall:
    if not isinstance(entry, Mapping):
        return ToolCall(index, None, "", None, entry, problem=f"the call is a {type(entry).__name__}, not an object")
    call_id = entry.get("id")
    return _function(index, call_id if isinstance(call_id, str) else None, entry.get("function"), entry, legacy=False)


def _function(index: int, call_id: str | None, function: Any, raw: Any, *, legacy: bool) -> ToolCall:
    if not isinstance(function, Mapping):
        problem = f"the call has no function object (it is a {type(function).__name__})"
        return ToolCall(index, call_id, "", None, raw, legacy, problem)
    name = function.get("name")
    arguments = function.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCall(index, call_id, "", arguments, raw, legacy, "the call does not name a function")
    return ToolCall(index, call_id, name, arguments, raw, legacy)


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """The arguments of `call` as a dict; ValueError with a sentence for the model if they are not a JSON object.

    >>> arguments_of(ToolCall(0, "c1", "search", '{"to": "OSL"}', {}))
    {'to': 'OSL'}
    >>> arguments_of(ToolCall(0, "c1", "search", "", {}))
    {}
    """
    value = call.arguments
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}  # several providers send no text for a function without parameters
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments are not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"the arguments must be a JSON object, not {type(value).__name__}")
    return dict(value)


def result_message(call: ToolCall, content: Any) -> Message:
    """The message that answers `call`: role ``tool``, or ``function`` for a legacy call.

    A call without an id is answered without one: pairing is by place.

    >>> result_message(ToolCall(0, "c1", "search", "{}", {}), "3 flights")
    {'role': 'tool', 'tool_call_id': 'c1', 'content': '3 flights'}
    """
    if call.legacy:
        return {"role": "function", "name": call.name, "content": content}
    if call.id is None:
        return {"role": "tool", "content": content}
    return {"role": "tool", "tool_call_id": call.id, "content": content}


def text_of(result: Any) -> str:
    """A tool's result as the text of its message: a str as it is, anything else as JSON (or its repr).

    >>> text_of({"seat": "12A"})
    '{"seat": "12A"}'
    """
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except Exception:  # a `__str__` of the tool's own may raise anything, and the tool took effect already
        return short(result)


def short(value: Any) -> str:
    """The repr of `value`, cut to `TEXT_CHARS_MAX` characters; what it is, where it has none."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= TEXT_CHARS_MAX else text[:TEXT_CHARS_MAX] + "… (shortened)"


def said(error: BaseException) -> str:
    """The kind of an exception and its text, which may itself raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose text cannot be had"


def is_result(message: Message) -> bool:
    """Whether `message` answers a call."""
    return message.get("role") in ("tool", "function")


def window(messages: Sequence[Message]) -> list[Message]:
    """What a model is shown of `messages`: all of it, each call without a result answered with `INTERRUPTED`.

    Only here: the stored history keeps the gap. Without the answer most providers refuse
    the whole conversation, and one interrupted call would wedge its thread for ever. O(messages).

    >>> cut = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]}
    >>> [m["role"] for m in window([cut, {"role": "user", "content": "never mind"}])]
    ['assistant', 'tool', 'user']
    """
    shown: list[Message] = []
    asking: Message | None = None  # the last message with calls, while its results are being counted
    wanted = 0
    results: list[Message] = []
    for message in messages:
        if asking is not None:
            if is_result(message):
                results.append(message)
                shown.append(message.copy())
                continue
            if len(results) < wanted:
                shown += _interrupted(asking, results)
            asking = None
        shown.append(message.copy())
        calls = message.get("tool_calls") or message.get("function_call")
        if calls:
            asking, results = message, []
            wanted = len(calls) if calls.__class__ is list else 1
    if asking is not None and len(results) < wanted:
        shown += _interrupted(asking, results)
    return shown


def _interrupted(asking: Message, results: Sequence[Message]) -> list[Message]:
    return [result_message(call, INTERRUPTED) for call in _unanswered(calls_of(asking), results)]


def _unanswered(calls: Sequence[ToolCall], results: Sequence[Message]) -> list[ToolCall]:
    """The calls that no message of `results` answers: by id where ids are there and differ, else by number."""
    ids = [call.id for call in calls]
    if None in ids or len(set(ids)) < len(ids):
        return list(calls[len(results) :])
    answered = {message.get("tool_call_id") for message in results}
    return [call for call in calls if call.id not in answered]
