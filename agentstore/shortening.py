"""Shortening: a message that is too large for a window is shown without the middle of its texts, and says so.

What is stored stays whole. Ids, names and roles are never touched: a result must still fit
its call, and a call its result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from agentstore.tokens import DEPTH_MAX, IMAGE_TYPES

WHOLE_KEYS: Final = frozenset({"role", "id", "tool_call_id", "name", "type"})
"""Keys whose texts are not shortened."""


def marker(cut: int) -> str:
    """What stands in the place of `cut` characters.

    >>> marker(12000)
    '[… 12000 characters cut from this window …]'
    """
    return f"[… {cut} characters cut from this window …]"


def shorten_text(text: str, chars_max: int) -> str:
    """`text` with at most `chars_max` of its characters, and a marker in the place of the others. O(chars_max).

    Two thirds are of its beginning, one of its end. A text that would not get shorter stays.

    >>> shorten_text("0123456789" * 100, 9)
    '012345[… 991 characters cut from this window …]789'
    >>> shorten_text("short", 2)
    'short'
    """
    cut = len(text) - chars_max
    if cut <= 0 or cut <= len(marker(cut)):
        return text
    tail = chars_max // 3
    return f"{text[: chars_max - tail]}{marker(cut)}{text[len(text) - tail :]}"


def shorten(message: Any, chars_max: int) -> Any:
    """A copy of `message` in which no text has more than `chars_max` characters and a marker. O(size).

    Arguments of a call stay valid JSON: an object with one text. An image with more characters than that is replaced
    by a text that says so.

    >>> shorten({"role": "user", "content": "x" * 1000}, 3)
    {'role': 'user', 'content': 'xx[… 997 characters cut from this window …]x'}
    """
    return _shorten(message, chars_max, 0)


def _shorten(value: Any, chars_max: int, depth: int) -> Any:
    if isinstance(value, str):
        return shorten_text(value, chars_max)
    if depth > DEPTH_MAX:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return value if len(value) <= chars_max + len(marker(len(value))) else marker(len(value))
    if isinstance(value, Mapping):
        if value.get("type") in IMAGE_TYPES:
            return _image(value, chars_max)
        return {key: _entry(key, each, chars_max, depth) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [_shorten(each, chars_max, depth + 1) for each in value]
    return value


def _entry(key: Any, value: Any, chars_max: int, depth: int) -> Any:
    if key in WHOLE_KEYS and isinstance(value, str):
        return value
    if key == "arguments" and isinstance(value, str):
        short = shorten_text(value, chars_max)
        return value if short is value else json.dumps({"shortened": short}, ensure_ascii=False)
    return _shorten(value, chars_max, depth + 1)


def _image(part: Mapping[Any, Any], chars_max: int) -> Any:
    # The bytes of half an image show nothing.
    chars = sum(len(text) for text in _texts(part))
    return part if chars <= chars_max else {"type": "text", "text": marker(chars)}


def _texts(value: Any, depth: int = 0) -> list[str]:
    if isinstance(value, str):
        return [value]
    if depth > DEPTH_MAX:
        return []
    each = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else ()
    return [text for one in each if not isinstance(one, bytes) for text in _texts(one, depth + 1)]


def longest_text(value: Any, depth: int = 0) -> int:
    """Characters of the longest text in a message (bytes count as characters). O(size)."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value)
    if depth > DEPTH_MAX:
        return 0
    if isinstance(value, Mapping) and value.get("type") in IMAGE_TYPES:
        return sum(len(text) for text in _texts(value))
    each = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else ()
    return max([longest_text(one, depth + 1) for one in each], default=0)


def skeleton(message: Any) -> Any:
    """What is left of a message that cannot be shortened enough: its role, ids and names, and a marker. O(size).

    >>> skeleton({"role": "tool", "tool_call_id": "c1", "content": [{"n": 1}, {"n": 2}]})
    {'role': 'tool', 'tool_call_id': 'c1', 'content': '[… 20 characters cut from this window …]'}
    >>> skeleton([1, 2, 3])
    '[… 9 characters cut from this window …]'
    """
    if not isinstance(message, Mapping):
        return marker(_chars(message))
    kept = {key: message[key] for key in message if key in WHOLE_KEYS}
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str | bytes):
        kept["tool_calls"] = [_bare_call(call) for call in calls]
    elif calls:
        kept["tool_calls"] = calls
    if isinstance(message.get("function_call"), Mapping):
        kept["function_call"] = _bare_function(message["function_call"])
    rest = {key: value for key, value in message.items() if key not in kept}
    if rest.get("content") is not None or not calls:
        kept["content"] = marker(_chars(rest.get("content")))
    return kept


def _bare_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    bare = {key: call[key] for key in call if key in WHOLE_KEYS}
    if isinstance(call.get("function"), Mapping):
        bare["function"] = _bare_function(call["function"])
    return bare


def _bare_function(function: Mapping[Any, Any]) -> dict[Any, Any]:
    bare = {key: function[key] for key in function if key in WHOLE_KEYS}
    if "arguments" in function:
        bare["arguments"] = json.dumps({"shortened": marker(_chars(function["arguments"]))}, ensure_ascii=False)
    return bare


def _chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    try:
        return len(repr(value))
    except Exception:  # user data, and its repr is not ours to fail on
        return 0


def smallest(message: Any, tokens: Callable[[Any], int]) -> Any:
    """The smallest form of a message: itself, with all its texts cut, or its skeleton. O(size)."""
    return min([message, shorten(message, 0), skeleton(message)], key=tokens)


def fit(messages: Sequence[Any], fits: Callable[[Sequence[Any]], bool]) -> list[Any] | None:
    """`messages` with their longest texts shortened to one length, the largest with which `fits` says yes.

    None if it says yes to no length. O(size × log(longest text)).

    >>> fit([{"content": "x" * 1000}, {"content": "short"}], lambda m: sum(len(each["content"]) for each in m) < 60)
    [{'content': 'xxxxxxxxx[… 987 characters cut from this window …]xxxx'}, {'content': 'short'}]
    """
    low, high = 0, max([longest_text(message) for message in messages], default=0)
    best: list[Any] | None = None
    while low <= high:
        middle = (low + high) // 2
        tried = [shorten(message, middle) for message in messages]
        if fits(tried):
            best, low = tried, middle + 1
        else:
            high = middle - 1
    return best
