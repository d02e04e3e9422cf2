"""Recorded agent transcripts: OpenAI chat format, one JSON message a line.

Reading is strict about what makes a line a message (an object with a ``role``) and
lenient about everything else: whatever keys, contents and orders were recorded are kept
as they are, because a replay has to give them back.
"""

from __future__ import annotations

import codecs
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentstore.errors import AgentStoreError

Message = dict[str, Any]

LINE_BYTES_MAX = 256 * 1024 * 1024
"""Longest line that is parsed, in bytes; a longer one is not a transcript but a mistake."""

_ENCODINGS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16: its mark begins with UTF-16's
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


class TranscriptError(AgentStoreError):
    """A file is not a transcript; the message begins with ``file:line:``."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """One file: where it came from, the thread that it becomes, and its messages in order."""

    path: str
    thread_id: str
    messages: list[Message]


def read_messages(path: str) -> list[Message]:
    """The messages of the file at `path`, in order. Blank lines and byte-order marks are skipped. O(size).

    Raises `TranscriptError` naming file and line for anything that is not a message.
    """
    shown = printable_path(path)
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        raise TranscriptError(f"{shown}: cannot be read: {error.strerror or error}") from error
    for mark, encoding in _ENCODINGS:
        if raw.startswith(mark):
            raw = _as_utf8(raw[len(mark) :], encoding, shown)
            break
    messages = []
    # Not str.splitlines: U+2028 and its like may stand unescaped inside a JSON string.
    for number, line in enumerate(raw.split(b"\n"), start=1):
        line = line.removeprefix(codecs.BOM_UTF8).strip(b" \t\r")  # a mark in the middle: files were put together
        if line:
            messages.append(_message(line, f"{shown}:{number}"))
    return messages


def read_transcripts(paths: Sequence[str]) -> list[Transcript]:
    """All `paths` as transcripts with distinct, stable thread ids: the file's name, or its path where names repeat.

    Raises `TranscriptError` for a bad file or one that is given twice.
    """
    names = [_stem(path) for path in paths]
    seen: dict[str, str] = {}
    transcripts = []
    for path, name in zip(paths, names, strict=True):
        real = os.path.realpath(path)
        if real in seen:
            raise TranscriptError(f"{printable_path(path)}: given twice (also as {printable_path(seen[real])})")
        seen[real] = path
        thread_id = name if names.count(name) == 1 else printable_path(path)
        transcripts.append(Transcript(path, thread_id, read_messages(path)))
    return transcripts


def difference(recorded: object, stored: object, path: str = "") -> str | None:
    """The first place where two JSON values differ, as a sentence; None if they are the same value for value,
    type for type, with object keys in the same order.

    >>> difference({"a": 1, "b": 2}, {"b": 2, "a": 1})
    "keys ['a', 'b'] are recorded, ['b', 'a'] are stored"
    >>> difference([1, {"a": 1}], [1, {"a": 1.0}])
    '[1].a: int is recorded, float is stored'
    >>> difference({"a": [None]}, {"a": [None]}) is None
    True
    """
    at = f"{path.removeprefix('.')}: " if path else ""
    if type(recorded) is not type(stored):
        return f"{at}{type(recorded).__name__} is recorded, {type(stored).__name__} is stored"
    if isinstance(recorded, dict) and isinstance(stored, dict):
        if list(recorded) != list(stored):
            return f"{at}keys {list(recorded)} are recorded, {list(stored)} are stored"
        return _first(difference(recorded[key], stored[key], f"{path}.{key}") for key in recorded)
    if isinstance(recorded, list) and isinstance(stored, list):
        if len(recorded) != len(stored):
            return f"{at}{len(recorded)} items are recorded, {len(stored)} are stored"
        return _first(difference(a, b, f"{path}[{n}]") for n, (a, b) in enumerate(zip(recorded, stored, strict=True)))
    if isinstance(recorded, float) and isinstance(stored, float):
        # 0.0 and -0.0 are equal to Python, two nans are not.
        same = recorded == stored and math.copysign(1, recorded) == math.copysign(1, stored)
        return None if same or (math.isnan(recorded) and math.isnan(stored)) else f"{at}{recorded} became {stored}"
    return None if recorded == stored else f"{at}{_short(recorded)} is recorded, {_short(stored)} is stored"


def printable_path(path: str) -> str:
    """`path` as text that can be encoded: bytes of a file name that are not UTF-8 become ``\\xNN``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _first(results: Iterable[str | None]) -> str | None:
    return next((result for result in results if result is not None), None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _stem(path: str) -> str:
    return printable_path(os.path.basename(path)).removesuffix(".jsonl") or printable_path(path)


def _as_utf8(raw: bytes, encoding: str, shown: str) -> bytes:
    if encoding == "utf-8":
        return raw
    try:
        return raw.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise TranscriptError(
            f"{shown}: begins like {encoding} but is not: {error.reason} at byte {error.start}"
        ) from error


def _message(line: bytes, where: str) -> Message:
    if len(line) > LINE_BYTES_MAX:
        raise TranscriptError(f"{where}: the line has {len(line):,} bytes; at most {LINE_BYTES_MAX:,} are read")
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TranscriptError(f"{where}: not UTF-8: {error.reason} at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        hint = " (a transcript has one whole message on every line)" if line in (b"{", b"[") else ""
        raise TranscriptError(f"{where}: not JSON: {error.msg} at column {error.colno}{hint}") from error
    except RecursionError as error:
        raise TranscriptError(f"{where}: not readable: nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise TranscriptError(f"{where}: not readable: {error}") from error
    if not isinstance(value, dict):
        raise TranscriptError(f"{where}: a message is an object, this is {_json_name(value)}")
    if not isinstance(value.get("role"), str):
        raise TranscriptError(f'{where}: the message has no "role" (OpenAI chat format is expected)')
    return value


def _json_name(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "an array" if isinstance(value, list) else "a string" if isinstance(value, str) else "a number"
