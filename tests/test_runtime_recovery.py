"""Calls whose outcome nobody knows: what each rule does about them, in this process and after another one's death.

Deaths are those of `ManualClock` here: to the next run the caller is provably gone, while it really goes on, which a
real death cannot show. SIGKILL at every boundary is in test_runtime_kill.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime_agents import World, ask, say, script

from agentstore import CallNotWaiting, EffectConflict, Fenced, NotDone, RunFailed, Set, Store, Unknown, clock, events
from agentstore.runtime import Agent, RunEvent, ToolContext, ToolError, ToolMessage, resolve, tool
from agentstore.runtime.attempt import Doubt, attempt
from agentstore.runtime.plan import plan
from agentstore.testing.manual_clock import ManualClock


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "agents") as opened:
        yield opened
        assert opened.check() == []


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "world.db")


class Trouble:
    """Makes the first so many calls of a tool fail, before or after their effect."""

    def __init__(self, *, before: int = 0, after: int = 0, error: type[Exception] = ConnectionError) -> None:
        self.before = before
        self.after = after
        self.error = error

    def enter(self) -> None:
        if self.before:
            self.before -= 1
            raise self.error("refused")

    def leave(self) -> None:
        if self.after:
            self.after -= 1
            raise self.error("connection reset")


def one_call(name: str = "act") -> Any:
    return script(ask((name, {"what": "x"})), say("done"))


def contents(result: Any) -> list[Any]:
    return [message["content"] for message in result.messages if message["role"] == "tool"]


# --- exceptions and timeouts in a living run ----------------------------------------------


def test_read_is_tried_again_and_then_told(store: Store, world: World) -> None:
    trouble = Trouble(after=2)

    @tool(recovery="read", backoff_s=0)
    def act(what: str, ctx: ToolContext) -> str:
        trouble.enter()
        world.do("act", ctx.key, what)
        trouble.leave()
        return "seen"

    assert contents(Agent(model=one_call(), tools=[act]).run(store, "a", "go")) == ["seen"]
    assert len(world.done("act")) == 3
    trouble.before = 99
    told = contents(Agent(model=one_call(), tools=[act]).run(store, "b", "go"))
    assert told == ["error: no result after 4 attempts; the last one: it raised ConnectionError: refused"]
    assert store.thread("a").effects() == store.thread("b").effects() == []


def test_replay_is_tried_again_with_its_key(store: Store, world: World) -> None:
    trouble = Trouble(after=2)
    seen: list[tuple[str, int]] = []

    @tool(recovery="replay", backoff_s=0)
    def act(what: str, ctx: ToolContext) -> str:
        seen.append((ctx.key, ctx.attempt))
        world.do_once("act", ctx.key, what)
        trouble.leave()
        return "done"

    assert contents(Agent(model=one_call(), tools=[act]).run(store, "t", "go")) == ["done"]
    assert [attempt for _, attempt in seen] == [1, 2, 3]
    assert len({key for key, _ in seen}) == 1
    assert world.done("act") == ["x"]
    retries = [e.what for e in events.of_thread(store.thread("t")) if e.kind == "retry"]
    assert retries == ["it raised ConnectionError: connection reset"] * 2


def test_replay_that_never_answers_fails_the_run_and_the_next_run_goes_on(store: Store, world: World) -> None:
    trouble = Trouble(after=3)

    @tool(recovery="replay", backoff_s=0, retries=1)
    def act(what: str, ctx: ToolContext) -> str:
        world.do_once("act", ctx.key, what)
        trouble.leave()
        return f"attempt {ctx.attempt}"

    agent = Agent(model=one_call(), tools=[act])
    with pytest.raises(RunFailed, match=r"act \(call 0\): no result after 2 attempts; the last one: it raised"):
        agent.run(store, "t", "go", "1")
    assert store.thread("t").load()["state"] == "FAILED"
    assert [e.status for e in store.thread("t").effects(open=True)] == ["in_doubt"]
    assert contents(agent.run(store, "t", "go", "1")) == ["attempt 4"]
    assert world.done("act") == ["x"]


def test_a_run_that_fails_leaves_every_open_call_to_its_rule_at_once(store: Store, world: World) -> None:
    """One call fails the run, one waits for a person, one is done: the next run goes on with all of them."""
    broken = [True]

    def act(what: str, ctx: ToolContext) -> str:
        world.do("act", ctx.key, what)
        if broken[0]:
            raise ConnectionError("reset")
        return f"did {what}"

    @tool(recovery="replay", backoff_s=0, retries=0)
    def again(what: str, ctx: ToolContext) -> str:
        return act(what, ctx)

    @tool
    def once(what: str, ctx: ToolContext) -> str:
        return act(what, ctx)

    @tool(recovery="skip")
    def fine(what: str) -> str:
        return what

    said = ask(("again", {"what": "a"}), ("once", {"what": "b"}), ("fine", {"what": "c"}), ("again", {"what": "d"}))
    agent = Agent(model=script(said, say("done")), tools=[again, once, fine])
    with pytest.raises(RunFailed, match="again"):
        agent.run(store, "t", "go", "1")
    assert [e.status for e in store.thread("t").effects()] == ["in_doubt", "in_doubt", "done", "in_doubt"]
    broken[0] = False
    result = agent.run(store, "t", "go", "1")
    assert (result.status, contents(result)) == ("WAITING", ["did a", "c", "did d"])
    agent.resolve("t", result.waiting[0], happened="b it was")
    assert contents(agent.run(store, "t", "go", "1")) == ["did a", "b it was", "c", "did d"]


def test_a_tool_that_says_not_now_is_tried_again_only_where_that_is_safe(store: Store) -> None:
    calls: list[str] = []

    def busy(name: str) -> str:
        calls.append(name)
        raise ToolError("busy", final=False)

    @tool(recovery="replay", backoff_s=0, retries=2)
    def again(what: str) -> str:
        return busy("again")

    @tool(recovery="ask")
    def never(what: str) -> str:
        return busy("never")

    for made in (again, never):
        result = Agent(model=one_call(made.name), tools=[made]).run(store, made.name, "go")
        assert contents(result) == ["error: busy"]
    assert calls == ["again"] * 3 + ["never"]


@pytest.mark.parametrize("happened", [True, False])
def test_query_asks_the_tool_and_then_skips_or_replays(store: Store, world: World, happened: bool) -> None:
    trouble = Trouble(after=1) if happened else Trouble(before=1)
    asked: list[tuple[str, Any]] = []

    def find(key: str, arguments: dict[str, Any]) -> Any:
        asked.append((key, arguments))
        found = world.find(key)
        return NotDone if found is None else f"found {found}"

    @tool(recovery="query", query=find, backoff_s=0)
    def act(what: str, ctx: ToolContext) -> str:
        trouble.enter()
        world.do("act", ctx.key, what)
        trouble.leave()
        return f"did {what} at attempt {ctx.attempt}"

    result = Agent(model=one_call(), tools=[act]).run(store, "t", "go")
    assert contents(result) == ["found x" if happened else "did x at attempt 2"]
    assert world.done("act") == ["x"]
    (effect,) = store.thread("t").effects()
    assert asked == [(effect.key, {"what": "x"})]
    assert effect.source == ("query" if happened else "call")


def test_query_that_never_happens_is_told_to_the_model(store: Store) -> None:
    @tool(recovery="query", query=lambda key, arguments: NotDone(), backoff_s=0, retries=2)
    def act(what: str) -> str:
        raise OSError("no route")

    result = Agent(model=one_call(), tools=[act]).run(store, "t", "go")
    assert contents(result) == ["error: it did not happen: it raised OSError: no route"]
    (effect,) = store.thread("t").effects()
    assert (effect.outcome, effect.attempt) == ("failed", 3)


@pytest.mark.parametrize("knows", ["unknown", "raises", "hangs"])
def test_query_that_does_not_know_asks_a_person(store: Store, world: World, knows: str) -> None:
    answers: list[Any] = []

    async def find(key: str, arguments: dict[str, Any]) -> Any:
        if answers:
            return answers[0]
        if knows == "unknown":
            return Unknown
        if knows == "raises":
            raise ConnectionError("no route")
        return await asyncio.Event().wait()

    @tool(recovery="query", query=find, backoff_s=0, retries=1, timeout_s=0.05 if knows == "hangs" else 60)
    async def act(what: str, ctx: ToolContext) -> str:
        world.do("act", ctx.key, what)
        raise ConnectionError("reset")

    agent = Agent(model=one_call(), tools=[act])
    result = agent.run(store, "t", "go")
    assert (result.status, result.state["turn"]["asked"]) == ("WAITING", [0])
    (call,) = result.waiting
    assert (call.tool, call.index, call.arguments, call.thread_id) == ("act", 0, {"what": "x"}, "t")
    why = (result.checkpoint.metadata or {})["asked"][0]["why"]
    assert {"unknown": "does not know", "raises": "no route", "hangs": "no answer within"}[knows] in why
    # The tool is asked again each time; as long as it does not know, nothing is written.
    again = agent.run(store, "t", "go")
    assert (again.status, again.checkpoint) == ("WAITING", result.checkpoint)
    answers.append({"found": "x"})
    final = agent.run(store, "t", "go")
    assert contents(final) == ['{"found": "x"}']
    assert final.status == "COMPLETED" and world.done("act") == ["x"]


def test_skip_records_that_nobody_knows(store: Store, world: World) -> None:
    trouble = Trouble(after=1)

    @tool(recovery="skip")
    def act(what: str, ctx: ToolContext) -> str:
        world.do("act", ctx.key, what)
        trouble.leave()
        return "did"

    result = Agent(model=one_call(), tools=[act]).run(store, "t", "go")
    assert contents(result)[0].startswith("outcome unknown")
    assert world.done("act") == ["x"]
    (effect,) = store.thread("t").effects()
    assert (effect.outcome, result.state["tool_call_results"][0]["outcome"]) == ("unknown", "unknown")


def test_ask_waits_for_a_person_whatever_is_run_meanwhile(store: Store, world: World) -> None:
    trouble = Trouble(after=1)

    @tool
    def act(what: str, ctx: ToolContext) -> str:
        world.do("act", ctx.key, what)
        trouble.leave()
        return "did"

    @tool(recovery="replay")
    def other(n: int) -> int:
        return n

    said = ask(("other", {"n": 1}), ("act", {"what": "x"}), ("other", {"n": 2}))
    agent = Agent(model=script(said, say("done")), tools=[act, other])
    result = agent.run(store, "t", "go", "1")
    assert result.status == "WAITING"
    assert contents(result) == ["1", "2"]  # the others are not held up
    assert agent.run(store, "t", "go", "1").checkpoint == result.checkpoint
    (call,) = result.waiting
    assert call.why == "it raised ConnectionError: connection reset"
    checkpoint = agent.resolve("t", call, happened={"sent": True})
    assert (checkpoint.reason, checkpoint.status) == ("approval", "WAITING")
    with pytest.raises(CallNotWaiting, match="no call"):
        agent.resolve("t", call, happened=NotDone)
    final = agent.run(store, "t", "go", "1")
    assert contents(final) == ["1", '{"sent": true}', "2"]  # in the order of the calls
    assert final.status == "COMPLETED" and world.done("act") == ["x"]
    assert [e.source for e in store.thread("t").effects() if e.tool == "act"] == ["person"]
    assert store.thread("t").load() == final.state


def test_what_a_person_can_say(store: Store, world: World) -> None:
    trouble = Trouble(before=4)

    @tool
    def act(what: str, ctx: ToolContext) -> str:
        trouble.enter()
        world.do("act", ctx.key, what)
        return f"attempt {ctx.attempt}"

    said = ask(*[("act", {"what": str(n)}) for n in range(4)])
    agent = Agent(model=script(said, say("done")), tools=[act])
    waiting = agent.run(store, "t", "go").waiting
    assert [call.index for call in waiting] == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="store="):
        Agent(model=script()).resolve("t", waiting[0], happened=1)
    with pytest.raises(ValueError, match="while it is not known"):
        resolve(store, "t", waiting[0], happened=Unknown)
    with pytest.raises(CallNotWaiting, match=r"no call 'nothing' waiting; the open calls are: act .*, act "):
        resolve(store, "t", "nothing", happened=1)
    resolve(store, "t", waiting[0].key[:12].upper(), happened=ToolMessage(role="tool", content="by hand"))
    resolve(store, "t", "call_1", happened=NotDone("I looked"))
    with pytest.raises(CallNotWaiting, match="not started, not in doubt"):
        resolve(store, "t", "call_1", happened=NotDone)
    agent.resolve("t", waiting[2], happened=ToolError("the bank refused"))
    assert agent.run(store, "t", "go").status == "WAITING"  # the third is still open, the second was made
    assert world.done("act") == ["1"]
    agent.resolve("t", waiting[3], happened=None)
    final = agent.run(store, "t", "go")
    assert contents(final) == ["by hand", "attempt 2", "error: the bank refused", "null"]
    assert world.done("act") == ["1"]


def test_calls_with_one_id_are_told_apart_by_key(store: Store) -> None:
    @tool
    def act(what: str) -> str:
        raise OSError(what)

    said = ask(("act", {"what": "a"}), ("act", {"what": "b"}), ids=["same", "same"])
    agent = Agent(model=script(said, say("done")), tools=[act])
    waiting = agent.run(store, "t", "go").waiting
    with pytest.raises(CallNotWaiting, match="several calls 'same'"):
        agent.resolve("t", "same", happened=1)
    agent.resolve("t", waiting[1], happened="second")
    agent.resolve("t", waiting[0].key, happened="first")
    assert contents(agent.run(store, "t", "go")) == ["first", "second"]


def test_an_async_tool_that_is_late_is_stopped_and_goes_to_its_rule(store: Store, world: World) -> None:
    stopped: list[int] = []

    @tool(recovery="replay", timeout_s=0.02, backoff_s=0)
    async def act(what: str, ctx: ToolContext) -> str:
        try:
            await asyncio.Event().wait() if ctx.attempt < 3 else None
        except asyncio.CancelledError:
            stopped.append(ctx.attempt)
            raise
        return f"attempt {ctx.attempt}"

    assert contents(Agent(model=one_call(), tools=[act]).run(store, "t", "go")) == ["attempt 3"]
    assert stopped == [1, 2]


def test_a_sync_tool_that_is_late_may_still_answer_before_its_deadline() -> None:
    """A thread cannot be stopped. As long as nobody else may judge the call, what it returns counts."""
    go_on = threading.Event()

    @tool(recovery="ask", timeout_s=0.01)
    def act(what: str) -> str:
        go_on.wait()
        return "late"

    (planned,) = plan(ask(("act", {"what": "x"})), {"act": act}, None)
    context = ToolContext(
        key="00", attempt=1, deadline=0.0, thread_id="t", decision=0, index=0, tool="act", call=planned.call.raw
    )

    async def main() -> tuple[Any, Any]:
        given_up = await attempt(planned, context, patience_s=0.01)
        waited = asyncio.ensure_future(attempt(planned, context, patience_s=3600))
        await asyncio.sleep(0.05)
        go_on.set()
        return given_up, await waited

    given_up, waited = asyncio.run(main())
    assert given_up == Doubt("it took longer than 0.01 s and still runs", ended=False)
    assert (waited.outcome, waited.value) == ("ok", "late")


def test_a_tool_that_ends_its_interpreter_is_in_doubt(store: Store) -> None:
    @tool(recovery="skip")
    def act(what: str) -> str:
        raise SystemExit(3)

    @tool(recovery="skip")
    async def act2(what: str) -> str:
        raise KeyboardInterrupt

    for made in (act, act2):
        result = Agent(model=one_call(made.name), tools=[made]).run(store, made.name, "go")
        assert contents(result)[0].startswith("outcome unknown")


# --- after the death of a worker -----------------------------------------------------------


class Hanging:
    """A tool that has done its work and does not return until it is let go; whoever calls it again is not held."""

    def __init__(self, world: World, rule: str, **options: Any) -> None:
        self.started = asyncio.Event()
        self.let_go = asyncio.Event()
        calls = 0

        def find(key: str, arguments: dict[str, Any]) -> Any:
            return world.find(key) or NotDone

        @tool(recovery=rule, query=find if rule == "query" else None, **options)
        async def act(what: str, ctx: ToolContext) -> str:
            nonlocal calls
            calls += 1
            (world.do_once if rule == "replay" else world.do)("act", ctx.key, what)
            if calls == 1:
                self.started.set()
                await self.let_go.wait()
            return f"result of call {calls}"

        self.tool = act


def after_a_death(store: Store, world: World, rule: str) -> tuple[Any, Any, list[str]]:
    """A worker dies in its tool, another carries on, then the tool of the dead one returns after all (as in a worker
    that was only thought to be dead): result of the second, end of the first, events of recovery."""

    async def main() -> tuple[Any, Any, list[str]]:
        hanging = Hanging(world, rule)
        kinds: list[str] = []
        agent = Agent(model=one_call(), tools=[hanging.tool], on_event=lambda event: kinds.append(event.kind))
        machine = ManualClock()
        with clock.using(machine):
            worker = machine.start_process()
            first = asyncio.ensure_future(agent.arun(store, "t", "go", "1"))
            await hanging.started.wait()
            machine.kill(worker)
            machine.start_process()
            kinds.clear()
            second = await agent.arun(store, "t", "go", "1")
            told = [kind for kind in kinds if kind in ("skip", "query", "replay", "asked")]
            hanging.let_go.set()
            (end,) = await asyncio.gather(first, return_exceptions=True)
        return second, end, told

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("rule", "status", "content", "told"),
    [
        ("replay", "COMPLETED", "result of call 2", ["replay"]),
        ("query", "COMPLETED", "x", ["query"]),
        ("skip", "COMPLETED", "outcome unknown", ["skip"]),
        ("ask", "WAITING", None, ["asked"]),
    ],
)
def test_a_dead_workers_call_goes_to_its_rule_and_its_late_result_is_kept_as_evidence(
    store: Store, world: World, rule: str, status: str, content: str | None, told: list[str]
) -> None:
    second, end, kinds = after_a_death(store, world, rule)
    assert (second.status, kinds) == (status, told)
    assert world.done("act") == ["x"]
    assert isinstance(end, Fenced)  # whoever was thought dead writes nothing into the thread any more
    (effect,) = store.thread("t").effects()
    if content is not None:
        assert contents(second)[0].startswith(content)
        assert effect.duplicates == 1
    else:
        # Its receipt is evidence all the same: the call that waited for a person is settled by it.
        assert (effect.status, effect.result, effect.seq) == ("done", "result of call 1", None)
        settled = Agent(model=one_call(), tools=[Hanging(world, rule).tool]).run(store, "t", "go", "1")
        assert contents(settled) == ["result of call 1"]
    assert world.done("act") == ["x"]


def test_a_call_in_flight_elsewhere_is_waited_for(store: Store, world: World) -> None:
    """The run of a sync tool is cancelled: its thread goes on, in a living process. Nobody may judge the call before
    its deadline; then it goes to its rule."""
    started, let_go = threading.Event(), threading.Event()

    @tool(recovery="ask", timeout_s=600)
    def act(what: str, ctx: ToolContext) -> str:
        world.do("act", ctx.key, what)
        started.set()
        let_go.wait()
        return "too late"

    async def main() -> Any:
        waits = asyncio.Event()

        def observe(event: RunEvent) -> None:
            if event.kind == "wait":
                waits.set()

        agent = Agent(model=one_call(), tools=[act], on_event=observe, grace_s=0)
        machine = ManualClock()
        with clock.using(machine):
            first = asyncio.ensure_future(agent.arun(store, "t", "go"))
            await asyncio.to_thread(started.wait)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            second = asyncio.ensure_future(agent.arun(store, "t", "go"))
            await waits.wait()
            assert store.thread("t").load()["state"] == "WAITING"
            head = store.thread("t").head
            assert head is not None and head.metadata["in_flight"][0]["tool"] == "act"
            waits.clear()
            await waits.wait()  # looked at again, and still in flight
            machine.advance(606)
            return await second

    result = asyncio.run(main())
    let_go.set()
    assert result.status == "WAITING" and len(result.waiting) == 1
    assert "deadline passed" in result.waiting[0].why
    assert world.done("act") == ["x"]


def test_the_tools_of_an_agent_may_change_between_two_runs(store: Store, world: World) -> None:
    @tool(name="act")
    def first(what: str) -> str:
        raise OSError("dead")

    agent = Agent(model=one_call(), tools=[first])
    assert agent.run(store, "t", "go").status == "WAITING"
    # The tool is gone: only a person can say.
    assert Agent(model=one_call(), tools=[]).run(store, "t", "go").status == "WAITING"

    # Other parameters make another call of it: refused, not guessed at.
    @tool(name="act", recovery="replay")
    def other(what: str, extra: int = 1) -> str:
        return "x"

    assert contents(Agent(model=one_call(), tools=[other]).run(store, "t", "go")) == ["x"]

    @tool(name="act", recovery="query", query=lambda key, arguments: f"found {arguments['what']}")
    def queried(what: str) -> str:
        raise AssertionError("never called")

    agent.run(store, "u", "go")
    assert contents(Agent(model=one_call(), tools=[queried]).run(store, "u", "go")) == ["found x"]


def test_a_call_whose_arguments_changed_under_its_key_is_refused(store: Store) -> None:
    @tool
    def act(what: str) -> str:
        raise OSError("dead")

    agent = Agent(model=one_call(), tools=[act])
    agent.run(store, "t", "go")
    state = store.thread("t").load()
    history = state["conversation_history"]
    history[1]["tool_calls"][0]["function"]["arguments"] = '{"what": "y"}'
    store.thread("t").commit(Set("conversation_history", history))

    @tool(name="act", recovery="replay")
    def again(what: str) -> str:
        raise AssertionError("never called")

    with pytest.raises(EffectConflict):
        Agent(model=one_call(), tools=[again]).run(store, "t", "go")


def test_a_fork_of_an_open_decision_asks_a_person_and_knows_the_receipts(store: Store, world: World) -> None:
    trouble = Trouble(after=1)

    @tool(recovery="replay")
    def sure(n: int, ctx: ToolContext) -> int:
        world.do("sure", ctx.key, str(n))
        return n

    @tool
    def act(what: str, ctx: ToolContext) -> str:
        world.do("act", ctx.key, what)
        trouble.leave()
        return "did"

    said = ask(("sure", {"n": 1}), ("act", {"what": "x"}))
    agent = Agent(model=script(said, say("done")), tools=[sure, act], calls_at_once=1)
    result = agent.run(store, "t", "go")
    assert result.status == "WAITING"
    decision = next(c.seq for c in store.thread("t").history() if c.reason == "decision")
    store.thread("t").fork(at=decision, into="t/alt")
    forked = agent.run(store, "t/alt", "go")
    assert forked.status == "WAITING" and contents(forked) == ["1"]
    assert world.done("sure") == ["1"]  # its receipt came along
    (call,) = forked.waiting
    assert call.key == result.waiting[0].key
    agent.resolve("t/alt", call, happened="in the other world")
    assert contents(agent.run(store, "t/alt", "go")) == ["1", "in the other world"]
    assert agent.run(store, "t", "go").status == "WAITING"
    assert world.done("act") == ["x"]
