"""A disk whose plug can be pulled: every state that a power cut may leave, from what was written and what was synced.

`SimDisk` stands in for `Files`. The calls are made on real files; at the same time each is
noted in a journal. From any prefix of the journal `crash_images` makes the directories that
a power cut at that point may leave:

* of the writes to a file since its last sync, any subset is there, sector by sector (512 bytes):
  torn writes, holes, zeros at the end, lengths in between;
* of the names made, renamed and removed in a directory since its last sync, any subset;
* the control page, written by nobody but the kernel, has any content that it had since its last sync, or
  (its words being written one by one) a mixture of two;
* base.mdb is LMDB's affair, whose commits are taken to be atomic and durable: it joins as it
  was after each of them. tail.mdb is never synced and never comes back, nor do lock files.

Everything is kept in memory: for small workloads, see `agentstore.testing.limits`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import mmap
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentstore.engine.control import CONTROL_BYTES
from agentstore.engine.files import Files
from agentstore.engine.parts import BASE, BASE_NEW, CONTROL, LOCK, TAIL

SECTOR = 512
ROOT = ""
"""The path of the store directory itself; all paths are relative to it."""

LMDB_HEAD_BYTES = 8192
"""LMDB's two meta pages: one of them changes with every commit."""


def is_lock(path: str) -> bool:
    """Whether a file only serves to be locked: what was in it before a power cut means nothing."""
    return path.startswith(LOCK) or path.endswith("-lock")


class Event(NamedTuple):
    """One thing that was asked of the disk, or a note of the workload's (`name` "note", `data` its text).

    A "sync" has in `offset` the number of pending writes of its file when it began.
    """

    name: str
    path: str = ""
    file: int = 0
    offset: int = 0
    data: bytes = b""
    target: str = ""


@dataclass
class _File:
    """A file as the disk knows it: what is safe, and the writes since (offset, bytes; no bytes: a new length)."""

    safe: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    _choices: tuple[list[int], dict[int, list[bytes]]] | None = None

    def write(self, offset: int, data: bytes | None) -> None:
        self.pending.append((offset, data))
        self._choices = None

    def sync(self, writes: int) -> None:
        """The first `writes` of what is pending are safe."""
        content = bytearray(self.safe)
        for offset, data in self.pending[:writes]:
            if data is None:
                content = content[:offset].ljust(offset, b"\0")
            else:
                content = content.ljust(offset, b"\0")
                content[offset : offset + len(data)] = data
        self.safe = bytes(content)
        del self.pending[:writes]
        self._choices = None

    def choices(self) -> tuple[list[int], dict[int, list[bytes]]]:
        """The lengths that the file may have, and of each sector with more than one possible content all of them."""
        if self._choices is None:
            self._choices = self._find_choices()
        return self._choices

    def _find_choices(self) -> tuple[list[int], dict[int, list[bytes]]]:
        lengths = {len(self.safe)}
        longest = max([len(self.safe), *(offset + len(data or b"") for offset, data in self.pending)])
        content = bytearray(self.safe).ljust(longest, b"\0")
        sectors: dict[int, list[bytes]] = {}
        length = len(self.safe)
        for offset, data in self.pending:
            if data is None:
                length = offset
            else:
                first, last = offset // SECTOR, (offset + len(data) - 1) // SECTOR
                for sector in range(first, last + 1):
                    sectors.setdefault(sector, [bytes(content[sector * SECTOR : (sector + 1) * SECTOR])])
                content[offset : offset + len(data)] = data
                for sector in range(first, last + 1):
                    now = bytes(content[sector * SECTOR : (sector + 1) * SECTOR])
                    if now not in sectors[sector]:
                        sectors[sector].append(now)
                length = max(length, offset + len(data))
            lengths.add(length)
        return sorted(lengths), {sector: found for sector, found in sectors.items() if len(found) > 1}

    def as_chosen(self, length: int, sectors: dict[int, bytes]) -> bytes:
        content = bytearray(self.safe).ljust(length, b"\0")
        for sector, data in sectors.items():
            end = sector * SECTOR + len(data)
            content = content.ljust(end, b"\0")
            content[sector * SECTOR : end] = data
        return bytes(content[:length])


class Image:
    """What a power cut left: directories and files by relative path."""

    def __init__(self, directories: Iterable[str], files: dict[str, bytes]) -> None:
        self.directories = sorted(directories)
        self.files = files

    def digest(self) -> bytes:
        seen = hashlib.blake2b("\0".join(self.directories).encode(), digest_size=16)
        for path in sorted(self.files):
            seen.update(b"\0%b\0%d\0" % (path.encode(), len(self.files[path])))
            seen.update(self.files[path])
        return seen.digest()

    def numbers(self) -> dict[str, int]:
        """Negative numbers for what is there at the start of a journal."""
        return {path: -number for number, path in enumerate([*self.directories, *self.files], 1)}

    def write_to(self, root: str) -> None:
        """Make it real at `root`, which is not there yet (and is not made if the cut took the directory itself)."""
        for directory in self.directories:
            os.mkdir(os.path.join(root, directory) if directory else root, 0o700)
        for path, content in self.files.items():
            with open(os.path.join(root, path), "wb") as file:
                # What is zero stays a hole: most of a segment is.
                for at in range(0, len(content), 4096):
                    page = content[at : at + 4096]
                    if page.count(0) != len(page):
                        file.seek(at)
                        file.write(page)
                file.truncate(len(content))

    @classmethod
    def read_from(cls, root: str) -> Image:
        """The image of a real directory."""
        directories, files = [], {}
        for folder, _, names in os.walk(root):
            inside = os.path.relpath(folder, root)
            directories.append(ROOT if inside == "." else inside)
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    files[os.path.normpath(os.path.join(inside, name))] = file.read()
        return cls(
            directories, {path: content for path, content in files.items() if path != TAIL and not is_lock(path)}
        )


class Platter:
    """The disk after some prefix of a journal."""

    def __init__(self, start: Image) -> None:
        self.files: dict[int, _File] = {}
        self.safe_names: dict[str, int] = {}
        """Directories are files with a number, too."""
        self.directories: set[int] = set()
        self.pending_names: list[Event] = []
        self.notes: list[str] = []
        for path, number in start.numbers().items():
            self.safe_names[path] = number
            if path in start.files:
                self.files[number] = _File(start.files[path])
            else:
                self.directories.add(number)

    def apply(self, event: Event) -> None:
        name = event.name
        if name == "write":
            self.files[event.file].write(event.offset, event.data)
        elif name == "truncate":
            self.files[event.file].write(event.offset, None)
        elif name == "sync":
            self.files[event.file].sync(event.offset)
        elif name == "lmdb":
            self.files[event.file] = _File(event.data)
        elif name in ("create", "make_directory", "rename", "unlink"):
            if name == "create":
                self.files[event.file] = _File()
            elif name == "make_directory":
                self.directories.add(event.file)
            self.pending_names.append(event)
        elif name == "sync_directory":
            inside = [each for each in self.pending_names if os.path.dirname(each.path) == event.path and each.path]
            if event.path == "..":
                inside = [each for each in self.pending_names if each.path == ROOT]
            self._rename(self.safe_names, inside)
            self.pending_names = [each for each in self.pending_names if each not in inside]
        else:
            self.notes.append(event.data.decode())

    @staticmethod
    def _rename(names: dict[str, int], events: Iterable[Event]) -> None:
        for event in events:
            if event.name == "unlink":
                names.pop(event.path, None)
            elif event.name == "rename":
                if names.get(event.path) == event.file:
                    del names[event.path]
                names[event.target] = event.file
            else:
                names[event.path] = event.file

    # --- the plug ----------------------------------------------------------------------

    def images(self, limit: int, rng: random.Random) -> Iterator[Image]:
        """All images that a power cut now may leave, if there are at most `limit`; else that many of them.

        Those begin with the extremes and with one thing lost and one thing kept, and are then drawn.
        """
        spaces = self._spaces()
        if math.prod(spaces) <= limit:
            for each in itertools.product(*map(range, spaces)):
                yield self._image(each)
        else:
            for place, each in enumerate(itertools.islice(_drawn(spaces, rng), limit)):
                yield self._image(each, rng if place % 2 else None)

    def count(self) -> int:
        """How many combinations there are (some give the same image)."""
        return math.prod(self._spaces())

    def _dirty(self) -> list[int]:
        return [number for number, file in self.files.items() if file.pending]

    def _spaces(self) -> list[int]:
        """The number of possibilities of each independent choice: names first, then lengths and sectors by file."""
        spaces = [2] * len(self.pending_names)
        for number in self._dirty():
            lengths, sectors = self.files[number].choices()
            spaces.append(len(lengths))
            spaces += [len(each) for each in sectors.values()]
        return spaces

    def _image(self, pick: tuple[int, ...], mix: random.Random | None = None) -> Image:
        chosen = iter(pick)
        names = dict(self.safe_names)
        self._rename(names, [event for event in self.pending_names if next(chosen)])
        contents: dict[int, bytes] = {}
        for number in self._dirty():
            lengths, sectors = self.files[number].choices()
            length = lengths[next(chosen)]
            kept = {sector: each[next(chosen)] for sector, each in sectors.items()}
            if mix is not None and number == names.get(CONTROL) and 0 in sectors:
                kept[0] = _mixed(mix.choice(sectors[0]), mix.choice(sectors[0]), mix)
            contents[number] = self.files[number].as_chosen(length, kept)
        directories = {path for path, number in names.items() if number in self.directories}
        there = {
            path
            for path in directories
            if path == ROOT or (ROOT in directories and os.path.dirname(path) in directories)
        }
        files = {
            path: contents.get(number, self.files[number].safe)
            for path, number in names.items()
            if number not in self.directories and os.path.dirname(path) in there
        }
        return Image(there, files)


def _mixed(one: bytes, other: bytes, rng: random.Random) -> bytes:
    words = [rng.choice((one, other))[at : at + 8] for at in range(0, len(one), 8)]
    return b"".join(words)


def _drawn(spaces: list[int], rng: random.Random) -> Iterator[tuple[int, ...]]:
    old, new = [0] * len(spaces), [space - 1 for space in spaces]
    yield tuple(old)
    yield tuple(new)
    singles = [
        (*pattern[:place], other[place], *pattern[place + 1 :])
        for pattern, other in ((old, new), (new, old))
        for place in range(len(spaces))
    ]
    rng.shuffle(singles)
    # Half of the draws keep neighbours together: writes reach the disk in runs.
    for single in itertools.chain(singles, itertools.repeat(None)):
        if single is not None:
            yield single
        cut = rng.randrange(len(spaces) + 1)
        run = old[:cut] + new[cut:] if rng.random() < 0.5 else new[:cut] + old[cut:]
        yield tuple(run)
        yield tuple(rng.randrange(space) for space in spaces)


class _Environment:
    """An LMDB environment, and a look at its file behind each commit: nothing else says when that was."""

    def __init__(self, env: Any, look: Callable[[], None]) -> None:
        self._env = env
        self._look = look

    def begin(self, *given: Any, **options: Any) -> Any:
        txn = self._env.begin(*given, **options)
        return _Transaction(txn, self._look) if options.get("write") else txn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class _Transaction:
    """A write transaction of it."""

    def __init__(self, txn: Any, look: Callable[[], None]) -> None:
        self._txn = txn
        self._look = look

    def commit(self) -> None:
        self._txn.commit()
        self._look()

    def __enter__(self) -> _Transaction:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.commit()
        else:
            self._txn.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)


class SimDisk(Files):
    """Real calls below `root`, and a journal of them. For one thread.

    `start`: what is durable at the beginning (a store that is there already). `lies`: which of the calls that sync
    (names of the file or directory, relative to `root`) do nothing, as of a disk that acknowledges what it has in
    its cache; to see a checker fail.
    """

    def __init__(self, root: str, start: Image | None = None, *, lies: Callable[[str], bool] | None = None) -> None:
        self.root = os.path.abspath(root)
        self.start = start or Image([], {})
        self.journal: list[Event] = []
        self._lies = lies or (lambda path: False)
        self._numbers = itertools.count(1)
        self._named = self.start.numbers()
        self._open: dict[int, int] = {}
        self._lmdb: dict[int, tuple[int, int, bytes]] = {}
        self._buffered: set[str] = set()
        """Files of LMDB that it was told not to sync."""
        self._page: mmap.mmap | None = None
        self._words = b""
        self._unsynced: Counter[int] = Counter()
        self.during_sync: Callable[[], object] | None = None
        """Called once, while the next sync of a segment is under way: what it writes is not part of that sync."""

    def _path_of(self, number: int) -> str:
        return next((path for path, each in self._named.items() if each == number), "")

    def note(self, text: str) -> None:
        """Put `text` into the journal: what the workload asked for, what it was told."""
        self._look()
        self._add(Event("note", data=text.encode()))

    def _add(self, event: Event) -> None:
        if event.name in ("write", "truncate"):
            self._unsynced[event.file] += 1
        self.journal.append(event)

    def _relative(self, path: str) -> str | None:
        """`path` from `root` on, ".." for its parent, None outside."""
        path = os.path.abspath(path)
        if path == self.root:
            return ROOT
        if path.startswith(self.root + os.sep):
            return path[len(self.root) + 1 :]
        return ".." if path == os.path.dirname(self.root) else None

    # --- what happens without a call -----------------------------------------------------

    def _look(self) -> None:
        """Note what LMDB and the writers of the control page did since the last call."""
        page = self._page
        if page is not None:
            if page.closed:
                self._page = None
            elif page[:SECTOR] != self._words:
                self._words = page[:SECTOR]
                self._add(Event("write", CONTROL, self._named[CONTROL], 0, self._words))
        for name in (BASE_NEW, BASE):
            self._look_at(name)

    def _look_at(self, name: str) -> None:
        path = os.path.join(self.root, name)
        try:
            inode = os.stat(path).st_ino
        except FileNotFoundError:
            return
        if inode not in self._lmdb:
            number = self._named.get(name)
            if number is None:
                number = self._named[name] = next(self._numbers)
                self._add(Event("create", name, number))
            # Kept open to the end: closing it would drop the locks that LMDB has on it in this process.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._lmdb[inode] = (number, fd, os.pread(fd, LMDB_HEAD_BYTES, 0) if number < 0 else b"")
        number, fd, seen = self._lmdb[inode]
        head = os.pread(fd, LMDB_HEAD_BYTES, 0)
        if head != seen and len(head) == LMDB_HEAD_BYTES:
            self._lmdb[inode] = (number, fd, head)
            data = os.pread(fd, os.fstat(fd).st_size, 0)
            self._add(Event("write" if name in self._buffered else "lmdb", name, number, data=data))

    def end(self) -> None:
        """The last look; nothing is noted any more."""
        self._look()
        for _, fd, _ in self._lmdb.values():
            os.close(fd)
        self._lmdb.clear()

    # --- calls -----------------------------------------------------------------------------

    def environment(self, path: str, **options: Any) -> Any:
        inside = self._relative(path)
        env = super().environment(path, **options)
        if inside not in (BASE, BASE_NEW):
            return env
        if options.get("sync", True):
            self._buffered.discard(inside)
        else:
            self._buffered.add(inside)
        return _Environment(env, self._look)

    def open(self, path: str, flags: int) -> int:
        self._look()
        made = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        fd = super().open(path, flags)
        inside = self._relative(path)
        if inside is not None:
            if made and not is_lock(inside):
                self._named[inside] = next(self._numbers)
                self._add(Event("create", inside, self._named[inside]))
            self._open[fd] = self._named.get(inside, 0)
        return fd

    def close(self, fd: int) -> None:
        self._look()
        self._open.pop(fd, None)
        super().close(fd)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        self._look()
        super().pwrite(fd, data, offset)
        if number := self._open.get(fd, 0):
            self._add(Event("write", file=number, offset=offset, data=bytes(data)))

    def truncate(self, fd: int, size: int) -> None:
        self._look()
        super().truncate(fd, size)
        if number := self._open.get(fd, 0):
            self._add(Event("truncate", file=number, offset=size))

    def fdatasync(self, fd: int) -> None:
        """Not made on the real file: nobody pulls its plug."""
        self._look()
        self._synced(self._open.get(fd, 0))

    def _synced(self, number: int) -> None:
        writes = self._unsynced[number]
        if self.during_sync is not None:
            during, self.during_sync = self.during_sync, None
            during()
        if number and not self._lies(self._path_of(number)):
            self._unsynced[number] -= writes
            self._add(Event("sync", file=number, offset=writes))

    def make_directory(self, path: str) -> None:
        self._look()
        super().make_directory(path)
        inside = self._relative(path)
        if inside is not None:
            self._named[inside] = next(self._numbers)
            self._add(Event("make_directory", inside, self._named[inside]))

    def rename(self, source: str, target: str) -> None:
        self._look()
        super().rename(source, target)
        before, after = self._relative(source), self._relative(target)
        if before is not None and after is not None:
            self._named[after] = self._named.pop(before)
            self._add(Event("rename", before, self._named[after], target=after))

    def unlink(self, path: str) -> None:
        self._look()
        super().unlink(path)
        inside = self._relative(path)
        if inside in self._named:
            self._add(Event("unlink", inside, self._named.pop(inside)))

    def sync_directory(self, path: str) -> None:
        self._look()
        inside = self._relative(path)
        if inside is not None and not self._lies(inside):
            self._add(Event("sync_directory", inside))

    def map(self, fd: int, size: int) -> mmap.mmap:
        self._look()
        assert size == CONTROL_BYTES
        self._page = super().map(fd, size)
        self._look()
        return self._page

    def sync_map(self, page: Any) -> None:
        self._look()
        self._synced(self._named.get(CONTROL, 0))

    # --- crashes -----------------------------------------------------------------------------

    def platter(self, point: int) -> Platter:
        """The disk after the first `point` events of the journal."""
        platter = Platter(self.start)
        for event in self.journal[:point]:
            platter.apply(event)
        return platter
