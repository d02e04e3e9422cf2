"""The store: a directory that holds the threads of many agents."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

from agentstore import backup as backups
from agentstore import checking, deleting, pruning, records
from agentstore.effect_views import TIMEOUT_S_DEFAULT
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.once import NOT_GIVEN, once
from agentstore.pruning import Expiry
from agentstore.retention import Retention
from agentstore.sizes import Sizes
from agentstore.sizes import sizes as count_sizes
from agentstore.thread import Thread
from agentstore.upkeep import Upkeep

T = TypeVar("T")

PAGE_THREADS: Final = 256
"""Thread ids read at once by `Store.threads`: no snapshot stays open while the caller looks at them."""

DEFAULT_PATH: Final = "./agents"


class Store:
    """An open store. **Thread-safe**, also across processes: any number may have the directory open.

    >>> import tempfile
    >>> from agentstore import Set
    >>> with tempfile.TemporaryDirectory() as directory, Store.open(directory + "/agents") as store:
    ...     cp = store.thread("user-42:report-7").commit(Set("step", 1))
    ...     list(store.threads())
    ['user-42:report-7']
    """

    def __init__(self, engine: EmbeddedEngine) -> None:
        """Use `Store.open`."""
        self._engine = engine
        self._closed = False
        # Uuids and commit ids are compared, never guessed at by anybody: they must differ, not be secret. Commit ids
        # count up from a random number, since a pack of consecutive ones takes no room.
        self._random = random.Random(os.urandom(32))
        self._commit_ids = count(self._random.getrandbits(64))
        self._upkeep = _shared_upkeep(engine)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] = DEFAULT_PATH,
        *,
        create: bool = True,
        readonly: bool = False,
        background: bool = True,
    ) -> Store:
        """Open the store in the directory `path`; recover it first if it was not closed.

        `create`: make it if there is nothing. `readonly`: no commits. `background`: fold the log and take snapshots
        in a daemon thread, otherwise commits do it now and then. A second open in one process shares the first.

        `NotAStore`, `StoreNotFound`, `FormatTooNew`, `StoreAlreadyOpen`, `StoreInUse`, `RecoveryNeeded`,
        `UnsupportedPlatform`, `StorePermissionError`, `CorruptionError`. O(log to replay), at most about a second.
        """
        engine = EmbeddedEngine.open(os.fspath(path), create=create, readonly=readonly, background=background)
        store = cls(engine)
        try:
            if not readonly and not engine.has_background:
                deleting.finish_all(engine)
        except BaseException:
            store.close()
            raise
        return store

    @property
    def path(self) -> str:
        """The directory, absolute."""
        return self._engine.path

    @property
    def readonly(self) -> bool:
        """Whether commits are refused."""
        return self._engine.readonly

    def close(self) -> None:
        """Fold the log and let go of the directory. Idempotent; what is confirmed is safe without it. O(log)."""
        with _registry_lock:
            if self._closed:
                return
            self._closed = True
        _release_upkeep(self._engine)
        self._engine.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self.path}{' (closed)' if self._closed else ''}>"

    def _random_bytes(self, size: int) -> bytes:
        return self._random.getrandbits(8 * size).to_bytes(size, "big")

    def _commit_id(self) -> bytes:
        return (next(self._commit_ids) & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "big")

    # --- threads -----------------------------------------------------------------------

    def thread(self, thread_id: str) -> Thread:
        """A handle of the thread with this id, whether it exists or not; reads and writes nothing. O(1).

        `thread_id`: any text of 1 to 4,096 bytes of UTF-8, else `InvalidThreadId`.

        >>> from agentstore.testing.scratch import scratch_store
        >>> scratch_store().thread("")
        Traceback (most recent call last):
        agentstore.errors.InvalidThreadId: a thread id has 1 to 4096 bytes of UTF-8, this one has 0: ''
        """
        return Thread(self, thread_id)

    def threads(
        self, prefix: str = "", *, order: Literal["name", "created"] = "name", limit: int | None = None
    ) -> Iterator[str]:
        """Ids of the threads that begin with `prefix`: by name, or with ``order="created"`` the newest first.

        Lazy: pages of `PAGE_THREADS` are read as they are needed, so threads that come or go meanwhile may or may not
        be there. O(ids returned); with ``order="created"`` and a prefix, O(threads created since the oldest one
        returned).

        >>> from agentstore import Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> store = scratch_store()
        >>> for name in ("b", "a:1", "a:2"):
        ...     cp = store.thread(name).commit(Set("step", 0))
        >>> list(store.threads()), list(store.threads("a:", order="created")), list(store.threads(limit=1))
        (['a:1', 'a:2', 'b'], ['a:2', 'a:1'], ['a:1'])
        """
        if not isinstance(prefix, str):
            raise TypeError(f"a prefix of thread ids is a str, not {type(prefix).__name__}")
        wanted = prefix.encode("utf-8", "surrogatepass")
        if order == "name":
            found = self._by_name(wanted, limit)
        elif order == "created":
            found = self._by_creation(wanted, limit)
        else:
            raise ValueError(f'order is "name" or "created", not {order!r}')
        return _first(found, limit)

    def _by_name(self, prefix: bytes, limit: int | None) -> Iterator[str]:
        # A long name's key has the first bytes and a hash: those that share them sort by hash, and are put in order
        # here.
        low = records.NAMES + b"\x30" + records.cut_name(prefix).replace(b"\0", b"\0\xff")
        high = low + b"\xff\xff"
        for size in _page_sizes(limit):
            with self._engine.read() as snap:
                page, low = _page(snap.scan(low, high), size)
            group: list[bytes] = []
            cut = b""
            for name in page:
                if records.cut_name(name) != cut:
                    yield from _sorted_names(group, prefix)
                    group, cut = [], records.cut_name(name)
                group.append(name)
            yield from _sorted_names(group, prefix)
            if not low:
                return

    def _by_creation(self, prefix: bytes, limit: int | None) -> Iterator[str]:
        low = records.CREATED
        high = records.end_of(low)
        for size in _page_sizes(limit):
            page: list[bytes] = []
            with self._engine.read() as snap:
                for key, name in snap.scan(low, high, reverse=True):
                    high = key
                    page.append(name)
                    if len(page) == size:
                        break
            yield from [name.decode() for name in page if name.startswith(prefix)]
            if len(page) < size:
                return

    # --- effects without the loop --------------------------------------------------------

    def once(
        self,
        name: str,
        fn: Callable[..., T],
        *,
        arguments: Mapping[str, Any] | None = None,
        rule: str = "ask",
        query: Callable[[str], Any] | None = None,
        timeout_s: float = TIMEOUT_S_DEFAULT,
        happened: Any = NOT_GIVEN,
    ) -> T:
        """Call `fn` so that its result is recorded once, under a name of the caller's: the ledger of effects without a
        thread. `agentstore.once` tells all of it.

        The first time: a durable intent, ``fn(**arguments)`` (with ``key=``, the idempotency key, if it takes that), a
        durable receipt; every later time, in any process: the recorded result. A call that was started and has no
        receipt goes by `rule`.

        `EffectInFlight`, `EffectInDoubt`, `EffectConflict`, `UnencodableState`, `UnsupportedRule`; what `fn` raises.
        Two transactions; one that writes nothing if the result is there.

        >>> from agentstore.testing.scratch import scratch_store
        >>> store = scratch_store()
        >>> store.once("invoice-991", lambda amount: f"charged {amount}", arguments={"amount": 5})
        'charged 5'
        >>> store.once("invoice-991", lambda amount: "not called again", arguments={"amount": 5})
        'charged 5'
        """
        return once(
            self,
            name,
            fn,
            arguments=arguments,
            rule=rule,
            query=query,
            timeout_s=timeout_s,
            happened=happened,
        )

    # --- what stays ------------------------------------------------------------------------

    @property
    def retention(self) -> Retention | None:
        """The rule of what stays for all threads that have none of their own; None: everything stays. O(1)."""
        with self._engine.read() as snap:
            raw = snap.get(pruning.RULE)
        return None if raw is None else Retention.decode(raw, "the store")

    def set_retention(self, rule: Retention | None) -> None:
        """Have `rule` say what stays of every thread that has no rule of its own; None: everything.

        It is kept in the store. Applied behind the commits from now on, in every process that has the store open, to
        the threads that are written, and by `apply_retention` to all. O(1), one fdatasync.

        >>> from agentstore import Retention
        >>> from agentstore.testing.scratch import scratch_store
        >>> store = scratch_store()
        >>> store.set_retention(Retention(keep_last=50))
        >>> store.retention.keep_last
        50
        """
        data = None if rule is None else rule.encode()
        self._engine.transact(lambda tx: tx.delete(pruning.RULE) if data is None else tx.put(pruning.RULE, data))

    def apply_retention(self, default: Retention | None = None, *, dry_run: bool = False) -> list[Expiry]:
        """Remove now what retention lets go of all threads; what went of each, or with `dry_run` would go.

        `default`: in the place of the store's rule, for threads that have none of their own. What is damaged stays,
        with all that stands on it, and is logged. May run beside writers, and be interrupted and run again: each
        transaction leaves a whole store. O(store).

        >>> from agentstore import Retention, Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> store = scratch_store()
        >>> thread = store.thread("t")
        >>> cps = [thread.commit(Set("step", n), reason="final" if n == 1 else "round") for n in range(5)]
        >>> [one] = store.apply_retention(Retention(keep_last=2), dry_run=True)
        >>> sorted(one.removed), one.kept
        ([0, 2], {1: 'reason final', 3: 'one of the last 2', 4: 'head'})
        """
        return list(pruning.apply(self._engine, default, dry_run=dry_run))

    # --- looking after it ------------------------------------------------------------------

    def check(self) -> list[str]:
        """Every invariant of the store that does not hold, as a sentence each; empty if all is well.

        Reads everything: all records, every state of every checkpoint against its checksum, both ways of every index,
        the engine's log and files. Never raises for damage. O(store). Meant for a store at rest or in use.

        >>> from agentstore.testing.scratch import scratch_store
        >>> scratch_store().check()
        []
        """
        return checking.problems(self._engine)

    def backup(self, dest: str | os.PathLike[str], *, on_step: Callable[[str], None] | None = None) -> backups.Copied:
        """Copy the store to the new directory `dest`, while it is in use: everything that is confirmed by now is there.

        The copy is a store that opens, checked like `check` before it gets its name; it keeps the store's uuid (see
        `agentstore.backup`). `on_step` is told what is being done. `BackupFailed` (`dest` is not free, the check found
        something), `DiskFull`, `StorePermissionError`, `UnsupportedPlatform`: there is nothing at `dest`. O(store).

        >>> import tempfile
        >>> from agentstore import Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> store = scratch_store()
        >>> cp = store.thread("t").commit(Set("step", 1))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     copied = store.backup(directory + "/copy")
        ...     with Store.open(directory + "/copy") as copy:
        ...         copied.threads, copy.thread("t").load()
        (1, {'step': 1})
        """
        return backups.copy_store(self, os.fspath(dest), on_step)

    def stats(self) -> dict[str, int]:
        """Numbers about the store: ``threads``, and the engine's LSNs, sizes in bytes and counts. O(1).

        >>> from agentstore.testing.scratch import scratch_store
        >>> scratch_store().stats()["threads"]
        0
        """
        with self._engine.read() as snap:
            threads = records.counters_of(snap.get(records.COUNTERS_KEY))[1]
        return {"threads": threads, **self._engine.stats()}

    def sizes(self, threads: int = 10) -> Sizes:
        """Bytes and number of all records by kind, and the `threads` largest threads. O(store), a slice at a time.

        >>> from agentstore import Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> store = scratch_store()
        >>> cp = store.thread("t").commit(Set("step", 1))
        >>> counted = store.sizes()
        >>> counted.kinds["checkpoints"].records, [thread.thread_id for thread in counted.threads]
        (1, ['t'])
        >>> counted.bytes == sum(kind.bytes for kind in counted.kinds.values())
        True
        """
        return count_sizes(self._engine, threads)


def _page_sizes(limit: int | None) -> Iterator[int]:
    """How many ids to read at once: no more than are wanted, then more and more, since a prefix may fit few of them."""
    size = PAGE_THREADS if limit is None else max(1, min(limit, PAGE_THREADS))
    while True:
        yield size
        size = min(4 * size, PAGE_THREADS)


def _page(pairs: Iterator[tuple[bytes, bytes]], size: int) -> tuple[list[bytes], bytes]:
    """Names of some `size` entries, whole groups of one long prefix; the key to go on at, empty at the end."""
    names: list[bytes] = []
    cut = b""
    for key, value in pairs:
        name = records.name_of(value)[1]
        if len(names) >= size and records.cut_name(name) != cut:
            return names, key
        cut = records.cut_name(name)
        names.append(name)
    return names, b""


def _sorted_names(group: list[bytes], prefix: bytes) -> list[str]:
    return [name.decode() for name in sorted(group) if name.startswith(prefix)]


def _first(found: Iterator[str], limit: int | None) -> Iterator[str]:
    if limit is None:
        yield from found
        return
    for _ in range(limit):
        name = next(found, None)
        if name is None:
            return
        yield name


# --- one upkeep for each engine: stores that share the engine share it ------------------

_registry_lock = threading.Lock()


def _new_lock_in_child() -> None:
    global _registry_lock  # noqa: PLW0603 - another thread of the parent may have held it at the fork
    _registry_lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock_in_child)
_registry: dict[EmbeddedEngine, tuple[Upkeep, int]] = {}


def _shared_upkeep(engine: EmbeddedEngine) -> Upkeep:
    with _registry_lock:
        upkeep, users = _registry.get(engine, (None, 0))
        if upkeep is None:
            upkeep = Upkeep(engine)
            if not engine.readonly:
                engine.on_background(upkeep.run)
        _registry[engine] = (upkeep, users + 1)
        return upkeep


def _release_upkeep(engine: EmbeddedEngine) -> None:
    """The last one off the engine packs what is left."""
    with _registry_lock:
        upkeep, users = _registry[engine]
        if users > 1:
            _registry[engine] = (upkeep, users - 1)
            return
        del _registry[engine]
    engine.off_background(upkeep.run)
    upkeep.close()
