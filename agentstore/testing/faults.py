"""System calls that fail, stop half way, or are the last thing their process does.

A `FaultyFiles` is handed to `EmbeddedEngine.open` in place of `Files`. It counts calls; at the
n-th one that its `Fault` is meant for it fails or kills:

>>> import errno
>>> files = FaultyFiles(Fault(nth=2, action=Error(errno.EIO), calls=frozenset({"file_size"})))
>>> files.file_size(__file__) > 0, files.count
(True, 1)
>>> files.file_size("nothing here")
Traceback (most recent call last):
OSError: [Errno 5] Input/output error: 'nothing here'
>>> files.struck
Call(name='file_size', path='nothing here', offset=0, data=b'')
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from agentstore.engine import process
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.files import Files
from agentstore.engine.segment import FRAMES_AT
from agentstore.engine.segments import SEGMENT
from agentstore.errors import StoreClosed

T = TypeVar("T")

CALLS = frozenset(
    "open pread pwrite fdatasync truncate size path_identity file_size names make_directory rename unlink "
    "sync_directory lock map sync_map".split()
)
"""Every call that can fail for a reason outside the program."""

WRITING_CALLS = frozenset("open pwrite fdatasync truncate make_directory rename unlink sync_directory sync_map".split())
"""Those that ask the disk for something new: only they meet a full one."""


class Call(NamedTuple):
    """One system call about to be made."""

    name: str
    path: str
    offset: int = 0
    data: bytes | memoryview = b""


def is_frame(call: Call) -> bool:
    """Whether this call writes a frame into a segment, rather than its header or the zeros before."""
    return (
        call.name == "pwrite"
        and call.offset >= FRAMES_AT
        and call.path.endswith(SEGMENT)
        and any(call.data[:8])  # a frame begins with its marker
    )


@dataclass(frozen=True, slots=True)
class Error:
    """The call raises `OSError`. `part` of the bytes of a pwrite (0.0 to 1.0) is written before."""

    errno: int
    part: float = 0.0


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL: before the call, after it, or inside a pwrite, when `part` of its bytes (0.0 to 1.0) is written."""

    when: Literal["before", "after", "inside"] = "before"
    part: float = 0.5


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at the `nth` call (from 1) among those named in `calls` for which `where` is true.

    `for_ever`: all later ones fail too.
    """

    nth: int
    action: Error | Kill
    calls: frozenset[str] = CALLS
    for_ever: bool = False
    where: Callable[[Call], bool] | None = None


class FaultyFiles(Files):
    """System calls of which one goes wrong; the rest are made by `real`. Safe for threads; one fault at a time."""

    def __init__(self, fault: Fault | None = None, *, real: Files | None = None) -> None:
        self._real = real or Files()
        self._mutex = threading.Lock()
        self._paths: dict[int, str] = {}
        self.made: dict[str, int] = {}
        """Calls made since the start, by name."""
        self.arm(fault)

    def arm(self, fault: Fault | None) -> None:
        """From now on `fault`, counted from here; None: no more faults."""
        with self._mutex:
            self._fault = fault
            self.count = 0
            """Calls that the present fault was meant for."""
            self.struck: Call | None = None
            """The first call that went wrong since `arm`."""

    def path_of(self, fd: int) -> str:
        """The path that `fd` was opened under; empty if it was not opened here."""
        return self._paths.get(fd, "")

    def around(self, call: Call, run: Callable[[], T], partly: Callable[[float], object]) -> T:
        """Make the call, unless it is the one. A subclass may look at every call here."""
        with self._mutex:
            self.made[call.name] = self.made.get(call.name, 0) + 1
            action = self._action(call)
        if action is None:
            return run()
        if isinstance(action, Error):
            if call.name == "pwrite":
                partly(action.part)
            raise OSError(action.errno, os.strerror(action.errno), call.path or None)
        try:
            if action.when == "after":
                run()
            elif action.when == "inside":
                partly(action.part)
        finally:
            die()

    def _action(self, call: Call) -> Error | Kill | None:
        fault = self._fault
        if fault is None or call.name not in fault.calls or (fault.where is not None and not fault.where(call)):
            return None
        self.count += 1
        if self.count != fault.nth and not (fault.for_ever and self.count > fault.nth):
            return None
        self.struck = self.struck or call
        return fault.action

    def _call(self, name: str, path: str, run: Callable[[], T]) -> T:
        return self.around(Call(name, path), run, lambda _: None)

    # --- the calls -------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        def run() -> int:
            fd = self._real.open(path, flags)
            self._paths[fd] = path
            return fd

        return self._call("open", path, run)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return self._call("pread", self.path_of(fd), lambda: self._real.pread(fd, size, offset))

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        write = self._real.pwrite

        def partly(part: float) -> None:
            size = round(len(data) * part)
            if size:
                write(fd, memoryview(data)[:size], offset)

        call = Call("pwrite", self.path_of(fd), offset, data)
        self.around(call, lambda: write(fd, data, offset), partly)

    def fdatasync(self, fd: int) -> None:
        self._call("fdatasync", self.path_of(fd), lambda: self._real.fdatasync(fd))

    def truncate(self, fd: int, size: int) -> None:
        self._call("truncate", self.path_of(fd), lambda: self._real.truncate(fd, size))

    def size(self, fd: int) -> int:
        return self._call("size", self.path_of(fd), lambda: self._real.size(fd))

    def path_identity(self, path: str) -> tuple[int, int]:
        return self._call("path_identity", path, lambda: self._real.path_identity(path))

    def file_size(self, path: str) -> int:
        return self._call("file_size", path, lambda: self._real.file_size(path))

    def names(self, path: str) -> list[str]:
        return self._call("names", path, lambda: self._real.names(path))

    def make_directory(self, path: str) -> None:
        self._call("make_directory", path, lambda: self._real.make_directory(path))

    def rename(self, source: str, target: str) -> None:
        self._call("rename", target, lambda: self._real.rename(source, target))

    def unlink(self, path: str) -> None:
        self._call("unlink", path, lambda: self._real.unlink(path))

    def sync_directory(self, path: str) -> None:
        self._call("sync_directory", path, lambda: self._real.sync_directory(path))

    def lock(self, fd: int, *, shared: bool = False, wait: bool = True) -> bool:
        return self._call("lock", self.path_of(fd), lambda: self._real.lock(fd, shared=shared, wait=wait))

    def map(self, fd: int, size: int) -> mmap.mmap:
        return self._call("map", self.path_of(fd), lambda: self._real.map(fd, size))

    def sync_map(self, page: Any) -> None:
        self._call("sync_map", "", lambda: self._real.sync_map(page))

    def environment(self, path: str, **options: Any) -> Any:
        return self._real.environment(path, **options)


def killing_files(nth: int, when: Literal["before", "after", "inside"] = "inside", part: float = 0.5) -> FaultyFiles:
    """Files under which the process dies at the `nth` frame that it writes into the log.

    For a whole program: ``set_default_files(killing_files(3))`` before it opens its store.
    """
    return FaultyFiles(Fault(nth, Kill(when, part), frozenset({"pwrite"}), where=is_frame))


def die() -> NoReturn:
    """SIGKILL this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # the signal is delivered to some thread of the process, at once but not to this instruction
        signal.pause()


def abandon(engine: EmbeddedEngine) -> None:
    """Let go of an engine as SIGKILL would: files are closed, nothing is folded or cleared."""
    if engine._background is not None:
        engine._background.stop()
    with process.opening:
        if engine._gone is None:
            engine._release(StoreClosed(f"the store {engine.path} was abandoned"), clear=False)
