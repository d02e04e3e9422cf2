"""One call of a decision, from what the ledger knows about it to how it ended.

The ledger is asked first, always: a receipt there is the result, and the tool is not called;
a caller elsewhere that may be alive is left alone; a call in doubt goes to the rule of its
tool; only what is none of these is called, with the key that it has had all along.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentstore import Checkpoint, Effect, EffectInDoubt, EffectInFlight, EffectView, NotDone, is_not_done, is_unknown

from . import calling
from .attempt import Doubt, NotNow, attempt
from .messages import said
from .plan import Planned
from .results import ERROR, MALFORMED, OK, UNKNOWN, Ending, recorded
from .tool import ToolContext

if TYPE_CHECKING:
    from .loop import Run

Decision = Checkpoint | tuple[bytes, int]

AGAIN = ("read", "replay")
"""Rules under which a call whose outcome is not known is simply made again."""


@dataclass(slots=True)
class Ended:
    """The call has an ending; `stored`: its receipt is there already, or it needs none."""

    ending: Ending
    effect: Effect | None
    stored: bool = False


@dataclass(slots=True)
class Asked:
    """A person must say what happened; `effect`: to be marked in doubt, where this run made the call."""

    why: str
    key: str
    effect: Effect | None = None


@dataclass(slots=True)
class Elsewhere:
    """Another caller may still be at it, for at most `wait_s` seconds."""

    why: str
    key: str
    wait_s: float


@dataclass(slots=True)
class Exhausted:
    """Every attempt that the rule allows ended in doubt."""

    why: str
    effect: Effect


Settled = Ended | Asked | Elsewhere | Exhausted


async def settle(run: Run, after: Checkpoint, decision: Decision, planned: Planned) -> Settled:
    """Bring one call to its end. `after` is the confirmed checkpoint that holds the decision, or a later one."""
    tool = planned.tool
    if tool is None:
        return await _without_tool(run, decision, planned)
    try:
        effect = await run.book.call(
            run.book.thread.effect,
            decision=decision,
            index=planned.index,
            tool=planned.name,
            arguments=planned.arguments,
            rule=tool.rule,
            timeout_s=tool.timeout_s,
        )
    except EffectInFlight as error:
        return Elsewhere(str(error), "", error.wait_s)
    except EffectInDoubt as error:
        return await _in_doubt(run, after, error.effect, planned, error.rule, str(error))
    if effect.done:
        run.tell("skip", planned, effect.key, f"the result was recorded: {effect.outcome}")
        return Ended(recorded(effect), effect, stored=True)
    if effect.attempt > 1:
        run.tell("replay", planned, effect.key, f"attempt {effect.attempt}")
    return await _call(run, after, effect, planned)


async def _call(run: Run, after: Checkpoint, effect: Effect, planned: Planned) -> Settled:
    """Call the tool until there is an ending, or its rule or retries say stop."""
    tool = planned.tool
    assert tool is not None
    reads = tool.rule == "read"
    started = runs_on = False
    try:
        for retry in range(1, tool.retries + 2):
            after = await run.ensure_running(after)
            await run.outlast(effect.remaining_s if not reads else tool.timeout_s)
            run.tell("call", planned, effect.key, f"attempt {effect.attempt}")
            started = True
            patience_s = 0.0 if reads else max(0.0, effect.remaining_s - tool.timeout_s)
            found = await attempt(planned, _context(run, effect, planned), patience_s=patience_s)
            if isinstance(found, Ending):
                return Ended(found, effect)
            runs_on = isinstance(found, Doubt) and not found.ended
            settled = await _judge(run, effect, planned, found, last=retry > tool.retries)
            if settled is not None:
                return settled
            run.tell("retry", planned, effect.key, found.why)
            await asyncio.sleep(tool.wait_s(retry))
            await run.book.call(effect.retry, found.why)
            started = runs_on = False
    except asyncio.CancelledError as error:
        if not reads and getattr(error, "ended", not runs_on):
            why = "its run was cancelled"
            await run.book.call(effect.doubt if started else effect.not_done, why)
        raise
    raise AssertionError("the last retry has an ending")


async def _judge(run: Run, effect: Effect, planned: Planned, found: NotNow | Doubt, *, last: bool) -> Settled | None:
    """What follows from an attempt without an ending; None: try again."""
    tool = planned.tool
    assert tool is not None
    if isinstance(found, NotNow):
        return None if tool.rule in AGAIN and not last else Ended(Ending(ERROR, found.why), effect)
    if tool.rule in AGAIN:
        if not last:
            return None
        why = f"no result after {tool.retries + 1} attempts; the last one: {found.why}"
        return Ended(Ending(ERROR, why), effect) if tool.rule == "read" else Exhausted(why, effect)
    settled = await _by_rule(run, effect, planned, tool.rule, found.why)
    if settled is NotDone:
        return Ended(Ending(ERROR, f"it did not happen: {found.why}", "query"), effect) if last else None
    if isinstance(settled, Asked):
        settled.effect = effect if found.ended else None
    assert not isinstance(settled, type)
    return settled


async def _in_doubt(run: Run, after: Checkpoint, effect: Effect, planned: Planned, rule: str, why: str) -> Settled:
    """A call that somebody before us started and did not finish."""
    settled = await _by_rule(run, effect, planned, rule, why)
    if not isinstance(settled, type):
        return settled
    await run.book.call(effect.retry, "the tool says that it did not happen")
    return await _call(run, after, effect, planned)


async def _by_rule(run: Run, effect: Effect, planned: Planned, rule: str, why: str) -> Settled | type[NotDone]:
    """What the rule of a tool that is not simply called again says about a call in doubt."""
    if rule == "query":
        return await _query(run, effect, planned)
    if rule == "skip":
        run.tell("skip", planned, effect.key, "never made again: outcome unknown")
        return Ended(Ending(UNKNOWN, why, "rule"), effect)
    run.tell("asked", planned, effect.key, why)
    return Asked(why, effect.key)


async def _query(run: Run, effect: Effect, planned: Planned) -> Settled | type[NotDone]:
    """Ask the tool about the key. A query that keeps failing knows nothing: a person is asked."""
    tool = planned.tool
    assert tool is not None
    if tool.query is None:  # the intent's rule is query, and the tool has another one by now
        return Asked("the tool cannot be asked about its key any more", effect.key)
    problem = ""
    for retry in range(1, tool.retries + 2):
        answer = calling.start(tool.query, effect.key, planned.arguments, name=f"{planned.name} query")
        try:
            ended = await calling.within(answer, tool.timeout_s)
        finally:
            if not answer.done():
                answer.cancel()
        error = answer.exception() if ended and not answer.cancelled() else None
        if ended and error is None and not answer.cancelled():
            return _answered(run, effect, planned, answer.result())
        problem = said(error) if error else f"no answer within {tool.timeout_s:g} s"
        run.tell("retry", planned, effect.key, f"query: {problem}")
        if retry <= tool.retries:
            await asyncio.sleep(tool.wait_s(retry))
    why = f"asked about its key, the tool failed: {problem}"
    run.tell("asked", planned, effect.key, why)
    return Asked(why, effect.key)


def _answered(run: Run, effect: Effect, planned: Planned, answer: Any) -> Settled | type[NotDone]:
    if is_not_done(answer):
        run.tell("query", planned, effect.key, "not done")
        return NotDone
    if is_unknown(answer):
        run.tell("query", planned, effect.key, "unknown")
        why = "the tool does not know whether it happened"
        run.tell("asked", planned, effect.key, why)
        return Asked(why, effect.key)
    run.tell("query", planned, effect.key, "happened")
    return Ended(Ending(OK, answer, "query"), effect)


async def _without_tool(run: Run, decision: Decision, planned: Planned) -> Settled:
    """A call that could be made when it was decided, and whose tool is gone since, or has other parameters."""
    found = await run.book.call(view_of, run, decision, planned.index)
    if found is None or found.status == "not_started":
        return Ended(Ending(MALFORMED, planned.problem), None, stored=True)
    if found.status == "done":
        return Ended(recorded(found), None, stored=True)
    if found.status == "in_flight":
        return Elsewhere(found.why, found.key, found.wait_s)
    why = f"it was started, and cannot be made any more: {planned.problem}"
    run.tell("asked", planned, found.key, why)
    return Asked(why, found.key)


def view_of(run: Run, decision: Decision, index: int) -> EffectView | None:
    """What the ledger has about a call, if anything."""
    wanted = (decision.thread_uuid, decision.seq) if isinstance(decision, Checkpoint) else decision
    views = [view for view in run.book.thread.effects() if view.decision == wanted and view.index == index]
    return views[-1] if views else None


def _context(run: Run, effect: Effect, planned: Planned) -> ToolContext:
    return ToolContext(
        key=effect.key,
        attempt=effect.attempt,
        deadline=effect.deadline,
        thread_id=run.book.thread.id,
        decision=effect.identity.decision_seq,
        index=planned.index,
        tool=planned.name,
        call=planned.call.raw,
    )
