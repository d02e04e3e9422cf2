"""A lock between processes (flock) with a thread lock in front."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from agentstore.engine.files import Files


def unlock(files: Files, fd: int) -> None:
    """Free a flock, also when a signal's handler raises just before: what one process keeps, all others wait for."""
    try:
        files.unlock(fd)
    except BaseException:
        files.unlock(fd)
        raise


class FileLock:
    """flock is held per open file, so threads of one process need the lock in front.

    A holder that dies frees it (the kernel closes its descriptor); one that is stopped
    with SIGSTOP keeps it.
    """

    __slots__ = ("_fd", "_files", "path", "threads")

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self.path = path
        self.threads = threading.Lock()
        """The lock in front: who holds it may look around before it goes to the kernel."""
        self._fd = files.open(path, os.O_RDWR | os.O_CREAT)

    def acquire(self, *, wait: bool = True) -> bool:
        """True once held; False if `wait` is off and somebody else holds it."""
        if not self.threads.acquire(blocking=wait):
            return False
        try:
            held = self._files.lock(self._fd, wait=wait)
        except BaseException:
            # Perhaps interrupted just as it was had; to free what is not held does nothing.
            unlock(self._files, self._fd)
            self.threads.release()
            raise
        if not held:
            self.threads.release()
        return held

    def release(self) -> None:
        try:
            unlock(self._files, self._fd)
        finally:
            self.threads.release()

    @property
    def fd(self) -> int:
        """The descriptor to flock, for who holds `threads`: the part between processes."""
        return self._fd

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def close(self) -> None:
        """Close the descriptor (which frees the lock unless a forked child has a copy)."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._files.close(fd)
