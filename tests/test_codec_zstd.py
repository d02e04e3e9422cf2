"""zstd frames: what comes out is what went in, or an error, and never more of it than agreed."""

from __future__ import annotations

import os
import random
import threading
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from agentstore.codec import zstd
from agentstore.errors import CorruptionError, LimitExceeded

LARGE = 1 << 30


@given(
    st.binary(max_size=2_000) | st.binary(max_size=20).map(lambda piece: piece * 500), st.sampled_from([1, 3, 9, 19])
)
def test_comes_back(data: bytes, level: int) -> None:
    frame = zstd.compress(data, level)
    assert zstd.decompress(frame, max_bytes=len(data)) == data
    parameters = zstandard.get_frame_parameters(frame)
    assert parameters.content_size == len(data)
    assert parameters.has_checksum


def test_levels_have_limits() -> None:
    for level in (0, -1, 20, 22, 1000):
        with pytest.raises(ValueError, match="1 to 19"):
            zstd.compress(b"a", level)


def test_the_empty_frame_is_the_one_that_zstandard_writes() -> None:
    for level in range(zstd.LEVEL_MIN, zstd.LEVEL_MAX + 1):
        assert zstd.compress(b"", level) == zstd._EMPTY_FRAME


def test_the_limit_is_checked_before_anything_is_allocated() -> None:
    frame = zstd.compress(bytes(64 << 20))  # about 6 kB
    assert len(frame) < 10_000
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceeded, match="holds 67108864 bytes, more than the limit of 67108863"):
            zstd.decompress(frame, max_bytes=(64 << 20) - 1)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert zstd.decompress(frame, max_bytes=64 << 20) == bytes(64 << 20)


def test_frames_of_others_are_refused() -> None:
    content = b"some content " * 20
    without_size = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(content)
    with pytest.raises(CorruptionError, match="does not state the size"):
        zstd.decompress(without_size, LARGE)
    without_checksum = zstandard.ZstdCompressor(write_checksum=False).compress(content)
    with pytest.raises(CorruptionError, match="has no checksum"):
        zstd.decompress(without_checksum, LARGE)
    dictionary = zstandard.train_dictionary(2_000, [os.urandom(20) + b"common part " * 10 for _ in range(200)])
    with_dictionary = zstandard.ZstdCompressor(dict_data=dictionary, write_checksum=True).compress(content)
    with pytest.raises(CorruptionError, match="wants the dictionary"):
        zstd.decompress(with_dictionary, LARGE)
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    for data in (skippable, skippable + zstd.compress(content), b"", b"abc", content):
        with pytest.raises(CorruptionError):
            zstd.decompress(data, LARGE)


def test_nothing_may_stand_behind_a_frame() -> None:
    for content in (b"", b"a", b"content" * 100):
        frame = zstd.compress(content)
        for tail in (b"\x00", b"junk", frame, zstd._EMPTY_FRAME):
            with pytest.raises(CorruptionError):
                zstd.decompress(frame + tail, LARGE)


CONTENTS = [b"", b"a", b"hello" * 10, bytes(range(256)) * 4, b"x" * 70_000]


@pytest.mark.parametrize("content", CONTENTS, ids=[f"{len(content)} bytes" for content in CONTENTS])
def test_every_prefix_and_every_flipped_bit(content: bytes) -> None:
    """zstandard alone answers some of these with b"": it does not read a frame that states size 0."""
    frame = zstd.compress(content)
    for end in range(len(frame)):
        with pytest.raises(CorruptionError):
            zstd.decompress(frame[:end], LARGE)
    refused = 0
    for index in range(len(frame)):
        for bit in range(8):
            flipped = bytearray(frame)
            flipped[index] ^= 1 << bit
            try:
                assert zstd.decompress(bytes(flipped), 1 << 20) == content  # an unused bit
            except (CorruptionError, LimitExceeded):
                refused += 1
    assert refused >= 8 * len(frame) - 8


def test_zstandard_alone_would_answer_wrongly() -> None:
    """The fault that the rule about empty frames is for; when this fails the rule may go."""
    frame = bytearray(zstd.compress(b"hello" * 10))
    frame[4] ^= 2  # "has a 2-byte dictionary id": the size is then read from elsewhere, as 0
    assert zstandard.ZstdDecompressor().decompress(bytes(frame), allow_extra_data=False) == b""
    with pytest.raises(CorruptionError, match="says it is empty"):
        zstd.decompress(bytes(frame), LARGE)


def test_random_and_mutated_bytes_raise_only_the_two_errors() -> None:
    rng = random.Random(5)
    frames = [zstd.compress(content, 9) for content in CONTENTS]
    refused = 0
    for _ in range(5_000):
        data = bytearray(rng.choice(frames) if rng.random() < 0.9 else rng.randbytes(rng.randrange(60)))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data) + 1)
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        try:
            assert zstd.decompress(bytes(data), 1 << 20) in CONTENTS
        except (CorruptionError, LimitExceeded):
            refused += 1
    assert refused > 3_000


def test_threads_do_not_share_contexts() -> None:
    """Two threads on one compressor crashed the interpreter; here each has its own."""
    contents = [random.Random(i).randbytes(300) * 60 for i in range(8)]
    expected = [zstd.compress(content) for content in contents]
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(mine: int) -> None:
        start.wait()
        for _ in range(150):
            frame = zstd.compress(contents[mine])
            if frame != expected[mine] or zstd.decompress(frame, LARGE) != contents[mine]:
                failures.append(f"thread {mine}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
