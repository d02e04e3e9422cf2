"""Spans: which part of a conversation a summary may replace.

It ends at a legal cut, and before the first decision that has an effect without a receipt: whoever
resolves that effect must find the message that asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentstore.context import copied, messages_of, rendered
from agentstore.errors import CheckpointNotFound
from agentstore.exchange import Exchange, Pinned, calls_of, cuts_of, is_summary, pinned_of
from agentstore.summary import SUMMARY_HEAD, NotSummarized

if TYPE_CHECKING:
    from agentstore.effect_views import EffectView
    from agentstore.thread import Thread


@dataclass(frozen=True, slots=True)
class Span:
    """What is to be replaced: the messages from `start` to `cut`, but for those at `kept`."""

    start: int
    cut: int
    kept: tuple[int, ...]
    covered: tuple[int, ...]
    shown: list[Any]
    """What the summarizer is given: the covered messages but for older summaries, orphan calls with a result."""
    previous: str | None


def tail(sizes: Sequence[int], keep_tokens: int) -> int:
    """Index of the first of the newest messages that have at most `keep_tokens` together."""
    at = len(sizes)
    while at and sizes[at - 1] <= keep_tokens:
        keep_tokens -= sizes[at - 1]
        at -= 1
    return at


def pick(
    messages: Sequence[Any], found: Sequence[Exchange], limit: int, barrier: int, pinned: Pinned | None
) -> Span | NotSummarized:
    """The span up to the last legal cut that is not behind `limit`, nor behind what is open (`barrier`)."""
    cuts = [0, *cuts_of(found, len(messages))]
    stays = pinned_of(messages, found, pinned)
    kept = {at for place in stays for at in found[place].indexes}
    wanted = _cut_at(messages, found, max(cut for cut in cuts if cut <= limit), kept)
    if wanted is None:
        return NotSummarized("nothing_to_cut", "everything is pinned, summarized already or among the newest rounds")
    if wanted.cut <= barrier:
        return wanted
    allowed = _cut_at(messages, found, max(cut for cut in cuts if cut <= min(limit, barrier)), kept)
    return allowed or NotSummarized("open", "an effect without a receipt belongs to the oldest part")


def _cut_at(messages: Sequence[Any], found: Sequence[Exchange], cut: int, kept: set[int]) -> Span | None:
    covered = tuple(at for at in range(cut) if at not in kept)
    old = [messages[at].get("content", "") for at in covered if is_summary(messages[at])]
    if len(covered) == len(old):
        return None
    inside = set(covered)
    parts = [each for each in found if each.start in inside and not is_summary(messages[each.start])]
    shown = [copied(message) for each in parts for _, message in rendered(messages, each, still_open=False)]
    texts = [str(text).removeprefix(SUMMARY_HEAD) for text in old]
    start = covered[0]
    return Span(
        start, cut, tuple(sorted(at for at in kept if start <= at < cut)), covered, shown, "\n".join(texts) or None
    )


def barrier(
    thread: Thread, views: Sequence[EffectView], messages: Sequence[Any], found: Sequence[Exchange], field: str
) -> int:
    """Index of the first message that has an open effect; what stands from there on must stay.

    `views`: the open effects of the thread. O(messages × open effects), and one loading for every open decision.
    """
    first = len(messages)
    head = thread.head
    decided: dict[int, Any] = {}
    for view in views:
        uuid, seq = view.decision
        asking = None
        if head is not None and uuid == head.thread_uuid:  # in a fork, the decision may be another thread's
            if seq not in decided:
                decided[seq] = _decision(thread, seq, field)
            asking = decided[seq]
        first = min(first, _place(messages, found, view, asking))
    return first


def _decision(thread: Thread, seq: int, field: str) -> Any:
    """The message of a decision: the last one with calls in its checkpoint. None if there is none."""
    try:
        messages = messages_of(thread.load(at=seq), field)
    except (CheckpointNotFound, TypeError):
        return None
    return next((message for message in reversed(messages) if calls_of(message)), None)


def _place(messages: Sequence[Any], found: Sequence[Exchange], view: EffectView, asking: Any) -> int:
    """Where the call of an effect stands, rather too early than too late.

    At the message of its decision; where that is not known, at the first one that calls this tool at this place and
    has no result, else at the first one that calls it; else at 0, so that nothing is cut.
    """
    if asking is not None:
        for at, message in enumerate(messages):
            if message == asking:
                return at
    index = view.index
    meant = [each for each in found if index < len(each.calls) and each.calls[index].name == view.tool]
    waiting = [each for each in meant if each.answers[index] is None]
    return min([each.start for each in waiting or meant], default=0)
