"""What goes into the codec comes out of it, or is refused by name."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import struct
import zoneinfo
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal, localcontext
from typing import Any
from uuid import UUID, uuid1, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentstore.codec import cbor
from agentstore.errors import CorruptionError, LimitExceeded, UnencodableState

# --- equality that sees everything ---------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Equal in type, value, order, sign of zero, offset and fold. NaN equals NaN, and sNaN does not signal."""
    if a.__class__ is not b.__class__:
        return False
    if isinstance(a, float) and isinstance(b, float):
        return bool(struct.pack(">d", a) == struct.pack(">d", b)) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, Decimal) and isinstance(b, Decimal):
        return a.as_tuple() == b.as_tuple()
    if isinstance(a, datetime) and isinstance(b, datetime):
        return (
            a.replace(tzinfo=None) == b.replace(tzinfo=None)
            and a.fold == b.fold
            and a.utcoffset() == b.utcoffset()
            and a.tzname() == b.tzname()
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, set):
        unmatched = list(b)
        for x in a:
            match = next((i for i, y in enumerate(unmatched) if same(x, y)), None)
            if match is None:
                return False
            del unmatched[match]
        return not unmatched
    return bool(a == b)


def check(value: Any) -> bytes:
    data = cbor.encode(value)
    assert same(cbor.decode(data), value)
    one = cbor.canonical(value)
    back = cbor.decode(one)
    assert cbor.canonical(back) == one
    if not has_dict(value):
        assert same(back, value)
    return data


def has_dict(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list | tuple | set) and any(map(has_dict, value)))


# --- values --------------------------------------------------------------------------

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    23,
    24,
    255,
    256,
    -1,
    -(2**63),
    2**64 - 1,
    2**64,
    -(2**64),
    -(2**64) - 1,
    10**5000,
    -(10**5000),
    0.0,
    -0.0,
    0.1,
    1e308,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "naïve 🤖 \x00 中文",
    "\ud83d",
    "\udcff" * 3,
    "\ud83d\ude00",  # two surrogates that are a pair in UTF-16, and still two characters here
    b"",
    b"\x00\xff" * 50_000,
    "x" * 200_000,
    [],
    [[], [[]]],
    (),
    (1, (2, [3], ())),
    {},
    {"a": {"b": [{}]}},
    {"b": 1, "a": 2},
    {b"k": 1, "k": 2},
    {1: "int", "1": "str", b"1": "bytes", None: 0, 2.5: 1},
    {True: "one"},
    {0: "zero", -1: "minus", 2**70: "big", math.inf: "inf"},
    {"\ud800": "surrogate key"},
    {math.nan: 1, float("nan"): 2},
    {datetime(2026, 1, 2): 1, date(2026, 1, 2): 2, Decimal("1.50"): 3, UUID(int=7): 4},
    set(),
    {1, "a", b"a", None, 2.5, (1, "x"), UUID(int=1), date(2026, 1, 2)},
    {float("nan"), math.nan},
    datetime(2026, 11, 30, 21, 30, 5, 123_456),
    datetime.min,
    datetime.max,
    datetime(2026, 10, 25, 2, 30, fold=1),
    datetime(2026, 10, 25, 2, 30, tzinfo=UTC, fold=1),
    datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=45))),
    datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=-5), "EST")),
    datetime(2026, 1, 1, tzinfo=timezone(timedelta(0), "Zulu \ud800")),
    datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=23, minutes=59, seconds=59, microseconds=999_999))),
    # fromisoformat() of Python 3.11 reads this offset as 0; found by hypothesis
    datetime(2000, 1, 1, tzinfo=timezone(timedelta(microseconds=1), "")),
    datetime(2000, 1, 1, tzinfo=timezone(timedelta(microseconds=-1))),
    datetime(9999, 12, 31, tzinfo=timezone(-timedelta(seconds=3661, microseconds=7))),
    date.min,
    date.max,
    Decimal("0"),
    Decimal("-0"),
    Decimal("0E+5"),
    Decimal("1.500"),
    Decimal("1E+400000"),
    Decimal("-1E-400000"),
    Decimal("NaN"),
    Decimal("-NaN123"),
    Decimal("sNaN"),
    Decimal("sNaN9"),
    Decimal("Infinity"),
    Decimal("-Infinity"),
    Decimal("1" * 5000),
    UUID(int=0),
    uuid4(),
    uuid1(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_value_comes_back_alone_and_inside_each_container(value: Any) -> None:
    check(value)
    check([value])
    check((value, value))
    check({"field": value, "list": [value, "x"]})
    check({7: value})
    if value.__class__ not in (list, dict, set) and not (isinstance(value, Decimal) and value.is_snan()):
        try:
            hash(value)
        except TypeError:
            return  # a tuple that holds a list
        check({value})
        if value.__class__ is not tuple:
            check({value: "as key"})


def test_json_like_values_are_plain_cbor() -> None:
    """Any CBOR reader understands them: the examples of RFC 8949, appendix A."""
    assert cbor.encode([1, [2, 3], [4, 5]]).hex() == "8301820203820405"
    assert cbor.encode({"a": 1, "b": [2, 3]}).hex() == "a26161016162820203"
    assert cbor.encode([True, False, None, 1.1, -1, "ü", b"\x01"]).hex() == "87f5f4f6fb3ff199999999999a2062c3bc4101"


def test_tags_are_the_documented_ones() -> None:
    assert cbor.encode(2**64).hex() == "c249010000000000000000"
    assert cbor.encode(UUID(int=1)).hex() == "d82550" + "00" * 15 + "01"
    assert cbor.encode({2, 1}).hex() == "d90102820102"
    assert cbor.encode(date(2026, 11, 30)).hex() == "d903ec6a" + b"2026-11-30".hex()
    assert cbor.encode("\ud800").hex() == "d9af6443eda080"
    assert cbor.encode((1,)).hex() == "d9af658101"
    assert cbor.encode({1: 2}).hex() == "d9af66820102"
    assert cbor.encode(datetime(2026, 1, 2)).hex() == "d9af678273" + b"2026-01-02T00:00:00".hex() + "00"
    assert cbor.encode(Decimal("1.50")).hex() == "d9af6864" + b"1.50".hex()


def test_a_set_has_one_encoding_whatever_its_order() -> None:
    words = [f"word {i}" for i in range(200)]
    forwards, backwards = set(words), set()
    for word in reversed(words):
        backwards.add(word)
    assert cbor.encode(forwards) == cbor.encode(backwards)
    shuffled = {8, 0}, {0, 8}  # these two do iterate in different orders
    assert list(shuffled[0]) != list(shuffled[1])
    assert cbor.encode(shuffled[0]) == cbor.encode(shuffled[1])


def test_decimals_do_not_depend_on_the_callers_context() -> None:
    value = Decimal("-1.23456789E+30")
    expected = cbor.encode(value)
    with localcontext(prec=3, capitals=0, Emax=5, Emin=-5) as context:
        context.clear_traps()
        assert cbor.encode(value) == expected
        assert same(cbor.decode(expected), value)
        with pytest.raises(CorruptionError):
            cbor.decode(b"\xd9\xaf\x68\x63abc")


# --- properties ----------------------------------------------------------------------

SURROGATES = st.text(st.characters(exclude_categories=[]), max_size=20)
ZONES = st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)), st.text(max_size=5)) | st.builds(
    timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23))
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text(max_size=20)
    | SURROGATES
    | st.binary(max_size=20)
    | st.datetimes(timezones=st.none() | ZONES, allow_imaginary=False)
    | st.builds(lambda t, f: t.replace(fold=f), st.datetimes(), st.sampled_from([0, 1]))
    | st.dates()
    | st.decimals()
    | st.uuids()
)
KEYS = SCALARS.filter(lambda x: not (isinstance(x, Decimal) and x.is_snan()))
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    SCALARS | st.sets(KEYS | st.tuples(KEYS, KEYS), max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(ANYTHING)
def test_everything_comes_back(value: Any) -> None:
    check(value)


@given(st.lists(ANYTHING, max_size=30), st.dictionaries(SURROGATES | st.binary(max_size=5), SCALARS, max_size=30))
def test_headers_and_items_make_the_encoding_of_the_container(items: list[Any], fields: dict[Any, Any]) -> None:
    parts = [cbor.array_header(len(items)), *map(cbor.encode, items)]
    assert b"".join(parts) == cbor.encode(items)
    assert same(cbor.decode_joined(parts), items)
    fields = {key: value for key, value in fields.items() if isinstance(key, bytes) or key.isprintable()}
    pairs = [cbor.encode(key) + cbor.encode(value) for key, value in fields.items()]
    assert cbor.map_header(len(fields)) + b"".join(pairs) == cbor.encode(fields)


@pytest.mark.parametrize("items", [0, 23, 24, 255, 256, 65_535, 65_536, 70_000])
def test_headers_of_every_size(items: int) -> None:
    assert cbor.array_header(items) + b"\x00" * items == cbor.encode([0] * items)
    fields = {f"{i:05}": 0 for i in range(items)}
    assert cbor.map_header(items) + b"".join(cbor.encode(key) + b"\x00" for key in fields) == cbor.encode(fields)


@pytest.mark.parametrize("header", [cbor.array_header, cbor.map_header])
def test_headers_have_limits(header: Callable[[int], bytes]) -> None:
    for count in (-1, cbor.ENCODED_BYTES_MAX + 1):
        with pytest.raises(LimitExceeded):
            header(count)


@given(st.data(), st.dictionaries(KEYS, SCALARS, max_size=8) | st.dictionaries(st.text(max_size=5), ANYTHING))
def test_canonical_does_not_depend_on_order(data: st.DataObject, fields: dict[Any, Any]) -> None:
    shuffled = dict(data.draw(st.permutations(list(fields.items()))))
    assert cbor.canonical(shuffled) == cbor.canonical(fields)
    assert cbor.canonical([{"in": shuffled}]) == cbor.canonical([{"in": fields}])


def test_canonical_tells_types_apart() -> None:
    different = [1, 1.0, True, "1", b"1", Decimal(1), [1], (1,), {1}, {1: 1}, {True: 1}, {1.0: 1}, {"1": 1}, 0.0, -0.0]
    assert len({cbor.canonical(value) for value in different}) == len(different)
    assert len({cbor.encode(value) for value in different}) == len(different)


# --- refusals ------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Word(str):
    __slots__ = ()


class Real(float):
    __slots__ = ()


class Blob(bytes):
    __slots__ = ()


class Items(list[int]):
    pass


class Zone(zoneinfo.ZoneInfo):
    pass


class Moment(datetime):
    pass


@dataclasses.dataclass
class Point:
    x: int = 0


Pair = collections.namedtuple("Pair", "a b")

REFUSED: list[tuple[Any, str]] = [
    (Colour.RED, "Colour"),
    (Word("a"), "Word"),
    (Real(1.5), "Real"),
    (Blob(b"a"), "Blob"),
    (Items([1]), "Items"),
    (Pair(1, 2), "Pair"),
    (Point(), "Point"),
    (Moment(2026, 1, 1), "Moment"),
    (collections.OrderedDict(a=1), "OrderedDict"),
    (collections.defaultdict(list), "defaultdict"),
    (collections.Counter("a"), "Counter"),
    (collections.deque(), "deque"),
    (frozenset({1}), "frozenset"),
    (bytearray(b"a"), "bytearray"),
    (memoryview(b"a"), "memoryview"),
    (1j, "complex"),
    (range(3), "range"),
    (object(), "object"),
    (len, "builtin_function_or_method"),
    (int, "type"),
    (..., "ellipsis"),
    ({}.keys(), "dict_keys"),
    (iter([]), "list_iterator"),
    (timedelta(1), "timedelta"),
    (UTC, "timezone"),
]


@pytest.mark.parametrize(("value", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_other_types_are_refused_with_their_path(value: Any, name: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": value}]}
    for encoder in (cbor.encode, cbor.canonical):
        with pytest.raises(UnencodableState, match=rf"^conversation_history\[3\]\.content\[0\]\.text has .*{name}"):
            encoder({"conversation_history": [{}, "", (), message]})
        with pytest.raises(UnencodableState, match=rf"^conversation_history\[3\]\.content\[0\]\.text has .*{name}"):
            encoder(message, path=("conversation_history", 3))
        with pytest.raises(UnencodableState, match=rf"^the value has the type .*{name}"):
            encoder(value)
        with pytest.raises(UnencodableState, match=rf"^\[1\]\[5\]\['a key'\] has .*{name}"):
            encoder([0, {5: {"a key": (value)}}])


@pytest.mark.parametrize("key", [Colour.RED, Word("a"), (1, 2), frozenset(), timedelta(1), Moment(2026, 1, 1), len])
def test_other_keys_are_refused(key: Any) -> None:
    for value in ({key: 1}, {"ok": 1, key: 2}, {7: 0, key: 2}):
        with pytest.raises(UnencodableState, match=r"^a key of \[0\]\.meta has the type "):
            cbor.encode([{"meta": value}])


def test_a_zone_that_cannot_be_kept_is_refused() -> None:
    for zone in (zoneinfo.ZoneInfo("UTC"), Zone("UTC")):
        moment = datetime(2026, 7, 1, tzinfo=zone)
        with pytest.raises(UnencodableState, match=r"^due\[0\] is a datetime with a .*; use \.astimezone"):
            cbor.encode([moment], path=("due",))
        with pytest.raises(UnencodableState, match="is a datetime with a"):
            cbor.canonical({moment: 1})
        check(moment.astimezone(UTC))


def test_refusals_can_show_what_repr_cannot() -> None:
    """repr() of an int of more than 4,300 digits raises, and so may anybody's __repr__."""

    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    huge = 10**5000
    with pytest.raises(UnencodableState, match=r"^\[.*int.*\] has the type object"):
        cbor.encode({huge: object()})
    with pytest.raises(UnencodableState, match=r"^a key of the value has the type .*Silent"):
        cbor.encode({Silent(): 1})


def test_numpy_scalars_are_refused() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    for value in (numpy.float64(1), numpy.int64(1), numpy.str_("a"), numpy.bool_(True), numpy.zeros(2)):
        with pytest.raises(UnencodableState, match=r"numpy"):
            cbor.encode({"score": value})


def test_path_of_messages() -> None:
    assert cbor.format_path(()) == "the value"
    assert cbor.format_path(("a", 3, "b c", "d")) == "a[3]['b c'].d"
    assert cbor.format_path((3,)) == "[3]"
    long = cbor.format_path(("a", *range(40), "x" * 500))
    assert len(long) < 250
    assert long.startswith("a[0][1]")
    assert "…" in long
