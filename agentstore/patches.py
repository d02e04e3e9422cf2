"""A large value that changed a little, as what changed: the bytes in the middle, and zstd against what stood there.

The wrong base gives wrong bytes without an error unless the frame has a checksum: every frame
here has one, and the caller compares the checksum of the whole field besides.
"""

from __future__ import annotations

from typing import Final

import zstandard

from agentstore.codec import zstd
from agentstore.errors import CorruptionError, LimitExceeded

PATCH_BYTES_MIN: Final = 4096
"""A changed part shorter than this, in bytes, is stored as it is: making a patch takes 60 µs at least."""

PIECE_BYTES: Final = 512 * 1024
BASE_BYTES_MAX: Final = 1024 * 1024
"""Most bytes of base for one frame. zstandard's raw dictionaries stop helping above: ten edits in 1 MB made a frame of
304 bytes, in 2 MB one of 428 KB, with any window and with long-distance matching (measured, zstandard 0.25)."""

_LEVEL: Final = 3  # level 1 finds nothing in a base this large: 543 KB for the 304 bytes above
_BEFORE: Final = (BASE_BYTES_MAX - PIECE_BYTES) // 2
_ANCHOR_BYTES: Final = 64

Piece = tuple[int, int, bytes]
"""Where in the base a frame's dictionary begins, its length in bytes, the frame."""


def common_prefix(a: bytes, b: bytes) -> int:
    """Number of leading bytes that are equal. O(n), in slices: comparing byte by byte in Python is 200 times slower.

    >>> common_prefix(b"conversation", b"conversion")
    7
    """
    end = min(len(a), len(b))
    at, step = 0, 64
    while at < end and a[at : at + step] == b[at : at + step]:
        if at + step >= end:
            return end
        at += step
        step *= 2
    while step > 1 and at < end:
        step //= 2
        if a[at : at + step] == b[at : at + step]:
            at += step
    return min(at, end)


def common_suffix(a: bytes, b: bytes, most: int) -> int:
    """Number of trailing bytes that are equal, at most `most`. O(n).

    >>> common_suffix(b"spending", b"sending", 100)
    6
    """
    end = min(len(a), len(b), most)
    at, step = 0, 64
    while at < end:
        size = min(step, end - at)
        if a[len(a) - at - size : len(a) - at] != b[len(b) - at - size : len(b) - at]:
            break
        at += size
        step *= 2
    step = min(step, end - at)
    while step > 1:
        step //= 2
        if a[len(a) - at - step : len(a) - at] == b[len(b) - at - step : len(b) - at]:
            at += step
    while at < end and a[len(a) - at - 1] == b[len(b) - at - 1]:
        at += 1
    return at


def make(base: bytes, data: bytes) -> list[Piece]:
    """Frames that make `data` out of `base`. O(size), about 5 ms for each MB.

    Pieces of `PIECE_BYTES`, each against the part of the base around the place where the piece before it ended.
    """
    pieces: list[Piece] = []
    at = 0
    for begin in range(0, len(data), PIECE_BYTES):
        piece = data[begin : begin + PIECE_BYTES]
        low = max(0, min(at - _BEFORE, len(base) - BASE_BYTES_MAX))
        near = base[low : low + BASE_BYTES_MAX]
        compressor = zstandard.ZstdCompressor(
            level=_LEVEL,
            dict_data=zstandard.ZstdCompressionDict(near, dict_type=zstandard.DICT_TYPE_RAWCONTENT),
            write_checksum=True,
            write_content_size=True,
        )
        pieces.append((low, len(near), compressor.compress(piece)))
        # Insertions shift what follows: find where in the base this piece ended.
        found = near.rfind(piece[-_ANCHOR_BYTES:])
        at = low + found + _ANCHOR_BYTES if found >= 0 else at + len(piece)
    return pieces


def apply(base: bytes, pieces: list[Piece], max_bytes: int) -> bytes:
    """What `make` was given as data. O(size).

    CorruptionError if base or frames are not the ones of `make`, LimitExceeded above `max_bytes`.

    >>> old, new = b"a page of text, " * 500, b"a page of text, " * 250 + b"an edit, " + b"a page of text, " * 250
    >>> apply(old, make(old, new), 10_000) == new
    True
    """
    parts: list[bytes] = []
    left = max_bytes
    for low, size, frame in pieces:
        near = base[low : low + size]
        if len(near) != size or size > BASE_BYTES_MAX:
            raise CorruptionError("a patch reaches outside of its base")
        try:
            found = zstandard.get_frame_parameters(frame)
            if found.content_size > left:
                raise LimitExceeded(f"a patch makes more than {max_bytes} bytes")
            if not found.has_checksum or found.dict_id or not found.content_size:
                raise CorruptionError(
                    "a patch's frame is empty, has no checksum, or wants another dictionary than its base"
                )
            decompressor = zstandard.ZstdDecompressor(
                dict_data=zstandard.ZstdCompressionDict(near, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
            )
            part = decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CorruptionError(f"a patch of {len(frame)} bytes does not fit its base: {error}") from error
        left -= len(part)
        parts.append(part)
    return b"".join(parts)


def size_of(pieces: list[Piece]) -> int:
    """Bytes of what `apply` makes of these frames, as they state it. CorruptionError if they do not."""
    try:
        return sum([zstandard.frame_content_size(frame) for _, _, frame in pieces])
    except zstandard.ZstdError as error:
        raise CorruptionError(f"a patch is damaged: {error}") from error


def smaller(base: bytes, data: bytes) -> list[Piece] | None:
    """`make(base, data)` where that is at most half of `data` compressed alone, else None. O(size)."""
    if len(data) < PATCH_BYTES_MIN or len(base) < PATCH_BYTES_MIN:
        return None
    pieces = make(base, data)
    if 2 * sum(len(frame) for _, _, frame in pieces) < len(zstd.compress(data)):
        return pieces
    return None
