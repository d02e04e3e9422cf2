"""The one seam between the engine and the operating system.

Every system call of the engine goes through a `Files` object (LMDB's own calls
excepted), so that a test can stand in for the disk: fail the n-th call, cut the power,
tear a write. What processes share beside files (LMDB's environments, words of shared memory,
a wait for another process) is handed out here too, so that a test can say who runs when.
Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

import lmdb

from agentstore.errors import DiskFull, OutOfResources, StorePermissionError, UnsupportedPlatform

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
ZEROS = bytes(256 * 1024)

NETWORK_FILE_SYSTEMS = frozenset(
    "nfs nfs4 cifs smb smb2 smb3 smbfs 9p afs ceph lustre gfs2 ocfs2 glusterfs beegfs fuse.sshfs fuse.glusterfs "
    "fuse.s3fs fuse.rclone fuse.gcsfuse webdav davfs".split()
)
"""File systems whose locks or syncs do not reach every host that can write."""

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})

_sync_data: Callable[[int], object]
if sys.platform == "darwin":
    # fsync there does not flush the drive, and there is no fdatasync.
    def _sync_data(fd: int) -> object:
        return fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
elif sys.platform == "win32":
    raise UnsupportedPlatform("agentstore runs on Linux and macOS; Windows has none of the locks it is built on")
else:
    _sync_data = os.fdatasync


def _unescape(field: str) -> str:
    """mountinfo writes blanks, tabs, newlines and backslashes as octal escapes."""
    for code in ("040", "011", "012", "134"):
        field = field.replace("\\" + code, chr(int(code, 8)))
    return field


_advise: Callable[[int, int, int, int], object] | None = getattr(os, "posix_fadvise", None)


class Files:
    """The real system calls. Stateless; safe for any number of threads.

    All methods raise `OSError` as the system call does, but for `pwrite`, which loops
    on short writes.
    """

    # --- files -----------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        """A descriptor of `path`, mode 0600 if it is made; not inherited over exec."""
        return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes; less only at the end of the file (the kernel may cut a read at 2 GiB)."""
        data = os.pread(fd, size, offset)
        if len(data) == size or not data:
            return data
        parts = [data]
        got = len(data)
        while got < size:
            more = os.pread(fd, size - got, offset + got)
            if not more:
                break
            parts.append(more)
            got += len(more)
        return b"".join(parts)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data`."""
        done = os.pwrite(fd, data, offset)
        while done < len(data):
            more = os.pwrite(fd, memoryview(data)[done:], offset + done)
            if more == 0:
                raise OSError(errno.EIO, "pwrite wrote nothing")
            done += more

    def start_writing(self, fd: int, size: int, offset: int) -> None:
        """Have the kernel begin to write these bytes to the disk, without waiting, so that a later sync waits less.

        A hint: the kernel may do the same at any moment by itself, and an error of the disk is told by the sync.
        """
        if _advise is not None:
            try:
                _advise(fd, offset, size, os.POSIX_FADV_DONTNEED)
            except OSError:
                pass  # not supported there, or not allowed

    def fdatasync(self, fd: int) -> None:
        """Return once the data of `fd` is on stable storage."""
        _sync_data(fd)

    def zero_fill(self, fd: int, size: int) -> None:
        """Write `size` zero bytes from the start. posix_fallocate would leave the syncs that follow
        as slow as on a growing file: its blocks still have to be converted, in the journal."""
        for at in range(0, size, len(ZEROS)):
            self.pwrite(fd, memoryview(ZEROS)[: min(len(ZEROS), size - at)], at)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def identity(self, fd: int) -> tuple[int, int]:
        """(device, inode) of an open file."""
        status = os.fstat(fd)
        return status.st_dev, status.st_ino

    def same_file(self, fd: int, path: str) -> bool:
        """Whether `path` still names the file open as `fd`."""
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self.identity(fd)

    # --- names -----------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        """False only if it is known not to be there: what may not be looked at, or cannot be read, is an `OSError`."""
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def path_identity(self, path: str) -> tuple[int, int]:
        status = os.stat(path)
        return status.st_dev, status.st_ino

    def file_size(self, path: str) -> int:
        return os.stat(path).st_size

    def allocated_bytes(self, path: str) -> int:
        """Size of a file in blocks of the disk; 0 if it is not there, or a directory."""
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return 0
        return 0 if stat.S_ISDIR(status.st_mode) else status.st_blocks * 512

    def names(self, path: str) -> list[str]:
        """Names in a directory, sorted, so that runs repeat."""
        return sorted(os.listdir(path))

    def make_directory(self, path: str) -> None:
        os.mkdir(path, DIRECTORY_MODE)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def remove(self, path: str) -> None:
        """Unlink if it is there."""
        try:
            self.unlink(path)
        except FileNotFoundError:
            pass

    def sync_directory(self, path: str) -> None:
        """Make created, renamed and removed names of `path` durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def read_only_file_system(self, path: str) -> bool:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)

    def free_bytes(self, path: str) -> int:
        """Room for more on the file system that holds `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def file_system(self, path: str) -> str:
        """The type of the file system that holds `path` (``ext4``), or an empty text where it is not known."""
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
                rows = [line.split(" ") for line in lines]
        except OSError:
            return ""
        real = os.path.realpath(path)
        best, found = -1, ""
        for row in rows:
            point = _unescape(row[4])
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            # Later mounts cover earlier ones at the same point.
            if inside and len(point) >= best and "-" in row:
                best, found = len(point), row[row.index("-") + 1]
        return found

    # --- locks and memory ------------------------------------------------------------

    def lock(self, fd: int, *, shared: bool = False, wait: bool = True) -> bool:
        """flock; False if `wait` is off and somebody holds it. Interrupted calls are made again by Python."""
        flags = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        if wait:
            fcntl.flock(fd, flags)
            return True
        try:
            fcntl.flock(fd, flags | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)

    def map(self, fd: int, size: int) -> mmap.mmap:
        """The first `size` bytes of `fd`, shared and writable; the caller made sure that the blocks are there."""
        return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)

    def sync_map(self, page: mmap.mmap) -> None:
        page.flush()

    def words(self, page: mmap.mmap) -> Any:
        """The aligned 64-bit words of a mapped page, each read and written whole; to be released before the page."""
        return memoryview(page).cast("Q")

    def environment(self, path: str, **options: Any) -> Any:
        """An open LMDB environment. `lmdb.Error`."""
        return lmdb.open(path, **options)

    def pause(self, shortest_s: float, longest_s: float) -> None:
        """Wait for another process, which does not say when it is done."""
        time.sleep(random.uniform(shortest_s, longest_s))


_default = Files()


def default_files() -> Files:
    """The system calls that an engine uses which is opened without others."""
    return _default


def set_default_files(files: Files) -> None:
    """Have every engine that this process opens from now on use `files`: for crash injection in a whole program."""
    global _default  # noqa: PLW0603 - the one seam for programs that open their store themselves
    _default = files


def translate(error: OSError, what: str) -> Exception | None:
    """The typed error for what is not a failed disk: DiskFull, StorePermissionError, or None for the rest."""
    if error.errno in FULL_DISK:
        return DiskFull(f"no space left for {what}; nothing was lost, free some and try again")
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return OutOfResources(
            f"the system refused {what}: {error.strerror}; nothing was lost, raise the limit and try again"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorePermissionError(f"no permission for {what}: {error.strerror}: {error.filename or ''}".rstrip(": "))
    return None


def boot_id() -> str:
    """A text that changes with every boot of this machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def pid_namespace() -> int:
    """The inode of this process's pid namespace (0 where there are none)."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
