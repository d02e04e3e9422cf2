"""A file that is there whole or as it was before: written under another name, synced, renamed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from agentstore.errors import AgentStoreError

from .transcript import printable_path

FILE_MODE = 0o600
"""What comes out of a store is as private as the store."""


class OutputFailed(AgentStoreError):
    """The file could not be written; what was there before is there still."""


@contextmanager
def replacing(path: str, store: str) -> Iterator[str]:
    """The name of a new, empty file that becomes `path` at the end of the block; removed if the block fails.

    `store` is a directory where no output belongs. `OutputFailed` for what the system refuses, also inside the block.
    """
    target = os.path.realpath(path)
    _check(target, path, store)
    partial = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{os.getpid()}.partial")
    try:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE))
        try:
            yield partial
            _sync(partial, os.O_RDONLY)
            os.replace(partial, target)
        except BaseException:
            _remove(partial)
            raise
        _sync(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise failed(path, error) from error


def failed(path: str, error: OSError) -> OutputFailed:
    """The typed error for what the system said about `path`."""
    return OutputFailed(f"{printable_path(path)} could not be written: {error.strerror or error}")


def is_special(path: str) -> bool:
    """Whether `path` is there and neither a file nor a directory: a terminal, a pipe."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _check(target: str, path: str, store: str) -> None:
    if os.path.isdir(target):
        raise OutputFailed(f"{printable_path(path)} is a directory; name a file")
    if is_special(target):
        raise OutputFailed(
            f"{printable_path(path)} is a device or a pipe, which no file can take the place of; name a file"
        )
    if target.startswith(os.path.realpath(store).rstrip("/") + "/"):
        raise OutputFailed(f"{printable_path(path)} is inside the store; choose a file elsewhere")


def _sync(path: str, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
