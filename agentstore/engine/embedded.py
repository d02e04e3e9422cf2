"""The embedded engine: a directory on a local disk, shared by the threads and processes of one machine."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import lmdb

from agentstore.engine import checking, process
from agentstore.engine.api import _SEAL, Confirmed, Tx
from agentstore.engine.api import Snapshot as SnapshotProtocol
from agentstore.engine.background import READERS_EVERY_S, Background, Every
from agentstore.engine.base import Base
from agentstore.engine.control import DURABLE_LSN, FAILED
from agentstore.engine.copying import write_copy
from agentstore.engine.files import Files, default_files
from agentstore.engine.fold import WAL_SOFT_BYTES, Folder
from agentstore.engine.gate import Gate
from agentstore.engine.lmdbfile import MAP_BYTES, allow_reopening, translate_lmdb
from agentstore.engine.opening import Opening, close_store, on_read_only_file_system, open_frozen, typed
from agentstore.engine.parts import LOCK, Parts
from agentstore.engine.sync import Syncer
from agentstore.engine.view import FrozenView, View
from agentstore.engine.writer import Writer
from agentstore.errors import (
    AgentStoreError,
    ForkedStore,
    OutOfResources,
    ReadOnlyStore,
    StoreAlreadyOpen,
    StoreClosed,
    StoreFailed,
)

T = TypeVar("T")


class Reading:
    """The context manager behind `EmbeddedEngine.read`."""

    __slots__ = ("_engine", "_view")

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._view: Any = None

    def __enter__(self) -> SnapshotProtocol:
        engine = self._engine
        engine._gate.enter()
        try:
            engine._check()
            self._view = engine._view()
        except BaseException as error:
            engine._gate.leave()
            if isinstance(error, StoreFailed):
                engine._drop()
            raise engine._typed(error) from error
        view: SnapshotProtocol = self._view
        return view

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._engine._gone, ForkedStore):
            # Left in a child that was forked inside: the readers' slots are the parent's, which still reads.
            _keep_for_ever(self._view)
            return
        self._view.end()
        self._engine._gate.leave()
        if isinstance(error, StoreFailed):
            self._engine._drop()
        if isinstance(error, lmdb.Error):
            raise translate_lmdb(error, self._engine.path) from error


class EmbeddedEngine:
    """Atomic, serializable, confirmed transactions in a directory. Safe for threads and processes.

    Made by `open`. After a fork only the parent may use it: the child gets `ForkedStore` and may open the
    directory anew.
    """

    def __init__(self, path: str, identity: process.Identity, files: Files, options: dict[str, bool]) -> None:
        self.path = path
        self.readonly = options["readonly"]
        self.uuid = b""
        self._identity = identity
        self._files = files
        self._options = options
        self._gate = Gate()
        self._users = 1
        self._gone: AgentStoreError | None = None
        self._background: Background | None = None
        self._frozen: Base | None = None

    # --- opening ---------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        readonly: bool = False,
        background: bool = True,
        files: Files | None = None,
        map_bytes: int = MAP_BYTES,
    ) -> EmbeddedEngine:
        """Open the store at `path`, recovering it if nobody else has it open.

        `create`: make it if the path is free. `readonly`: no commits. `background`: fold and prepare segments
        in a daemon thread. `files`, `map_bytes`: the system calls and the size of LMDB's maps, for tests. A second
        open in a process shares the first; with other options it is `StoreAlreadyOpen`.
        O(log to replay, at most about 40 MiB).
        """
        path = os.path.abspath(os.fspath(path))
        files = files or default_files()
        options = {"readonly": readonly, "background": background}
        with process.opening:
            try:
                shared = cls._shared(path, files, options)
            except OSError as error:
                raise typed(error, path) from error
            if shared is not None:
                return shared
            engine = cls(path, (0, 0), files, options)
            if readonly and on_read_only_file_system(files, path):
                engine._open_frozen()
            else:
                engine._open(create=create and not readonly, map_bytes=map_bytes)
            try:
                engine._identity = files.path_identity(path)
                if engine._background is not None:
                    engine._background.start()
                process.engines[engine._identity] = engine
            except BaseException as error:
                engine._stop_background()
                engine._release(StoreClosed(f"the store {path} could not be opened"), clear=False)
                if isinstance(error, OSError):
                    raise typed(error, path) from error
                if isinstance(error, RuntimeError):
                    raise OutOfResources(f"the store {path} was not opened: {error}; raise the limit") from error
                raise
        return engine

    @staticmethod
    def _shared(path: str, files: Files, options: dict[str, bool]) -> EmbeddedEngine | None:
        if not files.is_directory(path):
            return None
        there = process.engines.get(files.path_identity(path))
        if not isinstance(there, EmbeddedEngine) or there._gone is not None or there._was_deleted(path):
            return None
        if there._options != options:
            raise StoreAlreadyOpen(
                f"this process has the store {path} open with {there._options}; close it first or open it with "
                "the same options"
            )
        there._users += 1
        return there

    def _was_deleted(self, path: str) -> bool:
        """Whether the files that are open were deleted: then they are done with. What has the name, or the inode, of
        their directory now is another store."""
        if self._frozen is not None or self._files.same_file(self._lock, os.path.join(path, LOCK)):
            return False
        if not self._gate.held_here:
            self._stop_background()
            self._release(StoreFailed(f"the files of the store {path} were deleted while it was open"), clear=False)
        return True

    def _open(self, *, create: bool, map_bytes: int) -> None:
        opened = Opening(self._files, self.path, create=create, map_bytes=map_bytes).run()
        self._parts: Parts = opened.parts
        self._lock = opened.lock
        self.uuid = opened.parts.uuid
        self._syncer = Syncer(opened.parts)
        self._folder = Folder(opened.parts)
        self._writer = Writer(opened.parts, self._syncer, fold=self._make_room, rolled=self.poke)
        if self._options["background"]:
            self._background = Background(os.path.basename(self.path))
            for job in (self._watch, self._fold_when_due, self._prepare, Every(READERS_EVERY_S, self._check_readers)):
                self._background.add(job)

    def _open_frozen(self) -> None:
        self._frozen, self.uuid = open_frozen(self._files, self.path)

    # --- transactions ----------------------------------------------------------------

    def transact(self, fn: Callable[[Tx], T]) -> Confirmed[T]:
        """Run `fn` in a transaction; return once what it wrote, or what it read, is on stable storage.

        If `fn` raises, nothing was written. `fn` may run more than once and must not use the engine itself.
        `DiskFull`: nothing was written. `CommitUnknown`, `StoreFailed`, KeyboardInterrupt: it may have been.
        O(size of the writes) and one fdatasync, shared with others who commit at the moment.
        """
        gate = self._gate
        gate.enter()
        try:
            if self._gone is not None:
                self._check()
            if self.readonly:
                raise ReadOnlyStore(f"the store {self.path} was opened with readonly=True")
            request = self._writer.run(fn)
            return Confirmed(request.value, request.lsn, _SEAL)
        except lmdb.Error as error:
            raise translate_lmdb(error, self.path) from error
        except StoreFailed as error:
            failure = error
        finally:
            gate.leave()
        self._drop()
        raise failure

    def read(self) -> Reading:
        """A snapshot as a context manager: what it returns is on stable storage. Nothing may be awaited inside."""
        return Reading(self)

    def _view(self) -> View | FrozenView:
        if self._frozen is not None:
            return FrozenView(self._frozen)
        self._parts.check()
        return View(self._parts, self._syncer)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """What is not on the path of a commit: inside the gate, typed errors, and a failed store is let go."""
        failed = False
        self._gate.enter()
        try:
            self._check()
            yield
        except lmdb.Error as error:
            raise translate_lmdb(error, self.path) from error
        except StoreFailed:
            failed = True
            raise
        finally:
            self._gate.leave()
            if failed:
                self._drop()

    def _check(self) -> None:
        if self._gone is not None:
            raise type(self._gone)(*self._gone.args)

    def _typed(self, error: BaseException) -> BaseException:
        return translate_lmdb(error, self.path) if isinstance(error, lmdb.Error) else error

    # --- upkeep ----------------------------------------------------------------------

    def fold(self) -> None:
        """Replay everything that is durable into base now, waiting for a fold under way. O(log)."""
        with self._inside():
            if self._frozen is None:
                self._folder.fold(wait=True)

    def _make_room(self) -> None:
        """The log is at its limit: all of it becomes durable and is folded, by us or by who is at it."""
        self._syncer.sync(self._parts.tail.position().lsn)
        self._folder.fold(wait=True)

    def _watch(self) -> bool:
        """Let go of a store that another process poisoned, so that it can be opened again."""
        if self._gone is None and self._parts.control.words[FAILED]:
            self._drop()
        return False

    def _guarded(self, job: Callable[[], bool]) -> bool:
        self._gate.enter()
        try:
            return self._gone is None and job()
        except StoreFailed:
            return False  # the next round of `_watch` sees it
        except OSError as error:
            raise self._parts.fault(error, "background work") from error
        finally:
            self._gate.leave()

    def _fold_when_due(self) -> bool:
        def job() -> bool:
            parts = self._parts
            applied = parts.base.position().applied_lsn
            if parts.segments.live_bytes(applied, parts.tail.position()) < WAL_SOFT_BYTES:
                return False
            return self._folder.fold()

        return self._guarded(job)

    def _prepare(self) -> bool:
        return self._guarded(lambda: self._writer.rolls > 0 and self._parts.segments.prepare_spare())

    def _check_readers(self) -> None:
        """Free the reader slots of processes that were killed: each pins pages for ever."""

        def job() -> bool:
            self._parts.tail.env.reader_check()
            self._parts.base.env.reader_check()
            return False

        self._guarded(job)

    def on_background(self, job: Callable[[], bool]) -> None:
        """Have the background thread call `job` now and then: a short slice of work, True if it did something."""
        if self._background is not None:
            self._background.add(job)

    def off_background(self, job: Callable[[], bool]) -> None:
        """Do not call `job` any more."""
        if self._background is not None:
            self._background.remove(job)

    def poke(self) -> None:
        """Have the background thread look for work now."""
        if self._background is not None:
            self._background.poke()

    @property
    def has_background(self) -> bool:
        return self._background is not None

    # --- looking at it -----------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """LSNs, sizes in bytes, and counts of what this process did. O(WAL segments)."""
        with self._inside():
            if self._frozen is not None:
                applied = self._frozen.position().applied_lsn
                return {"lsn": applied, "durable_lsn": applied, "applied_lsn": applied, "wal_bytes": 0} | self._sizes(
                    self._frozen
                )
            parts = self._parts
            return {
                "lsn": parts.tail.position().lsn,
                "durable_lsn": parts.control.words[DURABLE_LSN],
                "applied_lsn": parts.base.position().applied_lsn,
                "wal_bytes": parts.segments.bytes(),
                "syncs": self._syncer.count,
                "rolls": self._writer.rolls,
                "folds": self._folder.folds,
                "dead_finished": self._writer.finished_dead,
            } | self._sizes(parts.base)

    def _sizes(self, base: Base) -> dict[str, int]:
        return {"base_bytes": self._files.file_size(base.path), "base_records": base.env.stat()["entries"]}

    def verify(self) -> list[str]:
        """Every invariant of the engine that does not hold, as a sentence each. O(store)."""
        with self._inside():
            if self._frozen is not None:
                return list(self._frozen.damaged_records())
            try:
                return checking.problems(self._parts)
            except OSError as error:
                raise typed(error, self.path) from error

    def copy_to(self, path: str) -> int:
        """Make a store of everything that is confirmed by now in the empty directory `path`; its size in bytes.

        The copy has this store's uuid. The fold lock is not held while it is written: what LMDB copies is a snapshot,
        and committers who need the log folded would wait for all of it. `DiskFull`; `OSError` of the copy's files as
        the system raised it. O(log + base), a read transaction of base for all of it.
        """
        with self._inside():
            if self._frozen is not None:
                return write_copy(self._files, self._frozen, path, self.uuid)
            self._make_room()
            return write_copy(self._files, self._parts.base, path, self.uuid)

    # --- the end ---------------------------------------------------------------------

    def close(self, *, shrink: bool = False) -> bool:
        """Fold and let go. Who closes last leaves an empty log. Idempotent; other users of a shared engine keep it.

        `shrink`: whatever its size, base gives its free pages back. Returns whether nobody else had the store open, so
        that this could be done.
        """
        with process.opening:
            if self._gone is not None:
                return False
            # Not below 0: a close that was interrupted is made again.
            self._users = max(0, self._users - 1)
            if self._users:
                return False
            self._stop_background()
            try:
                if self._frozen is None and not self.readonly:
                    self._fold_all()
            finally:
                alone = self._release(
                    StoreClosed(f"the store {self.path} was closed; open it again"), clear=True, shrink=shrink
                )
        return alone

    def _stop_background(self) -> None:
        if self._background is not None:
            self._background.stop()

    def _fold_all(self) -> None:
        self._gate.enter()
        try:
            if not self._parts.control.words[FAILED]:
                self._make_room()
        except (AgentStoreError, lmdb.Error):
            # Everything confirmed is in the log: the next open replays it, or says what is wrong.
            pass
        finally:
            self._gate.leave()

    def _drop(self) -> None:
        """The store failed: let go of everything, so that somebody can recover it."""
        if self._gate.held_here:
            return  # an outer call of this thread does it
        background = self._background
        # The background must not wait here for somebody who closes or forks and waits for the background.
        if not process.opening.acquire(blocking=background is None or not background.is_current_thread):
            return
        try:
            if background is not None:
                background.stop()
            if self._gone is None:
                self._release(self._parts.failure(), clear=False)
        finally:
            process.opening.release()

    def _release(self, why: AgentStoreError, *, clear: bool, shrink: bool = False) -> bool:
        """Close everything; whether nobody else has the store open."""
        alone = False
        self._gate.close()
        try:
            self._gone = why
            if process.engines.get(self._identity) is self:
                del process.engines[self._identity]
            if self._frozen is not None:
                self._frozen.close()
                return alone
            try:
                self._parts.close()
            except BaseException:
                clear = False
                raise
            finally:
                if clear:
                    alone = close_store(self._files, self._lock, self.path, self.uuid, shrink_always=shrink)
                else:
                    self._files.close(self._lock)
        finally:
            self._gate.open()
        return alone

    # --- fork ------------------------------------------------------------------------

    def before_fork(self) -> None:
        if self._background is not None:
            self._background.stop()
        self._fork_held = not self._gate.held_here
        if self._fork_held:
            self._gate.close()

    def after_fork_in_parent(self) -> None:
        if self._fork_held:
            self._gate.open()
        if self._background is not None and self._gone is None:
            self._background.start()

    def after_fork_in_child(self) -> None:
        """Give up the inherited store, but never close its LMDB environments: that frees the parent's reader slots."""
        self._gone = ForkedStore(f"the store {self.path} was opened before a fork; open it again in the child")
        self._gate = Gate()
        self._background = None
        allow_reopening()
        if self._frozen is not None:
            _keep_for_ever(self._frozen.env)
            return
        _keep_for_ever(self._parts.base.env)
        _keep_for_ever(self._parts.tail.env)
        # A flock lives as long as any copy of its descriptor: ours would keep a dead parent's locks.
        self._parts.sync_lock.close()
        self._parts.fold_lock.close()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            self._files.close(lock)


def _keep_for_ever(inherited: Any) -> None:
    """Not even the end of the interpreter may deallocate it: that would close it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
