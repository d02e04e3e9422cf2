"""How the end of a call enters the state: its message in its place, its entry in ``tool_call_results``.

Calls of one message run side by side and end in any order; their messages stand in the
order of the calls all the same, so that the conversation does not depend on who was
faster. One that ends early is appended, an earlier one that ends after it is put before it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from agentstore import Effect, EffectFailed, EffectView

from .draft import Draft, State
from .messages import Message, ToolCall, ToolMessage, result_message, text_of
from .tool import Interrupted, ToolError

OK = "ok"
ERROR = "error"
MALFORMED = "malformed"
UNKNOWN = "unknown"
INTERRUPTED = "interrupted"

UNKNOWN_TEXT = (
    "outcome unknown: the call was started and its result was lost; it may or may not have taken effect, "
    "and it is not made again"
)

WHOLE = "agentstore:tool_message"
"""Key of a receipt's result that is a `ToolMessage`: it must come back as one when only the receipt survived."""


@dataclass(slots=True)
class Ending:
    """How a call ended. `value` is the tool's result, or the text of its error."""

    outcome: str
    value: Any = None
    source: str = "call"
    """Who said so: ``call``, ``query``, ``person`` or ``rule``."""

    def message(self, call: ToolCall) -> Message | None:
        """The message that answers `call`; None for an interrupted one."""
        if self.outcome == INTERRUPTED:
            return None
        if self.outcome == OK:
            if isinstance(self.value, ToolMessage):
                return copy.deepcopy(dict(self.value))
            return result_message(call, text_of(self.value))
        if self.outcome == UNKNOWN:
            return result_message(call, UNKNOWN_TEXT)
        return result_message(call, f"error: {self.value}")

    def stored(self) -> Any:
        """The value as it goes into the receipt."""
        return {WHOLE: copy.deepcopy(dict(self.value))} if isinstance(self.value, ToolMessage) else self.value

    def failure(self) -> str:
        """The error as it goes into the receipt; the inverse is in `recorded`."""
        kind = Interrupted if self.outcome == INTERRUPTED else ToolError
        return f"{kind.__name__}: {self.value}"


def recorded(effect: Effect | EffectView) -> Ending:
    """The ending that a receipt has."""
    source = effect.source or "call"
    try:
        value = effect.result
    except EffectFailed:
        kind, _, text = (effect.error or "").partition(": ")
        return Ending(INTERRUPTED if kind == Interrupted.__name__ else ERROR, text, source)
    if effect.outcome == "unknown":
        return Ending(UNKNOWN, None, source)
    return Ending(OK, given_back(value), source)


def given_back(value: Any) -> Any:
    """The inverse of `Ending.stored`."""
    return ToolMessage(value[WHOLE]) if type(value) is dict and list(value) == [WHOLE] else value


def add(draft: Draft, state: State, decision: int, call: ToolCall, ending: Ending, key: str | None, tool: str) -> None:
    """Put the end of `call`, of the message at `decision`, into `draft`, which has no other end in it.

    O(1) when it is the last one in the order of calls, else O(conversation).
    """
    ended = of_decision(state, decision)
    earlier = [entry for entry in ended if entry["call"] < call.index and entry["message"] is not None]
    at = decision + 1 + len(earlier)
    message = ending.message(call)
    if message is None or at == len(state["conversation_history"]):
        append(draft, decision, call, ending, key, tool, at)
        return
    draft.splice("conversation_history", at, 0, message)
    moved = [
        {**each, "message": each["message"] + 1} if each["message"] is not None and each["message"] >= at else each
        for each in ended
    ]
    entry = _entry(decision, call, ending, key, tool, at)
    draft.splice("tool_call_results", len(state["tool_call_results"]) - len(ended), len(ended), *moved, entry)


def append(draft: Draft, decision: int, call: ToolCall, ending: Ending, key: str | None, tool: str, at: int) -> None:
    """Put the end of `call` into `draft`; its message comes to stand at `at`, the end of the conversation."""
    message = ending.message(call)
    if message is not None:
        draft.append("conversation_history", message)
    draft.append("tool_call_results", _entry(decision, call, ending, key, tool, None if message is None else at))


def _entry(decision: int, call: ToolCall, ending: Ending, key: str | None, tool: str, at: int | None) -> dict[str, Any]:
    return {
        "decision": decision,
        "call": call.index,
        "tool": tool,
        "key": key,
        "outcome": ending.outcome,
        "message": at,
    }


def of_decision(state: State, decision: int) -> list[dict[str, Any]]:
    """The entries of those calls of the message at `decision` that have ended, in that order. O(calls)."""
    ended: list[dict[str, Any]] = []
    for entry in reversed(state["tool_call_results"]):
        if entry["decision"] != decision:
            break
        ended.append(entry)
    ended.reverse()
    return ended
