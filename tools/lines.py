"""The lines of `agentstore export --jsonl`: one JSON object each, version 1.

    {"record": "export", "version": 1, "all": true, "threads": 2, …}
    {"record": "thread", "thread": id, "uuid": …, "head": 2, "decision": null, "checkpoints": 3, "effects": 1, …}
    {"record": "checkpoint", "thread": id, "seq": 0, "parent": null, "reason": "input", …, "state": {…}, "sha256": …}
    {"record": "checkpoint", "thread": id, "seq": 1, "parent": 0, …, "changes": [["append", name, […]]], "sha256": …}
    {"record": "effect", "thread": id, "decision": [uuid, seq], "call": 0, "generation": 0, "key": …, "tool": …, …}
    {"record": "pin", "thread": id, "seq": 0, "note": …}
    {"record": "gone", "thread": id}
    {"record": "end", "threads": 2}

``gone``: the thread was deleted while it was written, and its lines before do not count. A thread's lines follow each
other, as many as its own line says, checkpoints by rising seq, then effects, then pins. Without ``--all`` only the
head's line has a state; `decision` is the one on which the first checkpoint with a state stands, if that is elsewhere.

Metadata, arguments, results and the fields of states are tagged (`tagged`); names of fields stand as they are. Changes
lead from the parent's state, one for each field: ``["set", name, value]``, ``["append", name, [items]]``,
``["delete", name]``. ``sha256`` is of the text of the whole tagged state (`digest`), so that an import knows whether it
built the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Final

from agentstore.errors import AgentStoreError

from . import tagged

VERSION: Final = 1

LINE_BYTES_MAX: Final = 512 * 1024 * 1024
"""Longest line that is read, in bytes."""

_UNSAFE: Final = re.compile("[\x7f-\x9f\u2028\u2029]")
"""What JSON leaves as it is, in strings only, though some readers end a line there and terminals obey it."""

State = dict[str, Any]
"""A state of which the values are tagged and the names are as they are."""


class LineError(AgentStoreError):
    """A line is not one of an export; the message begins with ``file:line:``."""


def dump(value: Any) -> str:
    """`value`, tagged, as JSON on one line: what readers take for the end of a line or terminals obey is escaped.

    >>> print(dump(["a" + chr(0x2028), "é"]))
    ["a\\u2028","é"]
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text if _UNSAFE.search(text) is None else _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def parse(line: bytes, where: str) -> dict[str, Any]:
    """The object on a line. `LineError` if there is none. O(size)."""
    if len(line) > LINE_BYTES_MAX:
        raise LineError(f"{where}: the line has more than {LINE_BYTES_MAX:,} bytes, the limit")
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise LineError(f"{where}: not UTF-8: {error.reason} at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        cut = "" if line.endswith(b"\n") else " (the file ends in the middle of a line)"
        raise LineError(f"{where}: not JSON: {error.msg} at column {error.colno}{cut}") from error
    except RecursionError as error:
        raise LineError(f"{where}: not readable: nested too deeply") from error
    except ValueError as error:
        raise LineError(f"{where}: not readable: {error}") from error
    if not isinstance(value, dict):
        raise LineError(f"{where}: a line is an object, this is a {type(value).__name__}")
    return value


def texts_of(state: State) -> dict[str, str | list[str]]:
    """The text of every field; of a list that of every item. What `changes` compares: types count, nan is nan."""
    return {
        name: [dump(item) for item in value] if isinstance(value, list) else dump(value)
        for name, value in state.items()
    }


def digest(texts: dict[str, str | list[str]]) -> str:
    """SHA-256, in hex, of the fields' names and texts in their order."""
    made = hashlib.sha256()
    for name, text in texts.items():
        made.update(dump(name).encode())
        for part in [text] if isinstance(text, str) else ["[", *text]:
            made.update(b"\n" + part.encode())
        made.update(b"\n\n")
    return made.hexdigest()


def changes(
    before: dict[str, str | list[str]], after: dict[str, str | list[str]], state: State
) -> list[list[Any]] | None:
    """What leads from the one state to the other, `state`; None where only the whole state says it (another order)."""
    found: list[list[Any]] = [["delete", name] for name in before if name not in after]
    for name, text in after.items():
        old = before.get(name)
        if old == text and type(old) is type(text):
            continue
        if isinstance(old, list) and isinstance(text, list) and text[: len(old)] == old:
            found.append(["append", name, state[name][len(old) :]])
        else:
            found.append(["set", name, state[name]])
    order = [name for name in before if name in after] + [name for name in after if name not in before]
    return found if order == [*after] else None


def apply(before: State, steps: Any, where: str) -> State:
    """The state that `changes` lead to from `before`, which stays as it is. `LineError` if they fit no state."""
    if not isinstance(steps, list):
        raise LineError(f"{where}: changes are an array")
    after = dict(before)
    for step in steps:
        match step:
            case ["delete", str(name)] if name in after:
                del after[name]
            case ["set", str(name), value]:
                after[name] = value
            case ["append", str(name), list(items)] if isinstance(after.get(name), list):
                after[name] = after[name] + items
            case _:
                raise LineError(f"{where}: a change that does not fit the state before: {dump(step)[:80]}")
    return after


def encode_state(state: dict[str, Any]) -> State:
    """A state as a store gives it, its values tagged. O(size)."""
    return {name: tagged.encode(value) for name, value in state.items()}


def decode_state(state: State) -> dict[str, Any]:
    """The state as a store takes it. `tagged.TagError`. O(size)."""
    return {name: tagged.decode(value) for name, value in state.items()}
