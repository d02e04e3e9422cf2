"""Tools: their schemas, the check of arguments, the rules that fit together, contexts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from agentstore import NotDone, UnsupportedRule, effect_views, leases
from agentstore.runtime import Tool, ToolContext, ToolError, tool
from agentstore.runtime.agent import LEASE_S_MAX
from agentstore.runtime.schema import of_type, problems
from agentstore.runtime.tool import NAME_BYTES_MAX, TIMEOUT_S_MAX, table


class Passenger(TypedDict):
    name: str
    age: NotRequired[int]


@dataclass
class Seat:
    row: int


def parameters(made: Tool) -> Any:
    return made.schema["function"]["parameters"]


def context(**changes: Any) -> ToolContext:
    known: dict[str, Any] = {
        "key": "ab" * 32, "attempt": 1, "deadline": 0.0, "thread_id": "t", "decision": 0, "index": 0, "tool": "x",
        "call": {},
    }  # fmt: skip
    return ToolContext(**{**known, **changes})


# --- schemas -------------------------------------------------------------------------


def test_a_schema_from_a_signature() -> None:
    @tool(recovery="read")
    def search(
        to: Annotated[str, "IATA code"],
        when: Literal["now", "later"],
        ctx: ToolContext,
        seats: int = 1,
        price: float | None = None,
        passengers: list[Passenger] = [],  # noqa: B006  the signature under test
    ) -> list[str]:
        """Search flights.

        Only those that fly.

        Args:
            to: not used, the annotation says it better
            seats (int): how many
        """
        return []

    function = search.schema["function"]
    assert search.schema["type"] == "function"
    assert function["name"] == "search"
    assert function["description"] == "Search flights.\n\nOnly those that fly."
    assert parameters(search) == {
        "type": "object",
        "properties": {
            "to": {"type": "string", "description": "IATA code"},
            "when": {"type": "string", "enum": ["now", "later"]},
            "seats": {"type": "integer", "default": 1, "description": "how many"},
            "price": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "passengers": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["to", "when"],
        "additionalProperties": False,
    }


def test_a_bare_decorator_and_a_plain_function() -> None:
    @tool
    def pay(amount) -> None:  # type: ignore[no-untyped-def]  # a user without hints
        pass

    def other() -> None: ...

    assert pay.rule == "ask"  # the only rule that is safe for a tool that says nothing
    assert parameters(pay)["properties"] == {"amount": {}}
    assert list(table([pay, other])) == ["pay", "other"]


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Mapping[str, Any], {"type": "object", "additionalProperties": {}}),
        (Sequence[str], {"type": "array", "items": {"type": "string"}}),
        (tuple[int, ...], {"type": "array"}),
        (dict, {"type": "object"}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Literal[1, "a"], {"enum": [1, "a"]}),
        (Any, {}),
        (bytes, {}),
    ],
)
def test_hints(hint: Any, schema: Any) -> None:
    assert of_type(hint) == schema


def test_keyword_arguments_are_additional_properties() -> None:
    @tool
    def note(**fields: str) -> None: ...

    assert parameters(note)["additionalProperties"] == {"type": "string"}
    assert note.check({"a": "b"}) == []
    assert note.check({"a": 1}) == ["arguments.a must be a string, not an integer (1)"]


def test_a_signature_that_cannot_be_a_schema_fails_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="'args' cannot be positional"):

        @tool
        def one(*args: int) -> None: ...

    with pytest.raises(TypeError, match="Seat is a dataclass"):

        @tool
        def two(seat: Seat) -> None: ...

    with pytest.raises(TypeError, match="cannot be resolved"):

        @tool
        def three(seat: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821  the error under test


def test_the_check_of_arguments() -> None:
    @tool
    def book(seat: str, rows: list[int], price: float = 1.0, way: Literal["a", "b"] = "a") -> None: ...

    assert book.check({"seat": "1A", "rows": [1, 2], "price": 3, "way": "b"}) == []
    assert book.check({"seat": "1A", "rows": [2.0]}) == []  # JSON schema counts 2.0 as an integer
    assert book.check({}) == ["arguments.seat is missing", "arguments.rows is missing"]
    assert book.check({"seat": None, "rows": [1, "x"], "way": "c", "extra": 1}) == [
        "arguments.seat must be a string, not null (None)",
        "arguments.rows[1] must be an integer, not a string ('x')",
        "arguments.way must be one of ['a', 'b'], not 'c'",
        "arguments.extra is not a parameter (there are: seat, rows, price, way)",
    ]
    assert book.check({"seat": "1A", "rows": [True]})[0].startswith("arguments.rows[0] must be an integer")
    assert len(book.check({"seat": "1A", "rows": ["x"] * 1_000})) == 5


def test_what_a_schema_by_hand_says_more_is_not_checked() -> None:
    by_hand = {"type": ["object", "null"], "properties": {"n": {"type": "integer", "minimum": 3}}, "oneOf": [{}]}
    made = Tool(lambda n: n, name="f", parameters=by_hand)
    assert made.check({"n": 1, "more": 2}) == []
    assert made.check([]) == ["arguments must be an object or null, not an array ([])"]
    assert problems({"anyOf": [{"type": "string"}, {"type": "null"}]}, 3)[0].startswith("arguments fits none")


# --- calling -------------------------------------------------------------------------


def test_the_context_is_handed_over_and_not_in_the_schema() -> None:
    @tool
    def by_name(a: int, ctx: ToolContext) -> str:
        return f"{a} {ctx.key[:2]} {ctx.attempt}"

    @tool
    def by_place(ctx: ToolContext, /, **fields: Any) -> str:
        return f"{fields} {ctx.key[:2]}"

    assert by_name.start({"a": 1}, context(attempt=2)) == "1 ab 2"
    assert by_place.start({"ctx": "a field of this name"}, context()) == "{'ctx': 'a field of this name'} ab"
    assert "ctx" not in parameters(by_name)["properties"]
    assert by_name(3, context()) == "3 ab 1"


def test_a_raw_tool_gets_what_the_message_has() -> None:
    made = Tool(lambda arguments, ctx: (arguments, ctx.index), name="any", raw=True, recovery="skip")
    assert made.start("{not json", context(index=4)) == ("{not json", 4)
    assert made.check("{not json") == []
    assert parameters(made) == {"type": "object"}


def test_methods_are_tools_of_their_object() -> None:
    class Desk:
        def __init__(self, name: str) -> None:
            self.name = name

        def paid(self, key: str, arguments: Any) -> Any:
            return NotDone

        @tool(recovery="query", query=paid)
        def pay(self, amount: int) -> str:
            """Pay."""
            return f"{self.name} paid {amount}"

    desk = Desk("Oslo")
    assert desk.pay.start({"amount": 3}, context()) == "Oslo paid 3"
    assert list(parameters(desk.pay)["properties"]) == ["amount"]
    assert desk.pay.query is not None and desk.pay.query("key", {}) is NotDone
    assert list(table([desk.pay, Desk("Rome").pay.__class__(desk.paid, name="x", parameters={})])) == ["pay", "x"]


# --- rules ---------------------------------------------------------------------------


def test_compensate_is_refused_with_what_to_do_instead() -> None:
    undo = {"undo": lambda: None}
    for options in ({"recovery": "compensate"}, undo, {"recovery": "compensate", **undo}):
        with pytest.raises(UnsupportedRule, match="not available in this version; use 'query'"):
            tool(**options)(lambda: None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recovery": "perhaps"}, "must be one of read, replay, query, skip, ask"),
        ({"recovery": "query"}, "go together"),
        ({"recovery": "read", "query": lambda key, arguments: None}, "go together"),
        ({"retries": 2}, "never runs again by itself"),
        ({"recovery": "skip", "retries": 1}, "never runs again by itself"),
        ({"recovery": "read", "retries": -1}, "retries is an int of 0 or more"),
        ({"timeout_s": 0}, "timeout_s is above 0"),
        ({"timeout_s": float("nan")}, "timeout_s is above 0"),
        ({"backoff_s": -1}, "backoff_s"),
    ],
)
def test_options_that_do_not_fit_together(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Tool(lambda: None, name="f", **options)


def test_retries_and_waits() -> None:
    assert Tool(print, name="f", recovery="replay", parameters={}).retries == 3
    assert Tool(print, name="f", recovery="ask", parameters={}).retries == 0
    waits = Tool(print, name="f", recovery="read", parameters={}, backoff_s=0.5)
    assert [waits.wait_s(n) for n in (1, 2, 3, 7, 10_000)] == [0.5, 1.0, 2.0, 30.0, 30.0]


def test_a_tool_error_is_final_unless_it_says_otherwise() -> None:
    assert ToolError("no").final
    assert not ToolError("busy", final=False).final


def test_tables_refuse_what_they_cannot_tell_apart() -> None:
    with pytest.raises(ValueError, match="two tools are called 'f'"):
        table([Tool(print, name="f", parameters={}), Tool(print, name="f", parameters={})])
    with pytest.raises(ValueError, match="neither a Tool nor a function"):
        table(["search"])


@pytest.mark.parametrize(
    "limits",
    [
        {"timeout_s": 0}, {"timeout_s": float("inf")}, {"timeout_s": float("nan")}, {"timeout_s": 31 * 86_400.0},
        {"name": "x" * 201}, {"retries": 1.5}, {"retries": -1}, {"backoff_s": -1}, {"backoff_s": float("nan")},
    ],
)  # fmt: skip
def test_limits_that_no_call_could_keep_are_refused_where_they_are_written(limits: dict[str, Any]) -> None:
    """They were accepted, and then every run was refused."""
    with pytest.raises(ValueError, match="tool "):
        Tool(lambda: None, recovery="replay", **{"name": "act", **limits})


def test_the_runtimes_limits_are_the_stores() -> None:
    assert NAME_BYTES_MAX == effect_views.TOOL_NAME_BYTES_MAX
    assert TIMEOUT_S_MAX == effect_views.TIMEOUT_S_MAX
    assert LEASE_S_MAX == leases.TTL_S_MAX


def test_a_query_that_cannot_be_called_is_refused_where_it_is_written() -> None:
    """It showed after a crash only, as a call that waits for a person."""
    for wrong in (lambda key: None, lambda: None, 3):
        with pytest.raises(ValueError, match="called as query"):
            Tool(lambda: None, name="f", recovery="query", query=wrong)  # type: ignore[arg-type]
    Tool(lambda: None, name="f", recovery="query", query=lambda *both: None)
