"""A summarizer that works offline: it picks sentences, and makes up none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from agentstore.exchange import calls_of, role_of
from agentstore.tokens import estimate_text

SENTENCE_CHARS_MAX: Final = 300
"""Longer sentences are cut: they are listings and dumps, seldom sentences."""
SENTENCES_MAX: Final = 60
"""How many sentences of one message are looked at: the first half of them from its beginning, the others its last."""

_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
_WORD: Final = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\\W\\d_]{3,}")
# What a person said counts most, then what the model concluded; a tool's output is mostly noise.
_WEIGHTS: Final = {"user": 2.0, "assistant": 1.5, "tool": 0.7, "function": 0.7}
_PREVIOUS_WEIGHT: Final = 3.0


class _Candidate(NamedTuple):
    order: int
    line: str
    words: frozenset[str]
    weight: float


class ExtractiveSummarizer:
    """Picks the sentences whose words are the most frequent ones of the span, up to `max_tokens` estimated tokens.

    They stand in their order, each with the role that said it; calls are listed by their tools' names. Of the previous
    summary the lines compete with the new ones, with a higher weight, so that a rolling summary does not
    grow. Deterministic, without state: for any thread. Nothing is sent anywhere, and no tokens are used.

    >>> summarize = ExtractiveSummarizer(max_tokens=12)
    >>> print(summarize([{"role": "user", "content": "Book the flight to Oslo. Hm. The flight to Oslo is on May 3."}]))
    user: Book the flight to Oslo.
    """

    model: Final = "extractive"
    """The name that provenance records."""

    def __init__(self, max_tokens: int = 400) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens is 1 or more, not {max_tokens!r}")
        self.max_tokens: Final = max_tokens
        """Most tokens of a summary, as `estimate_text` counts them."""

    def __call__(self, messages: Sequence[Any], previous: str | None = None) -> str:
        """The summary of `messages` and of the summary before them; empty if there are no sentences. O(size)."""
        candidates = list(_candidates(messages, previous))
        counts = Counter(word for candidate in candidates for word in candidate.words)
        picked: list[_Candidate] = []
        room = self.max_tokens
        for candidate in sorted(candidates, key=lambda each: (-_score(each, counts), each.order)):
            tokens = estimate_text(candidate.line + "\n")
            if tokens <= room:
                picked.append(candidate)
                room -= tokens
        return "\n".join([each.line for each in sorted(picked, key=lambda each: each.order)])


def _score(candidate: _Candidate, counts: Counter[str]) -> float:
    """How frequent the words of a sentence are on average, weighted; those of a few words say little."""
    if not candidate.words:
        return 0.0
    mean = sum(counts[word] for word in candidate.words) / len(candidate.words)
    return float(candidate.weight * mean * min(1.0, len(candidate.words) / 4))


def _candidates(messages: Sequence[Any], previous: str | None) -> Iterator[_Candidate]:
    seen: set[str] = set()
    lines = [(line.strip(), _PREVIOUS_WEIGHT) for line in (previous or "").splitlines()]
    for message in messages:
        role = role_of(message)
        name = role if isinstance(role, str) and role else "message"
        lines += [(f"{name}: {sentence}", _WEIGHTS.get(name, 1.0)) for sentence in _sentences(message)]
        called = [call.name or "?" for call in calls_of(message)]
        if called:
            lines.append((f"{name} called {', '.join(called)}"[:SENTENCE_CHARS_MAX], 1.0))
    for order, (line, weight) in enumerate(lines):
        if line and line not in seen:
            seen.add(line)
            yield _Candidate(order, line, frozenset(word.lower() for word in _WORD.findall(line)), weight)


def _sentences(message: Any) -> list[str]:
    """The sentences of a message's text, in order."""
    texts = [each for text in _texts(message) for each in _SENTENCE.split(text)]
    sentences = [" ".join(text.split()) for text in texts if _WORD.search(text)]
    if len(sentences) > SENTENCES_MAX:
        half = SENTENCES_MAX // 2
        sentences = sentences[:half] + sentences[-half:]
    return [text if len(text) <= SENTENCE_CHARS_MAX else text[: SENTENCE_CHARS_MAX - 1] + "…" for text in sentences]


def _texts(message: Any) -> Iterator[str]:
    content = message.get("content") if isinstance(message, Mapping) else message
    parts = content if isinstance(content, Sequence) and not isinstance(content, str | bytes) else [content]
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text
