"""What the offline jobs need of a store that they do not have open yet: alone, with room, one at a time."""

from __future__ import annotations

import os
from types import TracebackType

from agentstore.engine.files import Files, default_files
from agentstore.engine.locks import FileLock
from agentstore.engine.opening import typed
from agentstore.engine.parts import BASE, FORMAT, JOB_LOCK, LOCK, WAL
from agentstore.errors import DiskFull, StoreInUse, StoreNotFound

ROOM_BYTES = 64 * 1024 * 1024
"""A job needs so much beside a second base.mdb: its log."""


class JobLock:
    """Held by the one offline job that may run on a store. `StoreInUse`, `StoreNotFound`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock: FileLock | None = None

    def __enter__(self) -> None:
        files = default_files()
        try:
            if not files.exists(os.path.join(self._path, FORMAT)):
                raise StoreNotFound(f"there is no store at {self._path}")
            lock = FileLock(files, os.path.join(self._path, JOB_LOCK))
            try:
                free = lock.acquire(wait=False)
            except OSError:
                lock.close()
                raise
        except OSError as error:
            raise typed(error, self._path) from error
        if not free:
            lock.close()
            raise StoreInUse(f"another offline job works on the store {self._path}; wait until it is done")
        self._lock = lock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lock is not None
        self._lock.release()
        self._lock.close()


def require_alone(path: str) -> None:
    """`StoreInUse` if somebody has the store open, this process included."""
    files = default_files()
    try:
        if not files.exists(os.path.join(path, LOCK)):
            return  # nobody can have it open
        fd = files.open(os.path.join(path, LOCK), os.O_RDWR)
        try:
            if not files.lock(fd, wait=False):
                raise StoreInUse(
                    f"the store {path} is open: this job needs it closed, or --online to do what can be done beside"
                    " others"
                )
        finally:
            files.close(fd)
    except OSError as error:
        raise typed(error, path) from error


def require_room(path: str) -> None:
    """`DiskFull` if there is no room for a second base.mdb and the log of the job."""
    files = default_files()
    try:
        wanted = files.file_size(os.path.join(path, BASE)) + ROOM_BYTES
        free = files.free_bytes(path)
    except OSError as error:
        raise typed(error, path) from error
    if free < wanted:
        raise DiskFull(f"a job on the store {path} needs {wanted:,} bytes and {free:,} are free; nothing was changed")


def disk_bytes(path: str, files: Files | None = None) -> int:
    """What a store takes of the disk, in bytes of allocated blocks. Files that come and go meanwhile may be missed."""
    files = files or default_files()
    total = 0
    for directory in (path, os.path.join(path, WAL)):
        try:
            names = files.names(directory)
        except OSError as error:
            raise typed(error, path) from error
        for name in names:
            total += files.allocated_bytes(os.path.join(directory, name))
    return total
