"""The calls of one decision, side by side: started, settled, and each stored as soon as it has ended.

The receipt, the tool's message and the checkpoint of a call are one transaction. Stored is one
at a time, in the order in which they end; nothing is ever held back for a slower one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from agentstore import Checkpoint, EffectDuplicate, LimitExceeded, UnencodableState

from .draft import Draft
from .messages import short
from .plan import Planned
from .results import INTERRUPTED, OK, UNKNOWN, Ending, add, given_back
from .settle import Asked, Decision, Elsewhere, Ended, Exhausted, Settled, settle
from .states import RUNNING, WAITING

if TYPE_CHECKING:
    from .loop import Run

POLL_S_MIN, POLL_S_MAX = 0.05, 1.0
"""How often a call in flight elsewhere is looked at."""

_log = logging.getLogger("agentstore.runtime")

Tasks = dict["asyncio.Task[Settled]", Planned]


class Acts:
    """The open calls of one decision, in one run."""

    def __init__(self, run: Run, decision: Decision, calls: Sequence[Planned]) -> None:
        self._run = run
        self._decision = decision
        self._queue = deque(calls)
        self._running: Tasks = {}
        self._asked: list[tuple[Planned, Asked]] = []
        self._elsewhere: list[tuple[Planned, Elsewhere]] = []
        self._exhausted: list[tuple[Planned, Exhausted]] = []

    async def act(self, after: Checkpoint) -> Checkpoint:
        """Bring every call to its end or to whom it waits for. `after`: the decision is confirmed."""
        poll_s = POLL_S_MIN
        try:
            while self._queue or self._running or self._elsewhere:
                self._start(after)
                if self._running:
                    done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                    after = await self._collect(after, done)
                elif self._elsewhere:
                    after = await self._wait_elsewhere(after, poll_s)
                    poll_s = min(POLL_S_MAX, poll_s * 1.5)
        except BaseException:
            await self._wind_down()
            raise
        if self._exhausted:
            return await self._fail(after)
        return await self._wait_for_person(after) if self._asked else after

    def _start(self, after: Checkpoint) -> None:
        while self._queue and len(self._running) < self._run.agent.calls_at_once:
            planned = self._queue.popleft()
            task = asyncio.ensure_future(settle(self._run, after, self._decision, planned))
            self._running[task] = planned

    async def _collect(self, after: Checkpoint, done: set[asyncio.Task[Settled]]) -> Checkpoint:
        """Store what has ended. The first error is raised once everything else of the group is stored."""
        first: BaseException | None = None
        for task in sorted(done, key=lambda task: self._running[task].index):
            planned = self._running.pop(task)
            try:
                after = await self._take(after, planned, task.result())
            except asyncio.CancelledError:
                raise
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
        return after

    async def _take(self, after: Checkpoint, planned: Planned, settled: Settled) -> Checkpoint:
        match settled:
            case Ended():
                return await self._store(planned, settled)
            case Asked():
                self._asked.append((planned, settled))
            case Elsewhere():
                self._elsewhere.append((planned, settled))
            case Exhausted():
                self._exhausted.append((planned, settled))
        return after

    # --- storing -----------------------------------------------------------------------

    async def _store(self, planned: Planned, ended: Ended) -> Checkpoint:
        """Receipt, message and checkpoint in one transaction."""
        book = self._run.book
        async with book.writing:
            try:
                head = await self._write(planned, ended)
            except EffectDuplicate as error:
                # The other result counts. Ours is kept beside it, as evidence that the tool was called twice.
                self._run.tell("duplicate", planned, ended.effect.key if ended.effect else "", str(error))
                first = Ended(Ending(OK, given_back(error.result)), ended.effect, stored=True)
                head = await self._write(planned, first)
            except (UnencodableState, LimitExceeded) as error:
                # It happened, and must never happen again: what is known of the result is stored in its place.
                _log.warning("thread %r: the result of %s cannot be stored: %s", book.thread.id, planned.name, error)
                text = f"{short(ended.ending.value)} (as text, since it cannot be stored: {error})"
                ended.ending.value = text
                head = await self._write(planned, ended)
        has_receipt = ended.effect is not None and not ended.stored and ended.effect.rule != "read"
        kind = "receipt" if has_receipt else "result"
        self._run.tell(kind, planned, ended.effect.key if ended.effect else "", ended.ending.outcome)
        return head

    async def _write(self, planned: Planned, ended: Ended) -> Checkpoint:
        run, ending = self._run, ended.ending
        draft = run.draft()
        key = None if ended.effect is None or ended.effect.rule == "read" else ended.effect.key
        add(draft, run.book.state, run.turn["decision"], planned.call, ending, key, planned.name)
        if planned.index in run.turn["asked"]:
            draft.set("turn", {**run.turn, "asked": [call for call in run.turn["asked"] if call != planned.index]})
        metadata = None
        if ended.stored and ended.effect is not None:
            metadata = {"recovery": {"call": planned.index, "tool": planned.name, "key": key, "found": "receipt"}}
        return await run.book.commit(draft, self._writer(ended), reason="tool_result", metadata=metadata)

    def _writer(self, ended: Ended) -> Callable[..., Checkpoint]:
        effect, ending = ended.effect, ended.ending
        if effect is None or ended.stored or effect.rule == "read":
            return self._run.book.thread.commit
        if ending.outcome == OK:
            return partial(effect.receipt, ending.stored(), source=ending.source)
        if ending.outcome == UNKNOWN:
            return effect.skip
        return partial(effect.fail, ending.failure(), source=ending.source)

    # --- waiting and failing -------------------------------------------------------------

    async def _fail(self, after: Checkpoint) -> Checkpoint:
        """FAILED: a rule that calls again got nowhere. What this run knows to have ended is in doubt from now on."""
        (planned, exhausted), *others = self._exhausted
        for _, other in others:
            await self._run.book.call(other.effect.doubt, other.why)
        for _, asked in self._asked:
            if asked.effect is not None:
                await self._run.book.call(asked.effect.doubt, asked.why)
        why = f"{planned.name} (call {planned.index}): {exhausted.why}"
        return await self._run.fail(after, why, write=partial(exhausted.effect.doubt, exhausted.why))

    async def _wait_for_person(self, after: Checkpoint) -> Checkpoint:
        """WAITING, once all other calls have ended."""
        run, book = self._run, self._run.book
        asked = sorted(self._asked, key=lambda pair: pair[0].index)
        indexes = [planned.index for planned, _ in asked]
        made_here = [found for _, found in asked if found.effect is not None]
        async with book.writing:
            if run.status == WAITING and run.turn["asked"] == indexes and not made_here:
                return after
            for found in made_here[:-1]:
                assert found.effect is not None
                await book.call(found.effect.doubt, found.why)
            draft = Draft(book.state)
            draft.set("turn", {**run.turn, "asked": indexes})
            if run.status == RUNNING:
                draft.move(WAITING)
            told = [{"call": p.index, "tool": p.name, "key": found.key, "why": found.why} for p, found in asked]
            write: Callable[..., Any] = book.thread.commit
            if made_here and made_here[-1].effect is not None:
                write = partial(made_here[-1].effect.doubt, made_here[-1].why)
            head = await book.commit(draft, write, reason="round", metadata={"asked": told})
        run.tell("state", detail=WAITING)
        return head

    async def _wait_elsewhere(self, after: Checkpoint, poll_s: float) -> Checkpoint:
        """WAITING for callers that may be alive; then their calls are looked at again."""
        run, book = self._run, self._run.book
        if run.status == RUNNING:
            async with book.writing:
                draft = Draft(book.state)
                draft.move(WAITING)
                told = [{"call": p.index, "tool": p.name, "why": found.why} for p, found in self._elsewhere]
                after = await book.commit(draft, book.thread.commit, reason="round", metadata={"in_flight": told})
            run.tell("state", detail=WAITING)
        for planned, found in self._elsewhere:
            run.tell("wait", planned, found.key, found.why)
        await asyncio.sleep(min(poll_s, *(found.wait_s for _, found in self._elsewhere)))
        self._queue.extend(planned for planned, _ in self._elsewhere)
        self._elsewhere.clear()
        return after

    # --- stopping ----------------------------------------------------------------------

    async def _wind_down(self) -> None:
        """The run stops: tools that return within the grace have their results stored, the others are given up."""
        self._queue.clear()
        try:
            if self._running:
                await asyncio.wait(self._running, timeout=self._run.agent.grace_s)
        except asyncio.CancelledError:
            pass  # asked to stop for the second time: no more waiting, what has ended is stored all the same
        ended = {task for task in self._running if task.done()}
        for task in self._running.keys() - ended:
            task.cancel()
        if self._running.keys() - ended:
            await asyncio.wait(self._running.keys() - ended)
        for task, planned in list(self._running.items()):
            await self._keep(task, planned)

    async def _keep(self, task: asyncio.Task[Settled], planned: Planned) -> None:
        """Store the ending of a stopped run's call, if it has one. Errors are told, the run ends for another reason."""
        if task.cancelled() or task.exception() is not None:
            return
        settled = task.result()
        try:
            if isinstance(settled, Ended):
                await self._store(planned, settled)
            elif isinstance(settled, Asked) and settled.effect is not None:
                await self._run.book.call(settled.effect.doubt, settled.why)
        except (Exception, asyncio.CancelledError) as error:
            # Whatever it is: the results of the other calls are still to be kept.
            _log.warning(
                "thread %r: the result of %s was not stored: %s", self._run.book.thread.id, planned.name, error
            )


def interrupted(ended: Sequence[dict[str, Any]]) -> bool:
    """Whether one of these entries says that its call was cut off, so that the turn ends here."""
    return any(entry["outcome"] == INTERRUPTED for entry in ended)
