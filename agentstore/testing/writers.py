"""Processes that write to a store until they are killed.

Each writer is a thread that takes its steps (`workload`) and keeps its diary (`acknowledged`). Between the steps it
reads what the others confirmed, gives transactions up, folds, and closes and opens the store.

SIGTERM ends a process in order; on SIGUSR1 it forks: the child opens the store anew and has a writer of its own.
"""

from __future__ import annotations

import faulthandler
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from agentstore.engine import keys
from agentstore.engine.api import Reader, Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.errors import AgentStoreError, CommitUnknown, DiskFull, ForkedStore, StoreFailed
from agentstore.testing.acknowledged import Diary, read_diaries, read_diary
from agentstore.testing.workload import (
    COUNTER,
    USUAL,
    WRITERS,
    Models,
    Sizes,
    decode_number,
    faults,
    head_key,
    take_step,
)

HANG_S = 120.0
"""A process that gets nowhere for this long says where it stands, on standard error."""

DISK_ERRORS = (StoreFailed, CommitUnknown, DiskFull)
"""What a writer may meet once its disk is gone."""


class GivenUp(Exception):
    """Raised by a function of a transaction to give it up."""


@dataclass(frozen=True)
class Job:
    """What a process does. `disk_may_fail`: its power will be cut, errors of the disk are no fault."""

    store: str
    diaries: str
    writer: str
    seed: int
    threads: int = 1
    disk_may_fail: bool = False
    sizes: Sizes = USUAL
    reopens: bool = True
    lifeline: int | None = None
    """A descriptor at whose end the process dies: whoever watches it is gone."""

    def abandoned(self) -> bool:
        return self.lifeline is not None and bool(select.select([self.lifeline], [], [], 0)[0])


class Writer:
    """One writer. `go_on` until told to stop."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._diary = Diary(job.diaries, job.writer)
        self._rng = random.Random(f"{job.seed}/{job.writer}/{os.getpid()}")
        self._engine: EmbeddedEngine | None = None
        self._step = -1

    @property
    def engine(self) -> EmbeddedEngine:
        assert self._engine is not None
        return self._engine

    def open(self) -> None:
        """Open the store and find out where this writer is, by a transaction: it finishes the dead."""
        self._engine = EmbeddedEngine.open(self._job.store)
        key = head_key(self._job.writer)
        self._step = self.engine.transact(lambda tx: decode_number(tx.get(key))).value
        promised = read_diary(self._job.diaries, self._job.writer)
        if not promised.confirmed <= self._step <= promised.asked:
            raise AssertionError(
                f"writer {self._job.writer} is at step {self._step}; "
                f"asked {promised.asked}, confirmed {promised.confirmed}"
            )

    def go_on(self, stop: threading.Event) -> None:
        """Take steps until `stop` is set."""
        try:
            self.open()
            while not stop.is_set():
                self._turn()
            self.engine.close()
        except BaseException as error:
            self._diary.gave_up(f"{type(error).__name__}: {error}")
            if not (self._job.disk_may_fail and isinstance(error, DISK_ERRORS)):
                traceback.print_exc()
                raise
        finally:
            self._diary.close()

    def _turn(self) -> None:
        at = self._rng.random()
        if at < 0.82:
            self._take_step()
        elif at < 0.92:
            self._look()
        elif at < 0.96:
            self._give_up()
        elif at < 0.985:
            time.sleep(self._rng.random() * 0.004)
        elif at < 0.995 or not self._job.reopens:
            self.engine.fold()
        else:
            self.engine.close()
            self.open()

    def _take_step(self) -> None:
        job, step = self._job, self._step + 1
        self._diary.asked(step)
        done = self.engine.transact(lambda tx: take_step(tx, job.seed, job.writer, step, job.sizes))
        self._diary.confirmed(step, done.lsn)
        self._step = step

    def _look(self) -> None:
        """What a snapshot shows is confirmed, so it may be told; and it is one moment of the store."""
        with self.engine.read() as view:
            heads = _heads(view)
            counter = max(decode_number(view.get(COUNTER)), 0)
        if heads.get(self._job.writer, -1) != self._step:
            raise AssertionError(f"writer {self._job.writer} took step {self._step} and sees {heads}")
        if counter != sum(head + 1 for head in heads.values()):
            raise AssertionError(f"a snapshot shows counter {counter} and heads {heads}")
        for writer, head in heads.items():
            if writer != self._job.writer:
                self._diary.saw(writer, head)

    def _give_up(self) -> None:
        """A transaction whose function raises has written nothing."""

        def fn(tx: Tx) -> None:
            take_step(tx, self._job.seed, self._job.writer, self._step + 1, self._job.sizes)
            raise GivenUp

        try:
            self.engine.transact(fn)
        except GivenUp:
            return
        raise AssertionError("a transaction swallowed the exception of its function")


def _heads(view: Reader) -> dict[str, int]:
    """Heads by writer, for one `get` each: a writer's name is found by jumping over the keys of the one before."""
    found: dict[str, int] = {}
    at = WRITERS
    while True:
        pair = next(iter(view.scan(at, keys.end_of(WRITERS))), None)
        if pair is None:
            return found
        writer = str(keys.decode(pair[0])[1])
        found[writer] = decode_number(view.get(head_key(writer)))
        at = keys.end_of(keys.encode("w", writer))


def run(job: Job) -> int:
    """The life of a process that writes: its exit status."""
    faulthandler.enable()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    names = [job.writer] if job.threads == 1 else [f"{job.writer}.{number}" for number in range(job.threads)]
    stop = threading.Event()
    failed: list[BaseException] = []

    def life(writer: Writer) -> None:
        try:
            writer.go_on(stop)
        except BaseException as error:
            failed.append(error)

    writers = [Writer(replace(job, writer=name)) for name in names]
    threads = [threading.Thread(target=life, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    forks = 0
    while any(thread.is_alive() for thread in threads):
        got = signal.sigtimedwait({signal.SIGTERM, signal.SIGUSR1}, 0.02)
        if job.abandoned():
            os.kill(os.getpid(), signal.SIGKILL)
        if got is None:
            continue
        if got.si_signo == signal.SIGTERM:
            stop.set()
            faulthandler.dump_traceback_later(HANG_S, exit=True)
        else:
            forks += 1
            if os.fork() == 0:
                inherited = writers[0]._engine
                os._exit(_forked(replace(job, writer=f"{job.writer}-child{os.getpid()}", threads=1), inherited))
    for thread in threads:
        thread.join()
    return 1 if failed else 0


def _forked(job: Job, inherited: EmbeddedEngine | None) -> int:
    """A forked child: what it inherited is refused, what it opens anew works, also while its parent goes on or dies."""
    stop = threading.Event()

    def poll() -> None:
        while signal.sigtimedwait({signal.SIGTERM}, 0.02) is None:
            if job.abandoned():
                os.kill(os.getpid(), signal.SIGKILL)
        stop.set()

    try:
        if inherited is not None and inherited._gone is None:
            raise AssertionError("a forked child could use the store of its parent")
        if isinstance(getattr(inherited, "_gone", None), ForkedStore):
            _refused(inherited, lambda engine: engine.transact(lambda tx: tx.get(COUNTER)))
            _refused(inherited, lambda engine: engine.read().__enter__())
        threading.Thread(target=poll, daemon=True).start()
        Writer(job).go_on(stop)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()
    return 0


def _refused(engine: EmbeddedEngine | None, call: Callable[[EmbeddedEngine], object]) -> None:
    assert engine is not None
    try:
        call(engine)
    except ForkedStore:
        return
    raise AssertionError("a forked child could use the store of its parent")


@dataclass
class Found:
    """What a check of a store saw."""

    open_s: float
    faults: list[str]
    heads: dict[str, int] = field(default_factory=dict)
    """The step that each writer was at when the store was opened."""


def check(
    job: Job, models: Models, report: Callable[[Found], None], *, write: bool = True, closes: bool = False
) -> None:
    """Open the store, hold it to all diaries, take a step as `job.writer`, `report`; then close it, if told to."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    found = Found(0.0, [])
    try:
        begun = time.perf_counter()
        engine = EmbeddedEngine.open(job.store)
        found.open_s = time.perf_counter() - begun
        found.faults += _check(engine, job, models)
        found.faults += engine.verify()
        with engine.read() as view:
            found.heads = _heads(view)
        if write:
            writer = Writer(job)
            writer.open()
            writer._take_step()
            found.faults += _check(engine, job, models)
            writer.engine.close()
    except (AgentStoreError, AssertionError, OSError) as error:
        traceback.print_exc()
        found.faults.append(f"{type(error).__name__}: {error}")
    report(found)
    if closes:
        engine.close()
    faulthandler.cancel_dump_traceback_later()


def _check(engine: EmbeddedEngine, job: Job, models: Models) -> list[str]:
    before = read_diaries(job.diaries)
    with engine.read() as view:
        return faults(view, models, before, lambda: read_diaries(job.diaries))
