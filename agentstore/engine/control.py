"""The control page: what all processes of a store must know at once, in shared memory.

One page of the file ``control``, mapped by everybody. Each field is one aligned 64-bit
word, read and written whole. The page needs no sync to be right: after a power cut any
older content is possible, and recovery sets all of it before `READY` is written.
"""

from __future__ import annotations

import os
import zlib

from agentstore.engine.files import Files, boot_id, pid_namespace

CONTROL_BYTES = 4096

DURABLE_LSN = 0
"""Everything up to this LSN is on stable storage."""
FAILED = 1
"""Not 0: a write or a sync failed; everybody must close."""
SYNCING = 2
"""Not 0 while somebody is between the start and the published end of a sync."""
LAST_SEGMENT = 3
"""The highest segment number that was ever given out."""
READY = 4
"""Random generation written last by recovery; 0 while nobody may join."""
BOOT = 5
PID_NAMESPACE = 6
WRITING_LSN = 8
"""The highest LSN whose frame somebody began to write. Equal to tail's own: nobody died or failed on the way,
and nobody has written since. Never a promise, only leave to look no further."""
BASE_INODE = 7
"""The inode of the base.mdb that was last found in order: another one is a copy, and is verified first."""
_WORDS = CONTROL_BYTES // 8


def boot_word() -> int:
    """The boot id as a word, never 0."""
    text = boot_id().encode()
    return zlib.crc32(text) << 32 | zlib.adler32(text) | 1


class Control:
    """The mapped page. Index it with the constants above: ``control.words[DURABLE_LSN]``."""

    __slots__ = ("_fd", "_files", "_page", "words")

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._fd = files.open(path, os.O_RDWR | os.O_CREAT)
        try:
            if files.size(self._fd) != CONTROL_BYTES:
                # Real blocks before the mapping: a page without one is a SIGBUS on a full disk.
                files.pwrite(self._fd, bytes(CONTROL_BYTES), 0)
                files.truncate(self._fd, CONTROL_BYTES)
                files.fdatasync(self._fd)
            self._page = files.map(self._fd, CONTROL_BYTES)
        except BaseException:
            files.close(self._fd)
            raise
        self.words = files.words(self._page)
        assert len(self.words) == _WORDS

    def publish(self, generation: int) -> None:
        """The last act of recovery: others may join."""
        words = self.words
        words[BOOT] = boot_word()
        words[PID_NAMESPACE] = pid_namespace()
        words[READY] = generation

    def sync(self) -> None:
        self._files.sync_map(self._page)

    def close(self) -> None:
        """Idempotent."""
        if self._page.closed:
            return
        self.words.release()
        self._page.close()
        self._files.close(self._fd)
