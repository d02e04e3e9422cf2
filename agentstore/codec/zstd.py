"""zstd frames: compressed, checksummed, and refused before they allocate.

Every frame states its content size and carries a checksum. Frames are independent of each
other: a live stream per thread compresses better, but decodes to wrong bytes without an
error when one of its outputs was never stored.

zstandard's objects are not thread-safe (two threads on one compressor crashed the
interpreter), so every thread keeps its own, made at first use.
"""

from __future__ import annotations

import threading
from typing import Final

import zstandard

from agentstore.errors import CorruptionError, LimitExceeded

LEVEL_DEFAULT: Final = 3
LEVEL_MIN: Final = 1
LEVEL_MAX: Final = 19
"""Levels above cost more memory for decoding than a reader has agreed to."""

# `ZstdDecompressor.decompress` returns b"" for every frame that *states* size 0, without
# reading the rest of it: one flipped header bit turns a full frame into "empty". So the
# empty content has exactly one encoding here, the one that zstandard writes at every level.
_EMPTY_FRAME: Final = bytes.fromhex("28b52ffd240001000099e9d851")


class _Contexts(threading.local):
    """The compressors (by level) and the decompressor of one thread."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress(data: bytes, level: int = LEVEL_DEFAULT) -> bytes:
    """One zstd frame of `data`, with its content size and a checksum. Thread-safe. O(n).

    Levels run from 1 (fast) to 19 (small).

    >>> decompress(compress(b"a" * 1000), max_bytes=1000) == b"a" * 1000
    True
    """
    compressor = _contexts.compressors.get(level)
    if compressor is None:
        if not LEVEL_MIN <= level <= LEVEL_MAX:
            raise ValueError(f"zstd levels here are {LEVEL_MIN} to {LEVEL_MAX}, not {level}")
        compressor = zstandard.ZstdCompressor(
            level=level, write_checksum=True, write_content_size=True, write_dict_id=True, threads=0
        )
        _contexts.compressors[level] = compressor
    return compressor.compress(data)


def decompress(data: bytes, max_bytes: int) -> bytes:
    """The content of the frame `data`, exactly one frame and nothing behind it. Thread-safe. O(n).

    Raises LimitExceeded, before it allocates, if the frame states more than `max_bytes` bytes
    of content; CorruptionError if it is not a whole frame with size and checksum, or its
    checksum does not fit.

    >>> decompress(compress(b"a" * 1000), max_bytes=999)
    Traceback (most recent call last):
    agentstore.errors.LimitExceeded: a compressed record holds 1000 bytes, more than the limit of 999
    """
    try:
        frame = zstandard.get_frame_parameters(data)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"{len(data)} bytes do not begin with a zstd frame: {error}") from error
    size = frame.content_size
    if size == 0:
        if data != _EMPTY_FRAME:
            raise CorruptionError(f"a zstd frame of {len(data)} bytes says it is empty, and is not the empty frame")
        return b""
    if size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
        raise CorruptionError("a zstd frame does not state the size of its content")
    if not frame.has_checksum:
        raise CorruptionError("a zstd frame has no checksum")
    if frame.dict_id:
        raise CorruptionError(f"a zstd frame wants the dictionary {frame.dict_id}, which nothing here wrote")
    if size > max_bytes:
        raise LimitExceeded(f"a compressed record holds {size} bytes, more than the limit of {max_bytes}")
    try:
        # max_output_size is not given: it is ignored for a frame that states its size.
        content = _contexts.decompressor.decompress(data, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise CorruptionError(f"a zstd frame of {len(data)} bytes is damaged: {error}") from error
    if len(content) != size:
        raise CorruptionError(f"a zstd frame states {size} bytes of content and holds {len(content)}")
    return content
