"""From a directory to an open store: who may, creation, recovery, joining.

Whoever gets the lock of the store exclusively recovers it and says so in the control
page; the others share the lock and join. flock cannot convert a lock atomically, so the
one who recovered looks again, after the conversion, whether it is still its own recovery.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from typing import NamedTuple

import lmdb

from agentstore.engine.base import Base, Position
from agentstore.engine.control import (
    BASE_INODE,
    BOOT,
    DURABLE_LSN,
    FAILED,
    LAST_SEGMENT,
    PID_NAMESPACE,
    READY,
    SYNCING,
    WRITING_LSN,
    Control,
    boot_word,
)
from agentstore.engine.files import NETWORK_FILE_SYSTEMS, Files, pid_namespace, translate
from agentstore.engine.format import encode_format, read_format
from agentstore.engine.lmdbfile import MAP_BYTES, damage_of, translate_lmdb
from agentstore.engine.log import LogReader, batches, chain
from agentstore.engine.parts import BASE, BASE_NEW, CONTROL, FORMAT, LOCK, OWN_NAMES, TAIL, WAL, Parts
from agentstore.engine.segments import Segments
from agentstore.engine.shrink import shrink
from agentstore.engine.tail import Tail, TailPosition
from agentstore.errors import (
    AgentStoreError,
    CorruptionError,
    NotAStore,
    RecoveryNeeded,
    StoreFailed,
    StoreInUse,
    StoreNotFound,
    UnsupportedPlatform,
)

logger = logging.getLogger("agentstore")

JOIN_WAIT_S = (0.001, 0.020)
"""How long a joiner that came between a recovery and its end waits before it tries again."""

VERIFY_AT_RECOVERY_BYTES = 16 * 1024 * 1024
"""A base up to this size is walked before LMDB opens it in a recovery (0.2 s at most): LMDB trusts every
pointer that it reads. A larger one is walked when it was copied, and by ``agentstore verify``."""


class Opened(NamedTuple):
    """An open store and the descriptor whose shared flock keeps it open."""

    parts: Parts
    lock: int
    generation: int


class Opening:
    """One attempt to open the store at `path`. Call `run` once."""

    def __init__(self, files: Files, path: str, *, create: bool, map_bytes: int = MAP_BYTES) -> None:
        self._files = files
        self._map_bytes = map_bytes
        self._path = path
        self._create = create

    def _name(self, name: str) -> str:
        return os.path.join(self._path, name)

    # --- who may ---------------------------------------------------------------------

    def run(self) -> Opened:
        """The open store. Typed errors of `agentstore.errors`, nothing left open behind them."""
        try:
            self._check_directory()
            fd = self._files.open(self._name(LOCK), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise typed(error, self._path) from error
        try:
            while True:
                opened = self._try(fd)
                if opened is not None:
                    return opened
                self._files.pause(*JOIN_WAIT_S)
        except OSError as error:
            self._files.close(fd)
            raise typed(error, self._path) from error
        except lmdb.Error as error:
            self._files.close(fd)
            raise translate_lmdb(error, self._path) from error
        except BaseException:
            self._files.close(fd)
            raise

    def _check_directory(self) -> None:
        """Refuse what is not ours before anything is touched; make what is missing."""
        files, path = self._files, self._path
        if files.exists(path) and not files.is_directory(path):
            raise NotAStore(f"{path} is not a directory")
        check_file_system(files, path)
        if not files.exists(path):
            if not self._create:
                raise StoreNotFound(f"there is no store at {path}")
            self._make_directories(path)
        names = files.names(path)
        if FORMAT in names:
            # Before the lock file is made: somebody else's directory may have a file of this name, too.
            self._check_format(names)
            return
        strangers = [name for name in names if name not in OWN_NAMES]
        if strangers:
            raise NotAStore(
                f"{path} is not an agentstore store and not empty ({strangers[0]!r} is in it); choose another directory"
            )
        if not self._create and BASE not in names:
            raise StoreNotFound(f"there is no store at {path}" + (" (its creation was interrupted)" if names else ""))

    def _check_format(self, names: list[str]) -> None:
        try:
            read_format(self._files, self._name(FORMAT))
        except NotAStore as error:
            if BASE in names:
                raise CorruptionError(
                    f"{self._name(FORMAT)} is damaged; keep a copy of the directory, then run 'agentstore verify'"
                ) from error
            raise

    def _make_directories(self, path: str) -> None:
        parent = os.path.dirname(path)
        if not self._files.exists(parent):
            self._make_directories(parent)
        try:
            self._files.make_directory(path)
        except FileExistsError:
            return
        self._files.sync_directory(parent)

    # --- the lock --------------------------------------------------------------------

    def _try(self, fd: int) -> Opened | None:
        """Recover alone or join the others; None to start again."""
        files = self._files
        if files.lock(fd, wait=False):
            generation = self._recover()
            files.lock(fd, shared=True)
        else:
            files.lock(fd, shared=True)
            generation = 0
        opened = self._join(fd, generation)
        if opened is None:
            files.unlock(fd)
        return opened

    def _join(self, fd: int, generation: int) -> Opened | None:
        """Open everything of a recovered store; None if it is not, or not by the recovery with this generation."""
        files = self._files
        if not files.exists(self._name(FORMAT)):
            return None
        uuid = read_format(files, self._name(FORMAT))
        control = Control(files, self._name(CONTROL))
        try:
            words = control.words
            ready = words[READY]
            if not ready or words[BOOT] != boot_word() or (generation and ready != generation):
                control.close()
                return None
            if words[PID_NAMESPACE] != pid_namespace():
                raise StoreInUse(
                    f"the store {self._path} is open in another pid namespace (a container?), where its users "
                    "cannot be told "
                    "alive from dead; use it from one namespace, or close it there"
                )
            if words[FAILED]:
                raise StoreFailed(
                    f"the store {self._path} failed and other processes still have it open; close it there, then "
                    "open it again"
                )
            base = Base(files, self._name(BASE), map_bytes=self._map_bytes)
        except BaseException:
            control.close()
            raise
        try:
            tail = Tail(files, self._name(TAIL), map_bytes=self._map_bytes)
        except BaseException:
            base.close()
            control.close()
            raise
        parts = Parts(files, self._path, uuid, control, base, tail, Segments(files, self._name(WAL), uuid))
        return Opened(parts, fd, ready)

    # --- recovery --------------------------------------------------------------------

    def _recover(self) -> int:
        """Alone with the store: create it or replay its log. Returns the generation that others may join."""
        files = self._files
        if not files.exists(self._name(FORMAT)):
            self._create_store()
        # Who made FORMAT or swapped base may have died, or failed, before these names were on the disk. What is folded
        # into base is given up in the log, so they must not go back.
        files.sync_directory(self._path)
        uuid = read_format(files, self._name(FORMAT))
        if not files.exists(self._name(WAL)):
            raise CorruptionError(
                f"{self._name(WAL)} is missing from the store; put it back: it may hold acknowledged commits"
            )
        control = Control(files, self._name(CONTROL))
        try:
            # So that a second power cut does not silence what this page knows of damage.
            control.sync()
            control.words[READY] = 0
            for stray in (BASE_NEW, BASE_NEW + "-lock"):
                self._files.remove(self._name(stray))  # a copy that was never swapped in
            self._check_base(control)
            return self._replay(control, uuid)
        finally:
            control.close()

    def _check_base(self, control: Control) -> None:
        path = self._name(BASE)
        if not self._files.exists(path):
            raise CorruptionError(
                f"{path} is missing from the store; put it back: the WAL alone holds only the newest commits"
            )
        copied = control.words[BASE_INODE] != self._files.path_identity(path)[1]
        if copied or self._files.file_size(path) <= VERIFY_AT_RECOVERY_BYTES:
            findings = damage_of(path)
            if findings:
                raise CorruptionError(
                    f"{findings[0]}"
                    + (f" (and {len(findings) - 1} more)" if len(findings) > 1 else "")
                    + "; keep a copy of the directory, then run 'agentstore verify'"
                )

    def _replay(self, control: Control, uuid: bytes) -> int:
        files, words = self._files, control.words
        base = Base(files, self._name(BASE))
        segments = Segments(files, self._name(WAL), uuid)
        try:
            owner, position = _meta(base)
            if owner != uuid:
                raise CorruptionError(f"{base.path} belongs to another store; put the store's own file back")
            links = chain(segments.headers(), position)
            # The whole log is read before anything is changed: damage leaves all as it was.
            for _ in LogReader(segments, links, position, durable_lsn=words[DURABLE_LSN]):
                pass
            for link in links:
                fd = segments.fd(link.file)
                assert fd is not None
                files.fdatasync(fd)
            for replay in batches(LogReader(segments, links, position, durable_lsn=words[DURABLE_LSN])):
                base.apply(replay.writes, replay.reached, replay.first_lsn)
                position = replay.reached
            last = max([position.segment, *(found.header.number for found in segments.headers())])
            segments.remove_strays()
            tail = TailPosition(position.applied_lsn, last, position.epoch, 0, 0, position.end, position.crc, True)
            if links and links[-1].header.number >= position.segment:
                tail = tail._replace(segment=links[-1].header.number, epoch=links[-1].header.epoch)
            Tail.create(files, self._name(TAIL), tail)
            words[DURABLE_LSN] = position.applied_lsn
            words[FAILED] = 0
            words[SYNCING] = 0
            words[WRITING_LSN] = position.applied_lsn
            words[LAST_SEGMENT] = last
            words[BASE_INODE] = files.path_identity(base.path)[1]
            generation = secrets.randbits(63) | 1
            control.publish(generation)
            return generation
        finally:
            segments.close()
            base.close()

    # --- creation --------------------------------------------------------------------

    def _create_store(self) -> None:
        """Make an empty store, whose FORMAT the caller syncs. What an interrupted creation left is made again; anything
        else is damage."""
        files, path = self._files, self._path
        self._check_unfinished()
        if not self._create:
            raise StoreNotFound(f"there is no store at {path} (its creation was interrupted)")
        wal = self._name(WAL)
        for name in (BASE, BASE_NEW, TAIL):
            files.remove(self._name(name))
            files.remove(self._name(name) + "-lock")
        uuid = secrets.token_bytes(16)
        # Under its own name only once it is whole: a base.mdb that cannot be read is then always damage.
        Base.create(files, self._name(BASE_NEW), uuid)
        files.rename(self._name(BASE_NEW), self._name(BASE))
        files.remove(self._name(BASE_NEW) + "-lock")
        if not files.exists(wal):
            files.make_directory(wal)
        control = Control(files, self._name(CONTROL))
        try:
            control.words[BASE_INODE] = files.path_identity(self._name(BASE))[1]
        finally:
            control.close()
        files.sync_directory(path)
        # FORMAT says that the directory's own name is on the disk, too: nobody syncs it again.
        files.sync_directory(os.path.dirname(path))
        new = self._name(FORMAT + ".new")
        fd = files.open(new, os.O_RDWR | os.O_CREAT)
        try:
            files.pwrite(fd, encode_format(uuid), 0)
            files.fdatasync(fd)
        finally:
            files.close(fd)
        files.rename(new, self._name(FORMAT))

    def _check_unfinished(self) -> None:
        """Without FORMAT: the rest of an interrupted creation, or a store that lost it."""
        files = self._files
        damage = (
            f"{self._name(FORMAT)} is missing, but there is data beside it; put it back, "
            "or keep a copy and run 'agentstore verify'"
        )
        if files.exists(self._name(WAL)) and files.names(self._name(WAL)):
            raise CorruptionError(damage)
        if not files.exists(self._name(BASE)):
            return
        if damage_of(self._name(BASE)):
            raise CorruptionError(damage)
        base = Base(files, self._name(BASE))
        try:
            if base.position().applied_lsn:
                raise CorruptionError(damage)
        finally:
            base.close()


def _meta(base: Base) -> tuple[bytes, Position]:
    txn = base.begin()
    try:
        return base.meta(txn)
    finally:
        txn.abort()


def check_file_system(files: Files, path: str) -> None:
    """Refuse network file systems: their locks and syncs do not reach everybody who can write."""
    kind = files.file_system(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise UnsupportedPlatform(
            f"{path} is on {kind}: agentstore keeps its promise on local file systems only; choose a local directory"
        )


def typed(error: OSError, path: str) -> Exception:
    """The error of this library for what the system said while the store at `path` was opened, if there is one."""
    known = translate(error, f"the store {path}")
    if known is not None:
        return known
    if error.errno in (errno.EIO, errno.ENXIO):
        return StoreFailed(
            f"the disk failed while {path} was opened: {error}; nothing was changed, look at the disk, "
            "then open it again"
        )
    return error


def on_read_only_file_system(files: Files, path: str) -> bool:
    """Whether `path` is there and nobody can write to it, whatever the rights."""
    try:
        return files.exists(path) and files.read_only_file_system(path)
    except OSError:
        return False  # the open itself meets the same error, and says what it means


def open_frozen(files: Files, path: str) -> tuple[Base, bytes]:
    """The base of a cleanly closed store on a read-only file system; RecoveryNeeded if its log holds anything."""
    try:
        return _open_frozen(files, path)
    except OSError as error:
        raise typed(error, path) from error


def _open_frozen(files: Files, path: str) -> tuple[Base, bytes]:
    if not files.exists(os.path.join(path, FORMAT)):
        raise StoreNotFound(f"there is no store at {path}")
    uuid = read_format(files, os.path.join(path, FORMAT))
    if any(name.endswith(".seg") for name in files.names(os.path.join(path, WAL))):
        raise RecoveryNeeded(
            f"the store {path} was not closed, and its file system is read-only: mount it writable and open it once"
        )
    file = os.path.join(path, BASE)
    findings = damage_of(file) if files.exists(file) else [f"{file} is missing from the store"]
    if findings:
        raise CorruptionError(findings[0])
    base = Base(files, file, frozen=True)
    if _meta(base)[0] != uuid:
        base.close()
        raise CorruptionError(f"{file} belongs to another store; put the store's own file back")
    return base, uuid


def close_store(files: Files, lock: int, path: str, uuid: bytes, *, shrink_always: bool = False) -> bool:
    """Let go of the lock; whoever is alone then leaves an empty log behind, if it is one, else all for recovery.

    And gives free pages of base back where they are many, or with `shrink_always`. Whether it could be alone.
    """
    try:
        files.unlock(lock)
        if not files.lock(lock, wait=False):
            return False
        if _clear(files, path, uuid):
            _shrink(files, path, always=shrink_always)
        return True
    except (AgentStoreError, OSError, lmdb.Error) as error:
        # Everything confirmed is in the log: the next open replays it, or says what is wrong.
        logger.warning("the store %s was closed, but not tidied up: %s", path, error)
        return False
    finally:
        files.close(lock)


def _shrink(files: Files, path: str, *, always: bool) -> None:
    base = os.path.join(path, BASE)
    try:
        if shrink(files, base, os.path.join(path, BASE_NEW), always=always):
            control = Control(files, os.path.join(path, CONTROL))
            try:
                control.words[BASE_INODE] = files.path_identity(base)[1]
            finally:
                control.close()
    finally:
        files.remove(base + "-lock")


def _clear(files: Files, path: str, uuid: bytes) -> bool:
    """Remove the log, if base has all of it; whether it has."""
    if not files.exists(os.path.join(path, FORMAT)):
        return False  # the directory was removed while it was open
    control = Control(files, os.path.join(path, CONTROL))
    words = control.words
    segments = Segments(files, os.path.join(path, WAL), uuid)
    base: Base | None = None
    try:
        words[READY] = 0
        if words[FAILED] or words[BOOT] != boot_word():
            return False
        base = Base(files, os.path.join(path, BASE))
        position = base.position()
        reader = LogReader(segments, chain(segments.headers(), position), position, durable_lsn=words[DURABLE_LSN])
        for _ in reader:
            return False  # somebody committed after our fold: recovery will replay it
        segments.remove_all()
        base.close()
        for name in (TAIL, TAIL + "-lock", BASE + "-lock"):
            files.remove(os.path.join(path, name))
        base = None
        return True
    finally:
        if base is not None:
            base.close()
        segments.close()
        control.close()
