"""Inputs: which turn a call of `run` means, and the commit that begins a new one.

An `input_id` decides by itself: one that is recorded carries its turn on, or is answered with
the result that turn had, whatever the input says this time; that is what a caller who
cannot remember what he sent needs. Without one the input is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from agentstore import RunUnfinished

from . import clock
from .draft import Draft, State
from .messages import Message, calls_of
from .states import COMPLETED, RUNNING, new_state, new_turn

Input = str | Message | Sequence[Message] | None


def messages_of(given: Input) -> list[Message] | None:
    """The messages of an input, copied: a str is one user message; None: no new input, carry on.

    >>> messages_of("hi")
    [{'role': 'user', 'content': 'hi'}]
    """
    if given is None:
        return None
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for message in messages:
        if type(message) is not dict or not isinstance(message.get("role"), str):
            raise TypeError(
                f"an input is a str, a message with a role, or a list of such messages; not {message!r:.200}"
            )
    return copy.deepcopy(messages)


def recorded_turn(state: State, input_id: str | None) -> dict[str, Any] | None:
    """The turn, finished or not, that began with `input_id`. O(turns)."""
    turn: dict[str, Any] | None = state.get("turn")
    if turn is None or input_id is None:
        return None
    if turn["input_id"] == input_id:
        return turn
    return next((each for each in state["turns"] if each["input_id"] == input_id), None)


def begins_turn(thread_id: str, state: State, messages: list[Message] | None, input_id: str | None) -> bool:
    """Whether these messages begin a new turn; False: they carry on the present one.

    Raises `RunUnfinished`, and ValueError if there is nothing to carry on.
    """
    turn = state.get("turn")
    if turn is None:
        if messages is None:
            raise ValueError(f"thread {thread_id!r} has no input yet, so there is nothing to carry on")
        return True
    if messages is None:
        return False
    if state["state"] == COMPLETED:
        return True
    before = state["conversation_history"][turn["first"] : turn["first"] + turn["count"]]
    if input_id is None and before == messages:
        return False
    other = f" (input_id {turn['input_id']!r})" if turn["input_id"] is not None else ""
    raise RunUnfinished(
        f"thread {thread_id!r} is {state['state']} in a turn with another input{other}: "
        "carry that on first, with its own input and input_id, or with input None"
    )


def first_draft(thread_id: str, state: State) -> tuple[Draft, State]:
    """A draft on a thread without a run: it adds the fields that are missing. With it the state as it will be."""
    fresh = new_state(thread_id, clock.now())
    missing = {field: value for field, value in fresh.items() if field not in state}
    seen = {**fresh, **state}
    draft = Draft(state)
    for field, value in missing.items():
        draft.set(field, value)
    return draft, seen


def begin(
    draft: Draft, state: State, messages: list[Message], input_id: str | None, *, seq: int, run_calls: bool
) -> bool:
    """Put a new turn into `draft`; whether its last message has calls that are to be run.

    `state` has all fields of a run; `seq` is the checkpoint that ended the turn before.
    """
    at = len(state["conversation_history"])
    turn: dict[str, Any] = {**new_turn(input_id, at, len(messages))}
    before = state.get("turn")
    if before is not None:
        kept = {field: before[field] for field in ("input_id", "first", "count", "steps", "output")}
        draft.append("turns", {**kept, "seq": seq})
    decides = run_calls and bool(messages) and bool(calls_of(messages[-1]))
    if decides:
        turn["decision"] = at + len(messages) - 1
    draft.append("conversation_history", *messages)
    draft.set("turn", turn)
    draft.set("metadata", {**state["metadata"], "retry_count": 0})
    draft.move(RUNNING)
    return decides
