"""Tools: functions that a model may call, with the rule for a call whose outcome nobody knows.

The *rule* says what happens to a call that was started (its intent is durable) and whose
result was never stored, because the worker died, the call timed out, or it raised
something that is not a `ToolError`:

========== ================================================================================
``read``    changes nothing: no intent is written; called again
``replay``  idempotent, or takes the key: called again with the same key
``query``   the tool is asked about the key: done (its result is stored), or not (called again)
``skip``    never called again; the stored result says that the outcome is unknown
``ask``     never called again by itself; the run waits until a person says what happened
========== ================================================================================

A tool that declares nothing gets ``ask``, the only rule that is safe for every tool.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, overload

from agentstore import UnsupportedRule

from . import schema as schemas
from .clock import boottime

RULES = ("read", "replay", "query", "skip", "ask")
RETRYING = ("read", "replay", "query")
"""Rules under which a call may run again without a person."""

NAME_BYTES_MAX = 200
"""Longest name of a tool that the ledger keeps, in bytes of UTF-8."""
TIMEOUT_S_MAX = 30 * 24 * 3600.0
"""Longest timeout of a call that the ledger keeps."""

TIMEOUT_S = 60.0
RETRIES = 3
BACKOFF_S = 0.2
BACKOFF_S_MAX = 30.0


class ToolContext:
    """What a tool may know about its call: take it in a parameter annotated `ToolContext`.

    `key` is the idempotency key (hex, 64 characters), the same at every attempt; `attempt`
    counts from 1; `deadline` is in seconds of CLOCK_BOOTTIME. Immutable by convention.
    """

    __slots__ = ("attempt", "call", "deadline", "decision", "index", "key", "thread_id", "tool")

    def __init__(
        self,
        *,
        key: str,
        attempt: int,
        deadline: float,
        thread_id: str,
        decision: int,
        index: int,
        tool: str,
        call: Any,
    ) -> None:
        self.key = key
        self.attempt = attempt
        self.deadline = deadline
        self.thread_id = thread_id
        self.decision = decision
        self.index = index
        self.tool = tool
        self.call = call

    def remaining_s(self) -> float:
        """Seconds until the deadline, 0.0 if it has passed."""
        return max(0.0, self.deadline - boottime())


class ToolError(Exception):
    """Raised by a tool that knows that its call did *not* take effect, or that this is the final answer.

    It is the only exception that is a result: it is stored, and the model is told.
    `final` True (the default): do not try again. False: trying again may help; done for
    ``read`` and ``replay`` up to the tool's retries, then stored.

    >>> raise ToolError("no such flight: XX 1")
    Traceback (most recent call last):
    agentstore.runtime.tool.ToolError: no such flight: XX 1
    """

    def __init__(self, message: str = "the tool failed", *, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


class Interrupted(Exception):
    """Raised by a tool whose call was cut off by the world or a person, and will never have a result.

    A final recorded outcome: the receipt says so, no tool message is appended, and the turn
    ends once the other calls of the decision have ended; the next input goes on from there.
    """


class Tool:
    """A function as a tool: name, schema, rule and limits. Made by `tool`, or directly for one without a signature.

    Args:
        fn: called with the arguments as keywords, in a thread of its own, or awaited if it is async.
        name: as the model sees it; default: the function's name.
        description: default: the docstring above its ``Args:``.
        parameters: JSON schema; default: from the signature.
        recovery: the rule, see the module.
        query: ``query(key, arguments) -> result | NotDone | Unknown``, for the rule ``query``; None is a result too.
        undo: belongs to the rule ``compensate``, which this version refuses.
        timeout_s: after so many seconds a call is in doubt.
        retries: how often a call runs again by itself; default 3 for read, replay and query, 0 for the others.
        backoff_s: wait before the first retry, doubled each time, at most `BACKOFF_S_MAX`.
        raw: `fn` is called as ``fn(arguments, context)`` with the call's arguments as the message has them
            (a str even if it is no JSON), neither parsed nor checked.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        recovery: str = "ask",
        query: Callable[[str, Any], Any] | None = None,
        undo: Callable[..., Any] | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int | None = None,
        backoff_s: float = BACKOFF_S,
        raw: bool = False,
    ) -> None:
        own: str = getattr(fn, "__name__", type(fn).__name__)
        self.name = name or own
        _check_rule(self.name, recovery, query, undo, retries)
        _check_limits(self.name, timeout_s, retries, backoff_s)
        self.fn = fn
        self.rule = recovery
        self.query = query
        self.timeout_s = float(timeout_s)
        self.retries = (RETRIES if recovery in RETRYING else 0) if retries is None else retries
        self.backoff_s = backoff_s
        self.raw = raw
        self._given = (description, parameters)
        self._schema: dict[str, Any] | None = None
        self._context: tuple[str, bool] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as it is: no intent, no receipt. For tests of the tool itself."""
        return self.fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Tool:
        """A decorated method, bound to its object."""
        if instance is None:
            return self
        bound = object.__new__(Tool)
        bound.__dict__.update(self.__dict__, fn=self.fn.__get__(instance, owner), _schema=None, _context=None)
        if callable(getattr(self.query, "__get__", None)) and self.query is not None and _takes_self(self.query):
            bound.query = self.query.__get__(instance, owner)
        return bound

    def __repr__(self) -> str:
        return f"<Tool {self.name} recovery={self.rule!r}>"

    @property
    def schema(self) -> dict[str, Any]:
        """The entry for the model's ``tools``, as OpenAI has it: ``{"type": "function", ...}``. Do not change it."""
        if self._schema is None:
            text, described = schemas.read_doc(self.fn)
            description, parameters = self._given
            if parameters is None:
                parameters = (
                    {"type": "object"} if self.raw else schemas.of_function(self.fn, self._hidden()[0], described)
                )
            self._schema = {
                "type": "function",
                "function": {
                    "name": self.name,
                    "description": text if description is None else description,
                    "parameters": dict(parameters),
                },
            }
        return self._schema

    def check(self, arguments: Any) -> list[str]:
        """What is wrong with the arguments of a call, as sentences for the model; empty: they fit."""
        return [] if self.raw else schemas.problems(self.schema["function"]["parameters"], arguments)

    def start(self, arguments: Any, context: ToolContext) -> Any:
        """Call the function for one call of a model."""
        if self.raw:
            return self.fn(arguments, context)
        name, by_place = self._hidden()
        if not name:
            return self.fn(**arguments)
        return self.fn(context, **arguments) if by_place else self.fn(**arguments, **{name: context})

    def wait_s(self, retry: int) -> float:
        """Seconds to wait before retry number `retry` (from 1)."""
        return min(BACKOFF_S_MAX, self.backoff_s * 2.0 ** min(retry - 1, 30))

    def _hidden(self) -> tuple[str, bool]:
        """The name of the parameter annotated `ToolContext` ("" if none), and whether it is positional only."""
        if self._context is None:
            self._context = ("", False)
            hints = schemas.hints_of(self.fn)
            for name, parameter in inspect.signature(self.fn).parameters.items():
                if hints.get(name) is ToolContext:
                    self._context = (name, parameter.kind is parameter.POSITIONAL_ONLY)
        return self._context


def _takes_self(fn: Callable[..., Any]) -> bool:
    """Whether `fn` is a function with one parameter more than a query has, so the method of a class."""
    return inspect.isfunction(fn) and len(inspect.signature(fn).parameters) == 3


def _takes_query(query: Any) -> bool:
    """Asked where the tool is declared: a query that cannot be called would show only after a crash."""
    if not callable(query):
        return False
    try:
        inspect.signature(query).bind("", {})
    except TypeError:
        return _takes_self(query)
    except ValueError:
        pass  # a builtin that does not say what it takes
    return True


def _check_limits(name: str, timeout_s: float, retries: int | None, backoff_s: float) -> None:
    if not 1 <= len(name.encode("utf-8", "surrogatepass")) <= NAME_BYTES_MAX:
        raise ValueError(f"tool {name[:100]}…: a name has 1 to {NAME_BYTES_MAX} bytes of UTF-8")
    if not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise ValueError(f"tool {name}: timeout_s is above 0 and at most {TIMEOUT_S_MAX:.0f} s, not {timeout_s!r}")
    if retries is not None and (type(retries) is not int or retries < 0):
        raise ValueError(f"tool {name}: retries is an int of 0 or more, not {retries!r}")
    if not 0 <= backoff_s <= BACKOFF_S_MAX:
        raise ValueError(f"tool {name}: backoff_s is 0 to {BACKOFF_S_MAX:.0f} s, not {backoff_s!r}")


def _check_rule(name: str, rule: str, query: Any, undo: Any, retries: int | None) -> None:
    if rule == "compensate" or undo is not None:
        raise UnsupportedRule(
            f"tool {name}: recovery='compensate' and undo= are not available in this version; "
            f"use 'query' if the outcome can be looked up by key, else 'ask'"
        )
    if rule not in RULES:
        raise ValueError(f"tool {name}: recovery must be one of {', '.join(RULES)}, not {rule!r}")
    if (rule == "query") != (query is not None):
        raise ValueError(f"tool {name}: recovery='query' and query=function go together")
    if query is not None and not _takes_query(query):
        raise ValueError(f"tool {name}: the query is called as query(key, arguments), and {query!r} does not take that")
    if retries and rule not in RETRYING:
        raise ValueError(
            f"tool {name}: retries={retries} does not fit recovery={rule!r}, which never runs again by itself"
        )


@overload
def tool(fn: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    recovery: str = ...,
    query: Callable[..., Any] | None = ...,
    undo: Callable[..., Any] | None = ...,
    timeout_s: float = ...,
    retries: int | None = ...,
    backoff_s: float = ...,
    name: str | None = ...,
    description: str | None = ...,
    parameters: Mapping[str, Any] | None = ...,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function a `Tool`; its schema is derived from its signature. Options: see `Tool`.

    >>> @tool(recovery="replay", timeout_s=20)
    ... def reserve(flight: str, ctx: ToolContext, seats: int = 1) -> str:
    ...     '''Reserve seats on a flight.'''
    ...     return f"{seats} on {flight} ({ctx.key[:4]})"
    >>> reserve.schema["function"]["parameters"]["required"]
    ['flight']
    >>> reserve.check({"flight": 7})
    ['arguments.flight must be a string, not an integer (7)']
    """
    if fn is not None:
        return _made(fn)
    return lambda function: _made(function, **options)


def _made(fn: Callable[..., Any], **options: Any) -> Tool:
    made = Tool(fn, **options)
    if not _is_method(fn):
        _ = made.schema  # a signature that cannot be a schema is an error where it is written, not in a running agent
    return made


def _is_method(fn: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(fn).parameters), "") in ("self", "cls")


def table(tools: Any) -> dict[str, Tool]:
    """The tools by name; a plain function counts as ``tool(function)``."""
    found: dict[str, Tool] = {}
    for item in tools:
        made = item if isinstance(item, Tool) else tool(item) if callable(item) else None
        if made is None:
            raise ValueError(f"{item!r} is neither a Tool nor a function")
        if made.name in found:
            raise ValueError(f"two tools are called {made.name!r}; give one of them name=")
        found[made.name] = made
    return found
