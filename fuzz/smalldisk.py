"""Small disks that can be filled to the last byte: ext4 on a loop device, a tmpfs, and a thin one.

A thin disk is an ext4 that believes to have more room than the disk under it has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agentstore.testing.loopdisk import LoopDisk, tmpfs, why_no_tmpfs, why_not

DISKS = ("ext4", "tmpfs", "thin")
SIZE_MIB = 24
THIN_MIB, THIN_REAL_MIB, THIN_GROWN_MIB = 96, 24, 120
THIN_SLACK = 256 * 1024
"""For the journal of a thin disk's file system: without room for that it makes itself read-only at once."""
CHUNK = bytes(64 * 1024)


def why_no_disk(kind: str) -> str | None:
    """What is missing here for a small disk of this kind, or None. Makes one."""
    no_loop = why_not("ext4") if kind != "tmpfs" else None
    return no_loop or (why_no_tmpfs() if kind != "ext4" else None)


@dataclass
class SmallDisk:
    """A disk that can be filled, and given room again."""

    directory: str
    thin: LoopDisk | None = None

    @property
    def _ballast(self) -> str:
        return os.path.join(self.directory, "ballast")

    def fill(self, room: int) -> None:
        """Leave so many bytes: what the file system says is free is not what root may still use."""
        fd = os.open(self._ballast, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            if self.thin is not None:
                self._write(fd, max(_free(os.path.dirname(self.thin.image)) - THIN_SLACK - room, 0))
            else:
                taken = self._write(fd, 1 << 40)
                os.ftruncate(fd, max(taken - room, 0))
            os.fsync(fd)
        except OSError:
            pass  # a thin disk had no room for what its file system notes about it
        finally:
            os.close(fd)

    def _write(self, fd: int, size: int) -> int:
        """Write so many bytes, or as many as there is room for; how many."""
        taken = 0
        for chunk in (len(CHUNK), 4096):
            try:
                while taken + chunk <= size:
                    taken += os.write(fd, CHUNK[:chunk])
            except OSError:
                continue
        return taken

    def free(self) -> None:
        """Give room again. A thin disk: only once nobody uses it."""
        if self.thin is not None:
            self.thin.unplug()
            self.thin.grow(THIN_GROWN_MIB)
            self.thin.plug()
        if os.path.exists(self._ballast):
            os.unlink(self._ballast)


def _free(directory: str) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


@contextmanager
def small_disk(kind: str) -> Iterator[SmallDisk]:
    if kind == "tmpfs":
        with tmpfs(SIZE_MIB) as directory:
            yield SmallDisk(directory)
    elif kind == "thin":
        with LoopDisk("ext4", size_mib=THIN_MIB, real_mib=THIN_REAL_MIB) as disk:
            yield SmallDisk(disk.directory, disk)
    else:
        with LoopDisk(kind, size_mib=SIZE_MIB) as disk:
            yield SmallDisk(disk.directory)
