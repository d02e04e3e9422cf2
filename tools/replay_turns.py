"""A transcript cut into turns: what came from the world, what the model said, what its calls returned.

A live agent's thread grows in turns: the world puts something in, the model decides,
its calls return, the model goes on until it has nothing more to call. Any recorded
conversation can be cut that way:

* a message that is neither the model's nor the result of an open call is an *input*: several system messages,
  a user's own calls and their results, results whose call is not there;
* an assistant message that follows one without calls begins a turn without input;
* calls that a later message cuts off before their result were *interrupted*: nothing ever came back for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .transcript import Message


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a decision: its place, what answers it, and where its result stands (None: interrupted)."""

    index: int
    id: object
    name: object
    result: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """An assistant message at `position` with its calls."""

    position: int
    calls: tuple[RecordedCall, ...]

    @property
    def interrupted(self) -> bool:
        return any(call.result is None for call in self.calls)


@dataclass(frozen=True, slots=True)
class Turn:
    """`inputs` begin at message `position`; then the `decisions`. Turn k's input id is ``turn-k``, in every process."""

    number: int
    position: int
    inputs: list[Message]
    decisions: list[Decision] = field(default_factory=list)

    @property
    def input_id(self) -> str:
        return f"turn-{self.number}"


CallsOf = Callable[[Message], Sequence[RecordedCall]]


def plan(messages: Sequence[Message], calls_of: CallsOf) -> list[Turn]:
    """The turns of a conversation; together they hold every message once, in order. O(messages).

    `calls_of` gives the calls of an assistant message (without results), by their index.
    An empty conversation is one turn without input.
    """
    turns: list[Turn] = []
    at = 0
    while at < len(messages) or not turns:
        start = at
        while at < len(messages) and messages[at]["role"] != "assistant":
            at += 1
        turn = Turn(len(turns), start, list(messages[start:at]))
        turns.append(turn)
        while at < len(messages) and messages[at]["role"] == "assistant":
            decision, at = _decision(messages, at, calls_of)
            turn.decisions.append(decision)
            if not decision.calls or decision.interrupted:
                break
    return turns


def _decision(messages: Sequence[Message], at: int, calls_of: CallsOf) -> tuple[Decision, int]:
    """The decision at `at` with the results that follow it, and the position behind them."""
    position = at
    calls = list(calls_of(messages[at]))
    at += 1
    next_index = 0
    while at < len(messages):
        # Calls return in the order in which they were made; a result that comes out of that order
        # (or twice) is late news from the world, an input.
        found = next((n for n in range(next_index, len(calls)) if _answers(messages[at], calls[n])), None)
        if found is None:
            break
        call = calls[found]
        calls[found] = RecordedCall(call.index, call.id, call.name, at)
        next_index = found + 1
        at += 1
    return Decision(position, tuple(calls)), at


def _answers(message: Message, call: RecordedCall) -> bool:
    """Whether `message` is the result of `call` by id (none answers none), or name for the legacy ``function`` role."""
    if message["role"] == "tool":
        return bool(message.get("tool_call_id") == call.id)
    return bool(message["role"] == "function" and call.id is None and message.get("name") == call.name)
