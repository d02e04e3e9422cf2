"""Processes on one store, and the checks between their deaths.

Everything runs in forks of this process, which itself never opens a store: a fork takes milliseconds, and its
first instructions can be hit by a kill as well as any later one.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass

from agentstore.testing.acknowledged import Promise, read_diaries
from agentstore.testing.workload import Models
from agentstore.testing.writers import DISK_ERRORS, Found, Job, check, run

PROGRESS_S = 120.0
"""A crew of which nobody confirms a step for this long hangs."""

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command in good order."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Wrong(Exception):
    """The store broke its promise, or its processes did not behave; the message says how."""


_lifeline: list[int] = []
"""The two ends of a pipe: only this process has the second, so its end is seen at the first, in all it ever forked."""


def adopt_orphans() -> None:
    """Children of killed workers become ours, so that their end is seen; and none of them outlives us."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _lifeline[:] = os.pipe()

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in ENDING:
        signal.signal(number, end)


def fork(fn: Callable[[], int], group: int | None = None) -> int:
    """Run `fn` in a forked process; its result is the exit status. `group`: process group (0: its own, None: ours)."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Python loses an exception that a signal's handler raises while the functions run that are called at a fork.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if group is not None:
            _join_group(pid, group)
        return pid
    status = 1
    try:
        os.close(_lifeline[1])
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if group is not None:
            _join_group(0, group)
        status = fn()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _join_group(pid: int, group: int) -> None:
    """Called on both sides of a fork, so that neither goes on before it is done."""
    try:
        os.setpgid(pid, group)
    except (PermissionError, ProcessLookupError):
        pass  # dead already, or its group is: it is killed by its own number then


def alive(pid: int) -> bool:
    """Whether `pid` runs: a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass
class Checked(Found):
    """What a checker saw, and whether it was alone: then its open was a recovery."""

    alone: bool = True


class Crew:
    """Writers on one store. The parent side."""

    def __init__(
        self, store: str, diaries: str, seed: int, rng: random.Random, models: Models, *, disk_may_fail: bool = False
    ) -> None:
        self.store = store
        self.diaries = diaries
        self.rng = rng
        self._seed = seed
        self._models = models
        self.disk_may_fail = disk_may_fail
        self._group = 0
        self._log: int | None = None
        if disk_may_fail:
            # What they say of a disk that is gone interests only who looks for a fault.
            self._log = os.open(f"{diaries}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.workers: dict[int, Job] = {}
        """Of those that were started here and not seen dead, by pid."""
        self.open_s: list[float] = []
        """Of every open by a checker that was a recovery."""
        self.join_s: list[float] = []
        """Of every other open by a checker."""

    # --- the living ------------------------------------------------------------------

    def job(self, writer: str, threads: int = 1) -> Job:
        return Job(self.store, self.diaries, writer, self._seed, threads, self.disk_may_fail, lifeline=_lifeline[0])

    def start(self, writer: str, threads: int = 1) -> int:
        """Start a process that writes."""
        job = self.job(writer, threads)
        if not any(alive(pid) for pid in self.workers):
            self._group = 0
        pid = fork(lambda: self._run(job), self._group)
        if not self._group:
            self._group = pid
        self.workers[pid] = job
        return pid

    def _run(self, job: Job) -> int:
        if self._log is not None:
            os.dup2(self._log, 2)
        return run(job)

    def children(self) -> list[int]:
        """Pids of living processes that workers forked."""
        promises = read_diaries(self.diaries).items()
        return [promise.pid for writer, promise in promises if "-child" in writer and alive(promise.pid)]

    def promises(self) -> dict[str, Promise]:
        return read_diaries(self.diaries)

    def wait_for_progress(self, pids: list[int]) -> None:
        """Return once each of these workers has confirmed something more (or is dead)."""
        left = {pid: self._sizes(self.workers[pid]) for pid in pids if pid in self.workers}
        until = time.monotonic() + PROGRESS_S
        while left:
            for pid, before in list(left.items()):
                if not alive(pid) or self._confirmed_since(self.workers[pid], before):
                    del left[pid]
            if time.monotonic() > until:
                raise Wrong(f"processes {sorted(left)} confirmed nothing for {PROGRESS_S} s")
            time.sleep(0.005)

    def _sizes(self, job: Job) -> dict[str, int]:
        names = [name for name in os.listdir(self.diaries) if name == job.writer or name.startswith(job.writer + ".")]
        return {name: os.stat(os.path.join(self.diaries, name)).st_size for name in names}

    def _confirmed_since(self, job: Job, before: dict[str, int]) -> bool:
        for name in self._sizes(job):
            with open(os.path.join(self.diaries, name), "rb") as file:
                file.seek(before.get(name, 0))
                if any(line.startswith(b"c ") for line in file.read().splitlines()):
                    return True
        return False

    # --- the dying -------------------------------------------------------------------

    def kill(self, pid: int) -> None:
        """SIGKILL one process, and see it dead."""
        os.kill(pid, signal.SIGKILL)
        self._await_death(lambda: not alive(pid))

    def kill_all(self) -> int:
        """SIGKILL all of them at once; how many they were."""
        self.reap()
        count = len(self.workers) + len(self.children())
        if self._group:
            try:
                os.killpg(self._group, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for pid in [*self.workers, *self.children()]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self._await_death(lambda: not any(alive(pid) for pid in self.workers) and not self.children())
        return count

    def end_all(self) -> None:
        """SIGTERM: all of them finish in order and close the store."""
        for pid in [*self.workers, *self.children()]:
            if alive(pid):
                os.kill(pid, signal.SIGTERM)

    def wait_for_all(self) -> None:
        """Return once everybody is gone."""
        self._await_death(lambda: not any(alive(pid) for pid in self.workers) and not self.children())

    def _await_death(self, gone: Callable[[], bool]) -> None:
        until = time.monotonic() + PROGRESS_S
        while not gone():
            if time.monotonic() > until:
                raise Wrong(f"processes did not end within {PROGRESS_S} s")
            self.reap()
            time.sleep(0.001)
        self.reap()

    def reap(self) -> None:
        """See who died; Wrong if somebody gave up instead of being killed."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            job = self.workers.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if code not in (0, -signal.SIGKILL) and not self.disk_may_fail:
                raise Wrong(f"process {pid} ({job or 'a forked child'}) ended with status {code}")
            if code > 0 and (texts := self._gave_up_wrongly()):
                raise Wrong(f"process {pid} ({job or 'a forked child'}) gave up: {'; '.join(texts)}")
        for pid in [pid for pid in self.workers if not alive(pid)]:
            del self.workers[pid]

    def _gave_up_wrongly(self) -> list[str]:
        """A process whose disk failed leaves with an error of the disk and nothing else: `run` returns 1 for both."""
        texts = [text for promise in self.promises().values() for text in promise.gave_up]
        return [text for text in texts if not text.startswith(tuple(error.__name__ for error in DISK_ERRORS))]

    # --- the checks ------------------------------------------------------------------

    def check(self, *, closes: bool = False, write: bool = True) -> Checked:
        """Open, check, write and die (or close) in a process of its own; Wrong if anything is not as promised."""
        self.reap()
        alone = not self.workers and not self.children()
        checked = Checked(**asdict(self._in_a_fork(closes=closes, write=write)), alone=alone)
        if checked.faults:
            raise Wrong("\n".join(checked.faults))
        (self.open_s if alone else self.join_s).append(checked.open_s)
        return checked

    def _in_a_fork(self, *, closes: bool, write: bool) -> Found:
        for writer, promise in self.promises().items():
            self._models.of(writer).advance(promise.confirmed)
        reading, writing = os.pipe()

        def report(found: Found) -> None:
            os.write(writing, json.dumps(asdict(found)).encode())

        def checker() -> int:
            os.close(reading)
            check(self.job("checker"), self._models, report, write=write, closes=closes)
            if not closes:
                os.kill(os.getpid(), signal.SIGKILL)
            return 0

        pid = fork(checker)
        os.close(writing)
        return self._answer(pid, reading)

    def _answer(self, pid: int, reading: int) -> Found:
        parts = []
        with os.fdopen(reading, "rb") as pipe:
            while True:
                if not select.select([pipe], [], [], PROGRESS_S * 2)[0]:
                    os.kill(pid, signal.SIGKILL)
                    raise Wrong("a checker got nowhere")
                part = os.read(pipe.fileno(), 65536)
                if not part:
                    break
                parts.append(part)
        self._await_death(lambda: not alive(pid))
        if not parts:
            raise Wrong("a checker died without an answer: its errors are on standard error")
        return Found(**json.loads(b"".join(parts)))
