"""The loop: from one confirmed checkpoint to the next, until the run has nothing more to do by itself.

    model call → decision + intents of its calls    →    calls    →    receipt + message + checkpoint of each    → …
                          one commit                                                one commit each

Every step takes the checkpoint of the write before it. There is no way to get one without that
write being on stable storage, and so none to call a model or a tool on a state that could be lost.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from agentstore import Checkpoint, Lease, LimitExceeded, RunFailed, UnencodableState

from . import calling
from .acts import Acts, interrupted
from .book import Book
from .draft import Draft
from .events import RunEvent, tell
from .messages import Message, said, short
from .plan import Planned, open_calls, plan
from .reply import MalformedReplyError, Reply, Usage, read_reply
from .results import MALFORMED, Ending, append, of_decision
from .settle import Decision
from .states import COMPLETED, FAILED, PAUSED, RUNNING, WAITING

if TYPE_CHECKING:
    from .agent import Agent

LEASE_MARGIN_S = 5.0
"""How much longer than a call the lease of its run must last."""

_log = logging.getLogger("agentstore.runtime")


class ModelFailed(Exception):
    """The model callable kept raising; the cause is its last exception. Internal to the loop."""


class Run:
    """One run of an agent on one thread, under the lease of that thread."""

    def __init__(self, agent: Agent, book: Book, lease: Lease, max_steps: int) -> None:
        self.agent = agent
        self.book = book
        self.lease = lease
        self.max_steps = max_steps
        self.decision: Decision | None = None
        """Id of the decision whose calls are open; None: not known yet, the store is asked."""
        self._unbooked = Usage()  # tokens of replies that were not recorded

    # --- what the steps see ------------------------------------------------------------

    @property
    def status(self) -> str:
        """The confirmed state of the run."""
        status: str = self.book.state["state"]
        return status

    @property
    def turn(self) -> dict[str, Any]:
        """The turn as it is confirmed. Not to be changed in place."""
        turn: dict[str, Any] = self.book.state["turn"]
        return turn

    def draft(self) -> Draft:
        """A draft that also takes a waiting or paused run back to RUNNING. Hold `book.writing`."""
        draft = Draft(self.book.state)
        if draft.status in (WAITING, PAUSED):
            draft.move(RUNNING)
        return draft

    def tell(self, kind: str, planned: Planned | None = None, key: str = "", detail: str = "") -> None:
        """Tell the observer, if there is one."""
        if self.agent.on_event is not None:
            tool, index = ("", None) if planned is None else (planned.name, planned.index)
            event = RunEvent(kind, self.book.thread.id, self.book.seq, tool, index, key, detail)
            tell(self.agent.on_event, event)

    async def ensure_running(self, after: Checkpoint) -> Checkpoint:
        """Take a waiting or paused run back to RUNNING before a model or tool works for it."""
        if self.status == RUNNING:
            return after
        async with self.book.writing:
            if self.status == RUNNING:  # another call of the decision was first
                return after
            head = await self.book.commit(self.draft(), self.book.thread.commit, reason="round")
        self.tell("state", detail=RUNNING)
        return head

    async def outlast(self, seconds: float) -> None:
        """Make sure that the lease lasts longer than a call that may take `seconds`."""
        if self.lease.remaining_s < seconds + LEASE_MARGIN_S:
            await self.book.call(self.lease.ensure, seconds + 2 * LEASE_MARGIN_S)

    def open_calls(self) -> list[Planned]:
        """The calls of the newest decision that have not ended. O(size of its message)."""
        return open_calls(self.book.state, self.agent.tools, self.agent.fallback)

    # --- the steps ---------------------------------------------------------------------

    async def drive(self, after: Checkpoint) -> Checkpoint:
        """Go on from `after` until the run is COMPLETED, WAITING, PAUSED, or raises."""
        while self.status != COMPLETED:
            calls = self.open_calls()
            if calls:
                after = await self._act(after, calls)
                if self.status == WAITING:
                    return after
            elif self._was_interrupted():
                after = await self._complete(after, None)
            elif self.turn["steps"] >= self.max_steps:
                return await self._pause(after)
            else:
                after = await self._think(await self.ensure_running(after))
        return after

    async def _act(self, after: Checkpoint, calls: list[Planned]) -> Checkpoint:
        if self.decision is None:
            found = await self.book.call(lambda: self.book.thread.decision)
            self.decision = found if found is not None else after
        return await Acts(self, self.decision, calls).act(after)

    def _was_interrupted(self) -> bool:
        at = self.turn["decision"]
        return at is not None and interrupted(of_decision(self.book.state, at))

    async def _think(self, after: Checkpoint) -> Checkpoint:
        """Ask the model on the confirmed state, and record what it says; ask again if that is no message."""
        problem: str | None = None
        for _ in range(self.agent.reasks + 1):
            try:
                reply = read_reply(await self._ask_model(after, problem))
                self._unbooked = _sum(self._unbooked, Usage.of(reply.usage))
                return await self._record(after, reply)
            except (MalformedReplyError, UnencodableState, LimitExceeded) as error:
                problem = str(error)
                self.tell("malformed", detail=problem)
            except ModelFailed as error:
                return await self.fail(after, str(error), cause=error.__cause__)
        return await self.fail(after, f"the output of the model was malformed {self.agent.reasks + 1} times: {problem}")

    async def _ask_model(self, after: Checkpoint, problem: str | None) -> Any:
        """One answer of the model; its exceptions and timeouts are retried. `after` confirms what it is shown."""
        agent = self.agent
        assert after.seq == self.book.seq
        messages = list(agent.window(self.book.state["conversation_history"]))
        if problem is not None:
            text = f"Your last output could not be used: {problem}. Answer again with one assistant message."
            messages.append({"role": "user", "content": text})
        for retry in range(1, agent.model_retries + 2):
            answer = calling.start(agent.model, messages, agent.schemas, name="model")
            try:
                ended = await calling.within(answer, agent.model_timeout_s)
            finally:
                if not answer.done():
                    answer.cancel()
            error = answer.exception() if ended and not answer.cancelled() else None
            if ended and error is None and not answer.cancelled():
                return answer.result()
            why = said(error) if error else f"no answer within {agent.model_timeout_s:g} s"
            if retry > agent.model_retries:
                raise ModelFailed(f"the model failed {retry} times; the last time: {why}") from error
            self.tell("retry", detail=f"model: {why}")
            await asyncio.sleep(agent.model_backoff_s * 2.0 ** (retry - 1))
        raise AssertionError("the last retry returned or raised")

    async def _record(self, after: Checkpoint, reply: Reply) -> Checkpoint:
        """The decision of the model and the intents of its calls, or the end of the turn: one commit."""
        if reply.message is None:
            return await self._complete(after, None, reply)
        # The model may keep its message and change it later; what is stored and what the loop acts on may not.
        message = _own(reply.message, "the message")
        planned = plan(message, self.agent.tools, self.agent.fallback)
        if not planned:
            return await self._complete(after, message, reply)
        async with self.book.writing:
            draft = self._reply_draft(reply)
            head = await self._decide(draft, message, planned, "decision" if reply.plan is None else "plan")
        malformed = self.turn["malformed"]
        if malformed > self.agent.reasks:  # not in _decide: `fail` takes the lock that is held there
            problem = next(each.problem for each in planned if each.tool is None)
            await self.fail(head, f"{malformed} decisions in a row had calls that could not be made: {problem}")
        return head

    async def _decide(self, draft: Draft, message: Message, planned: list[Planned], reason: str) -> Checkpoint:
        """Commit a message with calls: the intents of those that start at once, the answers of those that cannot."""
        state, turn = self.book.state, self.turn
        at = len(state["conversation_history"])
        wrong = [each for each in planned if each.tool is None]
        malformed = turn["malformed"] + 1 if wrong else 0
        draft.append("conversation_history", message)
        for place, each in enumerate(wrong, start=at + 1):
            append(draft, at, each.call, Ending(MALFORMED, each.problem), None, each.name, place)
        steps = turn["steps"] + 1
        draft.set("turn", {**turn, "steps": steps, "decision": at, "malformed": malformed, "asked": []})
        draft.set("step", state["step"] + 1)
        starting = [each for each in planned if each.tool is not None][: self.agent.calls_at_once]
        intents = [each.intent() for each in starting if each.tool is not None and each.tool.rule != "read"]
        head = await self.book.commit(draft, self.book.thread.commit, reason=reason, intents=intents)
        self.decision = head
        self._unbooked = Usage()
        self.tell("decision", detail=", ".join(each.name for each in planned))
        for each in starting:
            if each.tool is not None and each.tool.rule != "read":
                self.tell("intent", each)
        for each in wrong:
            self.tell("malformed", each, detail=each.problem or "")
        return head

    # --- the ends ----------------------------------------------------------------------

    async def _complete(self, after: Checkpoint, message: Message | None, reply: Reply | None = None) -> Checkpoint:
        """The end of the turn, with the message that ends it if there is one."""
        async with self.book.writing:
            draft = self._reply_draft(reply) if reply is not None else self.draft()
            turn = self.turn
            if reply is not None and message is not None:
                draft.set("step", self.book.state["step"] + 1)
                turn = {**turn, "steps": turn["steps"] + 1}
            output = None
            if message is not None:
                output = len(self.book.state["conversation_history"])
                draft.append("conversation_history", message)
            draft.set("turn", {**turn, "output": output, "asked": [], "error": None})
            draft.move(COMPLETED)
            head = await self.book.commit(draft, self.book.thread.commit, reason="final")
        self._unbooked = Usage()
        self.tell("state", detail=COMPLETED)
        return head

    async def _pause(self, after: Checkpoint) -> Checkpoint:
        """PAUSED: the steps of the turn are used up. A call with a larger `max_steps` goes on."""
        if self.status == PAUSED:
            return after
        async with self.book.writing:
            draft = self.draft()
            draft.move(PAUSED)
            head = await self.book.commit(
                draft, self.book.thread.commit, reason="round", metadata={"max_steps": self.max_steps}
            )
        self.tell("state", detail=PAUSED)
        return head

    async def fail(
        self,
        after: Checkpoint,
        why: str,
        *,
        cause: BaseException | None = None,
        write: Callable[..., Any] | None = None,
    ) -> NoReturn:
        """FAILED, with the reason in the state; raises `RunFailed`. `write` commits it, if not `Thread.commit`."""
        why = why if len(why) < 4_000 else short(why)
        async with self.book.writing:
            draft = self.draft()
            draft.set("turn", {**self.turn, "error": why, "malformed": 0})
            draft.move(FAILED)
            await self.book.commit(draft, write or self.book.thread.commit, reason="round", metadata={"error": why})
        self.tell("state", detail=FAILED)
        raise failed(self.book, why, self.agent.max_retries) from cause

    def _reply_draft(self, reply: Reply) -> Draft:
        """A draft with what a reply brings beside its message: tokens, plan, partial output."""
        draft, state = self.draft(), self.book.state
        used = self._unbooked
        if used.total:
            before = state["token_usage"]
            draft.set("token_usage", {
                "prompt": before["prompt"] + used.prompt,
                "completion": before["completion"] + used.completion,
                "total": before["total"] + used.total,
            })  # fmt: skip
        if reply.plan is not None:
            draft.set("execution_plan", _own(reply.plan, "the plan"))
        if reply.partial is not None:
            draft.append("partial_outputs", _own(reply.partial, "the partial output"))
        return draft


def failed(book: Book, why: str, max_retries: int) -> RunFailed:
    """The exception of a run that is FAILED."""
    used = book.state["metadata"]["retry_count"]
    return RunFailed(
        f"thread {book.thread.id!r} failed: {why}. The same call tries again "
        f"({used} of {max_retries} retries are used; max_retries= allows more)"
    )


def _own(value: Any, what: str) -> Any:
    """A copy that nobody else can change."""
    try:
        return copy.deepcopy(value)
    except Exception as error:  # RecursionError, or whatever an object in it says to being copied
        raise MalformedReplyError(f"{what} cannot be copied: {said(error)}") from error


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(one.prompt + other.prompt, one.completion + other.completion)
