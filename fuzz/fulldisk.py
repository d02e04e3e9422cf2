"""Disks that are really full: ``python -m fuzz fulldisk``.

A story is told to a store on a small disk, which is filled at some step but for so many bytes. From then on steps may
be refused. What is refused must not be there, what is confirmed must be, and the store must go on once there is room:
in the same process, after a kill with the disk full, and after an open with the disk full.

Three disks: ext4 on a loop device; a tmpfs, where a mapped page without a block would be a SIGBUS; and a thin one,
whose file system believes to have room: there what was written is refused when it is synced, and the store is out of
use until it is opened again.
"""

from __future__ import annotations

import copy
import faulthandler
import itertools
import logging
import os
import random
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

from agentstore import Store
from agentstore.engine import job
from agentstore.engine.files import set_default_files
from agentstore.errors import CommitUnknown, DiskFull, StoreFailed, StorePermissionError
from agentstore.testing.crashsim import in_memory
from agentstore.testing.faults import Fault, FaultyFiles, Kill
from agentstore.testing.limits import small_limits
from fuzz.campaign import Case, Counts, Violation
from fuzz.smalldisk import DISKS, SmallDisk, small_disk, why_no_disk
from fuzz.story import Step, Teller, Told, differences, draw

ROOMS = (0, 0, 4096, 8192, 20_000, 36_864, 70_000, 140_000, 300_000)
"""Bytes that are left of a full disk: less than a page up to a few segments and lock files."""
LIVES_MAX = 4
T = TypeVar("T")
BROKEN = 4
"""Exit status of a process whose store went out of use."""


# --- what a process on a full disk does -----------------------------------------------------------


OUT_OF_USE = (CommitUnknown, StoreFailed, StorePermissionError)
"""What a store may say that is to be opened again; the last of a file system that made itself read-only."""


class OutOfUse(Exception):
    """The store says that it must be opened again."""


class Holder:
    """Takes the steps of a story on a disk that may be full, and knows what the store must hold.

    What it says goes to a file elsewhere: ``a N`` step N begins, ``c N`` it is confirmed, ``r N`` it was refused and
    is not there, ``d NAME`` the call NAME was begun and not finished.
    """

    def __init__(self, disk: SmallDisk, case: Case, diary: str) -> None:
        self._disk = disk
        self._case = case
        self._diary = os.open(diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._files = FaultyFiles()
        self._refusals = 0
        self._now = Told()
        self._number = 0
        """Of the next step."""
        self._uncertain: list[int] = []
        """The step that was begun when a process before this one ended."""
        self._filled = False
        self.full = False

    @property
    def _path(self) -> str:
        return os.path.join(self._disk.directory, "store")

    def _say(self, line: str) -> None:
        os.write(self._diary, line.encode() + b"\n")

    def remember(self, lines: list[str]) -> None:
        """Take over from a process that ended."""
        for line in lines:
            kind, _, rest = line.partition(" ")
            if kind == "a":
                self._number, self._uncertain = int(rest) + 1, [int(rest)]
            elif kind in "cr":
                self._uncertain = []
                if kind == "c":
                    self._now.take(int(rest), self._steps[int(rest)])
            elif kind == "d":
                self._now.doubtful.add(rest)
        self._filled = "full" in lines
        self.full = self._filled and "room" not in lines
        for number in self._uncertain:
            self._may_have_begun(self._steps[number])

    @property
    def _steps(self) -> list[Step]:
        steps: list[Step] = self._case["steps"]
        return steps

    # --- the life of a process ------------------------------------------------------------------

    def live(self) -> None:
        """Open the store, hold it to what is known, take all steps that are left, and look at everything."""
        try:
            self._live()
        except OUT_OF_USE as error:
            thin = self._disk.thin is not None
            if not self.full or not (thin or isinstance(error, (CommitUnknown, StoreFailed))):
                raise
            self._say(f"lost {type(error).__name__}")
            raise OutOfUse(str(error)) from error

    def _live(self) -> None:
        set_default_files(self._files)
        if self._case["fill_at"] < 0:
            self._fill()
        self._teller = self._opened(lambda: Teller(self._path, self._say))
        self._settle(self._uncertain)
        self._now.take(self._number, ["reopen"])
        while self._number < len(self._steps):
            number, self._number = self._number, self._number + 1
            if number == self._case["fill_at"]:
                self._fill()
            if self._now.allows(self._steps[number]):
                self._step(number, self._steps[number])
            if self.full and self._refusals >= self._case["patience"]:
                self._give_room()
        self._teller.close()
        store = self._opened(lambda: Store.open(self._path, background=False))
        if wrong := [*differences(store, self._now, None), *store.check()]:
            raise AssertionError("; ".join(wrong[:3]))
        store.close()

    def _fill(self) -> None:
        if self._filled:
            return
        self._disk.fill(self._case["room"])
        self.full = True
        self._say("full")
        if self._case["kill"]:
            calls = frozenset({"pwrite", "fdatasync", "unlink", "open"})
            self._files.arm(Fault(self._case["kill"], Kill(self._case["when"]), calls))

    def _give_room(self) -> None:
        if self._disk.thin is not None:
            raise OutOfUse("a thin disk gets no room while it is in use")
        self._disk.free()
        self.full = False
        self._say("room")

    def _refused(self, error: DiskFull) -> None:
        if not self.full:
            raise AssertionError(f"there is room on the disk: {error}") from error
        self._refusals += 1
        self._say("refused")

    def _opened(self, opens: Callable[[], T]) -> T:
        """On a full disk an open may be refused; then there is room, and it is not."""
        try:
            return opens()
        except DiskFull as error:
            self._refused(error)
        self._give_room()
        return opens()

    def _step(self, number: int, step: Step) -> None:
        self._say(f"a {number}")
        try:
            self._teller.take(number, step)
        except DiskFull as error:
            self._refused(error)
            self._may_have_begun(step)
            if step[0] in ("reopen", "kill", "compact"):
                self._now.take(number, step)
                self._opened(self._teller.reopen)
            if not self._settle([number] if step[0] == "delete" else []):
                self._say(f"r {number}")
        else:
            self._now.take(number, step)
            self._say(f"c {number}")

    def _may_have_begun(self, step: Step) -> None:
        if step[0] == "once":
            self._now.doubtful.add(step[1])
            self._say(f"d {step[1]}")

    def _settle(self, uncertain: list[int]) -> bool:
        """The store holds what was confirmed, with or without the uncertain step; whether with it."""
        wrong: list[str] = []
        for taken in [[], uncertain] if uncertain else [[]]:
            now = copy.deepcopy(self._now)
            for number in taken:
                if now.allows(self._steps[number]):
                    now.take(number, self._steps[number])
            found = differences(self._teller.store, now, None)
            if not found:
                self._now = now
                for number in taken:
                    self._say(f"c {number}")
                return bool(taken)
            wrong += found[:3]
        raise AssertionError("; ".join(wrong))


# --- the campaign -------------------------------------------------------------------------------


def _in_a_process(holder: Holder, complaint: str) -> int:
    """Have it live in a fork: the exit status, or the negative number of a signal."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            logging.getLogger("agentstore").setLevel(logging.CRITICAL)  # of what could not be tidied up
            faulthandler.disable()  # who waits says which signal it was
            job.ROOM_BYTES = 1 << 20
            with small_limits():
                holder.live()
            status = 0
        except OutOfUse:
            status = BROKEN
        except BaseException:
            with open(complaint, "w", encoding="utf-8") as file:
                file.write(traceback.format_exc())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class FullDiskCampaign:
    """Stories on disks that are full."""

    name = "fulldisk"
    repeats = True

    def __init__(self) -> None:
        self._why: dict[str, str | None] = {}

    def _why_not(self, disk: str) -> str | None:
        if disk not in self._why:
            self._why[disk] = why_no_disk(disk)
        return self._why[disk]

    def missing(self) -> str | None:
        """What this machine lacks to fill any disk, or None."""
        reasons = [self._why_not(disk) for disk in DISKS]
        return None if None in reasons else reasons[0]

    def cases(self, seed: int) -> Iterator[Case]:
        """The disks in turn; each filled at another place, at first before there is a store."""
        rng = random.Random(seed)
        disks = [disk for disk in DISKS if self._why_not(disk) is None]
        for number, disk in enumerate(itertools.cycle(disks)):
            steps = draw(rng, rng.choice([8, 16, 30]))
            early = number < len(disks)
            yield {
                "disk": disk,
                "steps": steps,
                "fill_at": -1 if early else rng.randrange(-1, len(steps)),
                "room": 0 if early else rng.choice(ROOMS),
                "patience": rng.choice([1, 2, 4, 8]),
                "kill": rng.choice([0, 0, rng.randint(1, 12), rng.randint(1, 40)]),
                "when": rng.choice(["before", "inside", "after"]),
            }

    def run(self, case: Case, counts: Counts) -> None:
        """Tell the story; after a kill, or where the store is out of use, another process goes on. Raises Violation."""
        if missing := self._why_not(case["disk"]):
            raise RuntimeError(f"{case['disk']} cannot be filled here: {missing}")
        home = tempfile.mkdtemp(dir=in_memory(), prefix="agentstore-")
        diary, complaint = os.path.join(home, "diary"), os.path.join(home, "complaint")
        try:
            with small_disk(case["disk"]) as disk:
                self._lives(disk, case, diary, complaint, counts)
            with open(diary, encoding="utf-8") as file:
                lines = file.read().splitlines()
            counts.outcomes["confirmed"] += sum(line.startswith("c ") for line in lines)
            counts.outcomes["refused"] += lines.count("refused")
            counts.outcomes.update(line[5:] for line in lines if line.startswith("lost "))
        finally:
            shutil.rmtree(home)

    def _lives(self, disk: SmallDisk, case: Case, diary: str, complaint: str, counts: Counts) -> None:
        lines: list[str] = []
        for life in range(LIVES_MAX):
            holder = Holder(disk, case, diary)
            holder.remember(lines)
            status = _in_a_process(holder, complaint)
            with open(diary, encoding="utf-8") as file:
                lines = file.read().splitlines()
            if "full" in lines and not life:
                counts.faults[f"{case['disk']} filled"] += 1
            if status == 0:
                counts.outcomes["went on to the end"] += 1
                return
            if status == -signal.SIGKILL and case["kill"] and not life:
                counts.faults[f"{case['disk']} killed"] += 1
            elif status == BROKEN and "room" not in lines:
                counts.faults[f"{case['disk']} out of use"] += 1
                disk.free()
                self._note_room(diary, lines)
            else:
                self._complain(complaint, status)
        raise Violation(f"it is not done after {LIVES_MAX} processes")

    def _note_room(self, diary: str, lines: list[str]) -> None:
        lines.append("room")
        with open(diary, "a", encoding="utf-8") as file:
            file.write("room\n")

    def _complain(self, complaint: str, status: int) -> None:
        if os.path.exists(complaint):
            with open(complaint, encoding="utf-8") as file:
                raise Violation(file.read())
        raise Violation(f"the process ended with status {status}")

    def smaller(self, case: Case) -> Iterator[Case]:
        """With fewer steps, filled at another place, without the kill."""
        steps = case["steps"]
        size = len(steps)
        while size := size // 2:
            for at in range(0, len(steps), size):
                fill_at = case["fill_at"] - min(size, max(0, case["fill_at"] - at))
                yield case | {"steps": steps[:at] + steps[at + size :], "fill_at": fill_at}
        if case["kill"]:
            yield case | {"kill": 0}


CAMPAIGN = FullDiskCampaign()
