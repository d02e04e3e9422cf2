"""What a person says about a call that nobody else knows the outcome of."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from agentstore import CallNotWaiting, Checkpoint, EffectInDoubt, EffectView, Store, Thread, is_not_done, is_unknown

from . import clock
from .draft import Draft, State
from .messages import ToolCall, calls_of
from .outcome import WaitingCall
from .results import ERROR, OK, Ending, add, of_decision
from .tool import ToolError

LEASE_S = 30.0
KEY_CHARS_MIN = 8
"""Shortest begin of a key that stands for it."""


def waiting_calls(thread: Thread, state: State) -> tuple[WaitingCall, ...]:
    """The calls of the newest decision that are in doubt and wait for a person. O(open calls)."""
    found = []
    for view, call in _open(thread, state):
        if view.status == "in_doubt":
            found.append(
                WaitingCall(
                    thread.id,
                    view.identity.decision_seq,
                    view.index,
                    view.tool,
                    view.arguments,
                    view.key,
                    view.why,
                    call.id,
                )
            )
    return tuple(found)


def resolve(store: Store, thread_id: str, call: WaitingCall | str, *, happened: Any) -> Checkpoint:
    """`Agent.resolve` without an agent; raises what that raises. One commit, and those of the lease."""
    if is_unknown(happened):
        raise ValueError("happened= is the result, NotDone or a ToolError; while it is not known the call just waits")
    thread = store.thread(thread_id)
    owner = f"resolve:{socket.gethostname()}:{os.getpid()}"
    thread.load()
    with thread.lease(owner, ttl_s=LEASE_S):
        state = thread.load()
        view, said = _find(thread, state, call)
        if view.status != "in_doubt":
            raise CallNotWaiting(
                f"thread {thread_id!r}: {view.tool} (call {view.index}) is {view.status.replace('_', ' ')}, "
                f"not in doubt: {view.why}"
            )
        try:
            effect = thread.effect(
                decision=view.decision,
                index=view.index,
                tool=view.tool,
                arguments=view.arguments,
                rule="ask",
                timeout_s=1.0,
                generation=view.generation,
            )
        except EffectInDoubt as error:
            effect = error.effect
        draft = Draft(state)
        turn = state["turn"]
        draft.set("turn", {**turn, "asked": [index for index in turn["asked"] if index != view.index]})
        write: Callable[..., Checkpoint | None]
        if is_not_done(happened):
            write = partial(effect.not_done, "a person says that it did not happen")
        else:
            failed = isinstance(happened, ToolError)
            ending = Ending(ERROR, str(happened), "person") if failed else Ending(OK, happened, "person")
            add(draft, state, turn["decision"], said, ending, view.key, view.tool)
            value = ending.failure() if failed else ending.stored()
            write = partial(effect.fail if failed else effect.receipt, value, source="person")
        head = write(*draft.changes(clock.now()), reason="approval", step=draft.step, status=draft.status)
        assert head is not None
        return head


def _open(thread: Thread, state: State) -> list[tuple[EffectView, ToolCall]]:
    """The started calls of the newest decision that have not ended, each with what the model said."""
    at = state.get("turn", {}).get("decision")
    decision = thread.decision
    if at is None or decision is None:
        return []
    ended = {entry["call"] for entry in of_decision(state, at)}
    calls = calls_of(state["conversation_history"][at])
    views = [view for view in thread.effects(open=True) if view.decision == decision]
    return [(view, calls[view.index]) for view in views if view.index < len(calls) and view.index not in ended]


def _find(thread: Thread, state: State, wanted: WaitingCall | str) -> tuple[EffectView, ToolCall]:
    """The open call that `wanted` names."""
    found = _open(thread, state)
    name = wanted.key if isinstance(wanted, WaitingCall) else wanted
    matches = [
        pair
        for pair in found
        if pair[1].id == name or (len(name) >= KEY_CHARS_MIN and pair[0].key.startswith(name.lower()))
    ]
    if len(matches) == 1:
        return matches[0]
    there = ", ".join(f"{view.tool} {view.key[:12]} (id {call.id!r})" for view, call in found) or "none"
    problem = "several calls" if matches else "no call"
    raise CallNotWaiting(f"thread {thread.id!r}: {problem} {name!r} waiting; the open calls are: {there}")
