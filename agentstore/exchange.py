"""Exchanges: a message together with the results of the calls that it asks for.

A conversation is a list of messages in OpenAI chat format, and it is the user's data: what
has another shape is kept and passed over. Calls and results are paired by id where they
have one, else by place; ids may repeat in a conversation, and recorded ones do. Three
things go wrong in long conversations, and each has a name here:

    orphan call      no result, and later messages: the conversation went on without it
    open call        no result, and it stands at the end: its result may still come
    stray result     no call that it answers

A cut may fall between two exchanges, never inside of one, and only before what is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

INTERRUPTED: Final = "interrupted: this call has no result"
"""What a window shows as the result of an orphan call; the runtime says the same."""

SUMMARY_KEY: Final = "agentstore:summary"
"""Key of a summary message: the checkpoint that has what it covers, and where (see `agentstore.summarizing`)."""

SYSTEM_ROLES: Final = ("system", "developer")
RESULT_ROLES: Final = ("tool", "function")

Pinned = Callable[[Any], bool]
"""Says of a message whether it must stay, beside those with a truthy ``pinned`` key."""


class Call(NamedTuple):
    """One call that a message asks for; `id` and `name` are None where the message has none."""

    id: str | None
    name: str | None
    legacy: bool
    """A ``function_call``, which a message of role ``function`` answers."""


@dataclass(slots=True)
class Exchange:
    """The messages ``start`` up to (not including) ``stop``: one message, and the results right behind it."""

    start: int
    stop: int
    calls: list[Call] = field(default_factory=list)
    answers: list[int | None] = field(default_factory=list)
    """For every call the index of its result, which may stand behind `stop`; None without one."""
    stray: bool = False
    """It is a result that stands alone, or the late answer of an earlier exchange."""

    @property
    def indexes(self) -> list[int]:
        """All messages that belong to it, in order."""
        late = [at for at in self.answers if at is not None and at >= self.stop]
        return [*range(self.start, self.stop), *sorted(late)]

    @property
    def unanswered(self) -> bool:
        """Whether a call of it has no result."""
        return None in self.answers

    @property
    def reach(self) -> int:
        """Index behind its last message."""
        return max([self.stop, *[at + 1 for at in self.answers if at is not None]])


def role_of(message: Any) -> Any:
    """The role of a message; None where it has none.

    >>> role_of({"role": "user", "content": "hi"}), role_of("hi")
    ('user', None)
    """
    return message.get("role") if isinstance(message, Mapping) else None


def is_result(message: Any) -> bool:
    """Whether a message answers a call, by its role."""
    return role_of(message) in RESULT_ROLES


def is_summary(message: Any) -> bool:
    """Whether a message is a summary that `agentstore.summarize` put there."""
    return isinstance(message, Mapping) and isinstance(message.get(SUMMARY_KEY), Mapping)


def calls_of(message: Any) -> list[Call]:
    """The calls that a message asks for, in order. What is no call in form is listed too: it needs an answer. O(calls).

    >>> calls_of({"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "search"}}, 7]})
    [Call(id='c1', name='search', legacy=False), Call(id=None, name=None, legacy=False)]
    >>> calls_of({"role": "assistant", "content": "hello", "tool_calls": None}), calls_of(None)
    ([], [])
    """
    if not isinstance(message, Mapping):
        return []
    entries = message.get("tool_calls")
    if isinstance(entries, Sequence) and not isinstance(entries, str | bytes) and entries:
        return [_call(entry) for entry in entries]
    if entries and not isinstance(entries, Sequence):
        return [Call(None, None, False)]
    legacy = message.get("function_call")
    if legacy is None or legacy in ("", {}):
        return []
    return [Call(None, _name(legacy), True)]


def _call(entry: Any) -> Call:
    if not isinstance(entry, Mapping):
        return Call(None, None, False)
    call_id = entry.get("id")
    return Call(call_id if isinstance(call_id, str) else None, _name(entry.get("function")), False)


def _name(function: Any) -> str | None:
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def exchanges(messages: Sequence[Any]) -> list[Exchange]:
    """The exchanges of a conversation, in order; together they hold every message. O(messages + calls).

    A result is paired with a call of the message before it: by id, else the first call that has no id, else (a
    result without an id) the first call without a result. A result that comes later, behind other messages, is
    paired with the newest call of its id that has none.

    >>> ask = {"role": "assistant", "tool_calls": [{"id": "c1"}, {"id": "c2"}]}
    >>> found = exchanges([{"role": "user"}, ask, {"role": "tool", "tool_call_id": "c2"}, {"role": "user"}])
    >>> [(e.start, e.stop, e.answers) for e in found]
    [(0, 1, []), (1, 3, [None, 2]), (3, 4, [])]
    """
    found: list[Exchange] = []
    waiting: dict[str, list[tuple[Exchange, int]]] = {}  # calls without a result that a late one may answer
    at = 0
    while at < len(messages):
        exchange = Exchange(at, at + 1, calls_of(messages[at]))
        exchange.answers = [None] * len(exchange.calls)
        if is_result(messages[at]) and not exchange.calls:
            exchange.stray = True
            _answer_late(messages[at], at, waiting)
        elif exchange.calls:
            for place in _results_behind(messages, at):
                if not _answer(exchange, messages[place], place):
                    _answer_late(messages[place], place, waiting)
                exchange.stop = place + 1
            for index, call in enumerate(exchange.calls):
                if call.id is not None and exchange.answers[index] is None:
                    waiting.setdefault(call.id, []).append((exchange, index))
        found.append(exchange)
        at = exchange.stop
    return found


def _results_behind(messages: Sequence[Any], at: int) -> Iterator[int]:
    for place in range(at + 1, len(messages)):
        if not is_result(messages[place]) or calls_of(messages[place]):
            return
        yield place


def _answer(exchange: Exchange, result: Any, place: int) -> bool:
    """Pair a result with a call of the message that it follows; False if it may be the late answer of another."""
    result_id = result.get("tool_call_id")
    free = [index for index, answer in enumerate(exchange.answers) if answer is None]
    if isinstance(result_id, str):
        same = [index for index in free if exchange.calls[index].id == result_id]
        if not same and any(call.id == result_id for call in exchange.calls):
            return True  # a second result of one call: nothing else may take it
        fits = same or [index for index in free if exchange.calls[index].id is None]
    else:
        fits = [index for index in free if exchange.calls[index].id is None] or free
    if fits:
        exchange.answers[fits[0]] = place
    return bool(fits)


def _answer_late(result: Any, place: int, waiting: dict[str, list[tuple[Exchange, int]]]) -> None:
    result_id = result.get("tool_call_id")
    if isinstance(result_id, str) and waiting.get(result_id):
        exchange, index = waiting[result_id].pop()
        exchange.answers[index] = place


def open_from(found: Sequence[Exchange], count: int) -> int:
    """Index of the message at the end of `count` messages whose calls have no result yet; `count` if there is none."""
    if found and found[-1].unanswered and found[-1].stop == count:
        return found[-1].start
    return count


def cuts_of(found: Sequence[Exchange], count: int) -> list[int]:
    """The legal cuts of the exchanges of `count` messages, see `agentstore.legal_cuts`. O(exchanges)."""
    last = open_from(found, count)
    cuts: list[int] = []
    reach = 0
    for exchange in found:
        if 0 < exchange.start <= last and reach <= exchange.start and not exchange.stray:
            cuts.append(exchange.start)
        reach = max(reach, exchange.reach)
    if count and last == count:
        cuts.append(count)
    return cuts


def kept_from(messages: Sequence[Any], found: Sequence[Exchange], rounds: int) -> int:
    """Index of the first message of the newest `rounds` rounds; 0 if there are not more. O(exchanges).

    A round is a message of the model's (or any with calls) with its results, and what was said to it before.
    """
    ends = [
        exchange.stop
        for exchange in found
        if (exchange.calls or role_of(messages[exchange.start]) == "assistant")
        and not is_summary(messages[exchange.start])
    ]
    return ends[-rounds - 1] if len(ends) > rounds else 0


def pinned_of(messages: Sequence[Any], found: Sequence[Exchange], pinned: Pinned | None) -> set[int]:
    """The places in `found` of what must stay: system prompt, first goal, and pinned messages with their exchange.

    The first goal is the first message of role ``user``; the system prompt are the messages of role ``system`` or
    ``developer`` before it (without a goal: before everything else). O(messages).
    """
    stays: set[int] = set()
    goal: int | None = None
    heading = True  # nothing but the system prompt so far
    heads: list[int] = []
    for place, exchange in enumerate(found):
        message = messages[exchange.start]
        role = None if is_summary(message) else role_of(message)
        if goal is None and role in SYSTEM_ROLES:
            (stays.add if heading else heads.append)(place)
        else:
            heading = False
        if goal is None and role == "user":
            goal = place
            stays.update([place, *heads])
        if not exchange.stray and any(_is_pinned(messages[at], pinned) for at in exchange.indexes):
            stays.add(place)
    return stays


def _is_pinned(message: Any, pinned: Pinned | None) -> bool:
    if isinstance(message, Mapping) and message.get("pinned"):
        return True
    return pinned is not None and bool(pinned(message))
