"""Reading the log: which segments it is, where it ends, and what is damage.

The log is the chain backwards from its newest segment: each header names its
predecessor by number and epoch. A bad or missing frame is a torn tail only above
everything that is known to have been durable; below that, acknowledged data is damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from agentstore.engine.base import Position
from agentstore.engine.segment import FRAME_BYTES, FRAMES_AT, Frame, decode_batch, epoch_crc, frame_at, frames_behind
from agentstore.engine.segments import Found, Segments
from agentstore.errors import CorruptionError

logger = logging.getLogger("agentstore")

REPLAY_BYTES_MAX = 4 * 1024 * 1024
"""Payload of the frames that go into base in one transaction (one frame at least)."""

WHAT_NOW = "keep a copy of the directory, then run 'agentstore verify'"


class LogFrame(NamedTuple):
    """A frame in its place in the log."""

    frame: Frame
    data: bytes
    """All bytes of its segment."""
    segment: int
    epoch: int

    @property
    def payload_bytes(self) -> int:
        return self.frame.end - self.frame.start - FRAME_BYTES

    @property
    def reached(self) -> Position:
        """Base's position once it is applied."""
        return Position(self.frame.lsn, self.segment, self.epoch, self.frame.end, self.frame.crc)

    def batch(self) -> dict[bytes, bytes | None]:
        frame = self.frame
        try:
            return decode_batch(self.data, frame.start + FRAME_BYTES, frame.end)
        except ValueError as error:
            raise CorruptionError(
                f"the frame with LSN {frame.lsn} in segment {self.segment} has a right CRC and no batch in it: {error}"
            ) from error


def chain(headers: Iterable[Found], base: Position, top: Found | None = None) -> list[Found]:
    """The segments from base's position to the newest one, oldest first; CorruptionError if a needed one is missing.

    `top` is the newest segment in an open store (the active one); without it, it is the one with the highest number.
    """
    by_name = {(found.header.number, found.header.epoch): found for found in headers}
    if top is None:
        if not by_name:
            return []
        top = by_name[max(by_name)]
    links = [top]
    while True:
        header = links[0].header
        if header.previous_lsn <= base.applied_lsn or (header.number, header.epoch) == (base.segment, base.epoch):
            return links
        before = by_name.get((header.previous_number, header.previous_epoch))
        if before is None or before.header.number >= header.number:
            raise CorruptionError(
                f"segment {header.previous_number} of the log is missing: LSNs {base.applied_lsn + 1} to "
                f"{header.previous_lsn} were acknowledged and are not in base yet; {WHAT_NOW}"
            )
        links.insert(0, before)


class LogReader:
    """One pass over the frames above base's position. Iterate once; afterwards `lsn` is where the log ends."""

    def __init__(
        self, segments: Segments, links: list[Found], base: Position, *, durable_lsn: int, to: int | None = None
    ) -> None:
        self.lsn = base.applied_lsn
        """The newest LSN that was read."""
        self._segments = segments
        self._links = links
        self._base = base
        self._to = to
        self._known = max([base.applied_lsn, durable_lsn, *(link.header.previous_lsn for link in links)])
        self._crc = base.crc

    def __iter__(self) -> Iterator[LogFrame]:
        for place, link in enumerate(self._links):
            following = self._links[place + 1].header if place + 1 < len(self._links) else None
            last = None if following is None else following.previous_lsn
            if last is not None and last <= self.lsn:
                continue
            start = self._start(link)
            if start is not None:
                yield from self._segment(link, start, last)
            if self._reached():
                return
        if self._to is not None or self.lsn < self._known:
            wanted = self._known if self._to is None else self._to
            name = f"segment {self._links[-1].header.number}" if self._links else "the log, which has no segment,"
            raise CorruptionError(
                f"{name} ends at LSN {self.lsn}, but everything up to LSN {wanted} was durable: "
                f"LSNs {self.lsn + 1} to {wanted} are damaged; {WHAT_NOW}"
            )

    def _reached(self) -> bool:
        return self._to is not None and self.lsn >= self._to

    def _start(self, link: Found) -> int | None:
        """Where to read on in this segment, None if it has nothing new."""
        header = link.header
        if (header.number, header.epoch) == (
            self._base.segment,
            self._base.epoch,
        ) and self.lsn == self._base.applied_lsn:
            return self._base.end
        if header.previous_lsn == self.lsn:
            return FRAMES_AT
        if header.previous_lsn < self.lsn:
            return None
        raise CorruptionError(
            f"segment {header.number} begins behind LSN {header.previous_lsn}, the log before it ends at "
            f"{self.lsn}; {WHAT_NOW}"
        )

    def _segment(self, link: Found, at: int, last: int | None) -> Iterator[LogFrame]:
        header = link.header
        data = self._segments.read(link.file)
        seed = epoch_crc(header.epoch)
        while (last is None or self.lsn < last) and (self._to is None or self.lsn < self._to):
            frame = frame_at(data, at, header.epoch, seed)
            if frame is None or frame.lsn != self.lsn + 1 or frame.previous_crc != self._crc:
                self._hole(link, data, at, last)
                return
            self.lsn, self._crc, at = frame.lsn, frame.crc, frame.end
            if frame.durable_lsn > self._known:
                self._known = frame.durable_lsn
            yield LogFrame(frame, data, header.number, header.epoch)

    def _hole(self, link: Found, data: bytes, at: int, last: int | None) -> None:
        """Nothing to read at `at`: the end of the log, or damage below what was durable."""
        header = link.header
        behind: list[Frame] = list(frames_behind(data, at, header.epoch))
        self._known = max([self._known, *(frame.durable_lsn for frame in behind)])
        wanted = max([self._known, self._to or 0, last or 0])
        if self.lsn < wanted:
            raise CorruptionError(
                f"segment {header.number} ({self._segments.path(link.file)}) has no valid frame at offset {at}: "
                f"LSN {self.lsn + 1} "
                f"is damaged, everything up to LSN {wanted} was durable; {WHAT_NOW}"
            )
        if behind:
            logger.warning(
                "torn tail in segment %d at offset %d dropped: LSN %d and %d later frames were never confirmed",
                header.number,
                at,
                self.lsn + 1,
                len(behind),
            )


class Replay(NamedTuple):
    """What one transaction of base applies: the newest write of each key in some frames, and where they end."""

    writes: dict[bytes, bytes | None]
    first_lsn: int
    reached: Position


def batches(frames: Iterable[LogFrame]) -> Iterator[Replay]:
    """Group frames into transactions of bounded size, each ending on a frame."""
    writes: dict[bytes, bytes | None] = {}
    first_lsn = size = 0
    last: LogFrame | None = None
    for frame in frames:
        if last is not None and size + frame.payload_bytes > REPLAY_BYTES_MAX:
            yield Replay(writes, first_lsn, last.reached)
            writes, last, size = {}, None, 0
        if last is None:
            first_lsn = frame.frame.lsn
        writes.update(frame.batch())
        size += frame.payload_bytes
        last = frame
    if last is not None:
        yield Replay(writes, first_lsn, last.reached)
