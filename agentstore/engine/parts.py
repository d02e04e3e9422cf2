"""What an open store is made of, and how it fails as a whole."""

from __future__ import annotations

import os

from agentstore.engine.base import Base
from agentstore.engine.control import FAILED, Control
from agentstore.engine.files import Files, translate
from agentstore.engine.locks import FileLock
from agentstore.engine.segments import Segments
from agentstore.engine.tail import Tail
from agentstore.errors import StoreFailed

FORMAT, WAL, BASE, TAIL, CONTROL, LOCK = "FORMAT", "wal", "base.mdb", "tail.mdb", "control", "lock"
BASE_NEW = "base.mdb.new"
SYNC_LOCK, FOLD_LOCK, JOB_LOCK = "lock.sync", "lock.fold", "lock.job"

OWN_NAMES = frozenset(
    [FORMAT, FORMAT + ".new", WAL, CONTROL, LOCK, SYNC_LOCK, FOLD_LOCK, JOB_LOCK]
    + [name + suffix for name in (BASE, TAIL, BASE_NEW) for suffix in ("", "-lock")]
)
"""Every name that stands in a store directory."""


class Parts:
    """The files of a store that this process has open. Closing is the engine's business; what is handed over
    to a `Parts` that cannot be made is closed.
    """

    def __init__(
        self, files: Files, path: str, uuid: bytes, control: Control, base: Base, tail: Tail, segments: Segments
    ) -> None:
        self.files = files
        self.path = path
        self.uuid = uuid
        self.control = control
        self.base = base
        self.tail = tail
        self.segments = segments
        locks: list[FileLock] = []
        try:
            for name in (SYNC_LOCK, FOLD_LOCK):
                locks.append(FileLock(files, os.path.join(path, name)))
        except BaseException:
            for lock in locks:
                lock.close()
            for part in (segments, tail, base, control):
                part.close()
            raise
        self.sync_lock, self.fold_lock = locks

    def check(self) -> None:
        """StoreFailed if any process poisoned the store."""
        if self.control.words[FAILED]:
            raise self.failure()

    def failure(self) -> StoreFailed:
        return StoreFailed(
            f"a write or a sync of the store {self.path} failed, so what is on the disk is not known: "
            "close it in every process and open it again; everything that was confirmed is there"
        )

    def poison(self, error: OSError, what: str) -> StoreFailed:
        """Put the store out of use in every process. Raise what this returns."""
        self.control.words[FAILED] = 1
        failure = self.failure()
        failure.add_note(f"{what}: {error}")
        return failure

    def fault(self, error: OSError, what: str) -> Exception:
        """The typed error for a call that changed nothing; but a failed disk puts the store out of use. Raise it."""
        return translate(error, f"{what} of the store {self.path}") or self.poison(error, what)

    def close(self) -> None:
        self.sync_lock.close()
        self.fold_lock.close()
        self.segments.close()
        self.tail.close()
        self.base.close()
        self.control.close()
