"""The bytes of a WAL segment: its header, its frames, and how they are read back.

A segment is a zero-filled file. Two copies of its header stand 4 KiB apart, frames
follow from `FRAMES_AT` without gaps::

    0      header            (HEADER_BYTES, the rest of the 4 KiB is zero)
    4096   the same header
    8192   frame, frame, ... then zeros

    header  magic, format version, store uuid, file size, segment number, epoch, first LSN,
            and of the predecessor: number, epoch, last LSN, end offset; CRC-32C of all before
    frame   marker, payload length, CRC-32C, LSN, durable LSN, CRC of the frame before, payload
    payload items: key length (2), value length (4; DELETED for a delete), key, value

The epoch is random in each life of a segment and inside every CRC, so what an earlier
life left behind never parses. The marker is the epoch again, masked, so that a search
for frames behind a hole is one ``bytes.find``. Integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from agentstore.codec.crc import crc32c, extend

FORMAT_VERSION = 1

SEGMENT_BYTES = 4 * 1024 * 1024
HEADER_COPY_AT = 4096
FRAMES_AT = 8192
FRAME_PAYLOAD_BYTES_MAX = 512 * 1024 * 1024
"""Limit of one transaction. A larger length in a frame header is not a frame."""

MAGIC = b"AGSTWAL\n"
HEADER = struct.Struct("<8sII16sQQQQQQQQ")
HEADER_CRC = struct.Struct("<I")
HEADER_BYTES = HEADER.size + HEADER_CRC.size
FRAME = struct.Struct("<QIIQQI")
FRAME_BYTES = FRAME.size
_COVERED = struct.Struct("<IQQI")  # what a frame's CRC covers between epoch and payload
_EPOCH = struct.Struct("<Q")
ITEM = struct.Struct("<HI")
DELETED = 0xFFFFFFFF

MARKER_MASK = 0x9E3779B97F4A7C15
"""Xored with the epoch: neither zeros nor the header's epoch field look like a marker."""

assert HEADER.size == 96
assert FRAME_BYTES == 36
assert ITEM.size == 6


class Header(NamedTuple):
    """What a segment says of itself and of the one before it in the log."""

    uuid: bytes
    size: int
    number: int
    epoch: int
    first_lsn: int
    previous_number: int
    previous_epoch: int
    previous_lsn: int
    previous_end: int


class Frame(NamedTuple):
    """One frame that proved itself: its CRC is right for this epoch."""

    lsn: int
    durable_lsn: int
    previous_crc: int
    crc: int
    start: int
    end: int


Batch = list[tuple[bytes, bytes | None]]
"""The writes of a transaction in order: key and value, or None for a delete."""


def encode_header(header: Header) -> bytes:
    raw = HEADER.pack(
        MAGIC,
        FORMAT_VERSION,
        0,
        header.uuid,
        header.size,
        header.number,
        header.epoch,
        header.first_lsn,
        header.previous_number,
        header.previous_epoch,
        header.previous_lsn,
        header.previous_end,
    )
    return raw + HEADER_CRC.pack(crc32c(raw))


def decode_header(raw: bytes, uuid: bytes) -> Header | None:
    """The header in the first `HEADER_BYTES` of `raw`, or None if it is not one of this store."""
    if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
        return None
    (crc,) = HEADER_CRC.unpack_from(raw, HEADER.size)
    if crc32c(raw[: HEADER.size]) != crc:
        return None
    _, version, _, owner, *numbers = HEADER.unpack_from(raw)
    if version != FORMAT_VERSION or owner != uuid:
        return None
    return Header(owner, *numbers)


def epoch_crc(epoch: int) -> int:
    """The CRC-32C with which that of every frame of this epoch begins."""
    return crc32c(_EPOCH.pack(epoch))


def decode_batch(payload: bytes) -> Batch:
    """The writes in `payload`; ValueError if it is not a whole number of items."""
    batch: Batch = []
    at, end = 0, len(payload)
    unpack = ITEM.unpack_from
    while at < end:
        if at + 6 > end:
            raise ValueError(f"an item is cut short at {at}")
        key_size, value_size = unpack(payload, at)
        at += 6
        key = payload[at : at + key_size]
        at += key_size
        if value_size == DELETED:
            batch.append((key, None))
        else:
            batch.append((key, payload[at : at + value_size]))
            at += value_size
    if at != end:
        raise ValueError(f"the last item ends {at - end} bytes behind the payload")
    return batch


def encode_frame(
    epoch: int, seed: int, lsn: int, durable_lsn: int, previous_crc: int, payload: bytes
) -> tuple[bytes, int]:
    """The bytes of a frame and its CRC. `seed` is ``epoch_crc(epoch)``, computed once per segment."""
    size = len(payload)
    crc = extend(extend(seed, _COVERED.pack(size, lsn, durable_lsn, previous_crc)), payload)
    return FRAME.pack(epoch ^ MARKER_MASK, size, crc, lsn, durable_lsn, previous_crc) + payload, crc


def frame_at(data: bytes, at: int, epoch: int) -> Frame | None:
    """The frame that begins at `at` in the bytes of a segment, or None."""
    if at + FRAME_BYTES > len(data):
        return None
    marker, length, crc, lsn, durable, previous = FRAME.unpack_from(data, at)
    end = at + FRAME_BYTES + length
    if marker != epoch ^ MARKER_MASK or length > FRAME_PAYLOAD_BYTES_MAX or end > len(data):
        return None
    seed = crc32c(data[at + 8 : at + 12], epoch_crc(epoch))
    if crc32c(data[at + 16 : end], seed) != crc:
        return None
    return Frame(lsn, durable, previous, crc, at, end)


def frames_behind(data: bytes, at: int, epoch: int) -> Iterator[Frame]:
    """Every frame of this epoch from `at` on that proves itself, whatever stands between them. O(size)."""
    marker = _EPOCH.pack(epoch ^ MARKER_MASK)
    at = data.find(marker, at)
    while at >= 0:
        frame = frame_at(data, at, epoch)
        if frame is not None:
            yield frame
        at = data.find(marker, at + 1 if frame is None else frame.end)
