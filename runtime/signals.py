"""Running a loop to its end from sync code, and stopping it in good order.

SIGTERM and Ctrl-C cancel the run. A cancelled run finishes the commit that it is in, stores the
results of tools that return within its grace, gives its lease back, and ends: with
``SystemExit(0)`` after SIGTERM, with ``KeyboardInterrupt`` (exit status 130 in a shell)
after Ctrl-C. A second signal cuts the grace short. Nothing depends on this for safety: a
process that is simply killed is carried on just the same.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main()`` in an event loop of its own. RuntimeError in a thread whose loop runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise RuntimeError(
            "this thread runs an event loop already: `await agent.arun(...)` instead of `agent.run(...)`"
        )
    terminated: list[int] = []

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            terminated.append(signal.SIGTERM)
            task.cancel()

        with _on_sigterm(terminate):
            return await main()

    try:
        # Ctrl-C is the Runner's: it cancels the task and raises KeyboardInterrupt once that has ended.
        with asyncio.Runner() as runner:
            result = runner.run(guarded())
    except asyncio.CancelledError:
        if not terminated:
            raise
    if terminated:  # also when the run had just ended by itself: the process was asked to go
        raise SystemExit(0)
    return result


@contextmanager
def _on_sigterm(handler: Callable[[], None]) -> Iterator[None]:
    """Call `handler` in the loop on SIGTERM, if this is the main thread and nobody else handles that signal."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not mine:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, handler)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
