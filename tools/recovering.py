"""What recovery can do about the calls that a dead worker left, as the demo and the replay count it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentstore.runtime import calls_of

RECOVERIES = ("skip", "query", "replay", "asked")
"""Its result is recorded; the tool is asked; it is called again with its key; a person is asked."""


def results_recorded(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Tools of which a result stands behind the last decision of an unfinished turn: recovery skips their calls.

    >>> asked = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]}
    >>> results_recorded([asked, {"role": "tool", "tool_call_id": "1", "content": ""}]), results_recorded([asked])
    (['f'], [])
    """
    ids: list[object] = []
    for message in reversed(messages):
        if message["role"] not in ("tool", "function"):
            calls = calls_of(message) if message["role"] == "assistant" else []
            names: dict[object, str] = {call.id: call.name for call in calls}
            return [names.get(found, "") for found in reversed(ids)] if calls else []
        ids.append(message.get("tool_call_id"))
    return []
