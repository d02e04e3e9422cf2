"""Calling what users wrote, sync or async, with a limit on its time.

A sync function runs in a thread of its own, a daemon. A pool was weighed and lost: the
interpreter waits for the threads of a pool at exit, so that one hanging tool would keep a
stopped worker alive, and a hanging tool also takes a place in the pool for ever.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any


def start(fn: Callable[..., Any], *args: Any, awaited: bool | None = None, name: str = "call") -> asyncio.Future[Any]:
    """Start ``fn(*args)`` and return the future of its result; needs a running event loop.

    `awaited`: whether it gives a coroutine; None: look. (A wrapper around an async function must say so.)
    Cancelling the future cancels an async function; a thread cannot be stopped, so the
    future of a sync one is merely given up, and what it returns later is dropped.
    """
    if is_async(fn) if awaited is None else awaited:
        return asyncio.ensure_future(_awaited(fn, args))
    return asyncio.ensure_future(_in_thread(fn, args, name))


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling `fn` (a function, a partial, a method, or an object with ``__call__``) gives a coroutine."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004  not a test for callable


async def _awaited(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return await fn(*args)
    except (SystemExit, KeyboardInterrupt) as error:
        raise _as_exception(error) from error


def _as_exception(error: BaseException) -> Exception:
    """An exception that may travel through a future; `SystemExit` and its like would end the event loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(repr(error))


async def _in_thread(fn: Callable[..., Any], args: tuple[Any, ...], name: str) -> Any:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(set_: Callable[[Any], None], value: Any) -> None:
        if not ended.done():
            set_(value)

    def report(set_: Callable[[Any], None], value: Any) -> None:
        try:
            loop.call_soon_threadsafe(deliver, set_, value)
        except RuntimeError:
            pass  # the loop was closed: nobody waits for this call any more

    def work() -> None:
        try:
            value = context.run(fn, *args)
        except BaseException as error:
            report(ended.set_exception, _as_exception(error))
        else:
            report(ended.set_result, value)

    threading.Thread(target=work, name=f"agentstore {name}", daemon=True).start()
    value = await ended
    # A sync wrapper around an async function hands its coroutine over to be awaited here.
    return await value if inspect.isawaitable(value) else value


async def within(future: asyncio.Future[Any], limit_s: float | None) -> bool:
    """Wait until `future` has ended, at most `limit_s` seconds; whether it has. Never raises its exception."""
    if not future.done():
        await asyncio.wait({future}, timeout=limit_s)
    return future.done()


async def stop(future: asyncio.Future[Any], limit_s: float) -> bool:
    """Cancel `future` and wait, at most `limit_s` seconds, until it has ended; whether it has."""
    future.cancel()
    ended = await within(future, limit_s)
    if ended and not future.cancelled():
        future.exception()  # looked at, so that asyncio does not report it as forgotten
    return ended
