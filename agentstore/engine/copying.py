"""A copy of a store: a directory that opens like one which was closed, with everything folded in.

LMDB writes the data file itself, from a read transaction: a second descriptor of an open data file would drop LMDB's
locks when it is closed. The log stays empty: base has all of it.
"""

from __future__ import annotations

import os

import lmdb

from agentstore.engine.base import Base
from agentstore.engine.files import Files
from agentstore.engine.format import encode_format
from agentstore.engine.lmdbfile import translate_lmdb
from agentstore.engine.parts import BASE, FORMAT, WAL
from agentstore.errors import DiskFull

ROOM_BYTES = 2 * 1024 * 1024
"""Needed beside the data file: FORMAT, and what the first open makes (locks, control, an empty tail)."""


def copy_bytes(base: Base) -> int:
    """Size of the data file that `write_copy` makes of `base` as it is now, in bytes: its pages without the free ones.
    O(1)."""
    txn = base.begin()
    try:
        stat = txn.stat()
    finally:
        txn.abort()
    pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
    return int((pages + 2) * stat["psize"])


def write_copy(files: Files, base: Base, path: str, uuid: bytes) -> int:
    """Make a store of all that `base` holds in the empty directory `path`, synced; the size of its data file in bytes.

    FORMAT comes last: without it the directory is not a store. `DiskFull` before anything is written if there is too
    little room; else what went wrong as an `OSError`. O(base), one read transaction.
    """
    wanted = copy_bytes(base) + ROOM_BYTES
    free = files.free_bytes(path)
    if free < wanted:
        raise DiskFull(f"{path} needs {wanted:,} bytes and {free:,} are free; nothing was copied")
    size = _copy_base(files, base, os.path.join(path, BASE))
    files.make_directory(os.path.join(path, WAL))
    _write_format(files, os.path.join(path, FORMAT), uuid)
    files.sync_directory(path)
    return size


def _copy_base(files: Files, base: Base, path: str) -> int:
    fd = files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        try:
            base.env.copyfd(fd, compact=True)
        except lmdb.Error as error:
            # Positive codes are the system's, of the file that is written; LMDB's own are of what it read.
            code = getattr(error, "code", 0)
            if code > 0:
                raise OSError(code, os.strerror(code), path) from error
            raise translate_lmdb(error, base.path) from error
        files.fdatasync(fd)
        return files.size(fd)
    finally:
        files.close(fd)


def _write_format(files: Files, path: str, uuid: bytes) -> None:
    fd = files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        files.pwrite(fd, encode_format(uuid), 0)
        files.fdatasync(fd)
    finally:
        files.close(fd)
