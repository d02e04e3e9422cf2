"""Records out of the files of a damaged store: everything that still proves itself, byte by byte. Nothing is written.

A record of base proves itself by its CRC over key and value, a frame of the log by its own. Base is read by a walk over
LMDB's pages in Python, from the newest root that can be read: a damaged page costs what stands in it and below it,
and the pages that nothing leads to any more are looked at only for what such holes may have taken. Those may hold old
versions, and what was deleted: they are marked.

The layout of the pages is that of LMDB 0.9 (``mdb.c``, `MDB_page`, `MDB_node`, `MDB_meta`, `MDB_db`).
"""

from __future__ import annotations

import os
import struct
import sys
from dataclasses import dataclass, field

from agentstore.engine.base import CRC_BYTES, META_KEY, unseal
from agentstore.engine.control import CONTROL_BYTES, DURABLE_LSN
from agentstore.engine.files import Files, default_files
from agentstore.engine.opening import typed
from agentstore.engine.parts import BASE, CONTROL, FORMAT, WAL
from agentstore.engine.segment import (
    FRAME_BYTES,
    FRAMES_AT,
    HEADER_BYTES,
    HEADER_COPY_AT,
    MARKER_MASK,
    Header,
    decode_batch,
    decode_header,
    frame_at,
    frames_behind,
)
from agentstore.errors import CorruptionError

PAGE_BYTES = 4096
_PAGE = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
_NODE = struct.Struct("<HHHH")  # two halves of a size or page number, flags, size of the key
_META = struct.Struct("<IIQQ")  # magic, version, address, size of the map
_DB = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
_TAIL = struct.Struct("<QQ")  # last page, transaction
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG = 1
_MAGIC = 0xBEEFC0DE
_NOTHING = (1 << 64) - 1
_BASE_META = struct.Struct("<16sQQQQI")


@dataclass(slots=True)
class Rescued:
    """What proved itself."""

    records: dict[bytes, bytes] = field(default_factory=dict)
    perhaps_old: set[bytes] = field(default_factory=set)
    """Keys whose record was found where nothing leads any more."""
    applied_lsn: int = 0
    """Base had everything up to here."""
    lsn: int = 0
    """Of the newest frame."""
    missing_lsns: list[tuple[int, int]] = field(default_factory=list)
    """First and last of what the log lost."""
    problems: list[str] = field(default_factory=list)


def rescue(path: str, files: Files | None = None) -> Rescued:
    """All records of the store at `path` that prove themselves, as they were last; what was damaged.

    O(store), in memory. `OSError` of a disk that cannot be read becomes the typed error for it.
    """
    files = files or default_files()
    found = Rescued()
    try:
        uuid = _base(files, os.path.join(path, BASE), found)
        if not files.exists(os.path.join(path, FORMAT)):
            found.problems.append("FORMAT is missing")
        durable = _log(files, os.path.join(path, WAL), uuid, found)
        if files.exists(os.path.join(path, CONTROL)):
            page = _read(files, os.path.join(path, CONTROL))
            if len(page) == CONTROL_BYTES:
                durable = max(durable, int.from_bytes(page[8 * DURABLE_LSN : 8 * DURABLE_LSN + 8], sys.byteorder))
        if durable > found.lsn:
            found.missing_lsns.append((found.lsn + 1, durable))
        found.problems += [f"the log: LSNs {first} to {last} are lost" for first, last in found.missing_lsns]
    except OSError as error:
        raise typed(error, path) from error
    return found


def _read(files: Files, path: str) -> bytes:
    fd = files.open(path, os.O_RDONLY)
    try:
        return files.pread(fd, files.size(fd), 0)
    finally:
        files.close(fd)


# --- base ------------------------------------------------------------------------------


def _base(files: Files, path: str, found: Rescued) -> bytes | None:
    """Take the records of base; the uuid of the store, if it is known."""
    if not files.exists(path):
        found.problems.append(f"{BASE} is missing: everything that was folded into it is lost")
        return None
    pages = _Pages(_read(files, path))
    for key, raw in pages.live():
        _take(key, raw, found, old=False)
    if pages.holes:
        found.problems += [f"{BASE}: {hole}" for hole in pages.holes]
        for key, raw in pages.all():
            if key not in found.records:
                _take(key, raw, found, old=True)
    meta = found.records.pop(META_KEY, None)
    found.perhaps_old.discard(META_KEY)
    if meta is None or len(meta) != _BASE_META.size:
        found.problems.append(f"{BASE}: its own record is lost, so how much of the log it has is not known")
        return None
    uuid, found.applied_lsn, *_ = _BASE_META.unpack(meta)
    return bytes(uuid)


def _take(key: bytes, raw: bytes, found: Rescued, *, old: bool) -> None:
    try:
        found.records[key] = unseal(key, raw, BASE)
    except CorruptionError as error:
        if not old:
            found.problems.append(str(error).partition(";")[0])
        return
    if old:
        found.perhaps_old.add(key)


class _Pages:
    """The pages of an LMDB file, of which nothing is trusted."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._count = len(data) // PAGE_BYTES
        self._seen: set[int] = set()
        self.holes: list[str] = []
        """Pages that should be there and cannot be read."""

    def live(self) -> list[tuple[bytes, bytes]]:
        """Key and value of everything that the newest root leads to."""
        roots = sorted([meta for at in (0, 1) if (meta := self._meta(at)) is not None], reverse=True)
        if not roots:
            self.holes.append("neither of its two roots can be read")
            return []
        pairs: list[tuple[bytes, bytes]] = []
        root = roots[0][1]
        todo = [] if root == _NOTHING else [root]
        while todo:
            number = todo.pop()
            if number in self._seen:
                continue
            self._seen.add(number)
            nodes = self._nodes(number)
            if nodes is None:
                self.holes.append(f"page {number} is damaged")
                continue
            leaf, entries = nodes
            if leaf:
                pairs += self._pairs(number, entries)
            else:
                todo += [low | high << 16 | flags << 32 for low, high, flags, _, _ in entries]
        return pairs

    def all(self) -> list[tuple[bytes, bytes]]:
        """Key and value of every node in every page that looks like a leaf, reachable or not."""
        pairs: list[tuple[bytes, bytes]] = []
        for number in range(self._count):
            nodes = self._nodes(number)
            if nodes is not None and nodes[0]:
                pairs += self._pairs(number, nodes[1])
        return pairs

    def _meta(self, at: int) -> tuple[int, int] | None:
        """(transaction, root) of one of the two meta pages."""
        start = at * PAGE_BYTES + _PAGE.size
        end = start + _META.size + 2 * _DB.size + _TAIL.size
        if end > len(self._data):
            return None
        magic, version, _, _ = _META.unpack_from(self._data, start)
        root = _DB.unpack_from(self._data, start + _META.size + _DB.size)[7]
        transaction = _TAIL.unpack_from(self._data, end - _TAIL.size)[1]
        if magic != _MAGIC or version != 1 or (root != _NOTHING and not 2 <= root < self._count):
            return None
        return transaction, root

    def _nodes(self, number: int) -> tuple[bool, list[tuple[int, int, int, bytes, int]]] | None:
        """(whether it is a leaf, nodes as halves, flags, key, offset of the data); None if it is no page of nodes."""
        if not 2 <= number < self._count:
            return None
        start = number * PAGE_BYTES
        itself, _, flags, lower, upper = _PAGE.unpack_from(self._data, start)
        if itself != number or flags & 0xF not in (_BRANCH, _LEAF):
            return None
        if not _PAGE.size <= lower <= upper <= PAGE_BYTES or lower % 2:
            return None
        nodes = []
        for at in range(start + _PAGE.size, start + lower, 2):
            offset = int.from_bytes(self._data[at : at + 2], "little")
            if not upper <= offset <= PAGE_BYTES - _NODE.size:
                return None
            low, high, kind, size = _NODE.unpack_from(self._data, start + offset)
            key_at = offset + _NODE.size
            if key_at + size > PAGE_BYTES:
                return None
            key = self._data[start + key_at : start + key_at + size]
            nodes.append((low, high, kind, key, start + key_at + size))
        return flags & 0xF == _LEAF, nodes

    def _pairs(self, number: int, nodes: list[tuple[int, int, int, bytes, int]]) -> list[tuple[bytes, bytes]]:
        pairs = []
        for low, high, kind, key, at in nodes:
            size = low | high << 16
            if kind & _BIG:
                first = int.from_bytes(self._data[at : at + 8], "little")
                at = first * PAGE_BYTES + _PAGE.size
            raw = self._data[at : at + size]
            if len(raw) == size >= CRC_BYTES:
                pairs.append((key, raw))
            else:
                self.holes.append(f"a record in page {number} reaches outside of the file")
        return pairs


# --- the log ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Segment:
    name: str
    data: bytes
    header: Header | None
    epoch: int


def _log(files: Files, directory: str, uuid: bytes | None, found: Rescued) -> int:
    """Take what the frames put and deleted, in the order of their LSNs, over what base has; the highest LSN that
    anything in the log says was durable."""
    if not files.is_directory(directory):
        found.problems.append("the directory wal is missing")
        found.lsn = found.applied_lsn
        return 0
    segments = [
        segment
        for name in files.names(directory)
        if name.endswith(".seg")
        and (segment := _segment(name, _read(files, os.path.join(directory, name)), uuid, found)) is not None
    ]
    batches: dict[int, dict[bytes, bytes | None]] = {}
    durable = 0
    for segment in sorted(segments, key=lambda each: -1 if each.header is None else each.header.number):
        if segment.header is not None:
            # A number that a torn frame had was given again: what the later segment has counts.
            for lsn in [lsn for lsn in batches if lsn >= segment.header.first_lsn]:
                del batches[lsn]
            durable = max(durable, segment.header.previous_lsn)
        durable = max(durable, _frames(segment, batches, found))
    wanted = found.applied_lsn + 1
    for lsn in sorted(lsn for lsn in batches if lsn > found.applied_lsn):
        if lsn > wanted and (found.applied_lsn or wanted > 1 or lsn > 1):
            found.missing_lsns.append((wanted, lsn - 1))
        for key, value in batches[lsn].items():
            found.perhaps_old.discard(key)
            if value is None:
                found.records.pop(key, None)
            else:
                found.records[key] = value
        wanted = lsn + 1
    found.lsn = max([found.applied_lsn, *batches])
    return durable


def _segment(name: str, data: bytes, uuid: bytes | None, found: Rescued) -> _Segment | None:
    for at in (0, HEADER_COPY_AT):
        raw = data[at : at + HEADER_BYTES]
        header = decode_header(raw, raw[16:32] if uuid is None else uuid)
        if header is not None:
            return _Segment(name, data, header, header.epoch)
    if not any(data[: FRAMES_AT + FRAME_BYTES]):
        return None  # prepared, never used
    epoch = int.from_bytes(data[FRAMES_AT : FRAMES_AT + 8], "little") ^ MARKER_MASK
    found.problems.append(f"wal/{name}: both copies of its header are damaged")
    return _Segment(name, data, None, epoch) if frame_at(data, FRAMES_AT, epoch) is not None else None


def _frames(segment: _Segment, batches: dict[int, dict[bytes, bytes | None]], found: Rescued) -> int:
    """Take the frames of a segment; the highest LSN that one of them says was durable."""
    end = FRAMES_AT
    durable = 0
    for frame in frames_behind(segment.data, FRAMES_AT, segment.epoch):
        if frame.start > end:
            found.problems.append(
                f"wal/{segment.name}: bytes {end} to {frame.start} are damaged (before LSN {frame.lsn})"
            )
        end = frame.end
        durable = max(durable, frame.durable_lsn)
        try:
            batches[frame.lsn] = decode_batch(segment.data, frame.start + FRAME_BYTES, frame.end)
        except ValueError as error:
            found.problems.append(f"wal/{segment.name}: the frame with LSN {frame.lsn} has no batch in it: {error}")
    return durable
