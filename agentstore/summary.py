"""What goes into a summary and what comes of it: the types of `agentstore.summarize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from agentstore.changes import Change, Splice

if TYPE_CHECKING:
    from agentstore.checkpoint import Checkpoint

SUMMARY_HEAD: Final = "Summary of the conversation up to here:\n"
"""What the content of a summary message begins with, for the model."""

Why: TypeAlias = Literal["below_high_water", "nothing_to_cut", "open", "indexed", "failed", "empty", "no_saving"]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a summarizer may return in place of a text: with it, the tokens that it used and the model that it asked.

    `usage`: a mapping or an object with OpenAI's or Anthropic's names (``prompt_tokens``, ``input_tokens``, …).

    >>> Summary("Ann wants a flight to Oslo.", usage={"prompt_tokens": 900, "completion_tokens": 9}).text
    'Ann wants a flight to Oslo.'
    """

    text: str
    usage: Any = None
    model: str | None = None


Summarizer = Callable[[Sequence[Any], "str | None"], "str | Summary | None"]
"""Takes the messages of the span and the text of the summary before them (None without one); gives their summary."""

Also = Callable[[Mapping[str, Any], Splice], Iterable[Change]]
"""Takes the state before and the splice; gives further changes for the same commit."""


@dataclass(frozen=True, slots=True)
class Summarized:
    """A summary was committed. True in a condition."""

    checkpoint: Checkpoint
    """The checkpoint, confirmed; the handle stands on it."""
    changes: tuple[Change, ...]
    """What it changed, the `Splice` first: for whoever keeps a copy of the state."""
    messages: int
    """How many messages the summary stands for, an older summary among them."""
    tokens_before: int
    """Tokens of these messages."""
    tokens_after: int
    """Tokens of the summary message."""
    model: str
    """The summarizer's model; the name of the callable where it says none."""
    usage: dict[str, int]
    """Tokens that the summarizer used: ``prompt`` and ``completion``."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class NotSummarized:
    """Nothing was changed, and why. False in a condition.

    `why`: ``below_high_water`` (few enough tokens), ``nothing_to_cut`` (all of it is pinned or among the newest
    rounds), ``open`` (an effect without a receipt is in the way), ``indexed`` (the state has indexes of messages, see
    `summarize`), ``failed`` (the summarizer raised `error`, or returned no text), ``empty``, ``no_saving`` (the
    summary is not smaller). The summarizer was called for the last three only.
    """

    why: Why
    detail: str
    """A sentence for people, without contents."""
    error: Exception | None = None
    tokens_before: int = 0
    tokens_after: int = 0
    model: str = ""
    usage: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "completion": 0})
    """Tokens that the summarizer used all the same."""

    def __bool__(self) -> bool:
        return False


def usage_of(value: Any) -> dict[str, int]:
    """The tokens of a usage in the words of OpenAI, Anthropic or this library; 0 for what it does not say.

    >>> usage_of({"input_tokens": 7, "output_tokens": 2}), usage_of(None)
    ({'prompt': 7, 'completion': 2}, {'prompt': 0, 'completion': 0})
    """

    def count(*names: str) -> int:
        fields = value if isinstance(value, Mapping) else None
        counts = [getattr(value, name, None) if fields is None else fields.get(name) for name in names]
        return next((each for each in counts if type(each) is int and each >= 0), 0)

    return {
        "prompt": count("prompt", "prompt_tokens", "input_tokens"),
        "completion": count("completion", "completion_tokens", "output_tokens"),
    }
