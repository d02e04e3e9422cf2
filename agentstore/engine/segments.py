"""The files of the WAL directory: found by their headers, made, reused and given up.

Names: ``<16 hex digits>.seg`` is a segment, ``.spare`` one that was zero-filled ahead and
never had a header, ``.making`` one that is being filled. The digits are random and mean
nothing: what a file is, its header says.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from typing import NamedTuple

from agentstore.engine.files import FULL_DISK, Files
from agentstore.engine.segment import (
    FRAMES_AT,
    HEADER_BYTES,
    HEADER_COPY_AT,
    SEGMENT_BYTES,
    Header,
    decode_header,
    encode_header,
    frames_behind,
)
from agentstore.engine.tail import TailPosition
from agentstore.errors import CorruptionError, DiskFull

SPARES_MAX = 1
"""Folded segments that are kept for reuse; the roller unlinks the rest."""

SEGMENT, SPARE, MAKING = ".seg", ".spare", ".making"


class Found(NamedTuple):
    """A segment file with a valid header."""

    header: Header
    file: int


class Segments:
    """The WAL directory of one open store. Safe for threads; who may write what is the caller's to know."""

    def __init__(self, files: Files, directory: str, uuid: bytes) -> None:
        self.files = files
        self.directory = directory
        self.uuid = uuid
        self._fds: dict[int, int] = {}
        self._last_lsn: dict[tuple[int, int], int] = {}
        self._mutex = threading.Lock()

    def path(self, file: int, suffix: str = SEGMENT) -> str:
        return os.path.join(self.directory, f"{file:016x}{suffix}")

    def names(self, suffix: str) -> list[int]:
        """The numbers in the names of all files with this suffix."""
        found = []
        for name in self.files.names(self.directory):
            stem, dot, end = name.partition(".")
            if dot + end == suffix and len(stem) == 16:
                try:
                    found.append(int(stem, 16))
                except ValueError:
                    continue
        return found

    # --- reading ---------------------------------------------------------------------

    def fd(self, file: int) -> int | None:
        """A cached descriptor of a segment, or None if there is no such file."""
        fd = self._fds.get(file)
        if fd is not None:
            return fd
        with self._mutex:
            return self._open(file)

    def _open(self, file: int) -> int | None:
        """The same, for who holds the mutex: only then nobody closes the descriptor of a segment that is not active."""
        fd = self._fds.get(file)
        if fd is None:
            self._close_unlinked()
            try:
                fd = self._fds[file] = self.files.open(self.path(file), os.O_RDWR)
            except FileNotFoundError:
                return None
        return fd

    def _close_unlinked(self) -> None:
        """Give up descriptors of files that somebody unlinked: all of them were folded."""
        there = set(self.names(SEGMENT))
        for file in [file for file in self._fds if file not in there]:
            self.files.close(self._fds.pop(file))

    def headers(self) -> list[Found]:
        """Every segment with a valid header, by number."""
        found = []
        for file in self.names(SEGMENT):
            header = self.header(file)
            if header is not None:
                found.append(Found(header, file))
        return sorted(found, key=lambda each: each.header.number)

    def header(self, file: int) -> Header | None:
        with self._mutex:
            fd = self._open(file)
            if fd is None:
                return None
            for at in (0, HEADER_COPY_AT):
                header = decode_header(self.files.pread(fd, HEADER_BYTES, at), self.uuid)
                if header is not None:
                    return header
        return None

    def read(self, file: int) -> bytes:
        """All bytes of a segment."""
        data = self._read(file)
        if data is None:
            raise CorruptionError(
                f"segment file {self.path(file)} vanished while it was needed; run 'agentstore verify'"
            )
        return data

    def _read(self, file: int) -> bytes | None:
        with self._mutex:
            fd = self._open(file)
            return None if fd is None else self.files.pread(fd, self.files.size(fd), 0)

    def last_lsn(self, found: Found) -> int:
        """The highest LSN that stands in a retired segment, torn frames included. O(size) once: it is remembered, so
        never ask it of a segment that somebody may still write."""
        key = (found.file, found.header.epoch)
        known = self._last_lsn.get(key)
        if known is None:
            # A roller may have given it up since its header was read: then nothing in it is needed.
            frames = frames_behind(self._read(found.file) or b"", FRAMES_AT, found.header.epoch)
            known = max((frame.lsn for frame in frames), default=found.header.previous_lsn)
            known = self._last_lsn[key] = max(known, found.header.previous_lsn)
        return known

    def remember_last(self, file: int, epoch: int, lsn: int) -> None:
        """What the roller knows of the segment it leaves, so that nobody has to scan it."""
        self._last_lsn[file, epoch] = lsn

    def reusable(self, found: Found, applied_lsn: int, active: int) -> bool:
        """Whether nothing in this segment is needed any more."""
        return found.file != active and found.header.previous_lsn <= applied_lsn and self.last_lsn(found) <= applied_lsn

    # --- writing (the roller, holding the writers' lock) ------------------------------

    def take(self, size: int, applied_lsn: int, active: int) -> int:
        """A zero-filled, synced file of `size` bytes without a header: prepared, reused or new.

        Gives up what is folded and not worth keeping on the way.
        """
        reusable = [found for found in self.headers() if self.reusable(found, applied_lsn, active)]
        fitting = [found for found in reusable if found.header.size == SEGMENT_BYTES]
        spares = self.names(SPARE)
        taken: int | None = None
        if size == SEGMENT_BYTES and spares:
            taken = spares[0]
            self._adopt(taken)
        elif size == SEGMENT_BYTES and fitting:
            taken = fitting.pop(0).file
            self._fill(taken, size)
        keep = {found.file for found in fitting[:SPARES_MAX]}
        for found in reusable:
            if found.file != taken and found.file not in keep:
                self._unlink(found.file)
        if taken is None:
            taken = secrets.randbits(64)
            self._fill(taken, size)
            self.files.sync_directory(self.directory)
        return taken

    def _adopt(self, file: int) -> None:
        """Make a segment's file of a spare. Opened first: the rename, once made, is not to be undone."""
        fd = self.files.open(self.path(file, SPARE), os.O_RDWR)
        try:
            with self._mutex:  # or `_close_unlinked` closes what has no name of a segment yet
                self.files.rename(self.path(file, SPARE), self.path(file))
                self._fds[file] = fd
        except BaseException:
            self.files.close(fd)
            raise
        self.files.sync_directory(self.directory)

    def _fill(self, file: int, size: int) -> None:
        path = self.path(file)
        try:
            fd = self.files.open(path, os.O_RDWR | os.O_CREAT)
            with self._mutex:
                stale = self._fds.pop(file, None)
                self._fds[file] = fd
                if stale is not None:
                    self.files.close(stale)
            self.files.zero_fill(fd, size)
            self.files.fdatasync(fd)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            # No header was written: this is not part of the log yet, so nobody has to be
            # poisoned; but after a failed sync what is on disk is not known: never this file again.
            self._unlink(file)
            raise DiskFull(
                f"no space left for a WAL segment of {size} bytes in {self.directory}; nothing was lost"
            ) from error

    def _unlink(self, file: int) -> None:
        with self._mutex:
            fd = self._fds.pop(file, None)
            if fd is not None:
                self.files.close(fd)
        self.files.remove(self.path(file))
        for key in [key for key in list(self._last_lsn) if key[0] == file]:
            self._last_lsn.pop(key, None)

    def write_header(self, file: int, header: Header) -> int:
        """Both copies. Returns the descriptor: once that is synced the segment is part of the log."""
        fd = self.fd(file)
        if fd is None:
            raise OSError(errno.EIO, "a new segment vanished", self.path(file))
        raw = encode_header(header)
        self.files.pwrite(fd, raw, 0)
        self.files.pwrite(fd, raw, HEADER_COPY_AT)
        return fd

    # --- the background, and recovery -------------------------------------------------

    def prepare_spare(self) -> bool:
        """Zero-fill a file ahead of the roll, under a name of its own. True if one was made; no space: False.

        `OSError` of a failed disk: a sync that failed is reported once, so whoever gets it must make it known.
        """
        if self.names(SPARE) or self.names(MAKING):
            return False
        file = secrets.randbits(64)
        making, spare = self.path(file, MAKING), self.path(file, SPARE)
        try:
            fd = self.files.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                self.files.zero_fill(fd, SEGMENT_BYTES)
                self.files.fdatasync(fd)
            finally:
                self.files.close(fd)
            self.files.rename(making, spare)
            self.files.sync_directory(self.directory)
        except OSError as error:
            self.files.remove(making)
            self.files.remove(spare)
            if error.errno not in FULL_DISK:
                raise
            return False
        return True

    def remove_strays(self) -> None:
        """What a killed process left half made. Only recovery calls this: nobody else has the store open."""
        for suffix in (MAKING, SPARE):
            for file in self.names(suffix):
                self.files.remove(self.path(file, suffix))
        for file in self.names(SEGMENT):
            if self.header(file) is None:
                # Recovery has replayed the whole log without it: it never had a header, or was being reused.
                self._unlink(file)

    def remove_all(self) -> None:
        """The log is empty: every frame is in base. Only a clean close calls this."""
        for suffix in (SEGMENT, SPARE, MAKING):
            for file in self.names(suffix):
                if suffix == SEGMENT:
                    self._unlink(file)
                else:
                    self.files.remove(self.path(file, suffix))

    def bytes(self) -> int:
        """Size of all files of the log together."""
        total = 0
        for suffix in (SEGMENT, SPARE, MAKING):
            for file in self.names(suffix):
                try:
                    total += self.files.file_size(self.path(file, suffix))
                except FileNotFoundError:
                    continue
        return total

    def live_bytes(self, applied_lsn: int, position: TailPosition) -> int:
        """Size of the segments that a replay would still read."""
        total = 0
        for found in self.headers():
            if found.header.number > position.segment:
                live = True  # rolled to since: it is being written, and what is in it now is not its last LSN
            elif found.file == position.file:
                live = position.lsn > applied_lsn
            else:
                live = not self.reusable(found, applied_lsn, position.file)
            if live:
                total += found.header.size
        return total

    def close(self) -> None:
        with self._mutex:
            fds, self._fds = self._fds, {}
        for fd in fds.values():
            self.files.close(fd)
