"""JSON schemas from signatures, and the check of a call's arguments against them.

Only the part of JSON schema that a signature can say is understood: types, enum, items,
properties, required, additionalProperties, anyOf. A schema given by hand may say more;
what is not understood is not checked. A library for this was weighed and left out: it
would be the largest dependency of the package, for a check of one call's arguments.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

Schema = dict[str, Any]

PROBLEMS_MAX = 5
"""How many problems of one call are told to the model."""

_PLAIN: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    None: "null",
    dict: "object",
    list: "array",
}


def of_type(hint: Any) -> Schema:
    """The schema of a type hint; ``{}`` (anything) for one that JSON has no word for.

    >>> of_type(list[int])
    {'type': 'array', 'items': {'type': 'integer'}}
    >>> of_type(Literal["one-way", "return"] | None)
    {'anyOf': [{'type': 'string', 'enum': ['one-way', 'return']}, {'type': 'null'}]}
    """
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        described = next((extra for extra in parts[1:] if isinstance(extra, str)), None)
        inner = of_type(parts[0])
        return inner if described is None else {**inner, "description": described}
    if origin is Literal:
        return _enum(parts)
    if origin in (Union, types.UnionType):
        return {"anyOf": [of_type(part) for part in parts]}
    if isinstance(origin, type):
        return _generic(origin, parts)
    if typing.is_typeddict(hint):
        return _typed_dict(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        raise TypeError(
            f"a tool's arguments arrive as JSON and {hint.__name__} is a dataclass: "
            "take a TypedDict or a dict, or give parameters= by hand"
        )
    return {}


def _typed_dict(hint: Any) -> Schema:
    properties: dict[str, Schema] = {}
    required = []
    for name, each in typing.get_type_hints(hint, include_extras=True).items():
        # __required_keys__ alone is wrong in a module whose annotations are strings: it misses NotRequired[] there.
        marker = typing.get_origin(each)
        marked = marker in (typing.Required, typing.NotRequired)
        properties[name] = of_type(typing.get_args(each)[0] if marked else each)
        if marker is typing.Required or (not marked and name in hint.__required_keys__):
            required.append(name)
    return _object(properties, required)


def _enum(values: Sequence[Any]) -> Schema:
    kinds = {type(value) for value in values}
    schema: Schema = {"enum": list(values)}
    if len(kinds) == 1 and (kind := _PLAIN.get(kinds.pop())):
        schema = {"type": kind, **schema}
    return schema


def _generic(origin: type, parts: Sequence[Any]) -> Schema:
    if issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": of_type(parts[1]) if len(parts) == 2 else True}
    if issubclass(origin, Sequence):
        return {"type": "array", "items": of_type(parts[0])} if len(parts) == 1 else {"type": "array"}
    return {}


def _object(properties: dict[str, Schema], required: Sequence[str], extra: bool | Schema = False) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": extra}


def of_function(fn: Callable[..., Any], hidden: str | None, described: Mapping[str, str]) -> Schema:
    """The schema of the parameters of `fn`, without `hidden`; `described` has their descriptions by name."""
    signature = inspect.signature(fn)
    hints = hints_of(fn)
    properties: dict[str, Schema] = {}
    required = []
    extra: bool | Schema = False
    for name, parameter in signature.parameters.items():
        if name == hidden:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = of_type(hints[name]) if name in hints else True
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise TypeError(f"{_name(fn)}: a model names its arguments, so the parameter {name!r} cannot be positional")
        schema = of_type(hints[name]) if name in hints else {}
        if name in described and "description" not in schema:
            schema = {**schema, "description": described[name]}
        if parameter.default is parameter.empty:
            required.append(name)
        elif isinstance(parameter.default, str | int | float | bool):
            schema = {**schema, "default": parameter.default}
        properties[name] = schema
    return _object(properties, required, extra)


def hints_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """The resolved hints of `fn`; a name that does not exist is a TypeError that says which function has it."""
    target: Any = fn if inspect.isroutine(fn) else type(fn).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"{_name(fn)}: its annotations cannot be resolved ({error}); they must be importable"
        ) from error


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


_ABOUT_PARAMETERS = ("Args:", "Arguments:", "Parameters:")
_SECTIONS = (*_ABOUT_PARAMETERS, "Returns:", "Raises:", "Yields:", "Example:", "Examples:", "Note:")


def read_doc(fn: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text of a docstring above its ``Args:``, and what that says about each parameter.

    >>> def book(seat: str) -> str:
    ...     '''Book a seat.
    ...
    ...     Args:
    ...         seat: like 12A,
    ...             window seats end in A
    ...     '''
    >>> read_doc(book)
    ('Book a seat.', {'seat': 'like 12A, window seats end in A'})
    """
    head: list[str] = []
    described: dict[str, str] = {}
    section = name = ""
    for line in (inspect.getdoc(fn) or "").splitlines():
        words = line.strip()
        if line == words and words in _SECTIONS:
            section = words
        elif not section:
            head.append(line)
        elif section in _ABOUT_PARAMETERS and words:
            indent = len(line) - len(line.lstrip())
            before, colon, after = words.partition(":")
            if colon and indent <= 4 and before.split(" ")[0].isidentifier():
                name = before.split(" ")[0]
                described[name] = after.strip()
            elif name:
                described[name] = f"{described[name]} {words}".strip()
    return "\n".join(head).strip(), described


def problems(schema: Schema, value: Any, path: str = "arguments") -> list[str]:
    """What is wrong with `value`, at most `PROBLEMS_MAX` sentences for the model; empty: it fits. O(size of value).

    >>> problems({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n", "m"]}, {"n": "1"})
    ['arguments.m is missing', "arguments.n must be an integer, not a string ('1')"]
    """
    return _problems(schema, value, path)[:PROBLEMS_MAX]


def _problems(schema: Schema, value: Any, path: str) -> list[str]:
    if options := schema.get("anyOf"):
        tried = [_problems(option, value, path) for option in options]
        return [] if not all(tried) else [f"{path} fits none of its types: {'; '.join(found[0] for found in tried)}"]
    if "enum" in schema and not any(type(value) is type(item) and value == item for item in schema["enum"]):
        return [f"{path} must be one of {schema['enum']!r}, not {_shown(value)}"]
    wanted = schema.get("type")
    if wanted is not None and not _is(value, wanted):
        return [f"{path} must be {_a(wanted)}, not {_a(_kind(value))} ({_shown(value)})"]
    if isinstance(value, dict):
        return _object_problems(schema, value, path)
    if isinstance(value, list) and isinstance(items := schema.get("items"), dict):
        return [p for i, item in enumerate(value) for p in _problems(items, item, f"{path}[{i}]")]
    return []


def _object_problems(schema: Schema, value: dict[str, Any], path: str) -> list[str]:
    found = [f"{path}.{name} is missing" for name in schema.get("required", ()) if name not in value]
    properties = schema.get("properties", {})
    extra = schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in properties:
            found += _problems(properties[name], item, f"{path}.{name}")
        elif extra is False:
            known = ", ".join(properties) or "none"
            found.append(f"{path}.{name} is not a parameter (there are: {known})")
        elif isinstance(extra, dict):
            found += _problems(extra, item, f"{path}.{name}")
    return found


def _kind(value: Any) -> str:
    return _PLAIN.get(type(value), type(value).__name__)


def _is(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(_is(value, each) for each in wanted)
    kind = _kind(value)
    if kind == wanted or (wanted == "number" and kind == "integer"):
        return True
    return bool(wanted == "integer" and kind == "number" and value.is_integer())  # 3.0 is one in JSON schema


def _a(kind: Any) -> str:
    if isinstance(kind, list):
        return " or ".join(_a(each) for each in kind)
    if kind == "null":
        return "null"
    return f"an {kind}" if kind[0] in "aio" else f"a {kind}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
