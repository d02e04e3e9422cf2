"""Patches: what they make is what was given, whatever the base, and a wrong base is an error."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentstore import patches
from agentstore.errors import CorruptionError, LimitExceeded

few_letters = st.lists(st.sampled_from(b"ab"), max_size=300).map(bytes)


@given(few_letters, few_letters, few_letters, st.integers(0, 400))
def test_common_prefix_and_suffix_are_the_longest(start: bytes, a: bytes, b: bytes, most: int) -> None:
    left, right = start + a, start + b
    prefix = patches.common_prefix(left, right)
    assert left[:prefix] == right[:prefix]
    assert prefix == min(len(left), len(right)) or left[prefix] != right[prefix]
    left, right = a + start, b + start
    suffix = patches.common_suffix(left, right, most)
    assert left[len(left) - suffix :] == right[len(right) - suffix :]
    assert suffix == min(len(left), len(right), most) or left[-1 - suffix] != right[-1 - suffix]


def edited(size: int, edits: int, seed: int) -> tuple[bytes, bytes]:
    rng = random.Random(seed)
    old = rng.randbytes(size)
    new = bytearray(old)
    for _ in range(edits):
        at = rng.randrange(len(new))
        new[at : at + rng.randrange(3)] = b"edit" * rng.randrange(500)
    return old, bytes(new)


@pytest.mark.parametrize("size", [5_000, 300_000, 1_100_000, 5_000_000])
def test_a_few_edits_cost_little_at_any_size(size: int) -> None:
    old, new = edited(size, 8, size)
    pieces = patches.smaller(old, new)
    assert pieces is not None
    assert sum(len(frame) for _, _, frame in pieces) < 4_000 + size // 1_000
    assert patches.apply(old, pieces, len(new)) == new
    assert patches.size_of(pieces) == len(new)


def test_what_a_patch_does_not_make_small_is_no_patch() -> None:
    rng = random.Random(1)
    assert patches.smaller(rng.randbytes(10_000), rng.randbytes(10_000)) is None
    assert patches.smaller(b"x" * 100, b"y" * 10_000) is None


def test_a_wrong_base_is_an_error_and_never_wrong_bytes() -> None:
    old, new = edited(50_000, 8, 1)
    pieces = patches.make(old, new)
    for at in range(0, len(old), 997):
        wrong = bytearray(old)
        wrong[at] ^= 1
        try:
            assert patches.apply(bytes(wrong), pieces, len(new)) == new  # the patch did not need this byte
        except CorruptionError:
            pass
    with pytest.raises(CorruptionError):
        patches.apply(old[:-1], pieces, len(new))
    with pytest.raises(LimitExceeded):
        patches.apply(old, pieces, len(new) - 1)


def test_a_damaged_frame_is_an_error_and_never_wrong_bytes() -> None:
    old, new = edited(5_000, 3, 1)
    [(low, size, frame)] = patches.make(old, new)
    noticed = 0
    for bit in range(8 * len(frame)):
        wrong = bytearray(frame)
        wrong[bit // 8] ^= 1 << bit % 8
        try:
            assert patches.apply(old, [(low, size, bytes(wrong))], len(new)) == new  # zstd has bits without a meaning
        except (CorruptionError, LimitExceeded):
            noticed += 1
    assert noticed > 7 * len(frame)
