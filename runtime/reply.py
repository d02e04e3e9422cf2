"""What a model callable gives back, and how its output is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .messages import Message, short

ROLES = ("assistant", "user")
"""Roles that a model may speak in. ``user`` is for simulated users, which are models too."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that one model call used.

    >>> Usage(prompt=120, completion=30).total
    150
    """

    prompt: int = 0
    completion: int = 0

    def __post_init__(self) -> None:
        for count in (self.prompt, self.completion):
            if type(count) is not int or count < 0:
                raise TypeError(f"tokens are counted in ints of 0 or more, not {short(count)}")

    @property
    def total(self) -> int:
        """Prompt and completion together."""
        return self.prompt + self.completion

    @classmethod
    def of(cls, value: Any) -> Usage:
        """`value` as a Usage: one, None, or a mapping or object with OpenAI's or Anthropic's names.

        >>> Usage.of({"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9})
        Usage(prompt=7, completion=2)
        """
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        fields = value if isinstance(value, Mapping) else None

        def count(*names: str) -> int:
            counts = [getattr(value, name, None) if fields is None else fields.get(name) for name in names]
            return next((c for c in counts if isinstance(c, int) and not isinstance(c, bool) and c >= 0), 0)

        return cls(
            count("prompt", "prompt_tokens", "input_tokens"),
            count("completion", "completion_tokens", "output_tokens"),
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model says: an OpenAI chat assistant message, the tokens it used, and its plan if it made one.

    `message` is stored exactly as it is, key for key; None says that there is nothing (more)
    to say, and ends the turn. `plan` becomes ``execution_plan`` of the state, `partial` is
    appended to its ``partial_outputs``.

    >>> Reply({"role": "assistant", "content": "done"}, usage=Usage(prompt=9, completion=1)).message["content"]
    'done'
    """

    message: Message | None
    usage: Any = None
    plan: Any = None
    partial: Any = None


class MalformedReplyError(ValueError):
    """The output of a model is not a message; the text says to the model what is wrong. Internal to the loop."""


def read_reply(output: Any) -> Reply:
    """The output of a model callable as a Reply (a bare message dict counts as one), or `MalformedReplyError`."""
    reply = Reply(output) if isinstance(output, dict) and "role" in output else output
    if not isinstance(reply, Reply):
        raise MalformedReplyError(f"the output is a {type(output).__name__}, not a message: {short(output)}")
    message = reply.message
    if message is None:
        return reply
    if type(message) is not dict:
        raise MalformedReplyError(f"the message is a {type(message).__name__}, not an object: {short(message)}")
    if message.get("role") not in ROLES:
        raise MalformedReplyError(f"the role of the message must be assistant, not {short(message.get('role'))}")
    calls = message.get("tool_calls")
    if calls is not None and type(calls) not in (list, tuple):
        raise MalformedReplyError(f"tool_calls of the message must be an array, not {short(calls)}")
    return reply
