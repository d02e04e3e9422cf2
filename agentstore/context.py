"""What the model sees of a conversation, and where a conversation may be cut.

A window is built for one call of a model and stored nowhere: the system prompt, the first
goal, the pinned messages and the summaries, then as much of the newest part as fits.

>>> talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Book a flight."}]
>>> for n in range(100):
...     talk += [{"role": "assistant", "content": f"Shall I take flight {n}?"}, {"role": "user", "content": "No."}]
>>> seen = window(talk, max_tokens=100)
>>> len(seen), seen[:2] == talk[:2], seen[2:] == talk[-11:]
(13, True, True)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from agentstore import shortening
from agentstore.errors import WindowTooSmall
from agentstore.exchange import (
    INTERRUPTED,
    Call,
    Exchange,
    Pinned,
    cuts_of,
    exchanges,
    is_summary,
    kept_from,
    open_from,
    pinned_of,
)
from agentstore.tokens import Meter, TokenCounter, estimate_message

HISTORY: Final = "conversation_history"
"""The field of a state that has the conversation."""


def window(
    messages: Sequence[Any] | Mapping[str, Any],
    max_tokens: int,
    *,
    keep_rounds: int = 1,
    counter: TokenCounter = estimate_message,
    usage: tuple[int, int] | None = None,
    pinned: Pinned | None = None,
    field: str = HISTORY,
) -> list[Any]:
    """What a model is shown of a conversation: a new list of at most `max_tokens` tokens. Nothing given is changed.

    `messages`: the conversation, or a state that has it in `field`. `counter`: tokens of one message; `usage`: what
    the provider reported last (`Reported`, or tokens and the number of messages they were for), which is believed
    before the counter. `pinned`: a predicate, beside the key ``pinned`` of a message, for what must stay.

    Where all of it fits, all is shown. Otherwise the oldest part goes, up to the first legal cut from which the rest
    fits. System prompt, first goal, pinned messages and summaries of that part stay; the window begins with
    them. The newest `keep_rounds` rounds stay if they can: where they alone are too much, their longest texts and
    those of the summaries are shortened, with a marker that says by how much; where that is not enough, fewer
    rounds are shown.

    In the window, and only there, every call has one result, right behind it: an orphan call gets an "interrupted"
    one, a late result is moved to its call, and a result without its call, or a second one, is dropped. A call at
    the very end whose result is still to come stays open. Messages of other shapes stay as they are.

    `WindowTooSmall` if the pinned parts alone are more than `max_tokens`, or nothing of the newest message would be
    left beside them. ValueError for limits below 1, and for a usage of more messages than there are; TypeError for
    something else than a list of messages. O(size); where texts are shortened, a logarithm more for those.

    >>> ask = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "pay", "arguments": "{}"}}]}
    >>> window([ask, {"role": "user", "content": "Never mind."}], max_tokens=1_000)[1]
    {'role': 'tool', 'tool_call_id': 'c1', 'content': 'interrupted: this call has no result'}
    >>> window([ask], max_tokens=1_000) == [ask]
    True
    """
    if max_tokens < 1 or keep_rounds < 1:
        raise ValueError(f"max_tokens and keep_rounds are 1 or more, not {max_tokens!r} and {keep_rounds!r}")
    messages = messages_of(messages, field)
    found = exchanges(messages)
    meter = Meter(messages, counter, usage)
    units = _units(messages, found, pinned_of(messages, found, pinned), meter)
    if _total(units, meter) <= max_tokens:
        return [message for unit in units for message in unit.copies()]
    _check_pinned(units, max_tokens)
    cuts = [0, *[cut for cut in cuts_of(found, len(messages)) if cut < len(messages)]]
    kept = kept_from(messages, found, keep_rounds)
    floor = max(cut for cut in cuts if cut <= kept)
    for cut, tokens in zip(cuts, _sizes(units, cuts), strict=True):
        if tokens <= max_tokens and cut <= floor:
            return [message for unit in _shown(units, cut) for message in unit.copies()]
    return _shortened(units, cuts[cuts.index(floor) :], meter, max_tokens)


def legal_cuts(messages: Sequence[Any] | Mapping[str, Any], *, field: str = HISTORY) -> list[int]:
    """The indexes before which a conversation may be cut, ascending, from 1 to its length. O(messages).

    Everything before a legal cut is closed: no call there has its result behind the cut, and none is open. An orphan
    call has no result anywhere and does not hinder; the last call is open if nothing but results follows it.

    >>> ask = {"role": "assistant", "tool_calls": [{"id": "c1"}]}
    >>> legal_cuts([{"role": "user"}, ask, {"role": "tool", "tool_call_id": "c1"}])
    [1, 3]
    >>> legal_cuts([{"role": "user"}, ask]), legal_cuts([{"role": "user"}, ask, {"role": "user"}])
    ([1], [1, 2, 3])
    """
    messages = messages_of(messages, field)
    return cuts_of(exchanges(messages), len(messages))


def messages_of(messages: Sequence[Any] | Mapping[str, Any], field: str = HISTORY) -> Sequence[Any]:
    """The conversation of a state (empty if it has none), or the one that was given. TypeError for what is no list.

    >>> messages_of({"conversation_history": ["hi"]}), messages_of({"step": 1}), messages_of(("hi",))
    (['hi'], [], ('hi',))
    """
    found = messages.get(field, []) if isinstance(messages, Mapping) else messages
    if isinstance(found, str | bytes) or not isinstance(found, Sequence):
        where = f"the field {field!r} of the state" if isinstance(messages, Mapping) else "a conversation"
        raise TypeError(f"{where} must be a list of messages, not {type(found).__name__}")
    return found


def rendered(messages: Sequence[Any], exchange: Exchange, *, still_open: bool) -> list[tuple[int | None, Any]]:
    """The messages of an exchange as a window shows them, each with its index (None: it stands nowhere). O(calls).

    Results stand in the order in which they came, made-up ones behind them; `still_open`: none is made up.
    """
    if exchange.stray:
        return []
    shown: list[tuple[int | None, Any]] = [(exchange.start, messages[exchange.start])]
    shown += [(at, messages[at]) for at in sorted(at for at in exchange.answers if at is not None)]
    if not still_open:
        missing = [call for call, at in zip(exchange.calls, exchange.answers, strict=True) if at is None]
        shown += [(None, _interrupted(call)) for call in missing]
    return shown


def _interrupted(call: Call) -> dict[str, Any]:
    if call.legacy:
        return {"role": "function", "name": call.name or "", "content": INTERRUPTED}
    if call.id is None:
        return {"role": "tool", "content": INTERRUPTED}
    return {"role": "tool", "tool_call_id": call.id, "content": INTERRUPTED}


@dataclass(slots=True)
class _Unit:
    """An exchange as the window shows it."""

    start: int
    shown: list[tuple[int | None, Any]]
    tokens: int
    pinned: bool
    summary: bool

    def copies(self) -> list[Any]:
        return [copied(message) for _, message in self.shown]


def copied(message: Any) -> Any:
    """A copy of a message, so that a model may put keys in without touching the state; what is no dict as it is."""
    return dict(message) if isinstance(message, Mapping) else message


def _units(messages: Sequence[Any], found: Sequence[Exchange], stays: set[int], meter: Meter) -> list[_Unit]:
    opened = open_from(found, len(messages))
    units = []
    for place, exchange in enumerate(found):
        shown = rendered(messages, exchange, still_open=exchange.start >= opened)
        tokens = sum([meter.of(message, at) for at, message in shown])
        units.append(_Unit(exchange.start, shown, tokens, place in stays, is_summary(messages[exchange.start])))
    return units


def _total(units: Sequence[_Unit], meter: Meter) -> int:
    """Tokens of all of it: as reported, without the rounding up of its messages, and what the report does not cover."""
    rest = [(at, message) for unit in units for at, message in unit.shown if at is None or at >= meter.covered]
    return meter.reported + sum([meter.of(message, at) for at, message in rest])


def _check_pinned(units: Sequence[_Unit], max_tokens: int) -> None:
    tokens = sum(unit.tokens for unit in units if unit.pinned)
    if tokens > max_tokens:
        raise WindowTooSmall(
            f"the system prompt, the first goal and the pinned messages alone are {tokens} tokens, and the window may "
            f"have {max_tokens}; give it more tokens, or pin less"
        )


def _sizes(units: Sequence[_Unit], cuts: Sequence[int]) -> list[int]:
    """Tokens of the window from each of `cuts` on. O(units)."""
    sizes: dict[int, int] = {}
    total = sum(unit.tokens for unit in units)
    for unit in units:
        sizes[unit.start] = total
        if not (unit.pinned or unit.summary):
            total -= unit.tokens
    return [sizes[cut] for cut in cuts]


def _shown(units: Sequence[_Unit], cut: int) -> list[_Unit]:
    """What the window from `cut` on shows: first what stays of the part before, the pinned parts before summaries."""
    before = [unit for unit in units if unit.start < cut]
    stays = [unit for unit in before if unit.pinned] + [unit for unit in before if unit.summary and not unit.pinned]
    return [*stays, *[unit for unit in units if unit.start >= cut]]


def _shortened(units: Sequence[_Unit], cuts: Sequence[int], meter: Meter, max_tokens: int) -> list[Any]:
    """The window from the first of `cuts` from which it can be made small enough, what is not pinned shortened."""
    least = [
        replace(unit, shown=shown, tokens=sum(meter.of(message, at) for at, message in shown))
        for unit in units
        for shown in [unit.shown if unit.pinned else _smallest(unit.shown, meter)]
    ]
    for cut, tokens in zip(cuts, _sizes(least, cuts), strict=True):
        if tokens <= max_tokens:
            return _fitted(_shown(units, cut), meter, max_tokens) or [
                message for unit in _shown(least, cut) for message in unit.copies()
            ]
    raise WindowTooSmall(
        f"a window of {max_tokens} tokens has no room for the newest message beside the pinned parts, even shortened; "
        "give it more tokens, or pin less"
    )


def _smallest(shown: Sequence[tuple[int | None, Any]], meter: Meter) -> list[tuple[int | None, Any]]:
    return [(at, shortening.smallest(message, meter.of)) for at, message in shown]


def _fitted(shown: Sequence[_Unit], meter: Meter, max_tokens: int) -> list[Any] | None:
    """The messages of `shown`, texts of those that are not pinned shortened as little as need be."""
    places = [(at, message) for unit in shown if not unit.pinned for at, message in unit.shown]
    room = max_tokens - sum(unit.tokens for unit in shown if unit.pinned)

    def fits(messages: Sequence[Any]) -> bool:
        return sum([meter.of(message, at) for (at, _), message in zip(places, messages, strict=True)]) <= room

    short = shortening.fit([message for _, message in places], fits)
    if short is None:
        return None
    rest = iter(short)
    return [copied(message if unit.pinned else next(rest)) for unit in shown for _, message in unit.shown]
