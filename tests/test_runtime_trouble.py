"""A store that fails under a run: the step stops, nothing unconfirmed is acted on, and the run can be carried on."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from runtime_agents import World, ask, say, script

from agentstore import CommitUnknown, DiskFull, Fenced, Set, StaleThread, Store, StoreFailed, clock, leases
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.segments import SEGMENT
from agentstore.runtime import Agent, Reply, ToolContext, tool
from agentstore.runtime.agent import LEASE_S
from agentstore.testing.faults import Call, Error, Fault, FaultyFiles, is_frame
from agentstore.testing.manual_clock import ManualClock

T = TypeVar("T")

MODEL = script(ask(("put", {"what": "a"}), ("see", {"what": "b"})), ask(("put", {"what": "c"})), say("done"))
CONVERSATION = ["user", "assistant", "put a", "saw b", "assistant", "put c", "assistant"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "world.db")


def agent_of(world: World) -> Agent:
    """An agent whose every call of model or tool looks whether what it stands on is confirmed."""

    @tool(recovery="query", query=lambda key, arguments: f"put {world.find(key)}")
    def put(what: str, ctx: ToolContext) -> str:
        world.do("put", ctx.key, what)
        return f"put {what}"

    @tool(recovery="read")
    def see(what: str) -> str:
        return f"saw {what}"

    return Agent(model=MODEL, tools=[put, see], grace_s=60)


def check(store: Store, world: World, result: Any) -> None:
    assert [m["content"] if m["role"] == "tool" else m["role"] for m in result.messages] == CONVERSATION
    assert result.state == store.thread("t").load()
    assert world.done("put") == ["a", "c"]
    assert [(e.status, e.duplicates) for e in store.thread("t").effects()] == [("done", 0)] * 2
    assert store.check() == []


@contextmanager
def next_process() -> Iterator[Callable[[], None]]:
    """What the block calls ends this process, as far as leases and effects can tell, and begins another one."""
    machine = ManualClock()
    with clock.using(machine):

        def start_process() -> None:
            machine.kill(machine.owner())
            machine.start_process()

        yield start_process


def in_the_log(call: Call) -> bool:
    return call.path.endswith(SEGMENT)


@contextmanager
def opened(path: Path, files: FaultyFiles) -> Iterator[Store]:
    """The store over these system calls: all who open it in this process share the engine that was first."""
    engine = EmbeddedEngine.open(str(path), files=files)
    try:
        with Store.open(path) as store:
            yield store
    finally:
        engine.close()


@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8])
def test_a_disk_that_is_full_for_a_moment_is_waited_for(tmp_path: Path, world: World, nth: int) -> None:
    files = FaultyFiles()
    with opened(tmp_path / "agents", files) as store:
        store.thread("before").commit()
        lease = store.thread("t").lease("before", ttl_s=1)  # so that the frames below are all of the run's own commits
        lease.release()
        files.arm(Fault(nth + 1, Error(errno.ENOSPC), frozenset({"pwrite"}), where=is_frame))
        result = agent_of(world).run(store, "t", "go", "1")
        assert files.struck is not None
        check(store, world, result)


def test_a_disk_that_stays_full_ends_the_run_and_it_can_be_carried_on(tmp_path: Path, world: World) -> None:
    files = FaultyFiles()
    with next_process() as start_process, opened(tmp_path / "agents", files) as store:
        store.thread("before").commit()
        files.arm(Fault(4, Error(errno.ENOSPC), frozenset({"pwrite"}), for_ever=True, where=is_frame))
        with pytest.raises(DiskFull):
            agent_of(world).run(store, "t", "go", "1")
        files.arm(None)
        start_process()
        check(store, world, agent_of(world).run(store, "t", "go", "1"))


class Interrupted(FaultyFiles):
    """The n-th sync of the log ends in an error that says nothing about the disk, once."""

    def __init__(self) -> None:
        super().__init__()
        self.nth = 0
        self.syncs = 0

    def around(self, call: Call, run: Callable[[], T], partly: Callable[[float], object]) -> T:
        if call.name == "fdatasync" and in_the_log(call) and self.nth:
            self.syncs += 1
            if self.syncs == self.nth:
                raise MemoryError("no room for a moment")
        return super().around(call, run, partly)


def test_a_commit_of_unknown_outcome_is_recognised_and_the_run_goes_on(tmp_path: Path, world: World) -> None:
    """Every sync of a run in turn: what it wrote is read again and found."""
    outcomes = []
    for nth in range(1, 30):
        directory = tmp_path / str(nth)
        directory.mkdir()
        world = World(directory / "world.db")
        files = Interrupted()
        with opened(directory / "agents", files) as store:
            store.thread("before").commit()
            files.nth = nth
            try:
                result = agent_of(world).run(store, "t", "go", "1")
                outcomes.append("went on")
            except CommitUnknown:
                outcomes.append("stopped")
            result = agent_of(world).run(store, "t", "go", "1")
            check(store, world, result)
            if files.syncs < nth:
                break
    # Lease, input, decision, two results, decision, result, end, lease given back: nothing of it stops the run.
    assert len(outcomes) >= 9
    assert outcomes.count("stopped") == 0


def test_a_store_that_failed_ends_the_run_and_the_next_process_carries_it_on(tmp_path: Path) -> None:
    for nth in range(1, 30):
        directory = tmp_path / str(nth)
        directory.mkdir()
        world = World(directory / "world.db")
        files = FaultyFiles()
        struck = False
        with next_process() as start_process:
            with opened(directory / "agents", files) as store:
                store.thread("before").commit()
                files.arm(Fault(nth, Error(errno.EIO), frozenset({"fdatasync"}), where=in_the_log))
                try:
                    agent_of(world).run(store, "t", "go", "1")
                except StoreFailed:
                    struck = True
            start_process()
            with Store.open(directory / "agents") as store:
                check(store, world, agent_of(world).run(store, "t", "go", "1"))
        if not struck:
            break
    assert nth >= 8


def test_whoever_moves_the_head_under_a_run_stops_it_and_the_receipt_stays(tmp_path: Path, world: World) -> None:
    with Store.open(tmp_path / "agents") as store:
        moved = False

        @tool(recovery="ask")
        def put(what: str, ctx: ToolContext) -> str:
            nonlocal moved
            world.do("put", ctx.key, what)
            if not moved:
                moved = True
                thread = store.thread("t")
                thread.load()
                thread.commit(Set("note", "from outside"))
            return f"put {what}"

        agent = Agent(model=script(ask(("put", {"what": "a"})), say("done")), tools=[put])
        with pytest.raises(StaleThread):
            agent.run(store, "t", "go")
        (effect,) = store.thread("t").effects()
        assert (effect.status, effect.result, effect.seq) == ("done", "put a", None)
        result = agent.run(store, "t", "go")
        assert result.messages[2]["content"] == "put a" and result.state["note"] == "from outside"
        assert world.done("put") == ["a"]
        assert store.check() == []


def test_a_worker_that_lost_its_lease_calls_nothing_more(tmp_path: Path) -> None:
    """The lease expires while the model thinks, and another worker takes the thread: the first may not go on."""

    async def main(store: Store) -> None:
        thinking, go_on = asyncio.Event(), asyncio.Event()
        called: list[str] = []

        @tool(recovery="replay")
        def put(what: str, ctx: ToolContext) -> str:
            called.append(what)
            return what

        async def slow(messages: Any, tools: Any) -> Any:
            thinking.set()
            await go_on.wait()
            return ask(("put", {"what": "by the slow one"}))

        machine = ManualClock()
        with clock.using(machine):
            first = asyncio.ensure_future(Agent(model=slow, tools=[put]).arun(store, "t", "go"))
            await thinking.wait()
            machine.advance(LEASE_S + 1)
            quick = Agent(model=script(ask(("put", {"what": "by the quick one"})), say("done")), tools=[put])
            result = await quick.arun(store, "t", "go")
            go_on.set()
            with pytest.raises(Fenced):
                await first
        assert called == ["by the quick one"]
        assert store.thread("t").load() == result.state

    with Store.open(tmp_path / "agents") as store:
        asyncio.run(main(store))


def test_the_lease_of_a_run_outlasts_its_calls(tmp_path: Path) -> None:
    with Store.open(tmp_path / "agents") as store:
        found: list[float] = []

        @tool(recovery="replay", timeout_s=3600)
        def put(what: str) -> str:
            holder = leases.holder(store.thread("t"))
            assert holder is not None
            found.append(holder.expires_in_s)
            return what

        Agent(model=script(ask(("put", {"what": "a"})), say("done")), tools=[put], lease_s=10).run(store, "t", "go")
    assert found[0] > 3600


class Mute:
    """Raises whatever it is asked."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize("result", [10**5000, Mute()], ids=["an int of too many digits", "no repr"])
def test_a_result_that_has_no_text_does_not_call_its_tool_again(store_dir: Path, result: object) -> None:
    """The run died with the error of the result's repr after the tool had taken effect, and a `replay` tool was called
    again at each further run."""
    calls = []

    @tool(recovery="replay", retries=0)
    def measure() -> object:
        calls.append(1)
        return result

    def model(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Reply:
        if messages[-1]["role"] == "tool":
            return Reply({"role": "assistant", "content": "done"})
        call = {"id": "1", "type": "function", "function": {"name": "measure", "arguments": "{}"}}
        return Reply({"role": "assistant", "tool_calls": [call]})

    with Store.open(store_dir) as store:
        for _ in range(2):
            assert Agent(model=model, tools=[measure]).run(store, "t", "go", input_id="1").status == "COMPLETED"
    assert calls == [1]
