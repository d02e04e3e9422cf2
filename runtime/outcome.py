"""What `Agent.run` gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentstore import Checkpoint

from .messages import Message


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A call that nobody knows the outcome of: `Agent.resolve` takes it, with what happened."""

    thread_id: str
    decision: int
    """Seq of the checkpoint of its decision."""
    index: int
    """Place of the call in its message."""
    tool: str
    arguments: Any
    key: str
    """Its idempotency key: what to look for in the outside world."""
    why: str
    call_id: str | None


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run stands when `Agent.run` returns."""

    thread_id: str
    status: str
    """``COMPLETED``; ``WAITING`` (see `waiting`); ``PAUSED`` (its steps are used up)."""
    state: dict[str, Any]
    """The whole state at `checkpoint`; the caller's own copy."""
    checkpoint: Checkpoint
    """The confirmed checkpoint that this is the state of."""
    message: Message | None
    """The message that ended the turn, if it ended with one."""
    waiting: tuple[WaitingCall, ...] = ()
    error: str | None = None

    @property
    def output(self) -> str | None:
        """The text of `message`; None if there is none, or its content is no text."""
        content = None if self.message is None else self.message.get("content")
        return content if isinstance(content, str) else None

    @property
    def messages(self) -> list[Message]:
        """The whole conversation."""
        history: list[Message] = self.state["conversation_history"]
        return history

    def __repr__(self) -> str:
        waiting = f", waiting for {len(self.waiting)} calls" if self.waiting else ""
        return f"<RunResult {self.thread_id!r} {self.status} at {self.checkpoint.seq}{waiting}>"
