"""Crash states from what strace saw: ``python -m fuzz strace``.

A story is told to a real store by a process under strace, an independent witness of all that it asks of the disk:
LMDB's calls too, and any that would go past the seam of the engine. From the log every state can be made that a power
cut may leave: any prefix, of unsynced writes any subset, torn at sectors, names lost. States are drawn, opened by the
real store, and held to what had been confirmed by then.

strace also makes calls fail, lie or kill, with no change in the code: what is on the disk after that must be right,
and so must every state that a power cut leaves of it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from agentstore.engine.control import BOOT
from agentstore.engine.parts import CONTROL
from agentstore.testing.bitflips import in_child
from agentstore.testing.crashsim import in_memory
from agentstore.testing.limits import small_limits
from agentstore.testing.simdisk import Image
from fuzz.campaign import Case, Counts, Violation
from fuzz.promise import Promised, examine
from fuzz.story import Step, draw, fewer_steps, told
from fuzz.strace_log import Disk, Watcher, bypasses
from fuzz.witness import INJECTED_FAILURE, SEAM, Untraceable, record

FAILING = {
    "fdatasync": 30,
    "fsync": 6,
    "pwrite64": 60,
    "writev": 8,
    "rename": 4,
    "unlink": 8,
    "ftruncate": 2,
    "mkdir": 2,
}
"""Calls that are made to fail, and about how many of each a story makes."""
STATES = 160
"""Made from one story."""


@dataclass
class _Run:
    """One case under way, in a directory of its own."""

    home: str
    case: Case

    def __post_init__(self) -> None:
        self.steps: list[Step] = self.case["steps"]
        self.inject: str | None = self.case.get("inject")
        self._lies = bool(self.inject and "retval=0" in self.inject)
        self._told = list(told(self.steps))
        self._rng = random.Random(self.case["seed"])

    def run(self, counts: Counts) -> None:
        watcher, status = record(self.home, self.steps, self.case["seed"], self.inject)
        expected = 0 if not self.inject else -signal.SIGKILL if "SIGKILL" in self.inject else INJECTED_FAILURE
        if status not in (0, expected):
            raise Violation(f"the story ended with status {status}")
        if self.inject:
            reached = watcher.injected or status == -signal.SIGKILL
            counts.faults[self.inject.rpartition(":")[0] if reached else "injections not reached"] += 1
        found = in_child(lambda: self._states(watcher))
        for point, came in found:
            if came.startswith("!"):
                raise Violation(f"{point}: {came[1:]}")
            if point != "end":
                counts.faults[f"cut at {point.partition(' ')[0]}"] += 1
                counts.outcomes[came] += 1
        if not found or found[-1][0] != "end":
            raise Violation(f"the process that opened state {len(found)} of the story died")
        if status == 0:
            self._nothing_bypassed(watcher)

    def _nothing_bypassed(self, watcher: Watcher) -> None:
        """What strace saw is what went through the seam, and LMDB's calls. A process that was killed cannot tell."""
        with open(os.path.join(self.home, SEAM), encoding="utf-8") as file:
            seam = Counter({tuple(call): count for call, count in json.load(file)})
        if wrong := bypasses(watcher, seam):
            raise Violation("; ".join(wrong[:5]))

    def _states(self, watcher: Watcher) -> Iterator[tuple[str, str]]:
        """Make states and examine them: what each is, and what came of it."""
        root = os.path.join(self.home, "cut")
        if self.inject and not self._lies:
            if os.path.exists(left := os.path.join(self.home, "store")):
                shutil.copytree(left, root)
            promised = Promised()
            for event in watcher.journal:
                if event.name == "note":
                    promised.hear(event.data.decode())
            yield "left behind", self._examine(root, promised)
        points = self._points(watcher)
        disk, promised, seen = Disk(), Promised(), set[bytes]()
        for at, event in enumerate(watcher.journal):
            disk.apply(event)
            if event.name == "note":
                promised.hear(event.data.decode())
            if at not in points:
                continue
            for image in disk.images(points[at], self._rng):
                digest = image.digest() + repr(promised).encode()
                if digest in seen:
                    continue
                seen.add(digest)
                self._reboot(image).write_to(root)
                yield f"{event.name} {at} of {event.path}", self._examine(root, promised)
        yield "end", ""

    def _points(self, watcher: Watcher) -> dict[int, int]:
        """Where the power goes, and how many states are made of it. Half of them where something was promised."""
        journal = watcher.journal
        promises = [at for at, event in enumerate(journal) if event.data.startswith((b"c ", b"x "))]
        count = self.case["states"] // 4
        points = dict.fromkeys(self._rng.sample(promises, min(count // 2, len(promises))), 4)
        return points | dict.fromkeys(self._rng.sample(range(len(journal)), min(count, len(journal)) - len(points)), 4)

    def _reboot(self, image: Image) -> Image:
        """A machine that lost its power comes up with another boot id (half of the time: the rest must not need it)."""
        page = image.files.get(CONTROL, b"")
        if len(page) < (BOOT + 1) * 8 or self._rng.random() < 0.5:
            return image
        other = page[: BOOT * 8] + b"\x01" * 8 + page[(BOOT + 1) * 8 :]
        return Image(image.directories, image.files | {CONTROL: other})

    def _examine(self, root: str, promised: Promised) -> str:
        try:
            with small_limits():
                return examine(root, self.steps, self._told, promised, lies=self._lies)
        except Exception as error:
            return f"!{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(root, ignore_errors=True)


class StraceCampaign:
    """Stories under strace."""

    name = "strace"
    repeats = True

    def missing(self) -> str | None:
        """What this machine lacks, or None. Tries it once."""
        if shutil.which("strace") is None:
            return "strace is not installed"
        try:
            with tempfile.TemporaryDirectory(dir=in_memory(), prefix="agentstore-") as home:
                record(home, [], 0, None)
        except Untraceable as error:
            return str(error)
        return None

    def cases(self, seed: int) -> Iterator[Case]:
        """Plain stories, and every third with something injected."""
        rng = random.Random(seed)
        for number in range(1 << 62):
            steps = [["commit", "a", 40, "round"]] * 3 if number == 0 else draw(rng, rng.choice([6, 12, 20, 30]))
            case: Case = {"seed": rng.randrange(1 << 32), "steps": steps, "states": STATES}
            yield case | {"inject": _injection(rng)} if number % 3 == 2 else case

    def run(self, case: Case, counts: Counts) -> None:
        """Tell the story, make the states. Raises Violation."""
        with tempfile.TemporaryDirectory(dir=in_memory(), prefix="agentstore-") as home:
            _Run(os.path.realpath(home), case).run(counts)

    def smaller(self, case: Case) -> Iterator[Case]:
        """With fewer steps."""
        for steps in fewer_steps(case["steps"]):
            yield case | {"steps": steps}


def _injection(rng: random.Random) -> str:
    call = rng.choice(["fdatasync", "pwrite64", *FAILING])
    nth = rng.randint(1, FAILING[call])
    kinds = ["error=EIO", "error=EIO+", "error=ENOSPC", "error=ENOSPC+", "signal=SIGKILL", "signal=SIGKILL"]
    if call in ("fdatasync", "fsync"):
        kinds += ["retval=0", "retval=0+"]
    kind = rng.choice(kinds)
    return f"{call}:{kind.rstrip('+')}:when={nth}{'+' if kind.endswith('+') else ''}"


CAMPAIGN = StraceCampaign()
