"""Power cuts of a real file system: ``python -m fuzz powercut``.

Processes write to a store on a loop device; at a random moment its file system is shut down without flushing anything,
not even its journal, and mounted again. The store is opened (and the power cut again meanwhile, now and then), held to
what every writer was promised, written to; the power is cut right after the acknowledgement; and it is checked again.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from agentstore.engine.embedded import EmbeddedEngine
from agentstore.errors import AgentStoreError
from agentstore.testing.loopdisk import LoopDisk, why_not, write_back_some
from agentstore.testing.workload import Models
from agentstore.testing.writers import DISK_ERRORS
from fuzz.apart import apart, nothing_smaller
from fuzz.campaign import Case, Counts
from fuzz.crew import Crew, Wrong, adopt_orphans, fork

CUTS_PER_STORE = 12
"""On average; then a new store is begun."""

PROCS_MAX = 3

REST_S = 0.15
"""The longest wait for the moment of a cut once everybody writes."""


@dataclass
class Tally:
    """What a run did."""

    kinds: Counter[str] = field(default_factory=Counter)
    cuts: int = 0
    confirmed: int = 0
    unconfirmed: int = 0
    """Steps that were asked for, not confirmed, and gone after a cut."""
    stores: int = 0
    open_s: list[float] = field(default_factory=list)

    @property
    def cycles(self) -> int:
        return sum(self.kinds.values())


class PowerCuts:
    """One run of the command."""

    def __init__(self, disk: LoopDisk, seed: int, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self.rng = random.Random(seed)
        self.tally = Tally()

    def run(self, cycles: int) -> None:
        """Cut until `cycles` cuts were survived; Wrong if one was not."""
        while self.tally.cycles < cycles:
            diaries = os.path.join(self._directory, f"{self.tally.stores}")
            os.mkdir(diaries)
            store_seed = self.rng.randrange(1 << 32)
            store = os.path.join(self._disk.directory, f"store{self.tally.stores}")
            crew = Crew(store, diaries, store_seed, self.rng, Models(store_seed), disk_may_fail=True)
            self.tally.stores += 1
            try:
                self._one_store(crew, cycles)
            except BaseException:
                crew.disk_may_fail = True  # no more questions
                crew.kill_all()
                self._disk.replug()
                raise
            shutil.rmtree(store)
            shutil.rmtree(diaries)

    def _one_store(self, crew: Crew, cycles: int) -> None:
        tally = self.tally
        if self.rng.random() < 0.7:
            self._cycle(crew, "creating", self._create)
        while tally.cycles < cycles:
            if self.rng.random() < 0.15:
                self._cycle(crew, "closing", lambda: self._write(crew, closing=True))
            else:
                self._cycle(crew, "writing", lambda: self._write(crew, closing=False))
            if self.rng.random() < 1 / CUTS_PER_STORE:
                break
        crew.check(closes=True)
        tally.confirmed += sum(promise.confirmations for promise in crew.promises().values())
        tally.open_s += crew.open_s

    def _cycle(self, crew: Crew, kind: str, until_cut: Callable[[], None]) -> None:
        until_cut()
        self._cut(crew)
        self.tally.kinds[kind] += 1
        while self.rng.random() < 0.4:
            self._open_and_cut(crew)
        before = {writer: promise.asked for writer, promise in crew.promises().items()}
        heads = crew.check().heads
        self.tally.unconfirmed += sum(asked - heads.get(writer, -1) for writer, asked in before.items())
        self._cut(crew)
        crew.check(closes=self.rng.random() < 0.5)
        if self.rng.random() < 0.3:
            self._cut(crew)

    # --- until the power goes ------------------------------------------------------------

    def _write(self, crew: Crew, *, closing: bool) -> None:
        procs = self.rng.randint(1, PROCS_MAX)
        for number in range(procs):
            crew.start(f"w{number}", threads=self.rng.choice([1, 1, 2]))
        if self.rng.random() < 0.8:
            crew.wait_for_progress(list(crew.workers))
        until = time.monotonic() + self.rng.random() * REST_S
        wal = os.path.join(crew.store, "wal")
        while time.monotonic() < until:
            if os.path.isdir(wal):
                write_back_some(wal, self.rng)
            time.sleep(self.rng.random() * 0.02)
        if closing:
            crew.end_all()
            time.sleep(self.rng.random() * 0.08)

    def _create(self) -> None:
        store = os.path.join(self._disk.directory, f"store{self.tally.stores - 1}")
        self._opener = fork(lambda: _open_and_wait(store))
        time.sleep(self.rng.random() * 0.03)

    def _open_and_cut(self, crew: Crew) -> None:
        """The power goes once more while somebody recovers what it left."""
        self._opener = fork(lambda: _open_and_wait(crew.store))
        time.sleep(self.rng.random() * 0.04)
        self._cut(crew)

    _opener = 0

    def _cut(self, crew: Crew) -> None:
        self._disk.cut_power()
        self.tally.cuts += 1
        if self.rng.random() < 0.5:
            time.sleep(self.rng.random() * 0.01)  # let them see the errors
        if self._opener:
            crew.kill(self._opener)
            self._opener = 0
        crew.kill_all()
        self._disk.replug()


def _open_and_wait(store: str) -> int:
    try:
        EmbeddedEngine.open(store)
    except (*DISK_ERRORS, AgentStoreError):
        pass  # the disk went away under it: what it says of it does not matter, what is on it does
    signal.pause()
    return 0


def run(cycles: int, kind: str, seed: int) -> Tally:
    """The command; Wrong if the store broke its promise."""
    adopt_orphans()
    directory = tempfile.mkdtemp(prefix="agentstore-powercut-")
    try:
        with LoopDisk(kind) as disk:
            cuts = PowerCuts(disk, seed, directory)
            try:
                cuts.run(cycles)
            except Wrong as wrong:
                kept = os.path.join(directory, "disk")
                shutil.copytree(disk.directory, kept)
                raise Wrong(f"after cut {cuts.tally.cuts}, a copy of the disk in {kept}: {wrong}") from wrong
    except Wrong:
        raise
    except BaseException:
        shutil.rmtree(directory)
        raise
    shutil.rmtree(directory)
    return cuts.tally


class PowerCutCampaign:
    """Some power cuts of a file system."""

    name = "powercut"
    repeats = False
    smaller = staticmethod(nothing_smaller)

    def __init__(self, fs: str) -> None:
        self._fs = fs

    def missing(self) -> str | None:
        """What this machine lacks, or None. Tries it once."""
        return why_not(self._fs)

    def cases(self, seed: int) -> Iterator[Case]:
        """Groups of cuts on a disk of their own; as in the command, the moments are not decided by the seed."""
        rng = random.Random(seed)
        while True:
            yield {"fs": self._fs, "cycles": 8, "seed": rng.randrange(1 << 32)}

    def run(self, case: Case, counts: Counts) -> None:
        """Cut, and check after each cut. Raises Violation."""

        def cutting() -> dict[str, Any]:
            tally = run(case["cycles"], case["fs"], case["seed"])
            more = tally.cuts - tally.cycles
            return {"kinds": tally.kinds, "more": more, "confirmed": tally.confirmed, "lost": tally.unconfirmed}

        done = apart(cutting)
        counts.faults.update({f"{case['fs']} cut while {kind}": count for kind, count in done["kinds"].items()})
        counts.faults[f"{case['fs']} cut during recovery or after a write"] += done["more"]
        counts.outcomes.update({"commits confirmed": done["confirmed"], "unconfirmed steps lost": done["lost"]})


CAMPAIGN = PowerCutCampaign("ext4")
XFS = PowerCutCampaign("xfs")
