"""The demo's worker process: it runs the agent, and is killed while it does.

    python -m agentstore.tools.demo.worker --store DIR --world FILE --trips N [--die MOMENT] [--no-ledger]

It always makes the same call. Whether that starts the trip, carries it on after a kill or
finds it finished is the runtime's business, not the worker's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentstore import NotDone, Store
from agentstore.runtime import Agent, RunEvent, RunResult, WaitingCall

from ..recovering import results_recorded
from . import script
from .crash import Death, Reaper
from .desk import Moment, travel_desk
from .lines import emit
from .world import OutsideWorld

THREAD_ID = "travel-desk:team-trip"


@dataclass(slots=True)
class _Recovering:
    """The clock of one start: from before the store opens until the agent does something new."""

    began: float
    over: bool = False

    def end(self) -> None:
        if not self.over:
            self.over = True
            emit("working", ms=round((time.perf_counter() - self.began) * 1000, 1))


def run(store_path: str, world_path: str, trips: int, death: Death, *, ledger: bool) -> None:
    """Run `trips` trips to their end, or die at `death`."""
    clock = _Recovering(time.perf_counter())
    reaper = Reaper(death)

    def on_event(event: RunEvent) -> None:
        emit(event.kind, tool=event.tool, index=event.index, detail=event.detail)

    def hook(moment: Moment, tool: str) -> None:
        clock.end()
        reaper.in_tool(moment, tool)

    reaper.install()
    with OutsideWorld(world_path) as world, Store.open(store_path) as store:
        emit("opened", ms=round((time.perf_counter() - clock.began) * 1000, 1))
        _tell_skips(store)
        agent = travel_desk(world, hook=hook, ledger=ledger, on_event=on_event)
        for trip in range(1, trips + 1):
            result = _run_trip(agent, store, trip)
            while result.status == "WAITING":
                for call in result.waiting:
                    _ask_person(agent, store, world, call)
                result = _run_trip(agent, store, trip)
            if result.status != "COMPLETED":
                raise SystemExit(f"trip {trip} ended {result.status}: {result.error}")
        clock.end()
        emit("finished")


def _tell_skips(store: Store) -> None:
    """Say which calls of the open decision have their results already: they are skipped."""
    thread = store.thread(THREAD_ID)
    if thread.head is None:
        return
    state = thread.load()
    if state["state"] != "COMPLETED":
        for tool in results_recorded(state["conversation_history"]):
            emit("skip", tool=tool, detail="its result is recorded")


def _run_trip(agent: Agent, store: Store, trip: int) -> RunResult:
    return agent.run(store, THREAD_ID, script.trip_input(trip), input_id=script.input_id(trip))


def _ask_person(agent: Agent, store: Store, world: OutsideWorld, call: WaitingCall) -> None:
    """The demo's person: looks into the outbox, and says what she saw."""
    recipient, subject = call.arguments["recipient"], call.arguments["subject"]
    sent = world.look_for_mail(recipient, subject)
    agent.resolve(call.thread_id, call, happened={"sent_to": recipient} if sent else NotDone, store=store)
    emit("answered", tool=call.tool, detail="it was sent" if sent else "it was not sent")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="agentstore.tools.demo.worker")
    parser.add_argument("--store", required=True)
    parser.add_argument("--world", required=True)
    parser.add_argument("--trips", type=int, default=1)
    parser.add_argument("--die", default="", help="the moment of death, see agentstore.tools.demo.crash")
    parser.add_argument("--no-ledger", action="store_true")
    given = parser.parse_args(arguments)
    run(given.store, given.world, given.trips, Death.parse(given.die), ledger=not given.no_ledger)


if __name__ == "__main__":
    main(sys.argv[1:])
