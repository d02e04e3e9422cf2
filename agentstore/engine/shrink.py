"""Giving disk space back: LMDB reuses freed pages but never shortens its file, so base is copied and swapped.

Only whoever holds the store's lock exclusively may do this, with base.mdb closed. The copy gets its name once all of it
is on stable storage; killed at any moment, either file is the whole of base, and the next open removes the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lmdb

from agentstore.engine.base import META_KEY
from agentstore.engine.files import Files
from agentstore.engine.lmdbfile import open_environment, translate_lmdb
from agentstore.errors import DiskFull, StoreFailed

WASTE_BYTES_MIN = 256 * 1024
"""Less than so many bytes of free pages are left for later commits."""
CLOSE_COPY_BYTES_MAX = 64 * 1024 * 1024
"""A close copies no more than so many bytes: a second of work. The offline job copies any size."""

COPY_BYTES = 16 * 1024 * 1024
"""Copied in one transaction: its pages are in memory until it ends."""


def shrink(files: Files, path: str, new_path: str, *, always: bool = False) -> bool:
    """Put a copy of `path` without free pages in its place; whether that was done. O(size).

    Without `always` only where free pages are more than a quarter of the file, and the copy is small. DiskFull,
    StoreFailed, OSError: then nothing has changed.
    """
    try:
        # NOSYNC: nothing is written here.
        env = open_environment(files, path, sync=False, create=False)
    except lmdb.Error as error:
        raise translate_lmdb(error, path) from error
    try:
        stat, info = env.stat(), env.info()
        pages = info["last_pgno"] + 1
        used = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] + 2
        size, waste = used * stat["psize"], (pages - used) * stat["psize"]
        if not always and (waste < max(WASTE_BYTES_MIN, size // 3) or size > CLOSE_COPY_BYTES_MAX):
            return False
        if files.free_bytes(os.path.dirname(path)) < size + WASTE_BYTES_MIN:
            raise DiskFull(f"no space left for a copy of {path} ({size} bytes); nothing was lost")
        try:
            _copy(files, env, new_path)
            _compare(files, env, new_path)
        except BaseException:
            files.remove(new_path)
            raise
        finally:
            files.remove(new_path + "-lock")
    except lmdb.Error as error:
        raise translate_lmdb(error, path) from error
    finally:
        env.close()
    files.rename(new_path, path)
    files.sync_directory(os.path.dirname(path))
    return True


def _copy(files: Files, env: Any, new_path: str) -> None:
    """All records in the order of their keys: pages that were half full are full then, unlike in LMDB's own copy."""
    files.remove(new_path)
    files.remove(new_path + "-lock")
    copy = open_environment(files, new_path, sync=False, create=True)
    try:
        with env.begin() as source:
            pairs = source.cursor().iternext()
            more = True
            while more:
                more = _copy_some(copy, pairs)
        copy.sync(True)
    finally:
        copy.close()
    fd = files.open(new_path, os.O_RDWR)
    try:
        # LMDB's own sync is not seen by whoever stands in for the disk.
        files.fdatasync(fd)
    finally:
        files.close(fd)


def _copy_some(copy: Any, pairs: Iterator[tuple[bytes, bytes]]) -> bool:
    """One transaction of bounded size; whether there may be more."""
    left = COPY_BYTES
    with copy.begin(write=True) as target:
        for key, raw in pairs:
            target.put(key, raw, append=True)
            left -= len(raw)
            if left <= 0:
                return True
    return False


def _compare(files: Files, env: Any, new_path: str) -> None:
    """The copy has as many records, and the same record of where in the log it is."""
    copy = open_environment(files, new_path, sync=False, create=False)
    try:
        seen = []
        for each in (env, copy):
            with each.begin() as txn:
                seen.append((txn.stat()["entries"], txn.get(META_KEY)))
        if seen[0] != seen[1]:
            raise StoreFailed(f"the copy of base.mdb at {new_path} is not what it is a copy of; nothing was changed")
    finally:
        copy.close()
