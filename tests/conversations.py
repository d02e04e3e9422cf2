"""Conversations for tests: written shortly, or generated with all that goes wrong in real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from agentstore.exchange import calls_of, is_result


def said(role: str, content: Any) -> dict[str, Any]:
    """A message of a role."""
    return {"role": role, "content": content}


def asks(*ids: str) -> dict[str, Any]:
    """A message that asks for calls with these ids."""
    calls = [{"id": each, "type": "function", "function": {"name": f"f-{each}", "arguments": "{}"}} for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: str, content: Any = "ok") -> dict[str, Any]:
    """The result of a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def one_result_for_every_call(messages: Sequence[Any]) -> None:
    """Fail unless every call has one result right behind its message, and every result a call.

    The last message may have fewer: its calls are open.
    """
    at = 0
    while at < len(messages):
        assert not is_result(messages[at]) or calls_of(messages[at]), f"{at}: a result without a call"
        calls = calls_of(messages[at])
        behind = at + 1
        while behind < len(messages) and is_result(messages[behind]) and not calls_of(messages[behind]):
            behind += 1
        if calls:
            results = messages[at + 1 : behind]
            assert len(results) == len(calls) or (behind == len(messages) and len(results) < len(calls)), at
            ids = [call.id for call in calls]
            got = [each.get("tool_call_id") for each in results]
            if len(results) == len(calls) and None not in ids and None not in got:
                assert sorted(map(str, ids)) == sorted(map(str, got)), at
            at = behind
        else:
            at += 1


TEXTS = st.one_of(
    st.none(),
    st.text(max_size=30),
    st.sampled_from(["word " * 100, "你好" * 60, "x" * 700, ""]),
    st.just([{"type": "text", "text": "part"}]),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Any]:
    """Parallel calls, orphans, late and second and stray results, pinned and malformed messages, ids that repeat."""
    talk: list[Any] = []
    if draw(st.booleans()):
        talk.append(said("system", draw(TEXTS)))
    for _ in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["said", "said", "calls", "calls", "calls", "stray", "odd"]))
        if kind == "said":
            talk.append(said(draw(st.sampled_from(["user", "assistant", "system"])), draw(TEXTS)))
        elif kind == "calls":
            ids = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3))
            talk.append(asks(*ids))
            for each in draw(st.permutations(ids)):
                talk += [result(each, draw(TEXTS))] * draw(st.sampled_from([0, 1, 1, 1, 1, 2]))
        elif kind == "stray":
            talk.append(result(draw(st.sampled_from("abcdefgh")), draw(TEXTS)))
        else:
            talk.append(
                draw(st.sampled_from([None, 3, "bare", {}, {"role": "user"}, {"role": "assistant", "tool_calls": 1}]))
            )
        if isinstance(talk[-1], dict) and draw(st.integers(0, 9)) == 0:
            talk[-1] = {**talk[-1], "pinned": True}
    return talk
