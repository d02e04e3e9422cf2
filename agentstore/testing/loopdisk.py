"""A real file system on a loop device, whose power can be cut and whose space can run out.

Needs root, ``losetup``/``mount`` and the mkfs of the file system; `why_not` says what is missing::

    with LoopDisk() as disk:
        ...                     # use disk.directory
        disk.cut_power()        # what was not synced is gone; the file system answers EIO
        disk.replug()           # mounted again: its journal is replayed
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN are the same number."""
WITHOUT_FLUSHING_THE_JOURNAL = 2

SYNC_FILE_RANGE_WRITE = 2
"""Start writing dirty pages back, wait for nothing."""

UNMOUNT_TRIES = 100
"""Of 50 ms each: a process that was killed gives its files up a moment later."""

MKFS = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
}
SIZE_MIB = {"ext4": 256, "xfs": 512}
"""Sparse; mkfs.xfs refuses less than 300 MiB."""


class DiskError(Exception):
    """A command about a loop disk failed; the message has its output."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DiskError(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr.strip()}")


def why_not(kind: str = "ext4") -> str | None:
    """What is missing for a `LoopDisk` of this kind here, or None if one can be made. Tries it once."""
    if os.geteuid() != 0:
        return "mounting needs root"
    for tool in (MKFS[kind][0], "mount", "umount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    try:
        with LoopDisk(kind):
            return None
    except (DiskError, OSError) as error:
        return f"no {kind} on a loop device here: {error}"


class LoopDisk:
    """A mounted file system in an image file. A context manager; for one process.

    `size_mib` is what the file system believes to have. With `real_mib` the image lies on a tmpfs of only
    that size: the disk is full where the file system does not expect it, when data is written back.
    """

    def __init__(self, kind: str = "ext4", *, size_mib: int | None = None, real_mib: int | None = None) -> None:
        self._kind = kind
        self._size_mib = size_mib or SIZE_MIB[kind]
        self._real_mib = real_mib
        self._home = tempfile.mkdtemp(prefix="agentstore-disk-")
        self._store = os.path.join(self._home, "image")
        self.directory = os.path.join(self._home, "mounted")
        """Where the file system is mounted."""
        self.cuts = 0
        self._mounted: list[str] = []

    @property
    def image(self) -> str:
        """The file that stands for the disk."""
        return os.path.join(self._store, "disk")

    def __enter__(self) -> LoopDisk:
        try:
            os.mkdir(self._store)
            os.mkdir(self.directory)
            if self._real_mib is not None:
                _run("mount", "-t", "tmpfs", "-o", f"size={self._real_mib}M", "tmpfs", self._store)
                self._mounted.append(self._store)
            with open(self.image, "wb") as file:
                file.truncate(self._size_mib << 20)
            _run(*MKFS[self._kind], self.image)
            self.plug()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for point in reversed(self._mounted):
            # Lazily: whatever went wrong, nothing of it stays behind.
            subprocess.run(["umount", "-l", point], capture_output=True, check=False)
        self._mounted.clear()
        shutil.rmtree(self._home, ignore_errors=True)

    def plug(self, *options: str) -> None:
        """Mount, with mount options such as ``ro``."""
        _run("mount", "-o", ",".join(["loop", *options]), self.image, self.directory)
        self._mounted.append(self.directory)

    def unplug(self) -> None:
        """Unmount. Nothing may use it any more (killed processes get five seconds to go)."""
        for left in reversed(range(UNMOUNT_TRIES)):
            try:
                _run("umount", self.directory)
                break
            except DiskError:
                if not left:
                    raise
                time.sleep(0.05)
        self._mounted.remove(self.directory)

    def replug(self, *options: str) -> None:
        """Unmount and mount again: after a power cut this replays the journal."""
        self.unplug()
        self.plug(*options)

    def grow(self, real_mib: int) -> None:
        """Give the tmpfs under the image more room."""
        _run("mount", "-o", f"remount,size={real_mib}M", self._store)

    def cut_power(self) -> None:
        """Nothing reaches the disk from here on, not even the journal; what needs it fails with EIO."""
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("<I", WITHOUT_FLUSHING_THE_JOURNAL))
        finally:
            os.close(fd)
        self.cuts += 1


@contextmanager
def tmpfs(size_mib: int) -> Iterator[str]:
    """A directory in memory with room for only so much. Needs root."""
    home = tempfile.mkdtemp(prefix="agentstore-tmpfs-")
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size_mib}M", "tmpfs", home)
        try:
            yield home
        finally:
            subprocess.run(["umount", "-l", home], capture_output=True, check=False)
    finally:
        os.rmdir(home)


def why_no_tmpfs() -> str | None:
    """What is missing for a `tmpfs` here, or None if one can be made."""
    try:
        with tmpfs(1):
            return None
    except (DiskError, OSError) as error:
        return str(error)


def write_back_some(directory: str, rng: random.Random, *, pages: int = 8) -> None:
    """Have the kernel write random dirty pages of the files in `directory` back, in no order, as it may do at any time.

    So that a power cut leaves holes: later pages of a file that are on the disk and earlier ones that are not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for name in os.listdir(directory):
        try:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
        except OSError:
            continue
        try:
            page_count = os.fstat(fd).st_size // 4096
            for _ in range(min(pages, page_count)):
                at = rng.randrange(page_count) * 4096
                libc.sync_file_range(fd, ctypes.c_int64(at), ctypes.c_int64(4096), SYNC_FILE_RANGE_WRITE)
        finally:
            os.close(fd)
