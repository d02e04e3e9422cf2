"""What to do about a call whose outcome is not known: the rules of tools, decided in one place.

A call is *not started* (no intent; or it is known not to have happened), *in flight* (its caller may be
alive), *in doubt* (it was started, its caller is gone, there is no receipt) or *done* (there is a receipt).
Only *in doubt* needs the rule that the tool declared:

    read        free of effects: call again
    replay      idempotent, or takes the key: call again with the same key
    query       ask the tool about the key, then record its answer or call again
    compensate  undo, then call again (not in this version)
    skip        never call again; the recorded result is "outcome unknown"
    ask         a person decides

>>> decide(EffectState.IN_DOUBT, "replay").action.name
'CALL'
>>> decide(EffectState.IN_FLIGHT, "replay").action.name       # no rule runs while the caller may be alive
'WAIT'
>>> decide_answer(NotDone).action.name, decide_answer({"charge": "ch_1"}).action.name
('CALL', 'RECORD')
"""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any, Final, NamedTuple

from agentstore.errors import UnsupportedRule

RULES: Final = ("read", "replay", "query", "compensate", "skip", "ask")


class EffectState(Enum):
    """How far a call has come, as its durable records and the clock show it."""

    NOT_STARTED = "not_started"
    IN_FLIGHT = "in_flight"
    IN_DOUBT = "in_doubt"
    DONE = "done"


class Action(Enum):
    """What follows from a state and a rule."""

    CALL = "call"
    """Make the call, with the key it always had."""
    RETURN = "return"
    """Return the recorded result."""
    WAIT = "wait"
    """Leave it alone until its caller is known to be gone."""
    QUERY = "query"
    """Ask the tool about the key; `decide_answer` says what follows."""
    RECORD = "record"
    """Store the answer of the query as the result."""
    SKIP = "skip"
    """Record that the outcome is unknown, and go on."""
    ASK = "ask"
    """A person decides; the thread waits."""


class Ruling(NamedTuple):
    """What to do, and why, in words for the events of the thread."""

    action: Action
    why: str


class NotDone:
    """Answer of a query or of a person: the call did not happen. The class itself and an instance mean the same."""

    def __init__(self, why: str = "") -> None:
        self.why = why

    def __repr__(self) -> str:
        return f"NotDone({self.why!r})" if self.why else "NotDone"


class Unknown:
    """Answer of a query: the tool cannot tell. The class itself and an instance mean the same."""

    def __init__(self, why: str = "") -> None:
        self.why = why

    def __repr__(self) -> str:
        return f"Unknown({self.why!r})" if self.why else "Unknown"


_STATE_RULINGS: Final = {
    EffectState.NOT_STARTED: Ruling(Action.CALL, "the call was not started"),
    EffectState.IN_FLIGHT: Ruling(Action.WAIT, "its caller may be alive"),
    EffectState.DONE: Ruling(Action.RETURN, "there is a receipt"),
}

_DOUBT_RULINGS: Final = {
    "read": Ruling(Action.CALL, "started without a receipt; rule 'read': it has no effect, so it is called again"),
    "replay": Ruling(Action.CALL, "started without a receipt; rule 'replay': it is called again with the same key"),
    "query": Ruling(Action.QUERY, "started without a receipt; rule 'query': the tool is asked about its key"),
    "skip": Ruling(Action.SKIP, "started without a receipt; rule 'skip': it is never called again, outcome unknown"),
    "ask": Ruling(Action.ASK, "started without a receipt; rule 'ask': a person decides whether it happened"),
}


def check_rule(rule: str) -> None:
    """Raise ValueError for a rule that does not exist, UnsupportedRule for one that this version does not run."""
    if rule in _DOUBT_RULINGS:
        return
    if rule == "compensate":
        raise UnsupportedRule(
            "the rule 'compensate' (undo, then call again) is not available in this version; "
            "declare 'query' if the tool can be asked about its key, else 'ask'"
        )
    raise ValueError(f"there is no rule {rule!r}; the rules are {', '.join(RULES)}")


def decide(state: EffectState, rule: str) -> Ruling:
    """What to do about a call in `state` whose tool declared `rule`. O(1).

    Raises ValueError or UnsupportedRule as `check_rule` does, whatever the state: a rule that cannot run is refused
    before the first call, not after it.
    """
    check_rule(rule)
    if state is EffectState.IN_DOUBT:
        return _DOUBT_RULINGS[rule]
    return _STATE_RULINGS[state]


def decide_answer(answer: object) -> Ruling:
    """What follows from the answer of a query (or of a person): NotDone, Unknown, or the result itself. O(1)."""
    if is_not_done(answer):
        return Ruling(Action.CALL, "the tool says that it did not happen: it is called again with the same key")
    if is_unknown(answer):
        return Ruling(Action.ASK, "the tool does not know whether it happened: a person decides")
    return Ruling(Action.RECORD, "the tool says that it happened: its answer is recorded as the result")


def is_not_done(answer: object) -> bool:
    """Whether `answer` is `NotDone` or an instance of it."""
    return answer is NotDone or isinstance(answer, NotDone)


def is_unknown(answer: object) -> bool:
    """Whether `answer` is `Unknown` or an instance of it."""
    return answer is Unknown or isinstance(answer, Unknown)


def takes(fn: Any, count: int) -> bool:
    """Whether `fn` can be called with so many arguments; True where nobody can say. Found out after a crash is late.

    >>> takes(lambda key: None, 1), takes(lambda key: None, 2), takes(3, 1)
    (True, False, False)
    """
    if not callable(fn):
        return False
    try:
        inspect.signature(fn).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        pass  # a builtin that does not say what it takes
    return True
