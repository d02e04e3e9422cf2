"""The loop that moves an agent one step only after the write of the step before is confirmed.

>>> from agentstore.testing.scratch import scratch_store
>>> @tool(recovery="read")
... def weather(city: str) -> str:
...     '''The weather in a city.'''
...     return f"rain in {city}"
>>> def model(messages, tools):
...     if messages[-1]["role"] == "tool":
...         return Reply({"role": "assistant", "content": messages[-1]["content"]})
...     call = {"name": "weather", "arguments": '{"city": "Bergen"}'}
...     calls = [{"id": "c1", "type": "function", "function": call}]
...     return Reply({"role": "assistant", "content": None, "tool_calls": calls})
>>> agent = Agent(model=model, tools=[weather])
>>> agent.run(scratch_store(), "chat-1", "Do I need an umbrella?", input_id="q1").output
'rain in Bergen'
"""

from __future__ import annotations

from agentstore import NotDone, Unknown

from .agent import Agent
from .events import RunEvent
from .messages import ToolCall, ToolMessage, calls_of
from .outcome import RunResult, WaitingCall
from .reply import Reply, Usage
from .resolving import resolve
from .states import AgentState
from .tool import Interrupted, Tool, ToolContext, ToolError, tool

__all__ = [
    "Agent",
    "AgentState",
    "Interrupted",
    "NotDone",
    "Reply",
    "RunEvent",
    "RunResult",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolError",
    "ToolMessage",
    "Unknown",
    "Usage",
    "WaitingCall",
    "calls_of",
    "resolve",
    "tool",
]
