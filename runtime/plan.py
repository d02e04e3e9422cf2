"""What is to be done about each call of a message: its tool and its arguments, or what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentstore import EffectCall

from .draft import State
from .messages import Message, ToolCall, arguments_of, calls_of
from .results import of_decision
from .tool import NAME_BYTES_MAX, Tool


@dataclass(frozen=True, slots=True)
class Planned:
    """One call with its tool and arguments; `tool` None: it cannot be made, `problem` says why."""

    call: ToolCall
    name: str
    tool: Tool | None
    arguments: Any
    problem: str | None = None

    @property
    def index(self) -> int:
        """Index of the call in its message."""
        return self.call.index

    def intent(self) -> EffectCall:
        """The intent of the call, for the commit of its decision."""
        assert self.tool is not None
        return EffectCall(self.index, self.name, self.arguments, rule=self.tool.rule, timeout_s=self.tool.timeout_s)


def plan(message: Message, tools: Mapping[str, Tool], fallback: Tool | None) -> list[Planned]:
    """The calls of `message`, each with its tool. `fallback` takes those that no tool can. O(size of the calls)."""
    return [_planned(call, tools, fallback) for call in calls_of(message)]


def open_calls(state: State, tools: Mapping[str, Tool], fallback: Tool | None) -> list[Planned]:
    """The calls of the newest decision of a run that have not ended. O(size of its message)."""
    at = state["turn"]["decision"]
    if at is None:
        return []
    ended = {entry["call"] for entry in of_decision(state, at)}
    planned = plan(state["conversation_history"][at], tools, fallback)
    return [each for each in planned if each.index not in ended]


def _planned(call: ToolCall, tools: Mapping[str, Tool], fallback: Tool | None) -> Planned:
    found = None if call.problem else tools.get(call.name)
    problem = call.problem or f"there is no tool {call.name[:100]!r} (there are: {', '.join(tools) or 'none'})"
    if found is None:
        if fallback is None:
            return Planned(call, call.name, None, call.arguments, problem)
        return _with_arguments(call, _name(call, fallback), fallback)
    return _with_arguments(call, call.name, found)


def _with_arguments(call: ToolCall, name: str, tool: Tool) -> Planned:
    if tool.raw:
        return Planned(call, name, tool, call.arguments)
    try:
        arguments = arguments_of(call)
    except ValueError as error:
        return Planned(call, name, None, call.arguments, str(error))
    problems = tool.check(arguments)
    if problems:
        return Planned(call, name, None, arguments, "; ".join(problems))
    return Planned(call, name, tool, arguments)


def _name(call: ToolCall, fallback: Tool) -> str:
    """The name that a call of the fallback is kept under: what the model called it, where that can be kept."""
    fits = 0 < len(call.name.encode("utf-8", "surrogatepass")) <= NAME_BYTES_MAX
    return call.name if fits else fallback.name
