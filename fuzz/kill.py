"""Writers killed at random moments: ``python -m fuzz kill``.

Several processes write to one store. Again and again some are killed with SIGKILL: one while the others go on, all at
once, one that was stopped, a parent or a child after a fork, one that recovers, one that closes. After each kill the
store is opened, held to what every writer was promised, written to, abandoned, opened and checked once more.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentstore.engine.embedded import EmbeddedEngine
from agentstore.testing.workload import Models
from fuzz.apart import apart, nothing_smaller
from fuzz.campaign import Case, Counts
from fuzz.crew import Crew, Wrong, adopt_orphans, alive, fork

KINDS = {"one": 40, "all": 22, "stopped": 10, "parent": 7, "child": 5, "recovering": 9, "closing": 7}
"""Who is killed, and how often in a hundred."""

KILLS_PER_STORE = 15
"""On average; then a new store is begun."""

REST_S = 0.12
"""The longest wait for the moment of a kill once everybody writes."""


@dataclass
class Tally:
    """What a run did."""

    kinds: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    confirmed: int = 0
    stores: int = 0
    open_s: list[float] = field(default_factory=list)
    join_s: list[float] = field(default_factory=list)
    second_opens: int = 0

    @property
    def kills(self) -> int:
        return sum(self.kinds.values())


class Killing:
    """One run of the command."""

    def __init__(self, seed: int, procs: int, directory: str) -> None:
        self._seed = seed
        self._procs = procs
        self._directory = directory
        self.rng = random.Random(seed)
        self.tally = Tally()

    def run(self, kills: int) -> None:
        """Kill until `kills` kills were survived; Wrong if one was not."""
        while self.tally.kills < kills:
            here = os.path.join(self._directory, f"{self.tally.stores}")
            diaries = os.path.join(here, "diaries")
            os.makedirs(diaries)
            store_seed = self.rng.randrange(1 << 32)
            crew = Crew(os.path.join(here, "store"), diaries, store_seed, self.rng, Models(store_seed))
            self.tally.stores += 1
            try:
                self._one_store(crew, kills)
            except BaseException:
                crew.kill_all()
                raise
            shutil.rmtree(here)

    def _one_store(self, crew: Crew, kills: int) -> None:
        tally = self.tally
        while tally.kills < kills:
            self._fill_up(crew)
            kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
            tally.killed += getattr(self, f"_kill_{kind}")(crew)
            tally.kinds[kind] += 1
            closes = self.rng.random() < 0.3
            crew.check(closes=closes)
            if not crew.workers:
                crew.check(closes=self.rng.random() < 0.3)
                tally.second_opens += 1
            if self.rng.random() < 1 / KILLS_PER_STORE:
                break
        crew.end_all()
        crew.wait_for_all()
        crew.check(closes=True)
        tally.confirmed += sum(promise.confirmations for promise in crew.promises().values())
        tally.open_s += crew.open_s
        tally.join_s += crew.join_s

    def _fill_up(self, crew: Crew) -> None:
        """Everybody writes; mostly until all have got somewhere, now and then they are killed before."""
        crew.reap()
        there = {job.writer for job in crew.workers.values()}
        for number in range(self._procs):
            if f"w{number}" not in there:
                crew.start(f"w{number}", threads=2 if number == 0 else 1)
        if self.rng.random() < 0.75:
            crew.wait_for_progress(list(crew.workers))
        time.sleep(self.rng.random() * REST_S)

    def _somebody(self, crew: Crew) -> int:
        return self.rng.choice(sorted(crew.workers))

    # --- ways to die: each returns how many processes it killed -------------------------

    def _kill_one(self, crew: Crew) -> int:
        crew.kill(self._somebody(crew))
        return 1

    def _kill_all(self, crew: Crew) -> int:
        return crew.kill_all()

    def _kill_stopped(self, crew: Crew) -> int:
        """Stopped, perhaps with a lock in its hands; the others may have to wait. Then it goes on, or it dies."""
        pids = [self._somebody(crew)] if self.rng.random() < 0.7 else list(crew.workers)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(self.rng.random() * REST_S)
        if self.rng.random() < 0.5:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            crew.wait_for_progress(pids)
        crew.kill(pids[0])
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGCONT)
        return 1

    def _forked(self, crew: Crew) -> tuple[int, list[int]]:
        """Have a worker fork while its threads write; both go on."""
        parent = self._somebody(crew)
        crew.wait_for_progress([parent])
        before = set(crew.children())
        os.kill(parent, signal.SIGUSR1)
        until = time.monotonic() + 60
        while not set(crew.children()) - before:
            if time.monotonic() > until or not alive(parent):
                raise Wrong(f"process {parent} did not fork")
            time.sleep(0.002)
        time.sleep(self.rng.random() * REST_S)
        return parent, crew.children()

    def _kill_parent(self, crew: Crew) -> int:
        parent, _ = self._forked(crew)
        crew.kill(parent)
        return 1

    def _kill_child(self, crew: Crew) -> int:
        _, children = self._forked(crew)
        for child in children:
            crew.kill(child)
        return len(children)

    def _kill_recovering(self, crew: Crew) -> int:
        """All die; then those who recover what they left die, too."""
        count = crew.kill_all()
        for _ in range(self.rng.randint(1, 3)):
            pid = fork(lambda: _open_and_wait(crew.store))
            time.sleep(self.rng.random() * 0.03)
            crew.kill(pid)
            count += 1
        return count

    def _kill_closing(self, crew: Crew) -> int:
        """All close at once, and are killed while they do."""
        crew.end_all()
        time.sleep(self.rng.random() * 0.08)
        return crew.kill_all()


def _open_and_wait(store: str) -> int:
    EmbeddedEngine.open(store)
    signal.pause()
    return 0


def run(kills: int, procs: int, seed: int) -> Tally:
    """The command; Wrong if the store broke its promise, with the directory left behind for a look."""
    adopt_orphans()
    directory = tempfile.mkdtemp(prefix="agentstore-kill-")
    killing = Killing(seed, procs, directory)
    try:
        killing.run(kills)
    except Wrong as wrong:
        raise Wrong(f"after kill {killing.tally.kills + 1}, in {directory}: {wrong}") from wrong
    except BaseException:
        shutil.rmtree(directory)
        raise
    shutil.rmtree(directory)
    return killing.tally


class KillCampaign:
    """Some kills of a few writers."""

    name = "kill"
    repeats = False
    smaller = staticmethod(nothing_smaller)

    def missing(self) -> str | None:
        """What this machine lacks, or None."""
        return None if os.path.isdir("/proc/self") else "there is no /proc, by which processes are seen to be dead"

    def cases(self, seed: int) -> Iterator[Case]:
        """Groups of kills on a store of their own; as in the command, the moments are not decided by the seed."""
        rng = random.Random(seed)
        while True:
            yield {"kills": 10, "procs": rng.choice([2, 4, 4]), "seed": rng.randrange(1 << 32)}

    def run(self, case: Case, counts: Counts) -> None:
        """Kill, and check after each kill. Raises Violation."""

        def killing() -> dict[str, Any]:
            tally = run(case["kills"], case["procs"], case["seed"])
            return {"kinds": tally.kinds, "killed": tally.killed, "confirmed": tally.confirmed}

        done = apart(killing)
        counts.faults.update({f"kill {kind}": count for kind, count in done["kinds"].items()})
        counts.outcomes.update({"processes killed": done["killed"], "commits confirmed": done["confirmed"]})


CAMPAIGN = KillCampaign()
