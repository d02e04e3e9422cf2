"""Summaries as compaction: the oldest part of a conversation becomes one message.

A summary is a checkpoint like any other, with ``reason="summary"``: a `Splice` that replaces
a span of messages by their summary. What it covers is there in the checkpoint before it, for as
long as that is kept (`originals`). The message says which part of which checkpoint it covers;
the checkpoint's metadata say that too, and which model wrote it, and what it saved and used.

    history            s g [a a a a a a] r r r         s system prompt, g first goal, r rounds that stay
    after the splice   s g S r r r                     S the summary
    the next one       s g [S r r] r r r r             the summarizer is given S and the new span, one message returns

Nothing is locked while the summarizer runs, and nothing is written before it has returned.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agentstore.changes import Change, Splice
from agentstore.context import HISTORY, messages_of
from agentstore.effect_views import open_effects
from agentstore.engine.api import Tx
from agentstore.errors import CheckpointNotFound, StaleThread, ThreadNotFound
from agentstore.exchange import SUMMARY_KEY, Pinned, cuts_of, exchanges, is_summary, kept_from
from agentstore.records import shown
from agentstore.spans import Span, barrier, pick, tail
from agentstore.summary import SUMMARY_HEAD, Also, NotSummarized, Summarized, Summarizer, Summary, usage_of
from agentstore.tokens import Meter, TokenCounter, estimate_message

if TYPE_CHECKING:
    from agentstore.checkpoint import Checkpoint
    from agentstore.effect_views import EffectView
    from agentstore.thread import Thread

logger = logging.getLogger("agentstore")

KEEP_ROUNDS_DEFAULT: Final = 4
"""How many of the newest rounds stay as they are."""


@dataclass(frozen=True, slots=True)
class _Made:
    text: str
    model: str
    usage: dict[str, int]


def summarize(
    thread: Thread,
    summarizer: Summarizer,
    *,
    keep_rounds: int = KEEP_ROUNDS_DEFAULT,
    keep_tokens: int = 0,
    high_water: int = 0,
    cut: int | None = None,
    counter: TokenCounter = estimate_message,
    usage: tuple[int, int] | None = None,
    pinned: Pinned | None = None,
    role: str = "user",
    also: Also | None = None,
    field: str = HISTORY,
) -> Summarized | NotSummarized:
    """Replace the oldest part of the thread's conversation by a summary, in one commit; or nothing, and say why.

    `summarizer`: a callable that takes the messages of the span and the previous summary's text (or None), and gives a
    text or a `Summary`; `ExtractiveSummarizer` works offline. `keep_rounds`: at least so many of the newest rounds
    stay (1 or more), and as many messages as have `keep_tokens` tokens together. `high_water`: nothing is done while
    the conversation has no more tokens than that. `cut`: the index before which everything is covered, one of
    `legal_cuts`, in place of `keep_rounds` and `keep_tokens`. `counter`, `usage`, `pinned`, `field`: as in `window`.
    `role`: of the summary message. `also`: further changes for the same commit.

    System prompt, first goal and pinned messages of the span stay, before the summary. An older summary in the span is
    replaced with it. It is cut only where nothing is open: before a decision of which an effect has no receipt.

    A summarizer that raises an Exception, returns nothing or saves no tokens changes nothing; the thread's records
    stay byte for byte as they were. Its `usage` is in the result and in the checkpoint's metadata.

    A run of `agentstore.runtime` keeps indexes of messages in its state. Without `also`, which has to move them, such a
    thread is left alone (``indexed``).

    It works on the checkpoint that the handle stands on. `StaleThread` if somebody moved the head, or began an effect,
    while the summarizer ran: nothing was written. `ThreadNotFound`, and what `Thread.load` and `Thread.commit` raise;
    ValueError for options out of their range; TypeError if the field is no list. O(size of the state) beside the
    summarizer, one fdatasync.

    >>> from agentstore import Append, ExtractiveSummarizer
    >>> from agentstore.testing.scratch import scratch_store
    >>> thread = scratch_store().thread("t")
    >>> talk = [{"role": "user", "content": "Book a flight."}]
    >>> talk += [{"role": "assistant", "content": f"Flight {n} to Oslo is full, I go on looking."} for n in range(20)]
    >>> cp = thread.commit(Append("conversation_history", *talk))
    >>> done = summarize(thread, ExtractiveSummarizer(max_tokens=40), keep_rounds=2)
    >>> done.checkpoint.reason, done.messages, done.tokens_before > done.tokens_after
    ('summary', 18, True)
    >>> [message["role"] for message in thread.load()["conversation_history"]]
    ['user', 'user', 'assistant', 'assistant']
    >>> thread.load(at=cp.seq)["conversation_history"] == talk
    True
    >>> summarize(thread, lambda messages, previous: "", keep_rounds=1).why
    'empty'
    """
    if keep_rounds < 1 or keep_tokens < 0 or high_water < 0:
        raise ValueError(
            f"keep_rounds is 1 or more, keep_tokens and high_water 0 or more, not {keep_rounds!r}, {keep_tokens!r} and "
            f"{high_water!r}"
        )
    head = thread.head
    if head is None:
        raise ThreadNotFound(f"thread {shown(thread.id)} has no checkpoint yet")
    state = thread.load(at=head.seq)
    messages = messages_of(state, field)
    meter = Meter(messages, counter, usage)
    sizes = [meter.of(message, at) for at, message in enumerate(messages)]
    total = meter.reported + sum(sizes[meter.covered :])
    if total <= high_water:
        return _left(thread, NotSummarized("below_high_water", f"{total} tokens are not above {high_water}"))
    if also is None and _has_indexes(state):
        detail = "the state has indexes of messages, and no `also` was given to move them"
        return _left(thread, NotSummarized("indexed", detail))

    views = thread.effects(open=True)
    found = exchanges(messages)
    if cut is None:
        limit = min(kept_from(messages, found, keep_rounds), tail(sizes, keep_tokens))
    elif cut in cuts_of(found, len(messages)):
        limit = cut
    else:
        raise ValueError(f"{cut!r} is not a legal cut of this conversation; see legal_cuts()")
    opened = barrier(thread, views, messages, found, field)
    if cut is not None and opened < cut:
        return _left(thread, NotSummarized("open", f"an effect of message {opened} has no receipt"))
    span = pick(messages, found, limit, opened, pinned)
    if isinstance(span, NotSummarized):
        return _left(thread, span)

    before = sum(counter(messages[at]) for at in span.covered)
    made = _call(summarizer, span)
    if isinstance(made, NotSummarized):
        return _left(thread, made)
    splice, after = _splice(head, messages, span, made, role, field, counter)
    if after >= before:
        detail = f"the summary has {after} tokens, and the {len(span.covered)} messages that it covers have {before}"
        why = NotSummarized("no_saving", detail, None, before, after, made.model or "", made.usage)
        return _left(thread, why)
    changes: tuple[Change, ...] = (splice, *(also(state, splice) if also is not None else ()))
    done = _commit(thread, head, changes, span, made, (before, after), views)
    return Summarized(done, changes, len(span.covered), before, after, made.model or "", made.usage)


def originals(thread: Thread, message: Mapping[str, Any], *, field: str = HISTORY) -> list[Any]:
    """The messages that a summary message of the thread covers, from the checkpoint before it. O(size of that state).

    An older summary is among them as it was; call this again with it to go on. In a fork, the thread that it was
    forked from is asked. `CheckpointNotFound` when that checkpoint is gone, `ThreadNotFound` when its thread is.
    ValueError for a message that is no summary.

    >>> from agentstore import Append
    >>> from agentstore.testing.scratch import scratch_store
    >>> thread = scratch_store().thread("t")
    >>> talk = [{"role": "assistant", "content": f"number {n} of many"} for n in range(30)]
    >>> cp = thread.commit(Append("conversation_history", *talk))
    >>> done = summarize(thread, lambda messages, previous: "Numbers.", keep_rounds=1)
    >>> originals(thread, thread.load()["conversation_history"][0]) == talk[:29]
    True
    """
    covers = message[SUMMARY_KEY] if is_summary(message) else {}
    numbers = [each for each in map(covers.get, ("seq", "start", "count")) if type(each) is int and each >= 0]
    if len(numbers) < 3 or "commit" not in covers:
        raise ValueError(f"the message is not a summary of agentstore's: {SUMMARY_KEY!r} does not say what it covers")
    seq, start, count = numbers
    source = _origin(thread, seq, covers["commit"])
    found = messages_of(source.load(at=seq), field)[start : start + count]
    kept = set(covers.get("kept", ()))
    return [each for at, each in enumerate(found) if at not in kept]


def _origin(thread: Thread, seq: int, commit: str) -> Thread:
    """The thread in which checkpoint `seq` was made by this commit: `thread`, or one that it was forked from."""
    try:
        if thread.checkpoint(seq).commit_id.hex() == commit:
            return thread
    except CheckpointNotFound:
        pass  # of a fork, which has fewer
    fork = thread.checkpoint(0).metadata.get("fork")
    if not isinstance(fork, Mapping):
        raise CheckpointNotFound(
            f"thread {shown(thread.id)}: the checkpoint {seq} of this summary is not there any more"
        )
    return _origin(thread._store.thread(fork["thread"]), seq, commit)


def _left(thread: Thread, why: NotSummarized) -> NotSummarized:
    """Log why nothing was done: ids and numbers, never contents (the text of an exception may be some)."""
    level = logging.WARNING if why.why in ("failed", "empty", "no_saving") else logging.DEBUG
    logger.log(level, "thread %s: not summarized (%s): %s", shown(thread.id), why.why, why.detail)
    return why


def _has_indexes(state: Mapping[str, Any]) -> bool:
    """Whether the state is that of a run, whose turn and results name messages by their index."""
    turn = state.get("turn")
    return isinstance(turn, Mapping) and "first" in turn


def _call(summarizer: Summarizer, span: Span) -> _Made | NotSummarized:
    """Call the summarizer. What it raises is its failure; an interrupt or a cancellation is none, and goes on."""
    name = getattr(summarizer, "model", None) or getattr(summarizer, "__name__", None)
    model = name if isinstance(name, str) else type(summarizer).__name__
    try:
        said = summarizer(span.shown, span.previous)
    except Exception as error:
        return NotSummarized("failed", f"the summarizer raised {type(error).__name__}", error, model=model)
    used = {"prompt": 0, "completion": 0}
    text: Any = said
    if isinstance(said, Summary):
        model, used, text = said.model or model, usage_of(said.usage), said.text
    if text is None or (isinstance(text, str) and not text.strip()):
        return NotSummarized("empty", "the summarizer returned no text", model=model, usage=used)
    if not isinstance(text, str):
        problem = TypeError(f"a summarizer returns a str, a Summary or None, not {type(text).__name__}")
        return NotSummarized("failed", str(problem), problem, model=model, usage=used)
    return _Made(text.strip(), model, used)


def _splice(
    head: Checkpoint,
    messages: Sequence[Any],
    span: Span,
    made: _Made,
    role: str,
    field: str,
    counter: TokenCounter,
) -> tuple[Splice, int]:
    """The change, and the tokens of its summary message."""
    message = {"role": role, "content": SUMMARY_HEAD + made.text, SUMMARY_KEY: _covers(head, span)}
    kept = [messages[at] for at in span.kept]
    return Splice(field, span.start, span.cut - span.start, [*kept, message]), counter(message)


def _covers(head: Checkpoint, span: Span) -> dict[str, Any]:
    """Where the covered messages stand; the commit id tells a fork's checkpoint of that number from the one meant."""
    where = {"seq": head.seq, "commit": head.commit_id.hex(), "start": span.start, "count": span.cut - span.start}
    return {**where, "kept": [at - span.start for at in span.kept]} if span.kept else where


def _commit(
    thread: Thread,
    head: Checkpoint,
    changes: tuple[Change, ...],
    span: Span,
    made: _Made,
    tokens: tuple[int, int],
    views: Sequence[EffectView],
) -> Checkpoint:
    """Commit on the checkpoint that was summarized, unless another effect is open by now."""
    known = {view.identity for view in views}

    def guard(tx: Tx) -> None:
        assert thread._keys is not None
        if any(identity not in known for identity, _ in open_effects(tx, thread._keys.prefix)):
            raise StaleThread(
                f"thread {shown(thread.id)}: an effect began while it was summarized; nothing was written"
            )

    metadata = {
        "summary": {
            **_covers(head, span),
            "messages": len(span.covered),
            "model": made.model,
            "tokens_before": tokens[0],
            "tokens_after": tokens[1],
            "usage": made.usage,
        }
    }
    staged = thread._stage(
        changes, reason="summary", step=head.step, status=head.status, metadata=metadata, extra_guard=guard
    )
    return staged.commit()
