"""`agentstore replay`: recorded transcripts through the loop of a live agent, while its workers are killed.

The supervisor starts W worker processes on one store, kills one at random N times, starts
it again, and in the end compares every thread with its file, and the store's intents and
receipts with the calls that were recorded. Kills are spread over the work (a kill is due
when so many messages were played), its victim and the last milliseconds are random.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from agentstore import Store

from .demo.lines import parse
from .recovering import RECOVERIES
from .replay_player import ReplayFailed, recorded_calls
from .replay_turns import plan
from .replay_world import ReplayWorld
from .transcript import Transcript, difference

SILENCE_S_MAX = 120.0
"""Workers that say nothing for so long hang; the replay ends with an error instead of waiting for ever."""

KILLS_UNTIL = 0.9
"""The last kill is due when this part of all messages is played, so that it finds somebody at work."""


@dataclass(slots=True)
class Summary:
    """What a replay did.

    `decisions`, `calls` and `interrupted` (calls without a result) are the recordings'; `intents` and `receipts` are
    the store's; `requests`, `executions` (keys) and `duplicated` (places that were called under two keys) the world's.
    """

    transcripts: int
    messages: int
    decisions: int
    calls: int
    interrupted: int
    intents: int = 0
    receipts: int = 0
    requests: int = 0
    executions: int = 0
    duplicated: int = 0
    kills: int = 0
    kills_wanted: int = 0
    starts: int = 0
    recoveries: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    differences: dict[str, str] = field(default_factory=dict)
    store_problems: list[str] = field(default_factory=list)

    @property
    def equal(self) -> int:
        return self.transcripts - len(self.differences)

    @property
    def ok(self) -> bool:
        """Every thread equals its file, every recorded call has one intent and one receipt, and none was done twice."""
        counted = self.intents == self.receipts == self.calls and self.duplicated == 0
        return not self.differences and not self.store_problems and counted


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker process and what is known of it."""

    number: int
    process: subprocess.Popen[bytes]
    errors: BinaryIO
    busy: bool = False  # said something about a transcript since it started
    finished: bool = False
    killed: bool = False


_Said = tuple[_Worker, dict[str, Any] | None]  # None: its output ended

Progress = Callable[[int, int, int], None]
"""Called with (messages played, kills dealt, workers alive)."""


def replay(
    transcripts: Sequence[Transcript],
    store_path: str,
    *,
    workers: int = 1,
    kills: int = 0,
    seed: int | None = None,
    on_progress: Progress = lambda messages, kills, alive: None,
) -> Summary:
    """Play `transcripts` into the store at `store_path` (made if it is not there) and compare.

    Raises `ReplayFailed` if a worker fails by itself, and whatever opening the store raises.
    """
    began = time.monotonic()
    with Store.open(store_path):  # made, or refused, before any worker starts
        pass
    with tempfile.TemporaryDirectory(prefix="agentstore-replay-") as folder:
        supervisor = _Supervisor(transcripts, store_path, folder, random.Random(seed), on_progress)
        supervisor.run(workers, kills)
        summary = compare(transcripts, store_path, supervisor.world)
    summary.kills, summary.kills_wanted, summary.starts = supervisor.kills, kills, supervisor.starts
    summary.recoveries = {kind: supervisor.recoveries[kind] for kind in RECOVERIES}
    summary.seconds = round(time.monotonic() - began, 2)
    return summary


def compare(transcripts: Sequence[Transcript], store_path: str, world_path: str) -> Summary:
    """Every thread with its file, and what the store and the world counted with what was recorded. O(all messages)."""
    summary = Summary(len(transcripts), 0, 0, 0, 0)
    with Store.open(store_path, create=False) as store:
        summary.store_problems = list(store.check())
        for transcript in transcripts:
            decisions = [decision for turn in plan(transcript.messages, recorded_calls) for decision in turn.decisions]
            calls = [call for decision in decisions for call in decision.calls]
            thread = store.thread(transcript.thread_id)
            effects = list(thread.effects())
            different = difference(transcript.messages, thread.load()["conversation_history"])
            if different is not None:
                summary.differences[transcript.thread_id] = different
            summary.messages += len(transcript.messages)
            summary.decisions += len(decisions)
            summary.calls += len(calls)
            summary.interrupted += sum(call.result is None for call in calls)
            summary.intents += len(effects)
            summary.receipts += sum(effect.status == "done" for effect in effects)
    with ReplayWorld(world_path) as world:
        totals = world.totals()
    summary.requests, summary.executions = totals["requests"], totals["executions"]
    summary.duplicated = totals["executions"] - totals["calls"]
    return summary


class _Supervisor:
    """Starts, kills and restarts the workers until every one of them says that all is finished."""

    def __init__(
        self, transcripts: Sequence[Transcript], store: str, folder: str, rng: random.Random, on_progress: Progress
    ) -> None:
        self.world = os.path.join(folder, "world.sqlite")
        self.kills = self.starts = 0
        self.recoveries: Counter[str] = Counter()
        self._store = store
        self._list = os.path.join(folder, "files.json")  # a file, for there may be more names than a command line holds
        with open(self._list, "w", encoding="ascii") as file:
            json.dump([transcript.path for transcript in transcripts], file)
        self._played = [0] * len(transcripts)
        self._total = sum(len(transcript.messages) for transcript in transcripts)
        self._rng = rng
        self._on_progress = on_progress
        self._said: queue.Queue[_Said] = queue.Queue()
        self._workers: list[_Worker] = []

    def run(self, workers: int, kills: int) -> None:
        due = sorted(self._rng.uniform(0, KILLS_UNTIL) * self._total for _ in range(kills))
        try:
            self._workers = [self._start(number) for number in range(workers)]
            while self._workers:
                self._take(*self._next())
                played = sum(self._played)
                if self.kills < kills and played >= due[self.kills]:
                    self._kill_one()
                self._on_progress(played, self.kills, len(self._workers))
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.wait()
                worker.errors.close()

    def _start(self, number: int) -> _Worker:
        command = [sys.executable, "-P", "-m", "agentstore.tools.replay_worker", "--store", self._store]
        command += ["--world", self.world, "--number", str(number), "--list", self._list]
        errors = tempfile.TemporaryFile()  # noqa: SIM115  open as long as its process; closed where that has ended
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        worker = _Worker(number, process, errors)
        threading.Thread(target=self._listen, args=(worker,), name=f"reader of worker {number}", daemon=True).start()
        self.starts += 1
        return worker

    def _listen(self, worker: _Worker) -> None:
        """A thread of its own for every worker: hand on what it says, and its end."""
        assert worker.process.stdout is not None
        with worker.process.stdout as lines:
            for line in lines:
                self._said.put((worker, parse(line)))
        self._said.put((worker, None))

    def _next(self) -> _Said:
        try:
            return self._said.get(timeout=SILENCE_S_MAX)
        except queue.Empty:
            raise ReplayFailed(f"no worker said anything for {SILENCE_S_MAX:.0f} s") from None

    def _take(self, worker: _Worker, said: dict[str, Any] | None) -> None:
        if said is None:
            self._ended(worker)
        elif said["event"] == "progress":
            worker.busy = True
            self._played[said["file"]] = max(self._played[said["file"]], said["messages"])
        elif said["event"] == "finished":
            worker.finished = True
        elif said["event"] in RECOVERIES:
            self.recoveries[said["event"]] += 1

    def _kill_one(self) -> None:
        """SIGKILL a random worker that is at work, at a random moment of the next milliseconds."""
        victims = [worker for worker in self._workers if worker.busy and not worker.killed]
        if not victims:
            return  # all are starting; the kill stays due
        victim = self._rng.choice(victims)
        time.sleep(self._rng.uniform(0, 0.004))
        victim.process.kill()
        if victim.process.wait() == -signal.SIGKILL:
            victim.killed = True
            self.kills += 1

    def _ended(self, worker: _Worker) -> None:
        """Restart it if it was killed; else it has done its work, or the replay fails with what it said."""
        status = worker.process.wait()
        worker.errors.seek(0)
        told = worker.errors.read().decode("utf-8", "replace").strip()
        worker.errors.close()
        self._workers.remove(worker)
        if worker.killed:
            self._workers.append(self._start(worker.number))
        elif status != 0 or not worker.finished:
            raise ReplayFailed(f"worker {worker.number} ended with status {status}", told)
