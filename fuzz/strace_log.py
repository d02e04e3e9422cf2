"""What strace saw, as events of a disk.

`calls` reads the lines of a log; `Watcher` follows descriptors and names through them and notes, in the words
of `agentstore.testing.simdisk`, what was asked of the files of one directory.

Stores into mapped memory make no call. The writable maps of a store are its control page and LMDB's lock files:
of the page the process told what it held (lines ``k HEX``), the lock files mean nothing after a crash.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from agentstore.engine.parts import CONTROL
from agentstore.testing.simdisk import ROOT, Event, Image, Platter, _File, is_lock

TRACED = (
    "open openat creat close write writev pwrite64 pwritev pwritev2 fsync fdatasync msync sync_file_range rename "
    "renameat renameat2 unlink unlinkat mkdir mkdirat rmdir link linkat ftruncate truncate fallocate copy_file_range "
    "mmap lseek"
).split()
"""Everything that may change what is on a disk, and what tells which file it is."""

_LINE = re.compile(r"(\d+) +(?:<\.\.\. (\w+) resumed>|(\w+)\()(.*)", re.DOTALL)
_RESULT = re.compile(r"\) += (0x[0-9a-f]+|-?\d+|\?)(.*)$")
_UNFINISHED = " <unfinished ...>"
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_FD = re.compile(r"(-?\d+|AT_FDCWD)(?:<((?:\\x[0-9a-f]{2})*)>)?")


class Call(NamedTuple):
    """One system call, or its first half: `result` is None while it is under way."""

    task: int
    name: str
    arguments: str
    result: int | None
    injected: bool = False

    def texts(self) -> list[bytes]:
        """Its arguments that are bytes or paths."""
        return [_bytes(found) for found in _TEXT.findall(self.arguments)]

    def fd(self) -> tuple[int, str]:
        """The descriptor that it begins with, and the path of that."""
        found = _FD.match(self.arguments)
        if found is None or found[1] == "AT_FDCWD":
            return -1, ""
        return int(found[1]), os.fsdecode(_bytes(found[2] or ""))

    def numbers(self) -> list[int]:
        """What stands after the last text: sizes and offsets."""
        rest = _TEXT.sub("", self.arguments).rpartition("]")[2]
        return [int(each) for each in re.findall(r"(?<=, )-?\d+", rest)]


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def calls(log: str) -> Iterator[Call]:
    """The calls of a log. One that others ran beside comes twice: when it began, and with its result."""
    under_way: dict[int, str] = {}
    for line in log.split("\n"):
        found = _LINE.match(line)
        if found is None:
            continue  # the end of a process
        task, rest = int(found[1]), found[4]
        if found[2]:
            rest = under_way.pop(task, "") + rest
        if rest.endswith(_UNFINISHED):
            under_way[task] = rest[: -len(_UNFINISHED)]
            yield Call(task, found[3] or found[2], under_way[task], None)
            continue
        end = _RESULT.search(rest)
        if end is None:
            continue  # it was killed inside
        result = -1 if end[1] == "?" else int(end[1], 0)
        call = Call(task, found[3] or found[2], rest[: end.start()], result, "INJECTED" in end[2])
        if found[3]:
            yield call._replace(result=None)
        yield call


Seen = tuple[str, str, int, int]
"""A call that writes: its name, the path, an offset and a size (0 where it has none)."""


@dataclass
class _Open:
    path: str
    number: int
    at_once: bool
    """O_DSYNC or O_SYNC."""
    position: int = 0


@dataclass
class Watcher:
    """Follows the calls of one process and all its threads."""

    root: str
    told: str
    """The path of the file that the process tells its story to."""
    journal: list[Event] = field(default_factory=list)
    seen: Counter[Seen] = field(default_factory=Counter)
    maps: set[str] = field(default_factory=set)
    """Files that were mapped so that they can be written."""
    injected: int = 0
    """Calls that were made to fail, to lie or to kill."""

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._names: dict[str, int] = {}
        self._open: dict[int, _Open] = {}
        self._addresses: dict[int, int] = {}
        self._lies = False

    def watch(self, log: str) -> None:
        for call in calls(log):
            self.injected += call.injected and call.result is not None
            if call.result is None:
                if call.name in ("fsync", "fdatasync", "msync"):
                    self._sync_begins(call)
            elif call.result >= 0:
                # A sync with an injected result was not made: it lies.
                self._lies = call.injected
                getattr(self, f"_{call.name}", self._unknown)(call)

    def _relative(self, path: str) -> str | None:
        if path == self.root:
            return ROOT
        if path.startswith(self.root + os.sep):
            return path[len(self.root) + 1 :]
        return ".." if path == os.path.dirname(self.root) else None

    def _paths(self, call: Call) -> list[str | None]:
        return [self._relative(os.path.abspath(os.fsdecode(each))) for each in call.texts()]

    def _saw(self, name: str, path: str, offset: int = 0, size: int = 0) -> None:
        self.seen[name, path, offset, size] += 1

    def _unknown(self, call: Call) -> None:
        path = self._relative(call.fd()[1])
        inside = [each for each in (path, *self._paths(call)) if each is not None]
        if inside:
            raise AssertionError(f"{call.name} on {inside}: a call that nobody knew the store to make")

    # --- names and descriptors -----------------------------------------------------------------

    def _openat(self, call: Call) -> None:
        (path,) = self._paths(call)
        assert call.result is not None
        if path is None or path == "..":
            self._open.pop(call.result, None)
            return
        flags = call.arguments
        if "O_CREAT" in flags:
            self._saw("open", path)
            if path not in self._names:
                self._names[path] = next(self._numbers)
                self.journal.append(Event("create", path, self._names[path]))
        number = self._names.get(path, 0)
        if "O_TRUNC" in flags:
            self.journal.append(Event("truncate", file=number, offset=0))
        self._open[call.result] = _Open(path, number, "O_DSYNC" in flags or "O_SYNC" in flags)

    def _close(self, call: Call) -> None:
        self._open.pop(call.fd()[0], None)

    def _mkdir(self, call: Call) -> None:
        (path,) = self._paths(call)
        if path is not None:
            self._saw("mkdir", path)
            self._names[path] = next(self._numbers)
            self.journal.append(Event("make_directory", path, self._names[path]))

    def _rename(self, call: Call) -> None:
        before, after = self._paths(call)
        if before is not None and after is not None:
            self._saw("rename", after)
            self._names[after] = self._names.pop(before)
            self.journal.append(Event("rename", before, self._names[after], target=after))

    def _unlink(self, call: Call) -> None:
        (path,) = self._paths(call)
        if path in self._names:
            self._saw("unlink", path)
            self.journal.append(Event("unlink", path, self._names.pop(path)))

    # --- contents ---------------------------------------------------------------------------------

    def _write(self, call: Call) -> None:
        fd, path = call.fd()
        if path == self.told:
            self._hear(call.texts()[0].decode())
        elif fd in self._open:
            self._unknown(call)

    def _hear(self, line: str) -> None:
        if line.startswith("k "):
            if CONTROL in self._names:
                words = bytes.fromhex(line[2:])
                self.journal.append(Event("write", CONTROL, self._names[CONTROL], 0, words))
        else:
            self.journal.append(Event("note", data=line.strip().encode()))

    def _pwrite64(self, call: Call) -> None:
        self._wrote(call, b"".join(call.texts()), call.numbers()[-1])

    def _pwritev(self, call: Call) -> None:
        self._wrote(call, b"".join(call.texts()), call.numbers()[1])

    _pwritev2 = _pwritev

    def _lseek(self, call: Call) -> None:
        opened = self._open.get(call.fd()[0])
        if opened is not None:
            assert call.result is not None
            opened.position = call.result

    def _writev(self, call: Call) -> None:
        opened = self._open.get(call.fd()[0])
        if opened is not None:
            assert call.result is not None
            self._wrote(call, b"".join(call.texts()), opened.position)
            opened.position += call.result

    def _wrote(self, call: Call, data: bytes, offset: int) -> None:
        assert call.result is not None
        opened = self._open.get(call.fd()[0])
        if opened is None:
            return
        data = data[: call.result]
        self._saw("pwrite", opened.path, offset, len(data))
        event = Event("write", opened.path, opened.number, offset, data)
        self.journal.append(event)
        if opened.at_once:
            self.journal.append(event._replace(name="settle"))

    def _ftruncate(self, call: Call) -> None:
        opened = self._open.get(call.fd()[0])
        if opened is not None:
            size = call.numbers()[-1]
            self._saw("truncate", opened.path, size)
            self.journal.append(Event("truncate", opened.path, opened.number, size))

    # --- syncs -------------------------------------------------------------------------------------

    def _sync_begins(self, call: Call) -> None:
        number = self._synced(call)
        if number:
            self.journal.append(Event("sync_begins", file=number))

    def _synced(self, call: Call) -> int:
        if call.name == "msync":
            return self._addresses.get(int(call.arguments.partition(",")[0], 16), 0)
        opened = self._open.get(call.fd()[0])
        return 0 if opened is None else opened.number

    def _fdatasync(self, call: Call) -> None:
        opened = self._open.get(call.fd()[0])
        if opened is not None:
            self._saw("sync", opened.path)
            self._durable(Event("sync", opened.path, opened.number))

    def _fsync(self, call: Call) -> None:
        path = self._relative(call.fd()[1])
        if path is not None and (path in ("..", ROOT) or self._is_directory(path)):
            self._saw("sync_directory", path)
            self._durable(Event("sync_directory", path))
        else:
            self._fdatasync(call)

    def _durable(self, event: Event) -> None:
        if not self._lies:
            self.journal.append(event)

    def _is_directory(self, path: str) -> bool:
        number = self._names.get(path)
        return any(event.name == "make_directory" and event.file == number for event in self.journal)

    def _msync(self, call: Call) -> None:
        number = self._synced(call)
        if number:
            self._saw("sync_map", CONTROL)
            self.journal.append(Event("sync", file=number))

    def _mmap(self, call: Call) -> None:
        assert call.result is not None
        self._addresses.pop(call.result, None)
        # By its path: Python maps a copy of the descriptor.
        found = re.search(r", -?\d+<((?:\\x[0-9a-f]{2})*)>", call.arguments)
        path = self._relative(os.fsdecode(_bytes(found[1]))) if found else None
        if path in self._names and "PROT_WRITE" in call.arguments and "MAP_SHARED" in call.arguments:
            self.maps.add(path)
            self._addresses[call.result] = self._names[path]


# --- the disk under it -----------------------------------------------------------------------


class Disk(Platter):
    """A platter that also knows writes that are durable when they return, and syncs that others write beside."""

    def __init__(self) -> None:
        super().__init__(Image([], {}))
        self._begun: dict[int, int] = {}

    def apply(self, event: Event) -> None:
        if event.name == "sync_begins":
            self._begun[event.file] = len(self.files[event.file].pending) if event.file in self.files else 0
        elif event.name == "sync":
            writes = self._begun.pop(event.file, 0)
            super().apply(event._replace(offset=writes))
        elif event.name == "settle":
            settle(self.files[event.file], event.offset, len(event.data))
        else:
            super().apply(event)


def settle(file: _File, offset: int, size: int) -> None:
    """What is written in this range is safe; what is pending elsewhere stays so."""
    end, kept = offset + size, []
    safe = bytearray(file.safe)
    for at, data in file.pending:
        if data is None or at >= end or at + len(data) <= offset:
            kept.append((at, data))
            continue
        low, high = max(at, offset), min(at + len(data), end)
        safe = safe.ljust(high, b"\0")
        safe[low:high] = data[low - at : high - at]
        if at < low:
            kept.append((at, data[: low - at]))
        if high < at + len(data):
            kept.append((high, data[high - at :]))
    file.safe, file.pending[:], file._choices = bytes(safe), kept, None


def bypasses(watcher: Watcher, seam: Counter[Seen]) -> list[str]:
    """Calls that went past the seam and are not LMDB's, and calls through the seam that strace did not see."""
    found = [
        f"{call} went through the seam {count} times more than it was made"
        for call, count in (seam - watcher.seen).items()
    ]
    for (name, path, offset, size), count in (watcher.seen - seam).items():
        lmdb = ".mdb" in os.path.basename(path) and (name in ("open", "pwrite", "sync", "truncate"))
        if not lmdb:
            found.append(f"{name} of {path} at {offset}, {size} bytes: {count} times past the seam")
    return found + [
        f"{path} is mapped so that it can be written" for path in watcher.maps if path != CONTROL and not is_lock(path)
    ]
