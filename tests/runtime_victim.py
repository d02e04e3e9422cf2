"""The agent that test_runtime_kill.py kills: every rule, calls side by side, and a person who looks at the world."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from runtime_agents import World, ask, say, script

from agentstore import NotDone, Store
from agentstore.runtime import Agent, RunEvent, RunResult, ToolContext, tool
from agentstore.testing import crashpoints
from agentstore.testing.faults import die

THREAD = "trip"
SAYS = (
    ask(("look", {"what": "flights"})),
    ask(
        ("reserve", {"what": "seat 1"}),
        ("charge", {"what": "10"}),
        ("mail", {"what": "ticket"}),
        ("note", {"what": "n"}),
    ),
    ask(("charge", {"what": "20"})),
    ask(("mail", {"what": "bye"}), ("look", {"what": "weather"})),
    say("all done"),
)
TURNS = (("book it", "1"), ("thanks", "2"))


class Moments:
    """Counts the moments before and after effects; at the n-th of its kind the process dies."""

    def __init__(self, point: str, nth: int) -> None:
        self._point = point
        self._left = nth
        self._mutex = threading.Lock()

    def pass_by(self, point: str) -> None:
        with self._mutex:
            if point == self._point:
                self._left -= 1
                if self._left == 0:
                    die()


def agent_of(world: World, moments: Moments, log: Path) -> Agent:
    """The agent. What its recovery decides is appended to `log`."""

    def effect(name: str, ctx: ToolContext, what: str, *, once: bool = False) -> str:
        moments.pass_by("tool-before")
        (world.do_once if once else world.do)(name, ctx.key, what)
        moments.pass_by("tool-after")
        return f"{name} {what}"

    @tool(recovery="read")
    def look(what: str, ctx: ToolContext) -> str:
        return effect("look", ctx, what)

    @tool(recovery="replay")
    def reserve(what: str, ctx: ToolContext) -> str:
        return effect("reserve", ctx, what, once=True)

    def find(key: str, arguments: dict[str, Any]) -> Any:
        found = world.find(key)
        return NotDone if found is None else f"charge {found}"

    @tool(recovery="query", query=find)
    def charge(what: str, ctx: ToolContext) -> str:
        return effect("charge", ctx, what)

    @tool(recovery="skip")
    def note(what: str, ctx: ToolContext) -> str:
        return effect("note", ctx, what)

    @tool
    def mail(what: str, ctx: ToolContext) -> str:
        return effect("mail", ctx, what)

    def observe(event: RunEvent) -> None:
        if event.kind in ("skip", "query", "replay", "asked"):
            with log.open("a", encoding="utf-8") as lines:
                lines.write(f"{event.kind} {event.tool} {event.detail}\n")

    return Agent(model=script(*SAYS, say("welcome")), tools=[look, reserve, charge, note, mail], on_event=observe)


def live(directory: Path, point: str = "", nth: int = 0) -> RunResult:
    """The whole life of the victim: always the same calls. With a `point` it dies at the `nth` of its kind."""
    if point in crashpoints.POINTS:
        crashpoints.install(point, nth)
    world = World(directory / "world.db")
    with Store.open(directory / "agents") as store:
        agent = agent_of(world, Moments(point, nth), directory / "recovered.log")
        for given, input_id in TURNS:
            result = agent.run(store, THREAD, given, input_id)
            while result.status == "WAITING":
                for call in result.waiting:
                    found = world.find(call.key)
                    agent.resolve(THREAD, call, happened=NotDone if found is None else f"mail {found}")
                result = agent.run(store, THREAD, given, input_id)
    return result
