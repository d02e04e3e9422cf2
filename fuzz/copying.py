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
from dataclasses import dataclass, field

from agentstore.engine.embedded import EmbeddedEngine
from agentstore.errors import AgentStoreError, CorruptionError
from agentstore.testing.acknowledged import Promise
from agentstore.testing.workload import Models, faults
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
