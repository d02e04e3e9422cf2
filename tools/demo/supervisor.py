"""The demo's supervisor: starts the worker, kills it, starts it again, and counts what really happened.

The story is one conversation of a travel desk. If a trip is finished before all kills
were dealt, the team wants another trip; so every kill hits a worker that has work.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from agentstore import Store
from agentstore.errors import AgentStoreError

from ..recovering import RECOVERIES
from . import script
from .crash import Death
from .lines import parse
from .plan import deaths
from .worker import THREAD_ID
from .world import Count, OutsideWorld

WORKER_S_MAX = 120.0
"""A worker that says nothing for so long hangs: the demo ends with an error instead of waiting for ever."""

TRIPS_MAX = 1000


class DemoFailed(AgentStoreError):
    """A worker ended by itself with an error, or hung. `details`: what it wrote on its standard error."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(slots=True)
class Start:
    """One start of the worker: how it ended, and what recovery did first."""

    number: int
    killed: str | None = None
    recovering_ms: float | None = None
    recoveries: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What the demo found; `ok` is its verdict."""

    seed: int
    ledger: bool
    trips: int
    starts: list[Start]
    effects: dict[str, Count]
    same_conversation: bool
    store_problems: list[str]
    kills_wanted: int

    @property
    def kills(self) -> int:
        return sum(start.killed is not None for start in self.starts)

    @property
    def recoveries(self) -> Counter[str]:
        total: Counter[str] = Counter(dict.fromkeys(RECOVERIES, 0))
        for start in self.starts:
            total.update(start.recoveries)
        return total

    @property
    def recovering_ms(self) -> list[float]:
        """Of every start after a kill that came so far as to do something new."""
        return [start.recovering_ms for start in self.starts[1:] if start.recovering_ms is not None]

    @property
    def ok(self) -> bool:
        exact = all(count.duplicated == count.lost == count.unwanted == 0 for count in self.effects.values())
        return exact and self.same_conversation and not self.store_problems and self.kills == self.kills_wanted

    def to_json(self) -> dict[str, Any]:
        times = sorted(self.recovering_ms)
        return {
            "ok": self.ok,
            "seed": self.seed,
            "ledger": self.ledger,
            "trips": self.trips,
            "kills": self.kills,
            "killed_at": [start.killed for start in self.starts if start.killed is not None],
            "recoveries": dict(self.recoveries),
            "effects": {tool: asdict(count) for tool, count in self.effects.items()},
            "duplicated": sum(count.duplicated for count in self.effects.values()),
            "lost": sum(count.lost for count in self.effects.values()),
            "same_conversation": self.same_conversation,
            "store_problems": self.store_problems,
            "recovering_ms": {
                "total": round(sum(times), 1),
                "median": times[len(times) // 2] if times else None,
                "max": times[-1] if times else None,
            },
        }


Listener = Callable[[Start], None]


def run_demo(
    directory: str, *, kills: int, seed: int, ledger: bool = True, on_start: Listener = lambda start: None
) -> Report:
    """Play the demo in the empty `directory`; `on_start` hears how each start ended.

    Raises `DemoFailed` if a worker fails by itself.
    """
    rng = random.Random(seed)
    planned = deaths(kills, rng)
    store, world = os.path.join(directory, "store"), os.path.join(directory, "world.sqlite")
    trips = 1
    starts: list[Start] = []
    while True:
        dealt = sum(start.killed is not None for start in starts)
        death = planned[dealt] if dealt < len(planned) else Death.never()
        start = _start_worker(Start(len(starts) + 1), store, world, trips, death, ledger=ledger)
        starts.append(start)
        on_start(start)
        if start.killed is None:
            if dealt == len(planned):
                break
            if trips == TRIPS_MAX:
                raise DemoFailed(f"{TRIPS_MAX} trips were booked and only {dealt} of {kills} kills dealt")
            trips += 1
    quiet = os.path.join(directory, "undisturbed")
    os.mkdir(quiet)
    _start_worker(Start(0), os.path.join(quiet, "store"), os.path.join(quiet, "world.sqlite"), trips, Death.never())
    problems, conversation = _conversation(store)
    with OutsideWorld(world) as outside:
        effects = outside.count(script.wanted(trips))
    same = conversation == _conversation(os.path.join(quiet, "store"))[1]
    return Report(seed, ledger, trips, starts, effects, same, problems, kills)


def _conversation(store_path: str) -> tuple[list[str], list[Any]]:
    with Store.open(store_path, create=False) as store:
        return list(store.check()), store.thread(THREAD_ID).load()["conversation_history"]


def _start_worker(start: Start, store: str, world: str, trips: int, death: Death, *, ledger: bool = True) -> Start:
    """Run the worker until it ends, by `death` or because its work is done."""
    # -P: a directory of the user's that is called agentstore must not be imported.
    command = [sys.executable, "-P", "-m", "agentstore.tools.demo.worker"]
    command += ["--store", store, "--world", world, "--trips", str(trips), "--die", str(death)]
    command += [] if ledger else ["--no-ledger"]
    with tempfile.TemporaryFile() as errors:
        worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        hung = threading.Event()

        def give_up() -> None:
            hung.set()
            worker.kill()

        watchdog = threading.Timer(WORKER_S_MAX, give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            finished = _listen(worker, start, death)
            status = worker.wait()
        finally:
            watchdog.cancel()
            worker.kill()
            worker.wait()
        if status == 0 and finished:
            return start
        if status == -signal.SIGKILL and death.kind != "never" and not hung.is_set():
            start.killed = death.label
            return start
        errors.seek(0)
        told = errors.read().decode("utf-8", "replace").strip()
        how = f"hung for {WORKER_S_MAX:.0f} s" if hung.is_set() else f"ended with status {status}"
        raise DemoFailed(f"the worker {how}; planned was: {death.label}", told)


def _listen(worker: subprocess.Popen[bytes], start: Start, death: Death) -> bool:
    """Read what the worker says; kill it if its death comes from outside. Returns whether it said that it finished."""
    finished = False
    heard = 0
    assert worker.stdout is not None
    with worker.stdout as lines:
        for line in lines:
            said = parse(line)
            heard += 1
            kind = said["event"]
            finished = finished or kind == "finished"
            if kind == "working":
                start.recovering_ms = said["ms"]
                if start.number > 1:
                    start.notes.append(f"back at work after {said['ms']:.0f} ms")
            if kind in RECOVERIES:
                start.recoveries[kind] += 1
                start.notes.append(f"{kind}: {said['tool']}{_detail(said)}")
            if kind == "answered":
                start.notes.append(f"the person looked: {said.get('detail')}")
            if death.kind == "outside" and heard == death.number:
                time.sleep(death.part * 0.004)  # a random moment of the next milliseconds
                worker.kill()
    return finished


def _detail(said: dict[str, Any]) -> str:
    """The runtime's words, where they are short: why a person is asked is a paragraph."""
    return f" ({said['detail']})" if said.get("detail") and said["event"] != "asked" else ""
