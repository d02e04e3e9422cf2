"""The one daemon thread of an open engine: what can wait until after the commit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from agentstore.errors import AgentStoreError

logger = logging.getLogger("agentstore")

POLL_S = 0.5
"""How long it sleeps when nobody pokes it: within this time a process notices that another poisoned the store."""
BUSY_S = 0.02
"""The pause between two rounds that found something to do."""
READERS_EVERY_S = 30.0


class Background:
    """Calls jobs in turn, each a short slice that says whether it did something. Stopped before fork and close."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: list[Callable[[], bool]] = []
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, job: Callable[[], bool]) -> None:
        self._jobs.append(job)

    def remove(self, job: Callable[[], bool]) -> None:
        if job in self._jobs:
            self._jobs.remove(job)

    def poke(self) -> None:
        """Look for work now."""
        self._wake.set()

    def start(self) -> None:
        self._stopping.clear()
        if self._thread is not None and self._thread.is_alive():
            return
        thread = threading.Thread(target=self._run, name=f"agentstore-{self._name}", daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """Return once no job runs. From a job itself: it ends after that job."""
        self._stopping.set()
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            self._thread = None

    @property
    def is_current_thread(self) -> bool:
        return self._thread is threading.current_thread()

    def _run(self) -> None:
        while not self._stopping.is_set():
            busy = False
            for job in list(self._jobs):
                if self._stopping.is_set():
                    return
                try:
                    busy = job() or busy
                except AgentStoreError as error:
                    # Whoever commits next meets the same error and is told; here nobody is.
                    logger.warning("background work of the store failed: %s", error)
                except Exception:
                    logger.exception("background work of the store failed")
            self._wake.wait(BUSY_S if busy else POLL_S)
            self._wake.clear()


class Every:
    """A job that runs its function at most once in so many seconds."""

    def __init__(self, seconds: float, fn: Callable[[], object]) -> None:
        self._seconds = seconds
        self._fn = fn
        self._next = time.monotonic() + seconds

    def __call__(self) -> bool:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._seconds
            self._fn()
        return False
