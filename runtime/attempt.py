"""One attempt at a call: start the tool, wait for it as long as it may take, and say how that ended.

What a tool raises means one of three things. `ToolError`: it did not take effect, or this is
final, and the model is told. `Interrupted`: nothing will come back. Anything else, and a
timeout: nobody knows, which is for the rule of the tool to decide.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from . import calling
from .messages import said, short
from .plan import Planned
from .results import ERROR, INTERRUPTED, OK, Ending
from .tool import Interrupted, ToolContext, ToolError

STOP_S = 1.0
"""How long an async tool has to end after it was cancelled."""


@dataclass(slots=True)
class Doubt:
    """An attempt that ended without anybody knowing its outcome."""

    why: str
    ended: bool
    """Whether the tool is known not to run any more."""


@dataclass(slots=True)
class NotNow:
    """The tool says that it did not take effect, and that trying again may help."""

    why: str


class Cancelled(asyncio.CancelledError):
    """The run was cancelled while a tool ran; `ended` says whether the tool is known not to run any more."""

    def __init__(self, *, ended: bool) -> None:
        super().__init__()
        self.ended = ended


async def attempt(planned: Planned, context: ToolContext, *, patience_s: float) -> Ending | NotNow | Doubt:
    """Call the tool of `planned` once.

    `patience_s`: how long to wait, after the timeout, for a tool that cannot be stopped; what it returns in that
    time counts. Raises `Cancelled` when the run is cancelled.
    """
    tool = planned.tool
    assert tool is not None
    is_async = calling.is_async(tool.fn)
    call = calling.start(tool.start, planned.arguments, context, awaited=is_async, name=planned.name)
    try:
        if not await calling.within(call, tool.timeout_s):
            late = f"it took longer than {tool.timeout_s:g} s"
            ended = await (calling.stop(call, patience_s) if is_async else calling.within(call, patience_s))
            if not ended:
                call.cancel()
                return Doubt(f"{late} and still runs", ended=False)
            if call.cancelled():
                return Doubt(late, ended=True)
    except asyncio.CancelledError:
        ended = call.done() or (is_async and await calling.stop(call, STOP_S))
        call.cancel()
        raise Cancelled(ended=ended) from None
    return _outcome(call)


def _outcome(call: asyncio.Future[Any]) -> Ending | NotNow | Doubt:
    if call.cancelled():
        return Doubt("it was cancelled from inside", ended=True)
    error = call.exception()
    if error is None:
        return Ending(OK, call.result())
    if isinstance(error, ToolError):
        return Ending(ERROR, _text(error)) if error.final else NotNow(_text(error))
    if isinstance(error, Interrupted):
        return Ending(INTERRUPTED, _text(error) or "the call was cut off")
    return Doubt(f"it raised {short(said(error))[1:-1]}", ended=True)


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # its class is the user's
        return said(error)
