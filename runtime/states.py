"""The states of a run, the transitions between them, and the fields of its state.

INIT → RUNNING → COMPLETED is the straight way. From RUNNING a run goes to WAITING (a tool is
still running elsewhere, or a person must say what happened to a call), to PAUSED (its steps
are used up) or to FAILED, and from each of them back to RUNNING. Whatever is not in
`TRANSITIONS` raises `IllegalTransition`.
"""

from __future__ import annotations

from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, TypedDict

from agentstore import IllegalTransition, RuntimeStateError

from .messages import Message

INIT: Final = "INIT"
RUNNING: Final = "RUNNING"
WAITING: Final = "WAITING"
PAUSED: Final = "PAUSED"
COMPLETED: Final = "COMPLETED"
FAILED: Final = "FAILED"

TRANSITIONS: Final = MappingProxyType(
    {
        INIT: frozenset({RUNNING, FAILED}),
        RUNNING: frozenset({WAITING, PAUSED, COMPLETED, FAILED}),
        WAITING: frozenset({RUNNING, FAILED}),
        PAUSED: frozenset({RUNNING, FAILED}),
        COMPLETED: frozenset({RUNNING}),
        FAILED: frozenset({RUNNING, WAITING}),
    }
)


def check_transition(thread_id: str, now: str, then: str) -> None:
    """Raise `IllegalTransition` unless a run may go from `now` to `then`.

    >>> check_transition("trip-1", "PAUSED", "RUNNING")
    >>> check_transition("trip-1", "COMPLETED", "PAUSED")
    Traceback (most recent call last):
    agentstore.errors.IllegalTransition: thread 'trip-1': no transition from COMPLETED to PAUSED (only to RUNNING)
    """
    allowed = TRANSITIONS.get(now)
    if allowed is None:
        raise IllegalTransition(f"thread {thread_id!r}: {now!r} is not a state of a run ({', '.join(TRANSITIONS)})")
    if then not in allowed:
        raise IllegalTransition(
            f"thread {thread_id!r}: no transition from {now} to {then} (only to {', '.join(sorted(allowed))})"
        )


class TokenUsage(TypedDict):
    """Tokens of all model calls of the thread."""

    prompt: int
    completion: int
    total: int


class Metadata(TypedDict):
    """When the run began and was last stored (UTC, for people), and how often its present turn was tried again."""

    created_at: datetime
    last_checkpoint_at: datetime
    retry_count: int


class CallResult(TypedDict):
    """One finished call. Its content stands once, in ``conversation_history[message]`` (None: it has no message)."""

    decision: int
    """Index of the deciding message in the conversation."""
    call: int
    """Index of the call in that message."""
    tool: str
    key: str | None
    """Idempotency key in hex; None where no intent was needed."""
    outcome: str
    """``ok``, ``error`` (a ToolError), ``malformed`` (never called), ``unknown``, ``interrupted``."""
    message: int | None


class Turn(TypedDict):
    """One input and what followed from it."""

    input_id: str | None
    first: int
    """Index of the first message of the input."""
    count: int
    """Messages of the input."""
    steps: int
    """Model calls that were recorded in this turn."""
    decision: int | None
    """Index of the newest message of the turn whose calls are to be run."""
    malformed: int
    """Decisions in a row with a call that could not be made as it was written."""
    asked: list[int]
    """Calls of the decision that wait for a person."""
    again: list[int]
    """Calls of the decision that did not happen, as a person said, and are to be made."""
    output: int | None
    """Index of the message that ended the turn."""
    error: str | None
    """Why the turn failed."""


class AgentState(TypedDict, total=False):
    """The state of a run. A thread's state may have any further fields; the runtime leaves them alone."""

    task_id: str
    state: str
    step: int
    conversation_history: list[Message]
    tool_call_results: list[CallResult]
    execution_plan: Any
    partial_outputs: list[Any]
    token_usage: TokenUsage
    metadata: Metadata
    turn: Turn
    turns: list[dict[str, Any]]
    """Finished turns: input_id, first, count, output, and the seq of the checkpoint that ended each."""


def new_state(thread_id: str, created_at: datetime) -> dict[str, Any]:
    """The fields of a run before its first input."""
    return {
        "task_id": thread_id,
        "state": INIT,
        "step": 0,
        "conversation_history": [],
        "tool_call_results": [],
        "execution_plan": None,
        "partial_outputs": [],
        "token_usage": {"prompt": 0, "completion": 0, "total": 0},
        "metadata": {"created_at": created_at, "last_checkpoint_at": created_at, "retry_count": 0},
        "turns": [],
    }


def new_turn(input_id: str | None, first: int, count: int) -> Turn:
    """A turn that begins with the `count` messages at `first`."""
    return {
        "input_id": input_id,
        "first": first,
        "count": count,
        "steps": 0,
        "decision": None,
        "malformed": 0,
        "asked": [],
        "again": [],
        "output": None,
        "error": None,
    }


def check_state(thread_id: str, state: dict[str, Any]) -> None:
    """`RuntimeStateError` for a state whose fields, by the names that a run uses, hold something else. O(fields)."""
    fresh = new_state(thread_id, datetime.min)
    wrong = [
        field
        for field, value in fresh.items()
        if value is not None and field in state and type(state[field]) is not type(value)
    ]
    turn = state.get("turn")
    if "turn" in state and (type(turn) is not dict or not new_turn(None, 0, 0).keys() <= turn.keys()):
        wrong.append("turn")
    if "turn" in state:
        wrong += [field for field in fresh if field not in state]
    if wrong:
        raise RuntimeStateError(
            f"thread {thread_id!r}: {', '.join(map(repr, wrong))} of its state is not what a run keeps there, so "
            "something else wrote it; give the run a thread of its own, or rename the field"
        )
