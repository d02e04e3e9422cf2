"""The store for programs on an event loop: the same names, awaited.

    async with await AsyncStore.open("./agents") as store:
        thread = store.thread("user-42:report-7")
        cp = await thread.commit(Append("conversation_history", msg), Set("step", 1))

Store calls wait for the disk, so they run in worker threads of the store's own and never in the event loop. A call
that was begun cannot be taken back, and to leave it alone would mean not to know what it did: **a cancelled await
ends once its call has ended**, a commit's few milliseconds later, and then raises CancelledError. So nothing is half
done, and the handle stands where the thread stands. Calls on one handle run one after the other, in the order in
which they were made.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from agentstore.aio_effects import AsyncEffect, AsyncLease
from agentstore.backup import Copied
from agentstore.changes import Change
from agentstore.checkpoint import Checkpoint
from agentstore.effect_views import TIMEOUT_S_DEFAULT
from agentstore.errors import StoreClosed
from agentstore.once import NOT_GIVEN
from agentstore.pruning import Expiry
from agentstore.retention import Retention
from agentstore.sizes import Sizes
from agentstore.store import DEFAULT_PATH, PAGE_THREADS, Store
from agentstore.thread import Thread

if TYPE_CHECKING:
    from agentstore.effect_views import EffectView
    from agentstore.effects import EffectCall

T = TypeVar("T")

_NOT_CALLED: Final = "its caller was cancelled before it called the tool"

WORKERS_MAX: Final = 32
"""Store calls that wait for the disk at once; so many commits can share one sync."""


async def _ended(future: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait for the end of `future`, also when the waiting task is cancelled; then that is returned."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not future.cancelled():
        future.exception()  # seen: whoever asked for it is gone
    return cancelled


async def _to_the_end(future: asyncio.Future[T]) -> T:
    """The result of `future`; CancelledError, if the waiting task was cancelled, once it has ended."""
    cancelled = await _ended(future)
    if cancelled is not None:
        raise cancelled
    return future.result()


class AsyncStore:
    """An open store on an event loop. For one event loop and all of its tasks; other loops open their own.

    >>> import asyncio, tempfile
    >>> from agentstore import AsyncStore, Set
    >>> async def main(directory):
    ...     async with await AsyncStore.open(directory) as store:
    ...         cp = await store.thread("t").commit(Set("step", 1))
    ...         return cp.seq, await store.thread("t").load(), [name async for name in store.threads()]
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     asyncio.run(main(directory + "/agents"))
    (0, {'step': 1}, ['t'])
    """

    def __init__(self, store: Store, workers: ThreadPoolExecutor) -> None:
        """Use `AsyncStore.open`."""
        self._store = store
        self._workers = workers
        self._closed = False

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str] = DEFAULT_PATH,
        *,
        create: bool = True,
        readonly: bool = False,
        background: bool = True,
    ) -> AsyncStore:
        """As `Store.open`. Cancelled, it leaves nothing open."""
        workers = ThreadPoolExecutor(WORKERS_MAX, thread_name_prefix="agentstore")
        opening = asyncio.get_running_loop().run_in_executor(
            workers, lambda: Store.open(path, create=create, readonly=readonly, background=background)
        )
        try:
            return cls(await _to_the_end(opening), workers)
        except BaseException:
            if opening.exception() is None:
                await _ended(asyncio.get_running_loop().run_in_executor(workers, opening.result().close))
            workers.shutdown(wait=False)
            raise

    @property
    def path(self) -> str:
        """The directory, absolute."""
        return self._store.path

    @property
    def readonly(self) -> bool:
        """Whether commits are refused."""
        return self._store.readonly

    async def close(self) -> None:
        """As `Store.close`, once the calls under way have ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        closing = asyncio.get_running_loop().run_in_executor(self._workers, self._store.close)
        self._workers.shutdown(wait=False)
        await _to_the_end(closing)

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self._store)[1:]}"

    async def _call(self, fn: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a blocking call in a worker, to its end whatever happens."""
        if self._closed:
            raise StoreClosed(f"the store {self.path} was closed; open it again")
        loop = asyncio.get_running_loop()
        return await _to_the_end(loop.run_in_executor(self._workers, lambda: fn(*args, **options)))

    def thread(self, thread_id: str) -> AsyncThread:
        """As `Store.thread`: reads and writes nothing, so there is nothing to await."""
        return AsyncThread(self, self._store.thread(thread_id))

    async def threads(
        self, prefix: str = "", *, order: Literal["name", "created"] = "name", limit: int | None = None
    ) -> AsyncIterator[str]:
        """As `Store.threads`, to be used with ``async for``."""
        found = self._store.threads(prefix, order=order, limit=limit)
        while True:
            # One hop to a worker for a page of names, not for each of them.
            some = await self._call(_some, found)
            for name in some:
                yield name
            if len(some) < PAGE_THREADS:
                return

    async def once(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        rule: str = "ask",
        query: Callable[[str], Any] | None = None,
        timeout_s: float = TIMEOUT_S_DEFAULT,
        happened: Any = NOT_GIVEN,
    ) -> Any:
        """As `Store.once`; `fn` and `query` may be coroutine functions, which then run on this event loop.

        Cancelled while a coroutine function runs: that is cancelled too, and the call is in doubt. A plain function
        is waited for.
        """
        coroutines = _Coroutines(asyncio.get_running_loop())
        call = asyncio.ensure_future(
            self._call(
                self._store.once,
                name,
                coroutines.plain(fn),
                arguments=arguments,
                rule=rule,
                query=None if query is None else coroutines.plain(query),
                timeout_s=timeout_s,
                happened=happened,
            )
        )
        try:
            await asyncio.wait((call,))
        except asyncio.CancelledError:
            coroutines.cancel()
            await _ended(call)
            raise
        return call.result()

    async def check(self) -> list[str]:
        """As `Store.check`."""
        return await self._call(self._store.check)

    async def stats(self) -> dict[str, int]:
        """As `Store.stats`."""
        return await self._call(self._store.stats)

    async def sizes(self, threads: int = 10) -> Sizes:
        """As `Store.sizes`."""
        return await self._call(self._store.sizes, threads)

    @property
    def retention(self) -> Awaitable[Retention | None]:
        """As `Store.retention`, awaited: ``await store.retention``."""
        return self._call(lambda: self._store.retention)

    async def set_retention(self, rule: Retention | None) -> None:
        """As `Store.set_retention`."""
        await self._call(self._store.set_retention, rule)

    async def apply_retention(self, default: Retention | None = None, *, dry_run: bool = False) -> list[Expiry]:
        """As `Store.apply_retention`."""
        return await self._call(self._store.apply_retention, default, dry_run=dry_run)

    async def backup(self, dest: str | os.PathLike[str], *, on_step: Callable[[str], None] | None = None) -> Copied:
        """As `Store.backup`; `on_step` is called in a worker thread. Cancelled, it ends once the copy is made."""
        return await self._call(lambda: self._store.backup(dest, on_step=on_step))


def _some(found: Iterator[str]) -> list[str]:
    return list(islice(found, PAGE_THREADS))


class _Coroutines:
    """Lets a worker thread call coroutine functions, which run on the loop; and cancels those that do."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: set[Future[Any]] = set()
        self._cancelled = False

    def plain(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, or a plain function for the worker that runs the coroutine function `fn` to its end."""
        if not inspect.iscoroutinefunction(fn):
            return fn

        def call(*args: Any, **options: Any) -> Any:
            future = asyncio.run_coroutine_threadsafe(fn(*args, **options), self._loop)
            self._running.add(future)
            if self._cancelled:  # said between the two lines above: whoever says it looks at those that run after that
                future.cancel()
            try:
                return future.result()
            finally:
                self._running.discard(future)

        # The ledger looks whether `fn` takes the idempotency key.
        call.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]  # that is where inspect looks
        return call

    def cancel(self) -> None:
        """Cancel what runs, and what will be called yet."""
        self._cancelled = True
        for future in list(self._running):
            future.cancel()


class AsyncThread:
    """A `Thread` on an event loop; made by `AsyncStore.thread`. Tasks may share it: their calls take turns.

    Sharing does not make two commits one: of two tasks that load, think and commit, the second commits on top of the
    first.
    """

    def __init__(self, store: AsyncStore, thread: Thread) -> None:
        self._store = store
        self._thread = thread
        self._turn = asyncio.Lock()

    @property
    def id(self) -> str:
        """The caller's id of the thread."""
        return self._thread.id

    @property
    def recovered(self) -> Checkpoint | None:
        """As `Thread.recovered`."""
        return self._thread.recovered

    def __repr__(self) -> str:
        return f"<Async{repr(self._thread)[1:]}"

    async def _call(self, fn: Callable[..., T], *args: Any, **options: Any) -> T:
        async with self._turn:
            return await self._store._call(fn, *args, **options)

    async def commit(
        self,
        *changes: Change,
        reason: str = "manual",
        step: int | None = None,
        status: str | None = None,
        metadata: dict[str, Any] | None = None,
        parent: int | None = None,
        intents: Sequence[EffectCall] = (),
    ) -> Checkpoint:
        """As `Thread.commit`. Do not change the values before it returns: they are encoded in a worker thread."""
        return await self._call(
            self._thread.commit,
            *changes,
            reason=reason,
            step=step,
            status=status,
            metadata=metadata,
            parent=parent,
            intents=intents,
        )

    async def commit_state(
        self,
        state: dict[str, Any],
        *,
        reason: str = "manual",
        step: int | None = None,
        status: str | None = None,
        metadata: dict[str, Any] | None = None,
        parent: int | None = None,
    ) -> Checkpoint:
        """As `Thread.commit_state`. Do not change `state` before it returns."""
        return await self._call(
            self._thread.commit_state,
            state,
            reason=reason,
            step=step,
            status=status,
            metadata=metadata,
            parent=parent,
        )

    async def load(self, at: int | None = None) -> dict[str, Any]:
        """As `Thread.load`."""
        return await self._call(self._thread.load, at)

    @property
    def head(self) -> Awaitable[Checkpoint | None]:
        """As `Thread.head`: ``await thread.head``."""
        return self._call(lambda: self._thread.head)

    @property
    def decision(self) -> Awaitable[tuple[bytes, int] | None]:
        """As `Thread.decision`: ``await thread.decision``."""
        return self._call(lambda: self._thread.decision)

    async def history(self, limit: int | None = None, *, before: int | None = None) -> list[Checkpoint]:
        """As `Thread.history`."""
        return await self._call(self._thread.history, limit, before=before)

    async def checkpoint(self, seq: int) -> Checkpoint:
        """As `Thread.checkpoint`."""
        return await self._call(self._thread.checkpoint, seq)

    async def fork(self, at: int | None = None, *, into: str) -> AsyncThread:
        """As `Thread.fork`."""
        return AsyncThread(self._store, await self._call(self._thread.fork, at, into=into))

    async def pin(self, seq: int, note: str = "") -> None:
        """As `Thread.pin`."""
        await self._call(self._thread.pin, seq, note)

    async def unpin(self, seq: int) -> None:
        """As `Thread.unpin`."""
        await self._call(self._thread.unpin, seq)

    @property
    def retention(self) -> Awaitable[Retention | None]:
        """As `Thread.retention`, awaited: ``await thread.retention``."""
        return self._call(lambda: self._thread.retention)

    async def set_retention(self, rule: Retention | None) -> None:
        """As `Thread.set_retention`."""
        await self._call(self._thread.set_retention, rule)

    async def pins(self) -> dict[int, str]:
        """As `Thread.pins`."""
        return await self._call(self._thread.pins)

    async def delete(self) -> None:
        """As `Thread.delete`."""
        await self._call(self._thread.delete)

    async def effect(
        self,
        *,
        decision: Checkpoint | tuple[bytes, int],
        index: int,
        tool: str,
        arguments: Mapping[str, Any],
        rule: str = "ask",
        timeout_s: float = TIMEOUT_S_DEFAULT,
        generation: int | None = None,
    ) -> AsyncEffect:
        """As `Thread.effect`. Cancelled after its intent was stored, the call is known not to have been made."""
        opening = asyncio.ensure_future(
            self._call(
                self._thread.effect,
                decision=decision,
                index=index,
                tool=tool,
                arguments=arguments,
                rule=rule,
                timeout_s=timeout_s,
                generation=generation,
            )
        )
        try:
            return AsyncEffect(self, await _to_the_end(opening))
        except asyncio.CancelledError:
            if not opening.cancelled() and opening.exception() is None and not opening.result().done:
                await _ended(asyncio.ensure_future(self._call(opening.result().not_done, _NOT_CALLED)))
            raise

    async def effects(self, open: bool | None = None) -> list[EffectView]:
        """As `Thread.effects`."""
        return await self._call(self._thread.effects, open)

    async def lease(self, owner: str, ttl_s: float = 30.0) -> AsyncLease:
        """As `Thread.lease`. Cancelled after it was taken, the lease is given back before the await ends."""
        taking = asyncio.ensure_future(self._call(self._thread.lease, owner, ttl_s))
        try:
            return AsyncLease(self, await _to_the_end(taking))
        except asyncio.CancelledError:
            if not taking.cancelled() and taking.exception() is None:
                await _ended(asyncio.ensure_future(self._call(taking.result().release)))
            raise
