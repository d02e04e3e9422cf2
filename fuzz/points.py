"""The points between which processes of one store may be interleaved: all that one of them does and another can see.

`POINTS` is the one list of them. `PointFiles` stands in for the engine's system calls (`agentstore.engine.files`) and
calls `at` just before each; nothing else in the product knows of them, so they cost nothing where they are not used.
What would block asks first and calls `blocked` as long as it is refused, so that whoever says who runs is never waited
for.

`PointFiles.events` is what a watcher has to know: which frames were written, synced and overwritten, and what base
holds.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any, Final

from agentstore.engine import control
from agentstore.engine.base import META_KEY, Base
from agentstore.engine.files import Files
from agentstore.engine.parts import BASE, BASE_NEW, FOLD_LOCK, FORMAT, JOB_LOCK, LOCK, SYNC_LOCK, TAIL, WAL
from agentstore.engine.segment import FRAME, FRAME_BYTES, FRAMES_AT
from agentstore.engine.segments import MAKING, SEGMENT, SPARE

LOCKS: Final = {LOCK: "store", SYNC_LOCK: "sync", FOLD_LOCK: "fold", JOB_LOCK: "job"}
WORDS: Final = {
    getattr(control, name): name
    for name in "DURABLE_LSN FAILED SYNCING LAST_SEGMENT READY BOOT PID_NAMESPACE BASE_INODE WRITING_LSN".split()
}
ENVIRONMENTS: Final = {TAIL: "tail", BASE: "base", BASE_NEW: "new base"}

PAUSE: Final = "another process"
"""What `PointFiles.blocked` is told where only time is waited for."""

FINE: Final = frozenset(f"read {name}" for name in WORDS.values())
"""Points that are only used where a case says ``fine``: there are many, and few of them matter."""

POINTS: Final = FINE | {
    # the locks between processes; "share store" is of those that join
    *(f"{act} {lock}" for act in ("lock", "try", "unlock") for lock in LOCKS.values()),
    "share store",
    # LMDB: a snapshot, the writers' lock, the moment in which all of a transaction is there
    *(f"{act} {env}" for act in ("begin read of", "begin write of", "commit", "open") for env in ENVIRONMENTS.values()),
    # the control page
    *(f"set {name}" for name in WORDS.values()),
    "map control",
    # the log
    "list segments",
    "open segment",
    "read segment",
    "zero segment",
    "write header",
    "write frame",
    "sync segment",
    "unlink segment",
    "rename segment",
    "make spare",
    "rename spare",
    "sync log's directory",
    # names in the directory of the store
    "look for FORMAT",
    "rename FORMAT",
    "rename base",
    "unlink base",
    "unlink tail",
    "make directory",
    # what waits for another process without a lock
    "pause",
}
"""All points, by what is done there next."""


class Unsynced(Files):
    """The real system calls without the syncs: no power is cut here."""

    def fdatasync(self, fd: int) -> None:
        pass

    def start_writing(self, fd: int, size: int, offset: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass

    def file_system(self, path: str) -> str:
        return ""  # a page of text to be read at each opening

    def sync_map(self, page: mmap.mmap) -> None:
        pass

    def environment(self, path: str, **options: Any) -> Any:
        return super().environment(path, **{**options, "sync": False, "metasync": False})


class PointFiles(Unsynced):
    """System calls with a point before each that others can see. Syncs are noted and not made.

    Points are for the thread that made this object: those of a pool pass them by. `turns` is a directory for locks of
    our own: the writers' lock of LMDB cannot be asked for, so what begins a transaction takes one of these first.
    """

    def __init__(
        self, actor: int, at: Callable[[str], None], blocked: Callable[[str], None], turns: str, *, fine: bool
    ) -> None:
        self._actor = actor
        self._at = at
        self.blocked = blocked
        self._turns = turns
        self._fine = fine
        self._thread = threading.get_ident()
        self._paths: dict[int, str] = {}
        self._alone: set[int] = set()
        """Descriptors whose lock is held exclusively."""
        self.events: list[list[Any]] = []
        """What happened since somebody emptied this, oldest first."""

    def point(self, name: str) -> None:
        assert name in POINTS, name
        if threading.get_ident() == self._thread and (self._fine or name not in FINE):
            self._at(name)

    # --- files of the log -----------------------------------------------------------------

    def _end(self, fd_or_path: int | str) -> str:
        """What a path ends with: the suffix of a file of the log, else the name."""
        path = self._paths.get(fd_or_path, "") if isinstance(fd_or_path, int) else fd_or_path
        name = os.path.basename(path)
        return os.path.splitext(name)[1] if os.path.basename(os.path.dirname(path)) == WAL else name

    def open(self, path: str, flags: int) -> int:
        end = self._end(path)
        if end == SEGMENT:
            self.point("open segment")
        elif end == MAKING:
            self.point("make spare")
        fd = super().open(path, flags)
        self._paths[fd] = path
        return fd

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        if self._end(fd) == SEGMENT:
            self.point("read segment")
        return super().pread(fd, size, offset)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        if self._end(fd) != SEGMENT:
            super().pwrite(fd, data, offset)
        elif offset >= FRAMES_AT:
            self.point("write frame")
            super().pwrite(fd, data, offset)
            self.events.append(["frames", self._paths[fd], _lsns(bytes(data))])
        else:
            self.point("write header")
            super().pwrite(fd, data, offset)
            self.events.append(["gone", self._paths[fd]])

    def zero_fill(self, fd: int, size: int) -> None:
        if self._end(fd) == SEGMENT:
            self.point("zero segment")
            self.events.append(["gone", self._paths[fd]])
        os.pwrite(fd, bytes(size), 0)

    def fdatasync(self, fd: int) -> None:
        if self._end(fd) == SEGMENT:
            self.events.append(["syncing", self._actor, self._paths[fd]])
            self.point("sync segment")
            self.events.append(["synced", self._paths[fd]])

    # --- names ----------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        if self._end(path) == FORMAT:
            self.point("look for FORMAT")
        return super().exists(path)

    def names(self, path: str) -> list[str]:
        if os.path.basename(path) == WAL:
            self.point("list segments")
        return super().names(path)

    def make_directory(self, path: str) -> None:
        self.point("make directory")
        super().make_directory(path)

    def rename(self, source: str, target: str) -> None:
        kinds = {SEGMENT: "segment", SPARE: "spare", FORMAT: "FORMAT", BASE: "base"}
        self.point(f"rename {kinds[self._end(target)]}")
        super().rename(source, target)
        for fd in [fd for fd, path in self._paths.items() if path == source]:
            self._paths[fd] = target

    def unlink(self, path: str) -> None:
        kinds = {SEGMENT: "segment", BASE: "base", TAIL: "tail"}
        kind = kinds.get(self._end(path))
        if kind is not None:
            self.point(f"unlink {kind}")
        super().unlink(path)
        if kind == "segment":
            self.events.append(["gone", path])

    def sync_directory(self, path: str) -> None:
        if os.path.basename(path) == WAL:
            self.point("sync log's directory")

    # --- locks and memory -----------------------------------------------------------------

    def lock(self, fd: int, *, shared: bool = False, wait: bool = True) -> bool:
        name = LOCKS[os.path.basename(self._paths[fd])]
        if fd in self._alone and shared:
            # The kernel does it in two steps, between which somebody else may have the lock.
            self.unlock(fd)
        self.point(f"share {name}" if shared else f"lock {name}" if wait else f"try {name}")
        while not (had := super().lock(fd, shared=shared, wait=False)) and wait:
            self.blocked(name)
        if had and not shared:
            self._alone.add(fd)
        return had

    def unlock(self, fd: int) -> None:
        self.point(f"unlock {LOCKS[os.path.basename(self._paths[fd])]}")
        super().unlock(fd)
        self._alone.discard(fd)

    def close(self, fd: int) -> None:
        self._alone.discard(fd)
        super().close(fd)

    def map(self, fd: int, size: int) -> mmap.mmap:
        self.point("map control")
        return super().map(fd, size)

    def words(self, page: mmap.mmap) -> Any:
        return Words(self, super().words(page))

    def environment(self, path: str, **options: Any) -> Any:
        name = ENVIRONMENTS[os.path.basename(path)]
        self.point(f"open {name}")
        env = super().environment(path, **options)
        turn = os.open(os.path.join(self._turns, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return Environment(self, env, name, turn)

    def pause(self, shortest_s: float, longest_s: float) -> None:
        self.point("pause")
        self.blocked(PAUSE)


class Words:
    """The words of the control page, a point before each use."""

    def __init__(self, files: PointFiles, words: Any) -> None:
        self._files = files
        self._words = words

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, at: int) -> int:
        self._files.point(f"read {WORDS[at]}")
        value: int = self._words[at]
        return value

    def __setitem__(self, at: int, value: int) -> None:
        self._files.point(f"set {WORDS[at]}")
        self._words[at] = value

    def release(self) -> None:
        self._words.release()


class Environment:
    """An LMDB environment, a point before each transaction. Its writers take turns before LMDB makes them."""

    def __init__(self, files: PointFiles, env: Any, name: str, turn: int) -> None:
        self._files = files
        self._env = env
        self._name = name
        self._turn = turn

    def begin(self, write: bool = False, **options: Any) -> Any:
        if not write:
            self._files.point(f"begin read of {self._name}")
            return self._env.begin(**options)
        self._files.point(f"begin write of {self._name}")
        self.take_turn()
        return WriteTransaction(self._files, self._env.begin(write=True, **options), self._name, self)

    def take_turn(self) -> None:
        while True:
            try:
                fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._files.blocked(self._name)
            else:
                return

    def end_turn(self) -> None:
        fcntl.flock(self._turn, fcntl.LOCK_UN)

    def copyfd(self, fd: int, **options: Any) -> None:
        """LMDB takes the writers' lock for a moment in it."""
        self._files.point(f"begin write of {self._name}")
        self.take_turn()
        try:
            self._env.copyfd(fd, **options)
        finally:
            self.end_turn()

    def close(self) -> None:
        self._env.close()
        if self._turn >= 0:
            turn, self._turn = self._turn, -1
            os.close(turn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class WriteTransaction:
    """A write transaction; the turn ends with it."""

    def __init__(self, files: PointFiles, txn: Any, name: str, env: Environment) -> None:
        self._files = files
        self._txn = txn
        self._name = name
        self._env = env
        self._open = True
        self.get, self.put, self.delete, self.cursor = txn.get, txn.put, txn.delete, txn.cursor

    def commit(self) -> None:
        self._files.point(f"commit {self._name}")
        applied = _applied(self._txn) if self._name == "base" else None
        self._txn.commit()
        if applied is not None:
            self._files.events.append(["applied", applied])
        self._end()

    def abort(self) -> None:
        self._txn.abort()
        self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._env.end_turn()

    def __enter__(self) -> WriteTransaction:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()


def _applied(txn: Any) -> int | None:
    raw = txn.get(META_KEY)
    if raw is None:
        return None
    meta = Base._decode_meta(_NAMED, raw)
    return meta[1].applied_lsn


_NAMED: Final = Base.__new__(Base)
_NAMED.path = BASE


def _lsns(data: bytes) -> list[int]:
    """The LSNs of the frames that these bytes are."""
    found, at = [], 0
    while at + FRAME_BYTES <= len(data):
        _, length, _, lsn, _, _ = FRAME.unpack_from(data, at)
        found.append(lsn)
        at += FRAME_BYTES + length
    return found
