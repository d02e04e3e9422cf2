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

FORMAT_VERSION = 2

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
ITEM_BYTES = ITEM.size
DELETED = 0xFFFFFFFF

MARKER_MASK = 0x9E3779B97F4A7C15
"""Xored with the epoch: neither zeros nor the header's epoch field look like a marker."""

assert HEADER.size == 96
assert FRAME_BYTES == 36
assert ITEM_BYTES == 6


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


def decode_batch(data: bytes, at: int, end: int) -> dict[bytes, bytes | None]:
    """The writes in the payload ``data[at:end]``: keys with their values, None for a delete.

    ValueError if it is not a whole number of items.
    """
    batch: dict[bytes, bytes | None] = {}
    unpack = ITEM.unpack_from
    limit = end - ITEM_BYTES
    while at <= limit:
        key_size, value_size = unpack(data, at)
        at += ITEM_BYTES
        middle = at + key_size
        if value_size == DELETED:
            batch[data[at:middle]] = None
            at = middle
        else:
            batch[data[at:middle]] = data[middle : middle + value_size]
            at = middle + value_size
    if at != end:
        raise ValueError(f"the items end {at - end} bytes off the payload's end")
    return batch


def encode_frame(
    epoch: int, seed: int, lsn: int, durable_lsn: int, previous_crc: int, payload: bytes
) -> tuple[bytes, int]:
    """The bytes of a frame and its CRC. `seed` is ``epoch_crc(epoch)``, computed once per segment."""
    size = len(payload)
    crc = extend(extend(seed, _COVERED.pack(size, lsn, durable_lsn, previous_crc)), payload)
    return FRAME.pack(epoch ^ MARKER_MASK, size, crc, lsn, durable_lsn, previous_crc) + payload, crc


def frame_at(data: bytes, at: int, epoch: int, seed: int | None = None) -> Frame | None:
    """The frame that begins at `at` in the bytes of a segment, or None. `seed` is ``epoch_crc(epoch)``."""
    if at + FRAME_BYTES > len(data):
        return None
    marker, length, crc, lsn, durable, previous = FRAME.unpack_from(data, at)
    end = at + FRAME_BYTES + length
    if marker != epoch ^ MARKER_MASK or length > FRAME_PAYLOAD_BYTES_MAX or end > len(data):
        return None
    begin = epoch_crc(epoch) if seed is None else seed
    # In two parts around the CRC itself, each a slice of the segment as it is.
    if extend(extend(begin, data[at + 8 : at + 12]), data[at + 16 : end]) != crc:
        return None
    return Frame(lsn, durable, previous, crc, at, end)


def frames_behind(data: bytes, at: int, epoch: int) -> Iterator[Frame]:
    """Every frame of this epoch from `at` on that proves itself, whatever stands between them. O(size)."""
    marker = _EPOCH.pack(epoch ^ MARKER_MASK)
    seed = epoch_crc(epoch)
    at = data.find(marker, at)
    while at >= 0:
        frame = frame_at(data, at, epoch, seed)
        if frame is not None:
            yield frame
        at = data.find(marker, at + 1 if frame is None else frame.end)
