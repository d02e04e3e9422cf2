"""Stopping in good order: SIGTERM, Ctrl-C and cancellation, at every moment of a run."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from runtime_agents import World, ask, say, script

from agentstore import Store, leases
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.runtime import Agent, RunEvent, ToolContext, tool
from agentstore.testing.faults import Call, FaultyFiles, is_frame

T = TypeVar("T")

MODEL = script(ask(("put", {"what": "a"}), ("put", {"what": "b"})), ask(("put", {"what": "c"})), say("done"))
CONVERSATION = ["user", "assistant", "put a", "put b", "assistant", "put c", "assistant"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "world.db")


def putting(world: World, **options: Any) -> Agent:
    @tool(recovery="query", query=lambda key, arguments: f"put {world.find(key)}")
    def put(what: str, ctx: ToolContext) -> str:
        world.do("put", ctx.key, what)
        return f"put {what}"

    return Agent(model=MODEL, tools=[put], **options)


def shape(messages: list[dict[str, Any]]) -> list[str]:
    return [m["content"] if m["role"] == "tool" else m["role"] for m in messages]


def check_stopped(store: Store, thread_id: str) -> None:
    """What a stopped run leaves: no lease, a sound store."""
    holder = leases.holder(store.thread(thread_id))
    assert holder is None or holder.free
    assert store.check() == []


# --- cancellation ------------------------------------------------------------------------


class Watching(FaultyFiles):
    """Calls `at_frame` while the n-th frame is being written."""

    def __init__(self, at_frame: Callable[[int], None]) -> None:
        super().__init__()
        self._at_frame = at_frame
        self.frames = 0

    def around(self, call: Call, run: Callable[[], T], partly: Callable[[float], object]) -> T:
        if is_frame(call):
            self.frames += 1
            self._at_frame(self.frames)
        return super().around(call, run, partly)


def test_cancelled_during_every_commit(tmp_path: Path, world: World) -> None:
    """The n-th frame is on its way when the cancellation comes, for every n: nothing is lost, nothing is done twice."""
    cancel: list[Callable[[int], None]] = [lambda frame: None]
    files = Watching(lambda frame: cancel[0](frame))  # noqa: PLW0108  another one each time
    engine = EmbeddedEngine.open(str(tmp_path / "agents"), files=files)
    with Store.open(tmp_path / "agents") as store:
        for nth in range(1, 40):
            thread_id = f"t{nth}"

            async def cancelled(nth: int = nth, thread_id: str = thread_id) -> Any:
                loop = asyncio.get_running_loop()
                run = asyncio.ensure_future(putting(world).arun(store, thread_id, "go", "1"))
                begin = files.frames

                def at_frame(frame: int) -> None:
                    if frame == begin + nth:
                        loop.call_soon_threadsafe(run.cancel)

                cancel[0] = at_frame
                (end,) = await asyncio.gather(run, return_exceptions=True)
                cancel[0] = lambda frame: None
                return end

            end = asyncio.run(cancelled())
            check_stopped(store, thread_id)
            result = putting(world).run(store, thread_id, "go", "1")
            assert shape(result.messages) == CONVERSATION
            assert result.state == store.thread(thread_id).load()
            if not isinstance(end, asyncio.CancelledError):
                break
        else:
            raise AssertionError("a run of this size has less than 40 frames")
    engine.close()
    # Lease, input, decision, two results, decision, result, end, lease; the run may end before the last one is noticed.
    assert nth >= 9
    assert sorted(world.done("put")) == sorted(["a", "b", "c"] * nth)


def test_cancelled_at_every_event(tmp_path: Path, world: World) -> None:
    with Store.open(tmp_path / "agents") as store:
        for nth in range(1, 40):
            seen = 0

            async def cancelled(nth: int = nth) -> Any:
                def observe(event: RunEvent) -> None:
                    nonlocal seen
                    seen += 1
                    if seen == nth:
                        run.cancel()

                run = asyncio.ensure_future(putting(world, on_event=observe).arun(store, f"t{nth}", "go", "1"))
                (end,) = await asyncio.gather(run, return_exceptions=True)
                return end

            end = asyncio.run(cancelled())
            check_stopped(store, f"t{nth}")
            result = putting(world).run(store, f"t{nth}", "go", "1")
            assert shape(result.messages) == CONVERSATION
            if seen < nth:
                assert not isinstance(end, BaseException)
                break
    assert nth > 10
    assert sorted(world.done("put")) == sorted(["a", "b", "c"] * nth)


async def stop_in_tool(store: Store, agent: Agent, started: asyncio.Event) -> None:
    run = asyncio.ensure_future(agent.arun(store, "t", "go"))
    await started.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    check_stopped(store, "t")


def test_a_tool_that_returns_within_the_grace_has_its_result_stored(tmp_path: Path) -> None:
    async def main(store: Store) -> None:
        started = asyncio.Event()

        @tool
        async def act() -> str:
            started.set()
            for _ in range(20):
                await asyncio.sleep(0)
            return "in time"

        await stop_in_tool(store, Agent(model=script(ask(("act", {})), say("x")), tools=[act]), started)
        (effect,) = store.thread("t").effects()
        assert (effect.status, effect.result) == ("done", "in time")
        assert shape(store.thread("t").load()["conversation_history"]) == ["user", "assistant", "in time"]

    with Store.open(tmp_path / "agents") as store:
        asyncio.run(main(store))


def test_a_tool_that_does_not_is_stopped_and_in_doubt_at_once(tmp_path: Path) -> None:
    async def main(store: Store) -> None:
        started = asyncio.Event()

        @tool
        async def act() -> str:
            started.set()
            await asyncio.Event().wait()
            return "never"

        agent = Agent(model=script(ask(("act", {})), say("x")), tools=[act], grace_s=0)
        await stop_in_tool(store, agent, started)
        (effect,) = store.thread("t").effects()
        assert (effect.status, effect.why) == ("in_doubt", "its run was cancelled")
        assert (await agent.arun(store, "t", "go")).status == "WAITING"

    with Store.open(tmp_path / "agents") as store:
        asyncio.run(main(store))


def test_a_second_cancellation_cuts_the_grace_short(tmp_path: Path) -> None:
    async def main(store: Store) -> None:
        started = asyncio.Event()

        @tool
        async def act() -> str:
            started.set()
            await asyncio.Event().wait()
            return "never"

        agent = Agent(model=script(ask(("act", {})), say("x")), tools=[act], grace_s=3600)
        run = asyncio.ensure_future(agent.arun(store, "t", "go"))
        await started.wait()
        run.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not run.done()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        check_stopped(store, "t")
        assert store.thread("t").effects()[0].status == "in_doubt"

    with Store.open(tmp_path / "agents") as store:
        asyncio.run(main(store))


def test_calls_that_had_not_begun_are_made_by_the_next_run(tmp_path: Path, world: World) -> None:
    """One of two calls hangs, the other waits for its turn: only the first is in doubt after the stop."""

    async def main(store: Store) -> None:
        started = asyncio.Event()

        @tool
        async def act(what: str, ctx: ToolContext) -> str:
            started.set()
            if what == "first":
                await asyncio.Event().wait()
            world.do("act", ctx.key, what)
            return what

        said = ask(("act", {"what": "first"}), ("act", {"what": "second"}))
        agent = Agent(model=script(said, say("x")), tools=[act], grace_s=0, calls_at_once=1)
        await stop_in_tool(store, agent, started)
        result = await agent.arun(store, "t", "go")
        assert [call.arguments for call in result.waiting] == [{"what": "first"}]
        assert world.done("act") == ["second"]

    with Store.open(tmp_path / "agents") as store:
        asyncio.run(main(store))


# --- signals -----------------------------------------------------------------------------

PROGRAM = """
import signal, sys, threading, time
sys.path.insert(0, {tests!r})
from runtime_agents import ask, say, script
from agentstore import Store
from agentstore.runtime import Agent, tool

what, path = sys.argv[1:]
never = threading.Event()

def ready():
    print("ready", flush=True)

@tool(recovery="skip")
def act() -> str:
    ready()
    if what == "hangs":
        never.wait()
    signal.sigwait([signal.SIGUSR1])     # the test sends it after the signal that stops
    return "did it"

def model(messages, tools):
    if what == "model":
        ready()
        never.wait()
    return script(ask(("act", {{}})), say("done"))(messages, tools)

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
if what == "own":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
with Store.open(path) as store:
    agent = Agent(model=model, tools=[act], grace_s=0 if what == "hangs" else 60)
    try:
        agent.run(store, "t", "go")
    finally:
        print("closing", flush=True)
"""


def signal_at_its_moment(what: str, path: Path, number: int) -> tuple[int, str, str]:
    """Exit status, output and errors of the program that gets the signal `number` in the middle of `what`."""
    program = PROGRAM.format(tests=str(Path(__file__).parent))
    process = subprocess.Popen(
        [sys.executable, "-c", program, what, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, number)
    os.kill(process.pid, signal.SIGUSR1)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, -signal.SIGINT)])
@pytest.mark.parametrize("what", ["returns", "hangs", "model"])
def test_a_signal_ends_the_program_in_good_order(tmp_path: Path, what: str, number: int, status: int) -> None:
    code, out, err = signal_at_its_moment(what, tmp_path / "agents", number)
    assert (code, out) == (status, "closing\n"), err
    with Store.open(tmp_path / "agents") as store:
        check_stopped(store, "t")
        thread = store.thread("t")
        found = [(effect.status, effect.attempt) for effect in thread.effects()]
        assert found == {"returns": [("done", 1)], "hangs": [("in_doubt", 1)], "model": []}[what]
        if what == "returns":
            assert shape(thread.load()["conversation_history"]) == ["user", "assistant", "did it"]


def test_a_program_with_its_own_handler_keeps_it(tmp_path: Path) -> None:
    code, _, _ = signal_at_its_moment("own", tmp_path / "agents", signal.SIGTERM)
    assert code == 7


def test_a_shell_sees_130_after_ctrl_c(tmp_path: Path) -> None:
    program = PROGRAM.format(tests=str(Path(__file__).parent)) + "\n"
    script_path = tmp_path / "program.py"
    script_path.write_text(program)
    command = shlex.join([sys.executable, str(script_path), "model", str(tmp_path / "agents")])
    shell = subprocess.Popen(
        ["/bin/bash", "-c", f"trap : INT; {command}; echo status $?"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert shell.stdout is not None
    assert shell.stdout.readline() == "ready\n"
    os.killpg(shell.pid, signal.SIGINT)  # as a terminal does
    out, err = shell.communicate(timeout=60)
    assert out.splitlines()[-1] == "status 130", err


def test_a_run_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    during: list[Any] = []

    def model(messages: Any, tools: Any) -> Any:
        during.append(signal.getsignal(signal.SIGTERM))
        return say("x")

    with Store.open(tmp_path / "agents") as store:
        agent = Agent(model=model)
        worker = threading.Thread(target=agent.run, args=(store, "a", "hi"))
        worker.start()
        worker.join()
        agent.run(store, "b", "hi")
    assert during[0] is before and during[1] is not before
    assert signal.getsignal(signal.SIGTERM) is before
