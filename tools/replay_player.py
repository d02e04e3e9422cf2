"""Plays one transcript through the loop: its assistant messages are the model, its tool messages the tools.

The loop, its intents and receipts are those of a live agent; only model and tools are
doubles, and they keep nothing: what they give back follows from the conversation that the
loop hands them, so that any process can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentstore import NotDone, Store
from agentstore.errors import AgentStoreError, ThreadNotFound
from agentstore.runtime import Agent, Interrupted, Reply, RunEvent, Tool, ToolContext, ToolMessage, calls_of

from .recovering import results_recorded
from .replay_turns import RecordedCall, Turn, plan
from .replay_world import ReplayWorld
from .transcript import Message, Transcript, difference


class CallWithoutIntent(AgentStoreError):
    """A tool was called and the store knows of no intent for it: after a kill nobody could tell that it ran."""


class ReplayFailed(AgentStoreError):
    """A transcript cannot be played on this store; the message says why. `details`: what a worker said at its end."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def recorded_calls(message: Message) -> list[RecordedCall]:
    """The calls of a message, as the loop counts them."""
    return [RecordedCall(call.index, call.id, call.name) for call in calls_of(message)]


class Player:
    """One transcript on one store. `run` plays it to its end, from wherever the store stands; not thread-safe."""

    def __init__(
        self,
        transcript: Transcript,
        store: Store,
        world: ReplayWorld,
        *,
        on_event: Callable[[RunEvent], None] | None = None,
        on_progress: Callable[[int], None] = lambda position: None,
    ) -> None:
        self.transcript = transcript
        self.turns = plan(transcript.messages, recorded_calls)
        self._decisions = {decision.position: decision for turn in self.turns for decision in turn.decisions}
        self._store = store
        self._world = world
        self._on_event = on_event
        self._on_progress = on_progress
        self._violation: CallWithoutIntent | None = None
        self._said: int | None = None  # position of a message that the model just said, until its calls begin
        self._positions: dict[int, int] = {}  # of decisions, by the seq of their checkpoint
        self.tools = [self._tool(name, number) for number, name in enumerate(self._names())]
        fallback = Tool(self.call_tool, name="malformed call", recovery="replay", raw=True)
        # window=list: the model is shown the stored messages and nothing else, its position is their number.
        self.agent = Agent(
            model=self._model,
            tools=self.tools,
            fallback=fallback,
            window=list,
            on_event=on_event,
            max_steps=len(transcript.messages) + 1,
        )

    def run(self) -> None:
        """Play on to the end. Raises `LeaseHeld` if another worker plays this thread now."""
        thread_id = self.transcript.thread_id
        found, unfinished = self._stored()
        stored = found or []
        self._check_beginning(stored)
        if unfinished and self._on_event is not None:
            # Results behind the open decision: recovery finds them and calls nothing.
            for tool in results_recorded(stored):
                self._on_event(RunEvent("skip", thread_id, -1, tool=tool, detail="its result is recorded"))
        for turn in self._turns_left(len(stored)):
            self._said = None
            try:
                result = self.agent.run(self._store, thread_id, turn.inputs, input_id=turn.input_id)
            finally:
                # The loop takes what a tool raises for the tool's failure; this one is the loop's own.
                if self._violation is not None:
                    raise self._violation
            if result.status != "COMPLETED":
                raise ReplayFailed(f"thread {thread_id!r}: turn {turn.number} ended {result.status}: {result.error}")
            self._on_progress(len(result.messages))

    def finished(self) -> bool:
        """Whether the thread is there to its last message. One load."""
        stored, unfinished = self._stored()
        return not unfinished and stored is not None and len(stored) == len(self.transcript.messages)

    def _stored(self) -> tuple[list[Message] | None, bool]:
        """The conversation so far (None: there is no thread), and whether its newest turn is unfinished."""
        try:
            state = self._store.thread(self.transcript.thread_id).load()
        except ThreadNotFound:
            return None, False
        return state["conversation_history"], state["state"] != "COMPLETED"

    def _check_beginning(self, stored: list[Message]) -> None:
        """`ReplayFailed` if `stored` is not how the file begins."""
        recorded = self.transcript.messages
        known = max((at + 1 for at, message in enumerate(stored) if message["role"] == "assistant"), default=0)
        # Calls that ran side by side end in any order: behind the last decision some results may be missing.
        later = iter(recorded[known:])
        in_order = all(any(difference(one, other) is None for other in later) for one in stored[known:])
        if difference(recorded[:known], stored[:known]) is not None or not in_order:
            raise ReplayFailed(
                f"thread {self.transcript.thread_id!r} of this store does not begin like its file: "
                "replay into another --store, or rename the file"
            )

    def _turns_left(self, messages: int) -> Sequence[Turn]:
        """Turns that may be unfinished when `messages` are stored: the one that is begun last and its
        predecessor (its last message may be there and its end not yet), and all later ones."""
        begun = sum(turn.position <= messages for turn in self.turns)
        return self.turns[max(0, begun - 2) :]

    def _names(self) -> list[str]:
        """Every tool that the recording calls, in the order of its first call."""
        calls = (call for message in self.transcript.messages for call in calls_of(message))
        return list(dict.fromkeys(call.name for call in calls if call.problem is None))

    def _tool(self, name: str, number: int) -> Tool:
        """The double of tool `name`. Recordings do not say how theirs recover: the doubles take turns."""
        if number % 2:
            return Tool(self.call_tool, name=name, recovery="replay", raw=True)
        return Tool(self.call_tool, name=name, recovery="query", query=self._query, raw=True)

    # --- the doubles -----------------------------------------------------------------------

    async def _model(self, messages: Sequence[Message], _tools: object) -> Reply:
        position = len(messages)
        self._on_progress(position)
        if position not in self._decisions:
            return Reply(message=None)
        self._said = position
        return Reply(message=self.transcript.messages[position])

    async def call_tool(self, _arguments: Any, context: ToolContext) -> ToolMessage:
        if not self.has_intent(context.key):
            self._violation = CallWithoutIntent(
                f"thread {context.thread_id!r}: {context.tool!r} was called with key {context.key} and has no intent"
            )
            raise self._violation
        decision = self._decisions[self._position_of(context.decision)]
        result = decision.calls[context.index].result
        self._world.request(context.key, context.thread_id, position=decision.position, call=context.index)
        if result is None:
            raise Interrupted
        self._on_progress(result)
        return ToolMessage(self.transcript.messages[result])

    async def _query(self, key: str, _arguments: Any) -> Any:
        """What became of the call with this key: its result, or that it never arrived."""
        found = self._world.find(key)
        if found is None:
            return NotDone
        position, index = found
        result = self._decisions[position].calls[index].result
        # A call that was interrupted and has no result to give is made (and interrupted) again.
        return NotDone if result is None else ToolMessage(self.transcript.messages[result])

    def _position_of(self, seq: int) -> int:
        """Where the message of the decision at checkpoint `seq` stands.

        What this process read before the run is not asked: until the run had the lease, another worker may have
        moved the thread. Either this process's model said the message in this run, or the checkpoint tells.
        """
        if seq not in self._positions:
            if self._said is None:
                state = self._store.thread(self.transcript.thread_id).load(at=seq)
                self._said = len(state["conversation_history"]) - 1
            self._positions[seq], self._said = self._said, None
        return self._positions[seq]

    def has_intent(self, key: str) -> bool:
        """Whether the store has a durable intent with this key that is still open. One read."""
        return any(effect.key == key for effect in self._store.thread(self.transcript.thread_id).effects(open=True))
