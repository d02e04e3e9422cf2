"""A summarizer that works offline: it picks sentences, and makes up none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import log1p
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
_WEIGHTS: Final = {"user": 4.0, "assistant": 2.0, "tool": 0.5, "function": 0.5}
_CALL_WEIGHT: Final = 0.7
_PREVIOUS_WEIGHT: Final = 1.25
"""Times the weight of the role that a line of the previous summary begins with: it was worth keeping once."""


class _Candidate(NamedTuple):
    order: int
    line: str
    words: frozenset[str]
    weight: float


class ExtractiveSummarizer:
    """Picks the sentences whose words are frequent in the span, up to `max_tokens` estimated tokens.

    A word is worth half as much each time that it was picked, so that what is said often is said once. The sentences
    stand in their order, each with the role that said it; calls are listed by their tools' names. The lines of the
    previous summary compete with the new ones, so that a rolling summary does not grow. Deterministic, without
    state: for any thread. Nothing is sent anywhere, and no tokens are used.

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
        """The summary of `messages` and of the one before them; empty without sentences. O(size × log(size))."""
        candidates = list(_candidates(messages, previous))
        counts = Counter(word for candidate in candidates for word in candidate.words)
        worth = {word: log1p(count) for word, count in counts.items()}
        # Worths only go down, so a score that is still the best when it is computed again is the best of all.
        heap = [(-_score(each, worth), each.order, each) for each in candidates]
        heapify(heap)
        picked: list[_Candidate] = []
        room = self.max_tokens
        while heap and room > 0:
            score, order, best = heappop(heap)
            now = -_score(best, worth)
            if now > score and heap and now > heap[0][0]:
                heappush(heap, (now, order, best))
                continue
            tokens = estimate_text(best.line + "\n")
            if tokens > room:
                continue
            picked.append(best)
            room -= tokens
            worth.update([(word, worth[word] / 2) for word in best.words])
        return "\n".join([each.line for each in sorted(picked, key=lambda each: each.order)])


def _score(candidate: _Candidate, worth: Mapping[str, float]) -> float:
    """What the words of a sentence are worth on average, weighted; a sentence of few words says little."""
    if not candidate.words:
        return 0.0
    mean = sum(worth[word] for word in candidate.words) / len(candidate.words)
    return candidate.weight * mean * min(1.0, len(candidate.words) / 4)


def _candidates(messages: Sequence[Any], previous: str | None) -> Iterator[_Candidate]:
    seen: set[str] = set()
    lines: list[tuple[str, float]] = []
    for line in (previous or "").splitlines():
        lines.append((line.strip(), _PREVIOUS_WEIGHT * _WEIGHTS.get(line.partition(":")[0].strip(), 1.0)))
    for message in messages:
        role = role_of(message)
        name = role if isinstance(role, str) and role else "message"
        lines += [(f"{name}: {sentence}", _WEIGHTS.get(name, 1.0)) for sentence in _sentences(message)]
        called = [call.name or "?" for call in calls_of(message)]
        if called:
            lines.append((f"{name} called {', '.join(called)}"[:SENTENCE_CHARS_MAX], _CALL_WEIGHT))
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
