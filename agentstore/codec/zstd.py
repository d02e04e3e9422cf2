"""zstd frames: compressed, checksummed, and refused before they allocate.

Every frame states its content size and carries a checksum. Frames are independent of each
other: a live stream per thread compresses better, but decodes to wrong bytes without an
error when one of its outputs was never stored.

zstandard's objects are not thread-safe (two threads on one compressor crashed the
interpreter), so every thread keeps its own, made at first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

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


DICTIONARY_BYTES_MAX: Final = 1024 * 1024
_KEPT_MAX: Final = 8
"""A thread keeps the contexts of so many dictionaries."""


class Dictionary:
    """What frames may refer to in the place of repeating it. Immutable, for any thread.

    `data`: a dictionary as `train` makes it. `id`: the number that it has inside, which every frame made with it
    names. CorruptionError if it has none.
    """

    __slots__ = ("_contexts", "data", "id")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._contexts = zstandard.ZstdCompressionDict(data)
        self.id = self._contexts.dict_id()
        if not self.id:
            raise CorruptionError(f"{len(data)} bytes are not a zstd dictionary")

    @property
    def contexts(self) -> zstandard.ZstdCompressionDict:
        """What zstandard takes."""
        return self._contexts


Lookup: TypeAlias = Callable[[int], Dictionary]
"""Finds a dictionary by its id; CorruptionError if there is none."""


def train(samples: Sequence[bytes], size: int) -> Dictionary | None:
    """A dictionary of at most `size` bytes for data like `samples`; None if they are too few to learn from.

    O(samples), some 50 ns for each byte. Zstandard's COVER algorithm (Liao, Petri, Moffat, Wirth, 2016) with long
    segments: what messages share are whole prompts and outputs. (The parameters that it finds by itself, in a hundred
    times the time, make a dictionary that saves less.)
    """
    if len(samples) < 8:
        return None
    try:
        trained = zstandard.train_dictionary(min(size, DICTIONARY_BYTES_MAX), list(samples), k=2048, d=8)
    except zstandard.ZstdError:
        return None  # "source size incorrect": nothing in them comes twice
    return Dictionary(trained.as_bytes())


class _Contexts(threading.local):
    """The compressors and decompressors of one thread."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()
        self.with_dictionary: dict[int, tuple[Dictionary, zstandard.ZstdDecompressor]] = {}
        # The one that was used last: to load a dictionary takes longer than to compress a small pack with it.
        self.last: tuple[int, Dictionary, zstandard.ZstdCompressor] | None = None

    def compressor(self, level: int, dictionary: Dictionary | None) -> zstandard.ZstdCompressor:
        if dictionary is not None and self.last is not None and self.last[:2] == (level, dictionary):
            return self.last[2]
        if not LEVEL_MIN <= level <= LEVEL_MAX:
            raise ValueError(f"zstd levels here are {LEVEL_MIN} to {LEVEL_MAX}, not {level}")
        made = zstandard.ZstdCompressor(
            level=level,
            dict_data=None if dictionary is None else dictionary.contexts,
            write_checksum=True,
            write_content_size=True,
            write_dict_id=True,
            threads=0,
        )
        if dictionary is None:
            self.compressors[level] = made
        else:
            self.last = level, dictionary, made
        return made

    def decompressor_with(self, dictionary: Dictionary) -> zstandard.ZstdDecompressor:
        known = self.with_dictionary.get(dictionary.id)
        if known is None or known[0] is not dictionary:
            if len(self.with_dictionary) >= _KEPT_MAX:
                self.with_dictionary.clear()
            known = dictionary, zstandard.ZstdDecompressor(dict_data=dictionary.contexts)
            self.with_dictionary[dictionary.id] = known
        return known[1]


_contexts = _Contexts()


def compress(data: bytes, level: int = LEVEL_DEFAULT, dictionary: Dictionary | None = None) -> bytes:
    """One zstd frame of `data`, with its content size and a checksum. Thread-safe. O(n).

    Levels run from 1 (fast) to 19 (small). Without `dictionary` the frame can be read alone.

    >>> decompress(compress(b"a" * 1000), max_bytes=1000) == b"a" * 1000
    True
    """
    compressor = _contexts.compressors.get(level) if dictionary is None else None
    if compressor is None:
        compressor = _contexts.compressor(level, dictionary)
    return compressor.compress(data)


def decompress(data: bytes, max_bytes: int, lookup: Lookup | None = None) -> bytes:
    """The content of the frame `data`, exactly one frame and nothing behind it. Thread-safe. O(n).

    `lookup` is asked for the dictionary that the frame names, if it names one. Raises LimitExceeded, before it
    allocates, if the frame states more than `max_bytes` bytes of content; CorruptionError if it is not a whole frame
    with size and checksum, its checksum does not fit, or it names a dictionary that is not there.

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
    if frame.dict_id and lookup is None:
        raise CorruptionError(f"a zstd frame wants the dictionary {frame.dict_id}, which nothing here wrote")
    if size > max_bytes:
        raise LimitExceeded(f"a compressed record holds {size} bytes, more than the limit of {max_bytes}")
    decompressor = _contexts.decompressor
    if frame.dict_id and lookup is not None:
        decompressor = _contexts.decompressor_with(lookup(frame.dict_id))
    try:
        # max_output_size is not given: it is ignored for a frame that states its size.
        content = decompressor.decompress(data, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise CorruptionError(f"a zstd frame of {len(data)} bytes is damaged: {error}") from error
    if len(content) != size:
        raise CorruptionError(f"a zstd frame states {size} bytes of content and holds {len(content)}")
    return content
