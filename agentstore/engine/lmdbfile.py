"""Opening LMDB files the way this engine needs them, and naming their errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import lmdb
from lmdb import _envid
from lmdb.verify import VerifyError
from lmdb.verify import verify as _verify

from agentstore.engine.files import FULL_DISK, Files, default_files
from agentstore.errors import AgentStoreError, CorruptionError, DiskFull, OutOfResources, StoreFailed, StoreFull

_walk: Callable[..., list[str]] = _verify
_guard: Any = _envid

MAP_BYTES = 1 << 40
"""Size of the memory map of each LMDB file, in bytes: address space, not memory or disk. The same in
every process, since growing a map under others is not safe; past it is `StoreFull`."""

NO_ROOM_BYTES = 1024 * 1024
"""With less than this free a disk is full: a write that found no room for its rest has taken what there was."""

READERS_MAX = 1024
LOCK_BYTES = 128 * 1024
"""LMDB's lock file, allocated in full before LMDB maps it: growing a sparse one on a full disk is a SIGBUS.
LMDB takes its number of reader slots (64 bytes each) from the size that it finds."""

LMDB_09 = 0
"""The wheel bundles LMDB 0.9 and 1.0, whose files cannot read each other."""


def prepare_lock_file(files: Files, path: str) -> None:
    lock = path + "-lock"
    fd = files.open(lock, os.O_RDWR | os.O_CREAT)
    try:
        if files.size(fd) < LOCK_BYTES:
            files.zero_fill(fd, LOCK_BYTES)
            files.fdatasync(fd)
    finally:
        files.close(fd)


def open_environment(
    files: Files, path: str, *, sync: bool, create: bool, map_bytes: int = MAP_BYTES, frozen: bool = False
) -> Any:
    """An LMDB environment for `path`. `frozen`: the file system is read-only, nobody can write."""
    if not frozen:
        prepare_lock_file(files, path)
    return files.environment(
        path,
        map_size=map_bytes,
        subdir=False,
        readonly=frozen,
        lock=not frozen,
        create=create,
        mode=0o600,
        sync=sync,
        metasync=sync,
        map_async=False,
        writemap=False,
        meminit=True,
        readahead=False,
        max_readers=READERS_MAX,
        max_dbs=0,
        max_spare_txns=0,
        lib_version=LMDB_09,
    )


def damage_of(path: str) -> list[str]:
    """What is structurally wrong with an LMDB file that nobody has open, as sentences.

    A walk in pure Python: unlike LMDB itself it cannot be crashed by what it reads. `OSError` if it cannot be read.
    O(size), 80 MB/s.
    """
    try:
        return [f"{path}: {finding}" for finding in _walk(path, subdir=False)]
    except (VerifyError, IsADirectoryError) as error:
        return [f"{path}: {error}"]


def allow_reopening() -> None:
    """For a forked child: let it open files that the environments of its parent, which it may not close, have open.

    LMDB's locks belong to a process, so the child may; but py-lmdb's guard against two environments
    of one file was copied with the parent's memory. The child's keys get its pid, so that the guard still holds among
    its own. (Closing the inherited environments instead would free the reader slots of the parent.)
    """
    inherited = _guard.env_keys
    _guard.env_keys = lambda path, subdir: tuple((*key, os.getpid()) for key in inherited(path, subdir))


def _no_room(path: str) -> bool:
    """LMDB calls it EIO when the disk took the first part of a write and had no room for the rest. A disk that
    really fails while it is full is taken for a full one: the transaction is gone in either case, and the next
    one writes all of its pages itself.
    """
    try:
        return default_files().free_bytes(path) < NO_ROOM_BYTES
    except OSError:
        return False


def translate_lmdb(error: lmdb.Error, path: str) -> AgentStoreError:
    """The typed error for what LMDB raised about `path`."""
    code = getattr(error, "code", 0)
    if isinstance(error, lmdb.MapFullError):
        return StoreFull(
            f"{path} reached the size of its map (MAP_BYTES = {MAP_BYTES}); delete threads, or go on in another store"
        )
    if code in FULL_DISK or (code == errno.EIO and _no_room(path)):
        return DiskFull(f"no space left for {path}; nothing was lost, free some and try again")
    if isinstance(error, lmdb.ReadersFullError) or code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return OutOfResources(f"{path}: {error}; close snapshots or raise the limit, nothing was lost")
    damaged = (
        lmdb.CorruptedError,
        lmdb.PageNotFoundError,
        lmdb.InvalidError,
        lmdb.VersionMismatchError,
        lmdb.MapResizedError,  # the map has one size everywhere: only a damaged meta page names more pages
    )
    if isinstance(error, damaged):
        return CorruptionError(f"{path} is damaged: {error}; run 'agentstore verify', keep a copy of the directory")
    if code == errno.ENOENT:
        return CorruptionError(f"{path} is missing from the store; put it back from a copy")
    return StoreFailed(f"{path}: {error}; close the store in every process and open it again")
