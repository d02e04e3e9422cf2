"""Copies of a store: what `Store.backup` and `restore` do.

    DEST's directory/.DEST.partial    made, locked and filled by the engine (`EmbeddedEngine.copy_to`), synced
    opened readonly, checked          every invariant, as `Store.check`
    renamed to DEST                   and the directory synced

A process that dies on the way leaves the partial directory and nothing else; the next copy to the same DEST removes it.
A copy keeps the uuid of its store and those of its threads: it is the same store at an earlier time, so that the keys
of effects stay the same and a tool that honours them does nothing twice after a restore. Two copies that both go on
are two stories of one store; their keys meet.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from agentstore.engine.files import Files, default_files, translate
from agentstore.engine.opening import check_file_system
from agentstore.engine.parts import BASE, FORMAT, OWN_NAMES, WAL
from agentstore.errors import AgentStoreError, BackupFailed

if TYPE_CHECKING:
    from agentstore.store import Store

PARTIAL: Final = ".partial"
"""Ends the name of a copy that is not finished; the name begins with a dot."""

_KEPT: Final = frozenset({FORMAT, BASE, WAL})
"""What a finished copy consists of; the rest is made by the first open, which then also reads base whole."""

_ATTEMPTS: Final = 10
"""How often a partial directory that others remove meanwhile is made again."""


class Copied(NamedTuple):
    """What a copy holds."""

    path: str
    """The directory, absolute."""
    bytes: int
    """Size of its data file."""
    threads: int
    lsn: int
    """Number of the newest log frame in it."""


def restore(
    backup: str | os.PathLike[str], dest: str | os.PathLike[str], *, on_step: Callable[[str], None] | None = None
) -> Copied:
    """Make the store of `backup` anew in the directory `dest`; check both. What `Store.backup` and `Store.open` raise.

    A copy of a copy, so a backup on a file system that is mounted read-only will do. O(store).

    >>> import tempfile
    >>> from agentstore.testing.scratch import scratch_store
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     copied = scratch_store().backup(directory + "/copy")
    ...     restore(directory + "/copy", directory + "/agents").threads
    0
    """
    from agentstore.store import Store

    with Store.open(backup, create=False, readonly=True, background=False) as store:
        (on_step or _silent)("checking the backup")
        insist_on(store.check(), f"the backup {store.path}")
        return copy_store(store, os.fspath(dest), on_step)


def copy_store(store: Store, dest: str, on_step: Callable[[str], None] | None = None) -> Copied:
    """Copy everything that is confirmed in `store` to the new directory `dest`. What `Store.backup` promises."""
    on_step = on_step or _silent
    files = default_files()
    target = os.path.realpath(dest)
    partial = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}{PARTIAL}")
    try:
        check_free(files, target, store.path)
        with _made(files, partial, target):
            on_step("copying")
            wanted = store.stats()["durable_lsn"]
            size = store._engine.copy_to(partial)
            on_step("checking the copy")
            found = _verified(partial, wanted)
            _keep_only(files, partial)
            on_step("giving it its name")
            files.rename(partial, target)
    except OSError as error:
        raise _typed(error, target) from error
    try:
        files.sync_directory(os.path.dirname(target))
    except OSError as error:
        raise BackupFailed(
            f"{target} is whole, but its name may not survive a power cut: its directory could not be synced "
            f"({error.strerror or error}); look at the disk"
        ) from error
    return Copied(target, size, found["threads"], found["lsn"])


def _silent(_step: str) -> None:
    pass


def insist_on(problems: list[str], what: str) -> None:
    """BackupFailed if a check found something."""
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise BackupFailed(f"{what} does not pass its check: {problems[0]}{more}; run 'agentstore verify' on the store")


def check_free(files: Files, target: str, source: str) -> None:
    """Refuse (`BackupFailed`) a destination that is taken, inside the store, or where a store could not be opened."""
    real = os.path.realpath(source)
    if target == real or target.startswith(real.rstrip("/") + "/"):
        raise BackupFailed(f"{target} is inside the store {source}; choose a directory elsewhere")
    parent = os.path.dirname(target)
    if not files.is_directory(parent):
        raise BackupFailed(f"there is no directory {parent}; make it first")
    if not files.exists(target):
        pass
    elif not files.is_directory(target):
        raise BackupFailed(f"{target} exists and is not a directory; choose a name that is free")
    elif files.names(target):
        raise BackupFailed(f"{target} exists and is not empty; choose a name that is free")
    elif os.path.ismount(target):
        raise BackupFailed(f"{target} is a mount point, and a copy comes into place by a rename; choose a name inside")
    check_file_system(files, parent)


@contextmanager
def _made(files: Files, partial: str, target: str) -> Iterator[None]:
    """The empty directory `partial`, locked; removed if the block does not rename it."""
    fd = _lock_new(files, partial, target)
    try:
        yield
    except BaseException:
        try:
            _remove(files, partial)
        except (AgentStoreError, OSError):
            pass  # why it failed is what the caller has to know; the next copy removes the rest
        raise
    finally:
        files.close(fd)


def _lock_new(files: Files, partial: str, target: str) -> int:
    for _ in range(_ATTEMPTS):
        try:
            files.make_directory(partial)
        except FileExistsError:
            _sweep(files, partial, target)
            continue
        fd = _locked(files, partial)
        if fd is not None:
            return fd
    raise BackupFailed(f"another process makes a copy at {target}; wait for it, or choose another name")


def _locked(files: Files, partial: str) -> int | None:
    """A descriptor of the directory with its lock; None if another process has it or removed the directory."""
    try:
        fd = files.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        if files.lock(fd, wait=False) and files.same_file(fd, partial):
            return fd
    except BaseException:
        files.close(fd)
        raise
    files.close(fd)
    return None


def _sweep(files: Files, partial: str, target: str) -> None:
    """Remove what a copy that was killed left behind; BackupFailed if it is somebody's."""
    if not files.is_directory(partial):
        raise BackupFailed(f"{partial} is in the way and not a directory; remove it, or choose another name")
    fd = _locked(files, partial)
    if fd is None:
        if files.exists(partial):
            raise BackupFailed(f"another process makes a copy at {target}; wait for it, or choose another name")
        return
    try:
        _remove(files, partial)
    finally:
        files.close(fd)


def _remove(files: Files, partial: str) -> None:
    names = files.names(partial)
    strangers = [name for name in names if name not in OWN_NAMES]
    if strangers:
        raise BackupFailed(f"{partial} has {strangers[0]!r} in it, which no copy has; look at it, then remove it")
    for name in names:
        path = os.path.join(partial, name)
        if name == WAL:
            for segment in files.names(path):
                files.unlink(os.path.join(path, segment))
            files.remove_directory(path)
        else:
            files.unlink(path)
    files.remove_directory(partial)


def _verified(partial: str, wanted: int) -> dict[str, int]:
    """The numbers of the copy, which is opened and checked; BackupFailed if it is not what it has to be."""
    from agentstore.store import Store

    with Store.open(partial, create=False, readonly=True, background=False) as copy:
        insist_on(copy.check(), "the copy")
        found = copy.stats()
    if found["applied_lsn"] < wanted:
        raise BackupFailed(f"the copy ends at LSN {found['applied_lsn']}, but {wanted} was confirmed before; try again")
    return found


def _keep_only(files: Files, partial: str) -> None:
    """Take away what the check left, so that the first open verifies base again, wherever it was carried."""
    for name in files.names(partial):
        if name not in _KEPT:
            files.unlink(os.path.join(partial, name))
    files.sync_directory(partial)


def _typed(error: OSError, target: str) -> AgentStoreError:
    known = translate(error, f"the copy {target}")
    if isinstance(known, AgentStoreError):
        return known
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return BackupFailed(f"{target} was made by somebody else meanwhile; choose a name that is free")
    return BackupFailed(
        f"the copy {target} could not be made: {error.strerror or error}; look at the disk and the name"
    )
