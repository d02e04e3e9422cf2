"""Stores copied while they are written: ``python -m fuzz copy``.

No tool that copies files one after the other copies one moment of them. What comes of it must either open as a state
that the store had, at or after the beginning of the copy, or be refused as damaged; never anything else.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentstore.engine.embedded import EmbeddedEngine
from agentstore.errors import AgentStoreError, CorruptionError
from agentstore.testing.acknowledged import Promise
from agentstore.testing.workload import Models, faults
from fuzz.apart import apart, nothing_smaller
from fuzz.campaign import Case, Counts
from fuzz.crew import Crew, Wrong, adopt_orphans, fork

PROCS = 2
COPIES_PER_STORE = 20
CHUNK_BYTES = 64 * 1024
PAUSE_S = 0.004
"""The longest pause between two chunks: a copy takes as long as several folds."""


@dataclass
class Tally:
    """What a run did."""

    right: int = 0
    refused: int = 0
    stores: int = 0
    reasons: set[str] = field(default_factory=set)

    @property
    def copies(self) -> int:
        return self.right + self.refused


class Copying:
    """One run of the command."""

    def __init__(self, seed: int, directory: str) -> None:
        self._directory = directory
        self.rng = random.Random(seed)
        self.tally = Tally()

    def run(self, copies: int) -> None:
        """Wrong if a copy opened as anything that its store never was."""
        while self.tally.copies < copies:
            here = os.path.join(self._directory, f"{self.tally.stores}")
            diaries = os.path.join(here, "diaries")
            os.makedirs(diaries)
            seed = self.rng.randrange(1 << 32)
            crew = Crew(os.path.join(here, "store"), diaries, seed, self.rng, Models(seed))
            self.tally.stores += 1
            try:
                workers = [crew.start(f"w{number}") for number in range(PROCS)]
                for _ in range(COPIES_PER_STORE):
                    crew.wait_for_progress(workers)
                    self._one(crew, seed, os.path.join(here, "copy"))
                    if self.tally.copies == copies:
                        break
            finally:
                crew.kill_all()
            shutil.rmtree(here)

    def _one(self, crew: Crew, seed: int, copy: str) -> None:
        before = crew.promises()
        self._copy(crew.store, copy)
        after = crew.promises()
        answer = f"{copy}.answer"
        status = os.waitpid(fork(lambda: _examine(copy, seed, before, after, answer)), 0)[1]
        if status:
            raise Wrong(f"a process that opened a copy died with status {os.waitstatus_to_exitcode(status)}")
        with open(answer, encoding="utf-8") as file:
            found = json.load(file)
        if found["faults"]:
            raise Wrong("a copy opened as what its store never was: " + "; ".join(found["faults"][:5]))
        if found["refused"]:
            self.tally.refused += 1
            self.tally.reasons.add(found["refused"])
        else:
            self.tally.right += 1
        shutil.rmtree(copy)

    def _copy(self, store: str, copy: str) -> None:
        """Like ``cp -r``, with the names in a random order, and slowly."""
        os.mkdir(copy)
        names = os.listdir(store)
        self.rng.shuffle(names)
        pause = PAUSE_S * self.rng.random() ** 2
        for name in names:
            source, target = os.path.join(store, name), os.path.join(copy, name)
            if os.path.isdir(source):
                self._copy(source, target)
                continue
            try:
                with open(source, "rb") as reading, open(target, "wb") as writing:
                    while chunk := reading.read(CHUNK_BYTES):
                        writing.write(chunk)
                        time.sleep(self.rng.random() * pause)
            except FileNotFoundError:
                continue  # it was given up meanwhile


def _examine(copy: str, seed: int, before: dict[str, Promise], after: dict[str, Promise], answer: str) -> int:
    found: list[str] = []
    refused = ""
    try:
        engine = EmbeddedEngine.open(copy)
        with engine.read() as view:
            found = faults(view, Models(seed), before, lambda: after)
        found += [] if found else engine.verify()
        engine.close()
    except CorruptionError as error:
        refused = str(error)
    except AgentStoreError as error:
        found = [f"{type(error).__name__}: {error}"]
    with open(answer, "w", encoding="utf-8") as file:
        json.dump({"faults": found, "refused": refused}, file)
    return 0


def run(copies: int, seed: int) -> Tally:
    """The command; Wrong if a copy was neither right nor refused, with the directory left behind for a look."""
    adopt_orphans()
    directory = tempfile.mkdtemp(prefix="agentstore-copy-")
    copying = Copying(seed, directory)
    try:
        copying.run(copies)
    except Wrong as wrong:
        raise Wrong(f"copy {copying.tally.copies + 1}, in {directory}: {wrong}") from wrong
    except BaseException:
        shutil.rmtree(directory)
        raise
    shutil.rmtree(directory)
    return copying.tally


class CopyCampaign:
    """Some copies of a store that is written."""

    name = "copy"
    repeats = False
    smaller = staticmethod(nothing_smaller)

    def missing(self) -> str | None:
        """What this machine lacks, or None."""
        return None if os.path.isdir("/proc/self") else "there is no /proc, by which processes are seen to be dead"

    def cases(self, seed: int) -> Iterator[Case]:
        """Groups of copies of a store of their own; what is written meanwhile is not decided by the seed."""
        rng = random.Random(seed)
        while True:
            yield {"copies": 6, "seed": rng.randrange(1 << 32)}

    def run(self, case: Case, counts: Counts) -> None:
        """Copy, and open each copy. Raises Violation."""

        def copying() -> dict[str, Any]:
            tally = run(case["copies"], case["seed"])
            return {"right": tally.right, "refused": tally.refused}

        done = apart(copying)
        counts.faults["copied while written"] += case["copies"]
        counts.outcomes.update({"opened as it was": done["right"], "refused as damaged": done["refused"]})


CAMPAIGN = CopyCampaign()
