"""The effect ledger without threads and without our loop: `Store.once`.

    store.once("invoice-991", fn, arguments={…})      durable intent → fn → durable receipt; later: the receipt

The key space is the store's own, beside the threads: prefix "o", then as in `agentstore.effect_records`, with the name
of the call (a long one as its first bytes and a hash) in the place of an identity.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from agentstore import clock, ledger
from agentstore.codec.cbor import canonical
from agentstore.effect_records import (
    MARK_IN_DOUBT,
    MARK_NOT_DONE,
    Intent,
    Receipt,
    Slot,
    pack,
)
from agentstore.effect_views import TIMEOUT_S_DEFAULT, TIMEOUT_S_MAX, result_of
from agentstore.engine import keys
from agentstore.engine.api import Tx
from agentstore.errors import AgentStoreError, EffectClosed, EffectInDoubt, EffectInFlight
from agentstore.records import cut_name, shown
from agentstore.rules import Action, check_rule, decide_answer, is_not_done, takes

if TYPE_CHECKING:
    from agentstore.store import Store

T = TypeVar("T")

NOT_GIVEN: Final = object()
"""Stands for a `happened` that was not given: None is a result."""

NAME_BYTES_MAX: Final = 4096
"""Longest name of a call, in bytes of UTF-8."""
NAME_KEY_BYTES_MAX: Final = 400
"""Longest part of a name in a key, in bytes after escaping; LMDB keys end at 511."""

_ONCE: Final = keys.encode("o")
_INTENTS: Final = _ONCE + keys.encode("i")
_RECEIPTS: Final = _ONCE + keys.encode("e")


class _Call(NamedTuple):
    """One call by its name: where its records stand and what it is."""

    store: Store
    name: str
    slot: Slot
    key: bytes

    def __str__(self) -> str:
        return f"once({shown(self.name)})"


def once(
    store: Store,
    name: str,
    fn: Callable[..., T],
    *,
    arguments: Mapping[str, Any] | None = None,
    rule: str = "ask",
    query: Callable[[str], Any] | None = None,
    timeout_s: float = TIMEOUT_S_DEFAULT,
    happened: Any = NOT_GIVEN,
) -> T:
    """Call `fn` so that its result is recorded once under `name`: what `Store.once` does.

    The first time: a durable intent, then ``fn(**arguments)``, then its result as a durable receipt. `fn` gets the
    idempotency key (64 hex digits) as well if it has a parameter called ``key``. Every later time, in any process: the
    recorded result, and `fn` is not called. `timeout_s` is the time (plus a margin) after which others may judge a call
    whose caller may be alive; `fn` is not interrupted.

    If a call was started and has no receipt: EffectInFlight while its caller may be alive, then by `rule`:
    ``read`` and ``replay`` call `fn` again with the same key; ``query`` asks ``query(key)`` for the result, `NotDone`
    (then `fn` is called) or `Unknown`; ``skip`` and ``ask`` raise EffectInDoubt. A person who found out answers with
    `happened`, in the place of a query: the result, which is recorded and returned, or `NotDone`: then `fn` is called.

    An exception of `fn` is raised as it is and leaves the call in doubt. Raises EffectConflict for a `name` that was
    used with other arguments, TypeError if `fn` does not take them, UnencodableState (of the result: `fn` was called,
    and the call is in doubt), UnsupportedRule. Two transactions; one that writes nothing if the result is there.

    >>> from agentstore.testing.scratch import scratch_store
    >>> store = scratch_store()
    >>> def charge(amount, key):
    ...     print("charging", amount)
    ...     return {"charge": "ch_1"}
    >>> store.once("invoice-991", charge, arguments={"amount": 5})
    charging 5
    {'charge': 'ch_1'}
    >>> store.once("invoice-991", charge, arguments={"amount": 5})
    {'charge': 'ch_1'}
    """
    check_rule(rule)
    if rule == "query" and query is None:
        raise ValueError(f"once({shown(name)}): the rule 'query' needs query=, a callable that takes the key")
    if query is not None and not takes(query, 1):
        raise ValueError(f"once({shown(name)}): the query is called as query(key), and {query!r} does not take that")
    if not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise ValueError(
            f"once({shown(name)}): timeout_s is above 0 and at most {TIMEOUT_S_MAX:.0f}, not {timeout_s!r}"
        )
    given = {} if arguments is None else dict(arguments)
    call, fresh = _call(store, name, given, rule, timeout_s)
    passed = _passed(fn, given, call.key.hex())
    begun = _begin(call, fresh)
    action = begun.ruling.action
    if action in _WAITS_FOR_ANSWER and (happened is not NOT_GIVEN or action is Action.QUERY):
        assert begun.intent is not None
        source = "query" if happened is NOT_GIVEN else "person"
        answer = happened if query is None or source == "person" else query(call.key.hex())
        action = decide_answer(answer).action
        if action is Action.RECORD:
            return cast(T, _recorded(call, _finish(call, begun.intent, answer, source)[0]))
        if action is Action.CALL:
            begun = begun._replace(intent=_again(call, begun.intent, fresh))
    if action is Action.RETURN:
        assert begun.receipt is not None
        return cast(T, _recorded(call, begun.receipt))
    assert begun.intent is not None
    if action is Action.WAIT:
        raise EffectInFlight(
            f"{call} is in flight: {begun.standing.why}; in doubt at the latest in {begun.standing.wait_s:.0f} s",
            wait_s=begun.standing.wait_s,
        )
    if action is not Action.CALL:
        raise EffectInDoubt(
            f"{call} is in doubt: {begun.standing.why}. Find out whether it happened, then call once() with "
            "happened=its result, or happened=NotDone to have it called again",
            rule=begun.rule,
        )
    return _run(call, begun.intent, fn, passed)


_WAITS_FOR_ANSWER: Final = (Action.QUERY, Action.SKIP, Action.ASK)


def resolve(store: Store, name: str, happened: Any) -> None:
    """Say what became of a call in doubt: its result, or `NotDone`: then the next `once` calls it again.

    Raises EffectInFlight while its caller may be alive, EffectClosed if it has a receipt or was never started,
    UnencodableState. One transaction.
    """
    slot = _slot(name)
    packed = None if is_not_done(happened) else pack(happened, ("happened",))

    def write(tx: Tx) -> None:
        found = ledger.find(tx, slot)
        if found.receipt is not None or found.intent is None:
            state = "has its result" if found.receipt is not None else "was never started"
            raise EffectClosed(f"once({shown(name)}) {state}: there is nothing to resolve")
        now = ledger.standing(found)
        if now.wait_s > 0:
            raise EffectInFlight(
                f"once({shown(name)}) is in flight: {now.why}; it can be resolved in {now.wait_s:.0f} s at the latest",
                wait_s=now.wait_s,
            )
        if packed is None:
            ledger.mark(tx, slot, found.intent.nonce, MARK_NOT_DONE, "a person said that it did not happen", name)
        else:
            ledger.finish(tx, slot, found.intent, _receipt(found.intent, packed, "person")._replace(lsn=tx.lsn))

    store._engine.transact(write)


def _call(store: Store, name: str, arguments: dict[str, Any], rule: str, timeout_s: float) -> tuple[_Call, Intent]:
    key = hashlib.sha256(keys.encode("once", name))
    key.update(canonical(arguments, ("arguments",)))
    call = _Call(store, name, _slot(name), key.digest())
    fresh = ledger.new_intent(
        key=call.key,
        call_hash=b"",
        tool=name,
        rule=rule,
        arguments=pack(arguments, ("arguments",)),
        timeout_s=timeout_s,
        token=ledger.NO_TOKEN,
        attempt=1,
        nonce=ledger.new_nonce(),
        lsn=0,
    )
    return call, fresh


def _slot(name: str) -> Slot:
    raw = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else b""
    if not 1 <= len(raw) <= NAME_BYTES_MAX:
        raise ValueError(f"the name of a call is a str of 1 to {NAME_BYTES_MAX} bytes of UTF-8, not {shown(name)}")
    if len(raw) + raw.count(0) <= NAME_KEY_BYTES_MAX:
        tail = keys.encode(raw)
    else:
        tail = keys.encode(cut_name(raw), hashlib.sha256(raw).digest()[:16])
    return Slot(_INTENTS + tail, _RECEIPTS + tail, b"")


def _passed(fn: Callable[..., Any], arguments: dict[str, Any], key: str) -> dict[str, Any]:
    """The keyword arguments of `fn`; TypeError, before anything is written, if it does not take them."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return arguments  # a builtin that does not say what it takes
    passed = arguments if "key" in arguments or "key" not in signature.parameters else {**arguments, "key": key}
    signature.bind(**passed)
    return passed


def _begin(call: _Call, fresh: Intent) -> ledger.Begun:
    def write(tx: Tx) -> ledger.Begun:
        return ledger.begin(tx, call.slot, fresh._replace(lsn=tx.lsn), str(call))

    return call.store._engine.transact(write).value


def _again(call: _Call, before: Intent, fresh: Intent) -> Intent:
    """Begin another attempt after the query said that the one before did not happen."""

    def write(tx: Tx) -> Intent:
        attempt = ledger.open_attempt(tx, call.slot, before.nonce, str(call)).attempt + 1
        ledger.put_intent(tx, call.slot, stored := fresh._replace(attempt=attempt, lsn=tx.lsn))
        return stored

    return call.store._engine.transact(write).value


def _run(call: _Call, intent: Intent, fn: Callable[..., T], passed: dict[str, Any]) -> T:
    try:
        result = fn(**passed)
    except BaseException as error:
        _doubt(call, intent, f"its caller ended with {type(error).__name__}: {error}", error)
        raise
    try:
        receipt, mine = _finish(call, intent, result, "call")
    except AgentStoreError as error:
        _doubt(call, intent, f"it was called, and its result could not be stored: {error}", error)
        raise
    # Another caller may have been faster (after our deadline): its result is the recorded one.
    return result if mine else cast(T, _recorded(call, receipt))


def _doubt(call: _Call, intent: Intent, why: str, error: BaseException) -> None:
    """Let others know at once that nobody is at it any more; else they see it at the deadline."""
    if intent.lsn == 0:
        return  # a `read` has no intent in the store
    try:
        call.store._engine.transact(lambda tx: ledger.mark(tx, call.slot, intent.nonce, MARK_IN_DOUBT, why, str(call)))
    except AgentStoreError as failure:
        error.add_note(f"and that {call} is in doubt could not be stored: {failure}")


def _finish(call: _Call, intent: Intent, result: Any, source: str) -> tuple[Receipt, bool]:
    """Store a receipt; return the one that counts, and whether that is this one."""
    receipt = _receipt(intent, pack(result, ("result",)), source)

    def write(tx: Tx) -> Receipt | None:
        return ledger.finish(tx, call.slot, intent, receipt._replace(lsn=tx.lsn))

    before = call.store._engine.transact(write).value
    return (receipt, True) if before is None else (before, False)


def _receipt(intent: Intent, packed: bytes, source: str) -> Receipt:
    now = clock.current()
    return Receipt(
        ledger.new_nonce(),
        "result",
        source,
        packed,
        "",
        None,
        now.owner().pack(),
        ledger.NO_TOKEN,
        intent.attempt,
        now.wall_ns() // ledger.NS_PER_US,
        lsn=0,
    )


def _recorded(call: _Call, receipt: Receipt) -> Any:
    return result_of(receipt, str(call))
