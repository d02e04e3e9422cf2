"""Changes to ops and back: the edge cases by name, and sizes that show O(change)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentstore import (
    Append,
    Change,
    Delete,
    InvalidChange,
    LimitExceeded,
    Set,
    Splice,
    UnencodableState,
    deltas,
    fields,
)
from agentstore.codec import cbor
from agentstore.errors import CorruptionError
from agentstore.fields import State
from agentstore.records import OP_APPEND, OP_ORDER, OP_PATCH, OP_SET, OP_SPLICE, pack

LARGE = 8 * 1024 * 1024


def no_fetch(name: str) -> bytes:
    raise AssertionError(f"{name} was read from the store")


def state_of(value: dict[str, Any]) -> State:
    state: State = {}
    deltas.adopt(state, deltas.plan_state({}, value, no_fetch), LARGE)
    return state


def commit(state: State, *changes: Change) -> deltas.Plan:
    """Plan and adopt; and `apply` of the stored ops to a copy leads to the same."""
    other = state_of(fields.decode(state))
    before = fields.state_sum(state)
    made = deltas.plan(state, changes, no_fetch)
    expected = made.sum_after(before, state)
    sizes = sum(field.size for field in state.values())
    deltas.adopt(state, made, LARGE)
    assert fields.state_sum(state) == expected
    assert sum(field.size for field in state.values()) == sizes + made.grown
    for op in made.ops:
        fields.apply(other, [op])
    assert fields.sums_of(other) == fields.sums_of(state)
    assert all(fields.verify(state, name) and fields.verify(other, name) for name in state)
    assert fields.decode(other) == fields.decode(state)
    return made


def after(value: dict[str, Any], *changes: Change) -> dict[str, Any]:
    state = state_of(value)
    commit(state, *changes)
    return fields.decode(state)


# --- what changes do ---------------------------------------------------------------------


def test_no_changes_change_nothing() -> None:
    assert after({"a": 1}) == {"a": 1}


def test_append_creates_the_list_also_in_a_mapping_and_with_no_items() -> None:
    assert after({}, Append("notes", 1, 2)) == {"notes": [1, 2]}
    assert after({}, Append("notes")) == {"notes": []}
    assert after({"a": {}}, Append(("a", "b"), 1)) == {"a": {"b": [1]}}


def test_set_creates_the_last_part_only() -> None:
    assert after({"a": {}}, Set(("a", "b"), 1)) == {"a": {"b": 1}}
    with pytest.raises(InvalidChange, match="no key 'b'"):
        after({"a": {}}, Set(("a", "b", "c"), 1))
    with pytest.raises(InvalidChange, match="no field 'a'"):
        after({}, Set(("a", "b"), 1))


def test_paths_go_through_lists_from_both_ends() -> None:
    value = {"h": [{"n": 1}, {"n": 2}, {"n": 3}]}
    assert after(value, Set(("h", 1, "n"), 9), Set(("h", -1, "n"), 8)) == {"h": [{"n": 1}, {"n": 9}, {"n": 8}]}
    assert after(value, Delete(("h", 0))) == {"h": [{"n": 2}, {"n": 3}]}
    assert after({"m": {1: "a", None: "b"}}, Set(("m", 1), "c"), Delete(("m", None))) == {"m": {1: "c"}}


def test_splice_replaces_items_and_may_stand_at_the_end() -> None:
    assert after({"h": [1, 2, 3, 4]}, Splice("h", 1, 2, ["x"])) == {"h": [1, "x", 4]}
    assert after({"h": [1]}, Splice("h", 1, 0, [2])) == {"h": [1, 2]}
    assert after({"a": {"h": [1]}}, Splice(("a", "h"), 0, 1)) == {"a": {"h": []}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Append("step", 1), "not a list"),
        (Append(("h", 0), 1), "no list"),
        (Append(("usage", "prompt"), 1), "no list"),
        (Splice("h", 2, 2), "has 3 items"),
        (Splice("h", 4, 0, ["x"]), "has 3 items"),
        (Splice("step", 0, 0), "no list"),
        (Splice("missing", 0, 0), "no field"),
        (Delete("missing"), "no such field"),
        (Delete(("usage", "missing")), "no key"),
        (Delete(("h", 3)), "no index"),
        (Set(("h", 3), 1), "no index"),
        (Set(("h", "x"), 1), "no index"),
        (Set(("h", True), 1), "no index"),
        (Set(("step", "x"), 1), "inside a value of type int"),
        (Set(("usage", "prompt", "x"), 1), "inside a value of type int"),
        (Set(("usage", []), 1), "cannot be a key"),
        (Set(("t", 0), 1), "inside a value of type tuple"),
    ],
)
def test_a_change_that_does_not_fit_changes_nothing(change: Change, message: str) -> None:
    value = {"step": 1, "h": [1, 2, 3], "usage": {"prompt": 1}, "t": (1,)}
    state = state_of(value)
    with pytest.raises(InvalidChange, match=message):
        deltas.plan(state, (Set("step", 2), change), no_fetch)
    assert fields.decode(state) == value


@pytest.mark.parametrize("path", [(), 1, ["a"], (1,), ("a",) * 65, None])
def test_a_path_is_a_name_or_a_tuple_that_begins_with_one(path: Any) -> None:
    with pytest.raises(InvalidChange):
        Set(path, 1)


@pytest.mark.parametrize(("start", "delete"), [(-1, 0), (0, -1), (True, 0), ("0", 0)])
def test_a_splice_counts_from_0(start: Any, delete: Any) -> None:
    with pytest.raises(InvalidChange):
        Splice("h", start, delete)


def test_what_is_no_change_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        deltas.plan({}, (Change("a"),), no_fetch)
    with pytest.raises(TypeError):
        deltas.plan(state_of({"a": [1]}), (Splice("a", 0, 0), Change("a")), no_fetch)


def test_names_are_unicode_text() -> None:
    assert after({}, Set("ü\0", 1)) == {"ü\0": 1}
    with pytest.raises(InvalidChange, match="surrogate"):
        after({}, Set("\ud800", 1))
    with pytest.raises(UnencodableState, match="name of a field"):
        state_of({1: 2})  # type: ignore[dict-item]  # the point
    with pytest.raises(UnencodableState, match="a state is a dict"):
        deltas.plan_state({}, [], no_fetch)  # type: ignore[arg-type]  # the point


def test_several_changes_of_one_field_follow_each_other() -> None:
    assert after({"a": [1]}, Append("a", 2), Append("a", 3), Set(("a", 0), 0)) == {"a": [0, 2, 3]}
    assert after({"a": 1, "b": 2}, Delete("a"), Set("a", 3)) == {"b": 2, "a": 3}
    assert list(after({"a": 1, "b": 2}, Delete("a"), Set("a", 3))) == ["b", "a"]
    assert list(after({"a": {}, "b": 2}, Set(("a", "x"), 1), Delete("a"), Append("a", 3))) == ["b", "a"]
    assert list(after({}, Append("a", 1), Set("b", {}), Set(("a", 0), 2), Set(("b", "c"), 3))) == ["a", "b"]
    assert after({}, Append("a", [1]), Set(("a", 0, 0), 2), Delete("a")) == {}
    with pytest.raises(InvalidChange):
        after({"a": {}}, Delete("a"), Set(("a", "x"), 1))


def test_values_are_taken_as_they_are_and_never_changed() -> None:
    inner: dict[str, Any] = {"x": []}
    given_items = [inner]
    assert after({"a": {}}, Set(("a", "b"), inner), Append(("a", "b", "x"), 1)) == {"a": {"b": {"x": [1]}}}
    assert after({"a": []}, Splice("a", 0, 0, given_items), Set(("a", 0, "x"), 2)) == {"a": [{"x": 2}]}
    assert after({}, Set("a", inner), Append(("a", "x"), 1)) == {"a": {"x": [1]}}
    assert inner == {"x": []}


def test_an_error_names_the_path() -> None:
    for change in (Append("h", {"content": 1j}), Set(("h", 1), {"content": 1j})):
        with pytest.raises(UnencodableState, match=r"h\[1\]\.content"):
            after({"h": [0] if isinstance(change, Append) else [0, 1]}, change)


# --- what they cost ------------------------------------------------------------------------


def test_an_append_and_a_set_store_themselves_and_read_nothing() -> None:
    state = state_of({"h": [{"text": "x" * 1000}] * 1000, "step": 1})
    for field in state.values():
        field.parts = None  # a handle that never loaded
    made = deltas.plan(state, (Append("h", "new"), Set("step", 2), Append("h", "er")), no_fetch)
    assert [op[0] for op in made.ops] == [OP_APPEND, OP_SET, OP_APPEND]
    assert len(pack(made.ops)) < 60


def test_an_edit_inside_a_field_stores_little() -> None:
    state = state_of({"h": [{"n": n, "text": f"{n:04}" * 50} for n in range(1000)]})
    made = commit(state, Set(("h", 500, "n"), 5))
    assert [op[0] for op in made.ops] == [OP_SPLICE]
    assert len(pack(made.ops)) < 40


def test_a_large_value_that_changed_a_little_is_a_patch() -> None:
    page = b"".join(b"%d squared is %d\n" % (n, n * n) for n in range(5000))
    edited = page.replace(b"10 squared", b"ten squared").replace(b"4000 squared", b"4k squared")
    state = state_of({"page": page})
    made = commit(state, Set("page", edited))
    assert [op[0] for op in made.ops] == [OP_PATCH]
    assert len(pack(made.ops)) < 500
    # Without its bytes in memory the sizes still come out, and the bytes are read when a patch may pay.
    blind = state_of({"page": page})
    body = blind["page"].body()
    blind["page"].parts = None
    made = deltas.plan(blind, (Set("page", edited),), lambda name: body)
    assert [op[0] for op in made.ops] == [OP_PATCH]
    fields.apply(blind, made.ops)
    assert fields.sums_of(blind) == fields.sums_of(state)


def test_equal_values_are_no_ops() -> None:
    value = {"h": [1, {"a": [2]}], "text": "x" * 10_000, "step": 1}
    state = state_of(value)
    assert deltas.plan_state(state, copy.deepcopy(value), no_fetch).ops == []
    assert deltas.plan(state, (Set("text", "x" * 10_000), Set(("h", 0), 1)), no_fetch).ops == []


def test_commit_state_finds_what_differs() -> None:
    value: dict[str, Any] = {"h": list(range(1000)), "a": 1, "b": 2}
    state = state_of(value)
    value["h"].append(1000)
    kinds = [op[0] for op in deltas.plan_state(state, value, no_fetch).ops]
    assert kinds == [OP_APPEND]
    value["h"][3:5] = ["x"]
    del value["a"]
    made = deltas.plan_state(state, value, no_fetch)
    deltas.adopt(state, made, LARGE)
    assert fields.decode(state) == value


def test_commit_state_keeps_the_order_of_fields() -> None:
    state = state_of({"a": 1, "b": 2, "c": 3})
    new = {"c": 3, "d": 4, "a": 1}
    made = deltas.plan_state(state, new, no_fetch)
    assert [op[0] for op in made.ops][-1] == OP_ORDER
    deltas.adopt(state, made, LARGE)
    assert list(fields.decode(state)) == list(new)


def test_types_are_compared_not_only_values() -> None:
    for old, new in ((1, True), (1, 1.0), ([1], (1,)), (0.0, -0.0), ({"a": 1, "b": 2}, {"b": 2, "a": 1})):
        state = state_of({"v": old})
        deltas.adopt(state, deltas.plan_state(state, {"v": new}, no_fetch), LARGE)
        [value] = fields.decode(state).values()
        assert repr(value) == repr(new)


def test_a_state_over_the_limit_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="thread 't'"):
        fields.check_size(fields.STATE_BYTES_MAX + 1, "thread 't'")


# --- damage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        [OP_APPEND, "missing", b"\x01", 0, 1],
        [OP_APPEND, "step", b"\x01", 0, 1],
        [OP_APPEND, "h", b"\x01", 0, 1],
        [OP_SPLICE, "h", 2, 2, b"", 0, 0],
        [OP_SPLICE, "missing", 0, 0, b"", 0, 0],
        [OP_PATCH, "h", 0, 3, [[0, 9, b""]], 0, 0],
        [OP_PATCH, "h", 0, 3, [1], 0, 0],
        [2, "missing"],
        [OP_ORDER, ["h"]],
        [OP_ORDER, "h"],
        [9, "h"],
        [OP_SET, "h"],
        [],
        None,
    ],
)
def test_an_op_that_does_not_fit_is_corruption(op: Any) -> None:
    with pytest.raises(CorruptionError):
        fields.apply(state_of({"step": 1, "h": [1, 2, 3]}), [op])


def test_verify_sees_every_flipped_bit() -> None:
    body = state_of({"h": [1, "two", {"three": 3}]})["h"].body()
    for bit in range(8 * len(body)):
        state = state_of({"h": [1, "two", {"three": 3}]})
        wrong = bytearray(body)
        wrong[bit // 8] ^= 1 << bit % 8
        state["h"].parts = [bytes(wrong)]
        assert not fields.verify(state, "h")


@given(st.lists(st.binary(max_size=30), max_size=6), st.integers(0, 100), st.integers(0, 100), st.binary(max_size=10))
def test_splicing_parts_is_splicing_bytes(parts: list[bytes], start: int, removed: int, data: bytes) -> None:
    whole = b"".join(parts)
    start = min(start, len(whole))
    removed = min(removed, len(whole) - start)
    field = fields.Field(0, -1, 0, len(whole), list(parts))
    field.splice(start, removed, data)
    assert field.body() == whole[:start] + data + whole[start + removed :]


nested = st.recursive(
    st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.binary(max_size=300)),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner)),
)


@given(st.lists(nested, max_size=8))
def test_items_of_finds_the_items(items: list[Any]) -> None:
    encoded = [cbor.encode(item) for item in items]
    assert list(fields.items_of(b"".join(encoded))) == encoded
    for cut in range(1, len(encoded[-1]) if encoded else 0):
        with pytest.raises((ValueError, IndexError)):
            list(fields.items_of(encoded[-1][:-cut]))


@pytest.mark.parametrize("levels", range(90, 101))
def test_what_can_be_committed_can_be_loaded_however_deep(levels: int) -> None:
    deep: Any = 1
    for _ in range(levels):
        deep = [deep]
    assert after({}, Append("list", deep, 2), Set("value", deep)) == {"list": [deep, 2], "value": deep}
