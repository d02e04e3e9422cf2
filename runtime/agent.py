"""The agent: a model, its tools, and the limits of a run; `run` starts a thread of it or carries it on."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from agentstore import AgentStoreError, Checkpoint, CommitUnknown, DiskFull, Lease, Store

from . import resolving
from .book import Book, finished
from .draft import Draft
from .events import Observer
from .loop import Run, failed
from .messages import Message, window
from .outcome import RunResult, WaitingCall
from .plan import open_calls, plan
from .signals import run_to_end
from .states import COMPLETED, FAILED, RUNNING, WAITING
from .tool import Tool, table
from .turns import Input, begin, begins_turn, first_draft, messages_of, recorded_turn

Model = Callable[..., Any]
"""``model(messages, tools) -> Reply``, sync or async."""

MAX_STEPS = 100
MAX_RETRIES = 3
REASKS = 3
MODEL_RETRIES = 3
MODEL_BACKOFF_S = 0.5
MODEL_TIMEOUT_S = 600.0
CALLS_AT_ONCE = 16
GRACE_S = 5.0
LEASE_S = 90.0
"""Above the usual timeout of a tool with its margins: a longer call costs a renewal before it begins."""

LEASE_S_MAX = 31 * 24 * 3600.0
"""The longest that the store gives a lease for."""

_unreleased: dict[tuple[str, str], Lease] = {}
"""Leases of runs that have ended and could not give them back, by store and thread: the next run here tries again."""

_log = logging.getLogger("agentstore.runtime")


class Agent:
    """A model with tools. Keeps nothing of a run: that is in the store. Any number of runs, of any threads, at once.

    Args:
        model: ``(messages, tools) -> Reply``, sync (run in a thread) or async; it may not change `messages`.
        tools: `Tool` objects; a plain function counts as one that declares nothing (rule ``ask``).
        system: a system message, put before the first input of a thread.
        fallback: a raw `Tool` for every call that names none of the tools or has no proper shape.
        window: what the model is shown of the conversation; default: `messages.window`.
        on_event: called with a `RunEvent` for what happens, in the loop: it must be quick.
        max_steps: model calls of one turn; then the run is PAUSED until a call allows more.
        max_retries: how often a FAILED turn is tried again.
        reasks: how often in a row the model is asked again after an output, or calls, that nothing can be done with.
        model_retries, model_backoff_s, model_timeout_s: for a model that raises or hangs; the wait doubles.
        calls_at_once: calls of one message that run side by side.
        input_calls: run the tool calls of an input's last message. Off: an input may come from a stranger.
        grace_s: how long a stopped run waits for its tools to return.
        lease_s: how long a worker that is silent keeps its thread, where nobody can see that it is dead.

    >>> from agentstore.runtime import Reply
    >>> from agentstore.testing.scratch import scratch_store
    >>> def model(messages, tools):
    ...     return Reply({"role": "assistant", "content": f"you said {messages[-1]['content']}"})
    >>> agent = Agent(model=model)
    >>> agent.run(scratch_store(), "chat-1", "hello", input_id="1").output
    'you said hello'
    """

    def __init__(
        self,
        model: Model,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        *,
        system: str | None = None,
        fallback: Tool | None = None,
        window: Callable[[list[Message]], list[Message]] = window,
        on_event: Observer | None = None,
        max_steps: int = MAX_STEPS,
        max_retries: int = MAX_RETRIES,
        reasks: int = REASKS,
        model_retries: int = MODEL_RETRIES,
        model_backoff_s: float = MODEL_BACKOFF_S,
        model_timeout_s: float = MODEL_TIMEOUT_S,
        calls_at_once: int = CALLS_AT_ONCE,
        input_calls: bool = False,
        grace_s: float = GRACE_S,
        lease_s: float = LEASE_S,
    ) -> None:
        if fallback is not None and not fallback.raw:
            raise ValueError("the fallback must be a Tool(..., raw=True): it gets calls whose arguments nobody checked")
        if not callable(model) or not callable(window):
            raise TypeError("model and window are callables: model(messages, tools), window(messages)")
        counts = (calls_at_once, max_steps, max_retries, reasks, model_retries)
        if any(type(count) is not int or count < 0 for count in counts) or calls_at_once < 1:
            raise ValueError("calls_at_once is an int of 1 or more; the other counts are ints of 0 or more")
        if not 0 < lease_s <= LEASE_S_MAX or not grace_s >= 0 or not model_backoff_s >= 0 or not model_timeout_s > 0:
            raise ValueError(
                f"lease_s is above 0 and at most {LEASE_S_MAX:.0f}, model_timeout_s above 0, other times not negative"
            )
        self.model = model
        self.tools = table(tools)
        self.schemas = [tool.schema for tool in self.tools.values()]
        self.system = system
        self.fallback = fallback
        self.window = window
        self.on_event = on_event
        self.max_steps = max_steps
        self.max_retries = max_retries
        self.reasks = reasks
        self.model_retries = model_retries
        self.model_backoff_s = model_backoff_s
        self.model_timeout_s = model_timeout_s
        self.calls_at_once = calls_at_once
        self.input_calls = input_calls
        self.grace_s = grace_s
        self.lease_s = lease_s
        self._store: Store | None = None

    def run(
        self,
        store: Store,
        thread_id: str,
        input: Input = None,
        input_id: str | None = None,
        *,
        max_steps: int | None = None,
        max_retries: int | None = None,
    ) -> RunResult:
        """Start the thread or carry it on until there is nothing more to do without a person.

        The same call after a crash, in any process, goes on where the last confirmed checkpoint stands.

        `input`: a str, a message, or a list of messages (may be empty); None: carry on the unfinished turn.
        `input_id`: one that is recorded carries its turn on, or returns that turn's recorded result; a new one
        begins a turn after COMPLETED. Without one, an input equal to the unfinished turn's carries on, and
        after COMPLETED any input is a new turn. `max_steps`, `max_retries`: instead of the agent's, for this call.

        Raises `RunUnfinished` while a turn with another input is unfinished, `LeaseHeld` while another worker
        runs the thread, `RunFailed` when the run reaches FAILED (or is there with no retries left), and what the
        store raises (`StoreFailed`, `DiskFull`, …); the thread can be carried on after all of them.
        On SIGTERM, Ctrl-C: see `agentstore.runtime.signals`.
        """
        return run_to_end(
            lambda: self.arun(store, thread_id, input, input_id, max_steps=max_steps, max_retries=max_retries)
        )

    async def arun(
        self,
        store: Store,
        thread_id: str,
        input: Input = None,
        input_id: str | None = None,
        *,
        max_steps: int | None = None,
        max_retries: int | None = None,
    ) -> RunResult:
        """As `run`, in the caller's event loop, which is never blocked.

        Cancelling it finishes the commit that is on its way, gives tools `grace_s` to return, and releases the lease.
        """
        self._store = store
        messages = messages_of(input)
        book = Book(store, thread_id)
        try:
            if await book.load():
                found = await self._without_running(book, messages, input_id)
                if found is not None:
                    return found
            async with self._leased(book) as lease:
                if await book.moved():
                    await book.load()
                    found = await self._without_running(book, messages, input_id)
                    if found is not None:
                        return found
                run = Run(self, book, lease, self.max_steps if max_steps is None else max_steps)
                limit = self.max_retries if max_retries is None else max_retries
                return await self._run(run, messages, input_id, limit)
        finally:
            book.close()

    def resolve(
        self, thread_id: str, call: WaitingCall | str, *, happened: Any, store: Store | None = None
    ) -> Checkpoint:
        """Say what happened to a call that waits for a person; the next `run` goes on from there.

        `call`: one of `RunResult.waiting`, or its key (or the begin of it, 8 characters or more), or the id that the
        model gave it. `happened`: the result, as the tool would have returned it; `NotDone`: it did not happen,
        make it (again); a `ToolError`: it failed for good. `store`: the one of the agent's last run if not given.

        `CallNotWaiting` if there is no such call, or it is not in doubt; `LeaseHeld` while a worker runs the thread.
        """
        known = store if store is not None else self._store
        if known is None:
            raise TypeError("this agent has not run yet: give resolve() the store, store=")
        return resolving.resolve(known, thread_id, call, happened=happened)

    # --- inside --------------------------------------------------------------------------

    async def _without_running(
        self, book: Book, messages: list[Message] | None, input_id: str | None
    ) -> RunResult | None:
        """The result of a call that needs no run: its turn is finished, or still waits for a person."""
        turn = recorded_turn(book.state, input_id)
        if turn is not None and "seq" in turn:
            return await self._earlier_result(book, turn)
        if turn is None and "turn" in book.state and not begins_turn(book.thread.id, book.state, messages, input_id):
            turn = book.state["turn"]
        if turn is None:
            return None
        if book.state["state"] == COMPLETED:
            return self._result(book)
        if book.state["state"] == WAITING and turn["asked"]:
            waiting = await book.call(resolving.waiting_calls, book.thread, book.state)
            # A tool that can be queried is asked again; a rule that changed since may settle a call without a person.
            still = {each.index for each in waiting}
            open_ = open_calls(book.state, self.tools, self.fallback)
            if all(each.index in still and (each.tool is None or each.tool.rule == "ask") for each in open_):
                return self._result(book, waiting)
        return None

    async def _run(self, run: Run, messages: list[Message] | None, input_id: str | None, max_retries: int) -> RunResult:
        """Begin or carry on the turn, under the lease."""
        book = run.book
        carries_on = recorded_turn(book.state, input_id) is not None or not begins_turn(
            book.thread.id, book.state, messages, input_id
        )
        if not carries_on:
            assert messages is not None
            after = await self._begin(run, messages, input_id)
        else:
            assert book.head is not None
            after = book.head
            run.tell("resumed", detail=run.status)
            if run.status == FAILED:
                after = await self._try_again(run, after, max_retries)
        await run.drive(after)
        if run.status != WAITING:
            return self._result(book)
        return self._result(book, await book.call(resolving.waiting_calls, book.thread, book.state))

    async def _begin(self, run: Run, messages: list[Message], input_id: str | None) -> Checkpoint:
        """Record a new input, RUNNING: one commit, with the intents of its calls if they are to be run."""
        book = run.book
        async with book.writing:
            draft, state = first_draft(book.thread.id, book.state)
            if self.system is not None and not state["conversation_history"]:
                system = {"role": "system", "content": self.system}
                draft.append("conversation_history", system)
                state = {**state, "conversation_history": [system]}
            decides = begin(draft, state, messages, input_id, seq=book.seq, run_calls=self.input_calls)
            intents = []
            if decides:
                planned = plan(messages[-1], self.tools, self.fallback)[: self.calls_at_once]
                intents = [each.intent() for each in planned if each.tool is not None and each.tool.rule != "read"]
            reason = "decision" if decides else "input"
            head = await book.commit(draft, book.thread.commit, reason=reason, intents=intents)
        if decides:
            run.decision = head
        run.tell("input", detail=input_id or "")
        return head

    async def _try_again(self, run: Run, after: Checkpoint, max_retries: int) -> Checkpoint:
        """FAILED → RUNNING, counted before anything is tried; `RunFailed` once the retries are used up."""
        book = run.book
        metadata = book.state["metadata"]
        if metadata["retry_count"] >= max_retries:
            raise failed(book, run.turn["error"] or "no reason was recorded", max_retries)
        async with book.writing:
            draft = Draft(book.state)
            draft.set("metadata", {**metadata, "retry_count": metadata["retry_count"] + 1})
            draft.set("turn", {**run.turn, "error": None})
            draft.move(RUNNING)
            head = await book.commit(draft, book.thread.commit, reason="round")
        run.tell("state", detail=RUNNING)
        return head

    def _result(self, book: Book, waiting: Iterable[WaitingCall] = ()) -> RunResult:
        state, head = book.state, book.head
        assert head is not None
        output = state["turn"]["output"]
        message = None if output is None else state["conversation_history"][output]
        return RunResult(book.thread.id, state["state"], state, head, message, tuple(waiting), state["turn"]["error"])

    async def _earlier_result(self, book: Book, turn: dict[str, Any]) -> RunResult:
        """The result that a turn had which others followed: its checkpoint is loaded."""
        seq = turn["seq"]
        head = await book.call(book.thread.checkpoint, seq)
        state = await book.call(book.thread.load, seq)
        output = state["turn"]["output"]
        message = None if output is None else state["conversation_history"][output]
        return RunResult(book.thread.id, state["state"], state, head, message)

    @asynccontextmanager
    async def _leased(self, book: Book) -> AsyncIterator[Lease]:
        """Hold the thread's lease, renewed while the run goes on; released whatever ends the run."""
        owner = f"{socket.gethostname()}:{os.getpid()}"
        unreleased = _unreleased.pop((book.store.path, book.thread.id), None)
        if unreleased is not None:
            await _release(book, unreleased)
        acquiring = asyncio.ensure_future(book.call(book.thread.lease, owner, ttl_s=self.lease_s))
        try:
            lease = await finished(acquiring)
        except asyncio.CancelledError:
            if acquiring.exception() is None:
                await finished(asyncio.ensure_future(_release(book, acquiring.result())))
            raise
        renewing = asyncio.ensure_future(self._renew(book, lease))
        try:
            yield lease
        finally:
            renewing.cancel()
            # One task for both: a cancellation that comes now may not fall between them.
            await finished(asyncio.ensure_future(_give_back(book, lease, renewing)))

    async def _renew(self, book: Book, lease: Lease) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 3)
            try:
                await book.call(lease.ensure, self.lease_s * 0.9)  # a long call may have taken it for longer already
            except (DiskFull, CommitUnknown) as error:
                _log.warning("thread %r: the lease could not be renewed, trying again: %s", book.thread.id, error)


async def _give_back(book: Book, lease: Lease, renewing: asyncio.Future[None]) -> None:
    await asyncio.wait({renewing})
    if not renewing.cancelled() and (error := renewing.exception()) is not None:
        _log.warning("thread %r: the lease could not be renewed: %s", book.thread.id, error)
    await _release(book, lease)


async def _release(book: Book, lease: Lease) -> None:
    try:
        await book.call(lease.release)
    except AgentStoreError as error:
        # It expires by itself, and is free at once when this process ends; until then this process tries again.
        _unreleased[book.store.path, book.thread.id] = lease
        _log.warning("thread %r: the lease could not be released: %s", book.thread.id, error)
