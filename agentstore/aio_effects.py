"""Effects and leases on an event loop: what they are can be read at once, what they come to is awaited."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from agentstore.changes import Change
from agentstore.checkpoint import Checkpoint

if TYPE_CHECKING:
    from agentstore.aio import AsyncThread
    from agentstore.effect import Effect
    from agentstore.leases import Lease


def _shared(name: str) -> Any:
    """A property that only looks: what it returns is in memory already."""

    def read(self: AsyncEffect | AsyncLease) -> Any:
        return getattr(self._inner, name)

    return property(read)


class AsyncEffect:
    """An `Effect` on an event loop: what it is can be read at once, what it comes to is awaited."""

    def __init__(self, thread: AsyncThread, effect: Effect) -> None:
        self._thread = thread
        self._inner = effect

    key = _shared("key")
    tool = _shared("tool")
    arguments = _shared("arguments")
    attempt = _shared("attempt")
    timeout_s = _shared("timeout_s")
    deadline = _shared("deadline")
    remaining_s = _shared("remaining_s")
    done = _shared("done")
    outcome = _shared("outcome")
    source = _shared("source")
    error = _shared("error")
    result = _shared("result")
    seq = _shared("seq")
    identity = _shared("identity")
    rule = _shared("rule")
    duplicate = _shared("duplicate")

    def __repr__(self) -> str:
        return f"<Async{repr(self._inner)[1:]}"

    async def receipt(self, result: Any, *changes: Change, source: str = "call", **commit: Any) -> Checkpoint:
        """As `Effect.receipt`."""
        return await self._thread._call(self._inner.receipt, result, *changes, source=source, **commit)

    async def fail(
        self, error: BaseException | str, *changes: Change, source: str = "call", **commit: Any
    ) -> Checkpoint:
        """As `Effect.fail`."""
        return await self._thread._call(self._inner.fail, error, *changes, source=source, **commit)

    async def skip(self, *changes: Change, **commit: Any) -> Checkpoint:
        """As `Effect.skip`."""
        return await self._thread._call(self._inner.skip, *changes, **commit)

    async def doubt(self, why: str, *changes: Change, **commit: Any) -> Checkpoint | None:
        """As `Effect.doubt`."""
        return await self._thread._call(self._inner.doubt, why, *changes, **commit)

    async def not_done(self, why: str, *changes: Change, **commit: Any) -> Checkpoint | None:
        """As `Effect.not_done`."""
        return await self._thread._call(self._inner.not_done, why, *changes, **commit)

    async def retry(self, why: str, timeout_s: float | None = None) -> None:
        """As `Effect.retry`."""
        await self._thread._call(self._inner.retry, why, timeout_s)

    async def __aenter__(self) -> AsyncEffect:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._thread._call(self._inner.__exit__, kind, error, trace)


class AsyncLease:
    """A `Lease` on an event loop."""

    def __init__(self, thread: AsyncThread, lease: Lease) -> None:
        self._thread = thread
        self._inner = lease

    owner = _shared("owner")
    token = _shared("token")
    remaining_s = _shared("remaining_s")
    ttl_s = _shared("ttl_s")

    def __repr__(self) -> str:
        return f"<Async{repr(self._inner)[1:]}"

    async def renew(self, ttl_s: float | None = None) -> None:
        """As `Lease.renew`."""
        await self._thread._call(self._inner.renew, ttl_s)

    async def ensure(self, seconds: float) -> float:
        """As `Lease.ensure`."""
        return await self._thread._call(self._inner.ensure, seconds)

    async def release(self) -> None:
        """As `Lease.release`."""
        await self._thread._call(self._inner.release)

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._thread._call(self._inner.__exit__, kind, error, trace)
