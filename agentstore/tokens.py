"""Tokens: how large a message is for a model, estimated or as its provider reported it.

The estimate needs no tokenizer: four ASCII characters are a token, a Chinese, Japanese or
Korean character is one, of other scripts two characters are. It errs by some 20 % for
English prose and code; whoever needs more gives a counter of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

TokenCounter = Callable[[Any], int]
"""A message to its number of tokens. Messages are user data: it must take those of any shape."""

MESSAGE_TOKENS: Final = 4
"""What a message costs beside its texts: role and separators."""
IMAGE_TOKENS: Final = 1_000
"""What an image part is counted as, whatever its bytes: providers charge by its pixels."""
IMAGE_TYPES: Final = ("image_url", "input_image", "image")
DEPTH_MAX: Final = 100
"""How deep a message is looked into; what is below counts as one token. A state's own limit is not above."""

_WIDE: Final = re.compile(
    "[\u1100-\u11ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00010000-\U0010ffff]"
)
_ASCII: Final = re.compile("[\x00-\x7f]+")


class Reported(NamedTuple):
    """The last usage that a provider reported: `tokens` for the first `messages` messages of the conversation."""

    tokens: int
    """Prompt and completion together, if the completion is the last of the messages."""
    messages: int


def estimate_text(text: str) -> int:
    """About how many tokens a text is. O(characters).

    >>> estimate_text("twelve chars"), estimate_text("你好世界"), estimate_text("привет"), estimate_text("")
    (3, 4, 3, 0)
    """
    return -(-_quarters(text) // 4)


def _quarters(text: str) -> int:
    """Quarters of a token, so that many short texts are not each rounded up."""
    if text.isascii():
        return len(text)
    others = _ASCII.sub("", text)  # few, mostly: matching each character of a long text is slow
    wide = len(_WIDE.findall(others))
    return len(text) - len(others) + 4 * wide + 2 * (len(others) - wide)


def estimate_message(message: Any) -> int:
    """About how many tokens a message is: `MESSAGE_TOKENS` and all texts in it, of whatever shape. O(size).

    >>> estimate_message({"role": "user", "content": "twelve chars"})
    7
    >>> estimate_message({"role": "user", "content": [{"type": "text", "text": "你好"}]}), estimate_message(None)
    (10, 5)
    """
    return MESSAGE_TOKENS + -(-_Walk(_quarters).message(message) // 4)


def text_counter(count_text: Callable[[str], int], message_tokens: int = MESSAGE_TOKENS) -> TokenCounter:
    """A counter of messages from one of texts, such as ``lambda text: len(encoding.encode(text))`` with tiktoken.

    It is called for every text in a message, so once or twice for most.

    >>> words = text_counter(lambda text: len(text.split()))
    >>> words({"role": "user", "content": "book a flight to Oslo"})
    9
    """

    def count(message: Any) -> int:
        quarters = _Walk(lambda text: 4 * count_text(text)).message(message)
        return message_tokens + -(-quarters // 4)

    return count


class _Walk:
    """Adds up the texts of one message. A container that it meets twice is read once, so circles end."""

    def __init__(self, quarters: Callable[[str], int]) -> None:
        self._text = quarters
        self._known: dict[int, int] = {}

    def message(self, message: Any) -> int:
        if not isinstance(message, Mapping):
            return self._value(message, 0)
        # The role and the names of the keys are in MESSAGE_TOKENS.
        return sum([self._value(value, 0) for key, value in message.items() if key != "role"])

    def _value(self, value: Any, depth: int) -> int:
        if isinstance(value, str):
            return self._text(value)
        if value is None:
            return 1
        if isinstance(value, bytes | bytearray | memoryview):
            return len(value)
        if isinstance(value, Mapping | Sequence | Set):
            return self._container(value, depth + 1)
        try:
            return len(repr(value))
        except Exception:  # user data, and its repr is not ours to fail on
            return 4

    def _container(self, value: Any, depth: int) -> int:
        if depth > DEPTH_MAX:
            return 4
        known = self._known.get(id(value))
        if known is not None:
            return known
        self._known[id(value)] = 4  # while it is read
        if isinstance(value, Mapping):
            if value.get("type") in IMAGE_TYPES:
                total = 4 * IMAGE_TOKENS
            else:
                total = sum([1 + self._value(key, depth) + self._value(each, depth) for key, each in value.items()])
        else:
            total = sum([1 + self._value(each, depth) for each in value])
        self._known[id(value)] = total
        return total


def count_tokens(
    messages: Sequence[Any], *, counter: TokenCounter = estimate_message, usage: tuple[int, int] | None = None
) -> int:
    """The tokens of a conversation: what `usage` says of its first messages, and `counter` of the rest. O(size).

    `usage`: `Reported`, or a pair of tokens and messages. ValueError for one of more messages than there are, or for
    a counter that returns something else than an int of 0 or more.

    >>> messages = [{"role": "user", "content": "twelve chars"}, {"role": "assistant", "content": "four"}]
    >>> count_tokens(messages), count_tokens(messages, usage=Reported(tokens=11, messages=1))
    (12, 16)
    """
    meter = Meter(messages, counter, usage)
    return meter.reported + sum([meter.of(message) for message in messages[meter.covered :]])


class Meter:
    """Counts messages by their place in a conversation: what the provider's report covers in proportion to it.

    A report is about the sum. Its share of one message is the counter's number, scaled so that the sum comes out;
    tools' schemas and a counter that is wrong for this language are in it.
    """

    def __init__(self, messages: Sequence[Any], counter: TokenCounter, usage: tuple[int, int] | None) -> None:
        self._counter = counter
        self.reported, self.covered = (0, 0) if usage is None else usage
        if not 0 <= self.covered <= len(messages) or self.reported < 0:
            raise ValueError(
                f"usage is a number of tokens and of the messages that they are for; of {len(messages)} messages it "
                f"cannot be {self.reported} tokens for {self.covered}"
            )
        self._estimated = sum([self._count(message) for message in messages[: self.covered]])

    def of(self, message: Any, at: int | None = None) -> int:
        """Tokens of a message that stands, or stood before it was shortened, at index `at` of the conversation."""
        tokens = self._count(message)
        if at is None or at >= self.covered or not self._estimated:
            return tokens
        return -(-tokens * self.reported // self._estimated)

    def _count(self, message: Any) -> int:
        tokens = self._counter(message)
        if not isinstance(tokens, int) or tokens < 0:
            raise ValueError(f"the token counter must return an int of 0 or more, not {tokens!r}")
        return tokens
