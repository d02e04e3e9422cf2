"""Keys sort as their tuples, and come back as they went in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentstore.engine.keys import INT_MAX, decode, encode, end_of

TEXT = st.text(st.characters(), max_size=12)
PART = st.integers(0, INT_MAX) | st.binary(max_size=12) | TEXT
PARTS = st.lists(PART, max_size=5).map(tuple)


def order(parts: tuple[int | str | bytes, ...]) -> list[tuple[int, int | bytes]]:
    """What Python sorts as the keys do: ints, then bytes, then texts."""
    ranks: list[tuple[int, int | bytes]] = []
    for part in parts:
        if isinstance(part, int):
            ranks.append((0, part))
        elif isinstance(part, bytes):
            ranks.append((1, part))
        else:
            ranks.append((2, part.encode("utf-8", "surrogatepass")))
    return ranks


@given(PARTS)
def test_round_trip(parts: tuple[int | str | bytes, ...]) -> None:
    assert decode(encode(*parts)) == parts
    assert not parts or encode(*parts)[0] >= 0x10  # below, the engine keeps its own records


@given(PARTS, PARTS)
def test_keys_sort_as_their_tuples(one: tuple[int | str | bytes, ...], two: tuple[int | str | bytes, ...]) -> None:
    assert (encode(*one) < encode(*two)) == (order(one) < order(two))
    assert (encode(*one) == encode(*two)) == (one == two)


@given(PARTS, PARTS, PARTS)
def test_a_prefix_scan_has_its_own_and_nobody_elses(
    prefix: tuple[int | str | bytes, ...], rest: tuple[int | str | bytes, ...], other: tuple[int | str | bytes, ...]
) -> None:
    lo = encode(*prefix)
    assert lo <= encode(*prefix, *rest) < end_of(lo)
    assert (lo <= encode(*other) < end_of(lo)) == (other[: len(prefix)] == prefix)


@pytest.mark.parametrize("size", range(1, 9))
def test_ints_around_each_length(size: int) -> None:
    edge = 1 << 8 * size
    around = [number for number in (edge - 2, edge - 1, edge, edge + 1) if number <= INT_MAX]
    keys = [encode(number) for number in around]
    assert keys == sorted(keys)
    assert [decode(key) for key in keys] == [(number,) for number in around]


def test_zero_bytes_and_surrogates() -> None:
    for part in ("", "\0", "\0\xff", "a\0", "\ud800", b"", b"\0", b"\0\xff", b"\xff"):
        assert decode(encode(part, 1)) == (part, 1)
    assert encode("a") < encode("a\0") < encode("a\1")
    assert encode("a", 1) < encode("a\0", 0)


@pytest.mark.parametrize("number", [-1, INT_MAX + 1])
def test_an_int_out_of_range(number: int) -> None:
    with pytest.raises(ValueError, match="from 0 to"):
        encode(number)


@pytest.mark.parametrize("part", [True, 1.5, None, (1,)])
def test_other_types(part: object) -> None:
    with pytest.raises(TypeError, match="a key holds int, str and bytes"):
        encode(part)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [b"\x12\x01", b"\x99", b"\x31abc", b"\x30", b"\x05"])
def test_bytes_that_are_no_key(key: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(key)
