"""Step 6 of a commit: one fdatasync for everybody who wrote before it (group commit).

Across threads by the lock in front, across processes by flock: who gets the lock leads,
the others find their LSN durable when they get it.
"""

from __future__ import annotations

from agentstore.engine.control import DURABLE_LSN, FAILED, SYNCING, WRITING_LSN
from agentstore.engine.locks import unlock
from agentstore.engine.parts import Parts
from agentstore.engine.segment import FRAMES_AT
from agentstore.engine.tail import TailPosition


class Syncer:
    """Makes frames durable and says so in the control page. Safe for threads."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._words = parts.control.words
        self._lock = parts.sync_lock
        self._position = parts.tail.position
        self._fd = parts.segments.fd
        self._files = parts.files
        self._fdatasync = parts.files.fdatasync
        self.written: TailPosition | None = None
        """Where the newest commit of this process ended."""
        self.count = 0
        """fdatasync calls of this process on segments that commits wait for."""

    def sync(self, lsn: int) -> None:
        """Return once everything up to `lsn`, which is in the committed tail, is on stable storage."""
        words = self._words
        lock = self._lock
        while words[DURABLE_LSN] < lsn:
            with lock.threads:
                if words[DURABLE_LSN] >= lsn:
                    break  # the leader before us synced for us
                try:
                    fd = lock.fd
                    try:
                        # Inside: an interruption just as the lock is had must not leave it locked for everybody.
                        self._files.lock(fd)
                        if words[DURABLE_LSN] < lsn:
                            self._lead()
                    finally:
                        unlock(self._files, fd)
                except OSError as error:
                    raise self._parts.fault(error, "the sync lock") from error

    def _lead(self) -> None:
        """Sync for everybody whose frame is in the committed tail; the caller holds the sync lock."""
        words = self._words
        if words[FAILED]:
            raise self._parts.failure()
        # One committed position for both target and segment: a segment that was left since was synced by the
        # roll, which needs this lock to do it. Our own newest one will do if nobody has written since.
        position = self.written
        if position is None or words[WRITING_LSN] != position.lsn or words[SYNCING]:
            position = self._position()
        self._flush(position.file, position.offset)
        if position.lsn > words[DURABLE_LSN]:
            words[DURABLE_LSN] = position.lsn
        words[SYNCING] = 0

    def sync_retired(self, file: int, end: int) -> None:
        """The roller syncs the segment that it leaves, before the new header says so."""
        try:
            with self._lock:
                self._parts.check()
                self._flush(file, end)
                self._words[SYNCING] = 0
        except OSError as error:
            raise self._parts.fault(error, "the sync lock") from error

    def _flush(self, file: int, end: int) -> None:
        """fdatasync with `SYNCING` set; the caller holds the sync lock and clears it once the result is published."""
        try:
            fd = self._fd(file)
        except OSError as error:
            raise self._parts.fault(error, "a segment to sync") from error
        if fd is None:
            return
        words = self._words
        try:
            if words[SYNCING]:
                # A leader died in here. If its sync failed, the kernel told only the dead one and
                # counts the pages as clean: write them again, so that this sync means something.
                data = self._parts.files.pread(fd, end - FRAMES_AT, FRAMES_AT)
                self._parts.files.pwrite(fd, data, FRAMES_AT)
            words[SYNCING] = 1
            self.count += 1
            self._fdatasync(fd)
            if words[FAILED]:
                raise self._parts.failure()
        except OSError as error:
            raise self._parts.poison(error, f"sync of {self._parts.segments.path(file)}") from error
