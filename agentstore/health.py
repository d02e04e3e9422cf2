"""Measurements of the machine under a store: what `agentstore doctor` looks at."""

from __future__ import annotations

import os
import platform
import stat
import time
from typing import Final, NamedTuple

import cbor2
import lmdb
import zstandard

from agentstore.codec import crc
from agentstore.engine.files import NETWORK_FILE_SYSTEMS, default_files
from agentstore.engine.lmdbfile import LMDB_09

SYNC_BYTES: Final = 4096
"""Written before each measured sync, in bytes: about what a commit of a chat message takes."""

_SCRATCH_BYTES: Final = 1024 * 1024
_CHECKSUM_BYTES: Final = 1024 * 1024


class Checksum(NamedTuple):
    """The CRC-32C in use."""

    implementation: str
    """``google-crc32c``, ``crcmod`` or ``crcmod without its C extension``."""
    bytes_per_s: float


class Ownership(NamedTuple):
    """Who may use the files of a directory."""

    mode: int
    """Permission bits of the directory."""
    open_files: list[str]
    """Names of files that others than the owner may read or write."""
    foreign: list[str]
    """Names that belong to another user than the directory does; ``.`` if that is not this process's."""


def checksum() -> Checksum:
    """Which CRC-32C is used and how fast it is here. About 10 ms, 150 ms without any C extension.

    >>> checksum().bytes_per_s > 0
    True
    """
    name = "google-crc32c" if crc.HAVE_FAST else "crcmod"
    if not crc.HAVE_FAST:
        try:
            import crcmod._crcfunext  # noqa: F401 - whether it is there
        except ImportError:
            name = "crcmod without its C extension"
    data = bytes(_CHECKSUM_BYTES)
    began = time.perf_counter()
    rounds = 0
    while rounds == 0 or time.perf_counter() - began < 0.01:
        crc.crc32c(data)
        rounds += 1
    return Checksum(name, rounds * len(data) / (time.perf_counter() - began))


def versions() -> dict[str, str]:
    """Versions of Python and of what the store's bytes go through."""
    return {
        "python": platform.python_version(),
        "lmdb": ".".join(str(part) for part in lmdb.version(lib_version=LMDB_09)),
        "py-lmdb": str(lmdb.__version__),
        "zstandard": str(zstandard.__version__),
        "zstd": ".".join(str(part) for part in zstandard.ZSTD_VERSION),
        "cbor2": _version_of(cbor2),
    }


def _version_of(module: object) -> str:
    from importlib import metadata

    return str(getattr(module, "__version__", "")) or metadata.version("cbor2")


def sync_seconds(directory: str, count: int) -> list[float]:
    """Seconds that each of `count` syncs takes, of `SYNC_BYTES` overwritten in a file in `directory`, as a commit does.

    The file has no name, so that nothing stays of it. `OSError` as the system raises it.
    """
    files = default_files()
    name = os.path.join(directory, f".agentstore-doctor.{os.getpid()}")
    fd = files.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        files.unlink(name)
        files.zero_fill(fd, _SCRATCH_BYTES)
        files.fdatasync(fd)
        block = os.urandom(SYNC_BYTES)
        taken = []
        for index in range(count):
            began = time.perf_counter()
            files.pwrite(fd, block, index * SYNC_BYTES % _SCRATCH_BYTES)
            files.fdatasync(fd)
            taken.append(time.perf_counter() - began)
        return taken
    finally:
        files.close(fd)


def file_system(directory: str) -> tuple[str, bool]:
    """(type of the file system, whether it is one of a network). An empty type where it is not known."""
    kind = default_files().file_system(directory)
    return kind, kind in NETWORK_FILE_SYSTEMS


def free_bytes(directory: str) -> int:
    """Room for more where `directory` is. `OSError`."""
    return default_files().free_bytes(directory)


def ownership(directory: str) -> Ownership:
    """Permissions and owners of a directory and the files in it. `OSError`. O(files)."""
    top = os.stat(directory)
    open_files, foreign = [], []
    if hasattr(os, "geteuid") and top.st_uid != os.geteuid():
        foreign.append(".")
    for name in sorted(os.listdir(directory)):
        try:
            status = os.lstat(os.path.join(directory, name))
        except FileNotFoundError:
            continue  # others use the store
        if stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) & 0o077:
            open_files.append(name)
        if status.st_uid != top.st_uid:
            foreign.append(name)
    return Ownership(stat.S_IMODE(top.st_mode), open_files, foreign)
