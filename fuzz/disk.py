"""Power cuts of a simulated disk under the whole store: ``python -m fuzz disk``.

A story is told to a store on a disk in memory that notes every write and every sync (`agentstore.testing.simdisk`).
Then the power is cut after each of its calls: of what was not synced any part is lost, torn at sectors, or there; of
names that were made, changed and removed any part is. Each state is opened by the real store and held to what had been
confirmed by then. Of some states the recovery is cut off as well. A disk may also fail a call, or confirm a sync that
it does not make.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agentstore import Store
from agentstore.engine.files import default_files, set_default_files
from agentstore.errors import AgentStoreError
from agentstore.testing.crashsim import in_memory
from agentstore.testing.faults import WRITING_CALLS, Error, Fault, FaultyFiles, abandon
from agentstore.testing.limits import small_limits
from agentstore.testing.simdisk import ROOT, Event, Image, SimDisk
from fuzz.campaign import Case, Counts, Violation
from fuzz.promise import Promised, examine
from fuzz.story import Step, Teller, certain, draw, fewer_steps, told

IMAGES = 4
"""Made of each moment of a cut, at most."""
DEEPER = 0.01
"""The part of the states whose recovery is cut off, too."""
LIES = ("wal/", "control", "FORMAT", ROOT)
"""What the files begin with whose syncs a lying disk does not make."""


@dataclass
class Recorded:
    """A story as the disk saw it."""

    disk: SimDisk
    error: AgentStoreError | None
    """What ended it before its last step."""


def record(root: str, case: Case) -> Recorded:
    """Tell the story of a case to a store at `root`, which is gone afterwards."""
    lie = case.get("lies")
    disk = SimDisk(root, lies=None if lie is None else lambda path: path.startswith(lie) if lie else path == ROOT)
    files = FaultyFiles(_fault(case.get("fault")), real=disk)
    error: AgentStoreError | None = None
    with using(files), certain(case["seed"]):
        teller: Teller | None = None
        try:
            teller = Teller(root, disk.note)
            teller.tell(case["steps"])
            teller.close()
        except AgentStoreError as caught:
            error = caught
        finally:
            if teller is not None:
                abandon(teller.store._engine)
        if error is not None and not case["fault"]["for_ever"]:
            _go_on(root)
    disk.end()
    if os.path.exists(root):  # a disk that fails its first call has not even the directory
        shutil.rmtree(root)
    if error is not None and files.struck is None:
        raise Violation(f"the story ended with {type(error).__name__}: {error}")
    return Recorded(disk, error)


def _go_on(root: str) -> None:
    """Open what a fault left, rely on it, give up the log."""
    store = Store.open(root, background=False)
    try:
        store._engine.fold()
        store.close()
    finally:
        abandon(store._engine)


@contextmanager
def using(files: Any) -> Iterator[None]:
    """Have the stores that are opened inside use `files`."""
    before = default_files()
    set_default_files(files)
    try:
        yield
    finally:
        set_default_files(before)


def _fault(asked: dict[str, Any] | None) -> Fault | None:
    """The fault that a case names."""
    if asked is None:
        return None
    failing = Error(getattr(errno, asked["errno"]), asked["part"])
    calls = frozenset(asked["calls"]) if "calls" in asked else WRITING_CALLS
    return Fault(asked["nth"], failing, calls, for_ever=asked["for_ever"])


class _Cuts:
    """All cuts of one case."""

    def __init__(self, home: str, case: Case, counts: Counts) -> None:
        self._root = os.path.join(home, "cut")
        self._case = case
        self._counts = counts
        self._rng = random.Random(case["seed"])
        self._steps: list[Step] = case["steps"]
        self._told = list(told(self._steps))
        self._lies = case.get("lies") is not None
        self._seen: set[bytes] = set()
        self._home = home

    def run(self) -> None:
        recorded = record(os.path.join(self._home, "recorded"), self._case)
        if recorded.error is not None:
            self._counts.faults[f"{self._case['fault']['errno']} of a call"] += 1
        if self._lies:
            self._counts.faults["a disk that lies"] += 1
        self._cut(recorded.disk, Promised(), self._case.get("images", IMAGES), self._case.get("deeper", DEEPER))

    def _cut(self, disk: SimDisk, promised: Promised, images: int, deeper: float) -> None:
        """Cut after each event of the journal, once the step of the case has begun that cuts begin at."""
        platter = disk.platter(0)
        for event in disk.journal:
            platter.apply(event)
            if event.name == "note":
                promised.hear(event.data.decode())
            if promised.begun < self._case.get("begin", -1):
                continue
            self._counts.moments["with all states made" if platter.count() <= images else "with some made"] += 1
            for image in platter.images(images, self._rng):
                key = image.digest() + repr(promised).encode()
                if key in self._seen:
                    continue
                self._seen.add(key)
                self._check(image, promised, event)
                if deeper and self._rng.random() < deeper:
                    self._cut_recovery(image, promised)

    def _check(self, image: Image, promised: Promised, event: Event) -> None:
        image.write_to(self._root)
        try:
            came = examine(self._root, self._steps, self._told, promised, lies=self._lies)
        except Exception as error:
            raise Violation(
                f"power cut after {str(event)[:160]}, {promised}: {type(error).__name__}: {error}"
            ) from error
        finally:
            shutil.rmtree(self._root)
        self._counts.faults[f"cut at {event.name}"] += 1
        self._counts.outcomes[came] += 1

    def _cut_recovery(self, image: Image, promised: Promised) -> None:
        """Cut while this image is being recovered."""
        disk = SimDisk(os.path.join(self._home, "again"), image)
        image.write_to(disk.root)
        with using(disk):
            try:
                abandon(Store.open(disk.root, background=False)._engine)
            except AgentStoreError:
                if not self._lies:
                    raise
        disk.end()
        shutil.rmtree(disk.root)
        before = self._counts.outcomes.total()
        self._cut(disk, promised, 2, 0.0)
        self._counts.faults["cut again in recovery"] += self._counts.outcomes.total() - before


class DiskCampaign:
    """Stories on a simulated disk."""

    name = "disk"
    repeats = True

    def missing(self) -> str | None:
        """Nothing."""
        return None

    def cases(self, seed: int) -> Iterator[Case]:
        """Plain stories; every fourth with a call that fails, every eighth on a disk that lies."""
        rng = random.Random(seed)
        for number in range(1 << 62):
            case: Case = {"seed": rng.randrange(1 << 32), "steps": draw(rng, rng.choice([3, 6, 10, 16]))}
            if number % 4 == 3:
                fault = {"nth": rng.randint(1, 120), "errno": rng.choice(["EIO", "ENOSPC"])}
                case["fault"] = fault | {"for_ever": rng.random() < 0.5, "part": rng.choice([0.0, 0.3, 0.9])}
            elif number % 8 == 5:
                case["lies"] = rng.choice(LIES)
            yield case

    def run(self, case: Case, counts: Counts) -> None:
        """Tell the story, cut the power everywhere. Raises Violation."""
        with tempfile.TemporaryDirectory(dir=in_memory(), prefix="agentstore-") as home, small_limits():
            _Cuts(os.path.realpath(home), case, counts).run()

    def smaller(self, case: Case) -> Iterator[Case]:
        """With fewer steps."""
        for steps in fewer_steps(case["steps"]):
            yield case | {"steps": steps}


CAMPAIGN = DiskCampaign()
