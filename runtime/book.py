"""The loop's hand on its thread: every write in order, none abandoned halfway, the copy of the state in step with it.

Store calls block (they wait for the disk), so they run in one worker thread per run and not
in the event loop. One worker also means that the handle, which is not thread-safe, is used
by one call at a time. A call that was begun is always waited for, also when the run is
cancelled: cancelling an ``await`` cannot stop a write, and to leave it alone would mean not
to know what it did.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypeVar

from agentstore import Checkpoint, CommitUnknown, DiskFull, Store, ThreadNotFound

from . import clock
from .draft import Change, Draft
from .states import check_state

T = TypeVar("T")

DISK_FULL_WAITS_S = (0.1, 0.5, 2.0)
"""How long a full disk is waited for, each time; then `DiskFull` ends the run."""

UNKNOWN_TRIES_MAX = 3
"""How often a commit is made again after it turned out not to have been written."""

_log = logging.getLogger("agentstore.runtime")


class Book:
    """One thread of a store in the hands of one run. For one event loop; `close` it at the end."""

    def __init__(self, store: Store, thread_id: str) -> None:
        self.store = store
        self.thread = store.thread(thread_id)
        self.state: dict[str, Any] = {}
        """The state as of the newest confirmed checkpoint. Changed by `commit` and `load` only."""
        self.head: Checkpoint | None = None
        self.writing = asyncio.Lock()
        """Held by whoever makes a draft until it is committed: drafts are made from `state`."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="agentstore commit")

    def close(self) -> None:
        """End the worker thread."""
        self._worker.shutdown()

    @property
    def seq(self) -> int:
        """Seq of the newest confirmed checkpoint, -1 before the first."""
        return -1 if self.head is None else self.head.seq

    async def call(self, fn: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a blocking function of the store in the worker, to its end whatever happens.

        A full disk is waited for a little; then DiskFull is raised.
        """
        return await finished(asyncio.ensure_future(self._call(lambda: fn(*args, **options))))

    async def _call(self, fn: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        for wait_s in DISK_FULL_WAITS_S:
            try:
                return await loop.run_in_executor(self._worker, fn)
            except DiskFull:
                _log.warning("thread %r: the disk is full, trying again in %s s", self.thread.id, wait_s)
                await asyncio.sleep(wait_s)
        return await loop.run_in_executor(self._worker, fn)

    async def load(self) -> bool:
        """Read the head and its state; whether there is one."""
        try:
            self.state = await self.call(self.thread.load)
        except ThreadNotFound:
            self.state, self.head = {}, None
            return False
        check_state(self.thread.id, self.state)
        self.head = self.thread.head
        return True

    async def moved(self) -> bool:
        """Whether the thread's head is another than the one that was loaded. O(1)."""
        newest = await self.call(lambda: self.store.thread(self.thread.id).head)
        return newest != self.head

    async def commit(self, draft: Draft, write: Callable[..., Checkpoint], **options: Any) -> Checkpoint:
        """Commit `draft` through ``write(*changes, step=…, status=…, **options)`` and follow it with the own copy.

        `write` is `Thread.commit`, `Effect.receipt` or another of their kind. Held: `writing`.
        After CommitUnknown the thread is read again; if the commit is there it is taken for what it is, else it is
        made again. All other errors are raised.
        """
        return await finished(asyncio.ensure_future(self._commit(draft, write, options)))

    async def _commit(self, draft: Draft, write: Callable[..., Checkpoint], options: dict[str, Any]) -> Checkpoint:
        at = clock.now()
        changes: Iterable[Change] = draft.changes(at)
        for unknown in range(1, UNKNOWN_TRIES_MAX + 1):
            try:
                head = await self.call(write, *changes, step=draft.step, status=draft.status, **options)
            except CommitUnknown as error:
                _log.warning("thread %r: a commit was interrupted, reading the thread again: %s", self.thread.id, error)
                found = await self._recognise()
                if found is not None:
                    return found
                if unknown == UNKNOWN_TRIES_MAX:
                    raise
            else:
                self._follow(draft, head, at)
                return head
        raise AssertionError("the last try returned or raised")

    async def _recognise(self) -> Checkpoint | None:
        """Read the thread after a commit of unknown outcome; the own commit if it was written."""
        await self.load()
        found: Checkpoint | None = self.thread.recovered
        return found

    def _follow(self, draft: Draft, head: Checkpoint, at: datetime) -> None:
        draft.apply(at)
        self.head = head


async def finished(future: asyncio.Future[T]) -> T:
    """Await `future`; a cancellation is raised once that has ended, however it did (it can be asked)."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancelled = error
        except BaseException:
            break  # the future's own, raised below
    if cancelled is None:
        return future.result()
    failure = None if future.cancelled() else future.exception()
    if failure is not None:
        _log.warning("a store call failed while its run was cancelled: %s", failure)
    raise cancelled
