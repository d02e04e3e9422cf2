"""Effects: calls of tools that touch the world. At-least-once execution, exactly-once recorded result.

    decision + intents of the calls it starts at once  →  tool called with its key  →  receipt + message + checkpoint
                     one transaction                                                        one transaction

The intent is confirmed before the tool is called, so whoever comes after a crash knows that it may have happened; the
receipt is stored together with what follows from it, so it is never known twice and never half. What was started and
has no receipt is judged by the rule of its tool (`agentstore.rules`), and only once it cannot be in flight any more.

The functions here stand behind `Thread.effect`, `Thread.effects` and ``Thread.commit(…, intents=…)``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from agentstore import clock, events, ledger, lines
from agentstore.checkpoint import Checkpoint
from agentstore.clock import NS_PER_S
from agentstore.codec.cbor import canonical
from agentstore.effect import Effect
from agentstore.effect_forks import DecisionId, carried_decision, copy_open, decision_at, guard_move
from agentstore.effect_records import (
    MARK_NOT_DONE,
    Identity,
    Intent,
    Slot,
    decode_intent,
    effect_slot,
    hash_call,
    identity_of,
    intent_space,
    pack,
    receipt_space,
)
from agentstore.effect_views import (
    TIMEOUT_S_DEFAULT,
    EffectView,
    check_call,
    describe,
    find_receipts,
    list_effects,
)
from agentstore.engine import keys
from agentstore.engine.api import Reader, Tx
from agentstore.errors import EffectClosed, EffectInDoubt, EffectInFlight
from agentstore.fencing import enter, located
from agentstore.records import Head, shown
from agentstore.rules import Action, check_rule

if TYPE_CHECKING:
    from agentstore.thread import Thread

__all__ = [
    "Effect",
    "EffectCall",
    "EffectView",
    "copy_open",
    "find_receipts",
    "guard_move",
    "list_effects",
    "newest_decision",
    "open_effect",
    "write_intents",
]

Arguments = Mapping[str, Any]

# Nonces of intents that this process wrote with a decision and whose tool nobody has called yet. Whoever takes one
# out is the caller; the store alone cannot tell "about to be called by me" from "being called by another thread
# of mine". A forked child calls nothing on behalf of its parent.
_unclaimed: Final[set[bytes]] = set()
os.register_at_fork(after_in_child=_unclaimed.clear)


class EffectCall:
    """A call that a decision starts at once, to be stored in the decision's own transaction.

    >>> call = EffectCall(0, "charge", {"amount": 5}, rule="query", timeout_s=20)
    >>> call.index, call.tool, call.rule
    (0, 'charge', 'query')

    `thread.commit(…, reason="decision", intents=[call])` writes its intent; `thread.effect(…)` with the same decision,
    index, tool and arguments then costs no transaction. The arguments are read here: later changes of them are not
    seen. Raises UnencodableState, ValueError for a rule that does not exist, UnsupportedRule.
    """

    __slots__ = ("arguments", "canonical", "generation", "index", "nonce", "rule", "timeout_s", "tool")

    def __init__(
        self,
        index: int,
        tool: str,
        arguments: Arguments,
        rule: str = "ask",
        timeout_s: float = TIMEOUT_S_DEFAULT,
        generation: int = 0,
    ) -> None:
        check_rule(rule)
        check_call(index, tool, timeout_s, generation)
        self.index = index
        self.tool = tool
        self.rule = rule
        self.timeout_s = timeout_s
        self.generation = generation
        self.nonce = ledger.new_nonce()
        self.canonical = canonical(arguments, ("arguments",))
        self.arguments = pack(arguments, ("arguments",))

    def __repr__(self) -> str:
        return f"EffectCall({self.index}, {self.tool!r}, rule={self.rule!r})"


# --- beginning --------------------------------------------------------------------------


def open_effect(
    thread: Thread,
    *,
    decision: Checkpoint | DecisionId,
    index: int,
    tool: str,
    arguments: Arguments,
    rule: str = "ask",
    timeout_s: float = TIMEOUT_S_DEFAULT,
    generation: int | None = None,
) -> Effect:
    """The permission to call a tool once, or the result that is there: what `Thread.effect` does.

    `decision` is the confirmed checkpoint whose message asks for the call, or its id; `index` the place of the call in
    it. `generation` is raised by 1 when an approval edited the arguments (None: the newest that there is). `timeout_s`
    limits the tool; its caller keeps to it, the store only says when others may judge the call.

    Returns an `Effect` with ``done`` if there is a receipt: the tool must not be called. Else the intent is
    confirmed: a new one; the one that was stored with the decision; or, for the rules `read` and `replay`, another
    attempt with the same key after a caller that is gone.

    Raises EffectInFlight while another caller may be alive; EffectInDoubt, with the rule and a handle, for a call in
    doubt whose rule is `query`, `skip` or `ask`; EffectConflict for another tool or other arguments under the same
    identity; Fenced, ThreadNotFound, ThreadGone, UnencodableState, UnsupportedRule. At most one transaction; none if a
    receipt or the decision's own intent is there. O(size of the arguments).

    >>> from agentstore import Append
    >>> from agentstore.testing.scratch import scratch_store
    >>> thread = scratch_store().thread("user-42:report-7")
    >>> cp = thread.commit(Append("history", {"role": "assistant", "content": None}), reason="decision")
    >>> charge = {"decision": cp, "index": 0, "tool": "charge", "arguments": {"amount": 5}, "rule": "query"}
    >>> effect = open_effect(thread, **charge)
    >>> effect.done, effect.attempt, len(effect.key)
    (False, 1, 64)
    >>> effect.receipt({"id": "ch_1"}, Append("history", {"role": "tool", "content": "ch_1"}), step=2)
    Checkpoint('user-42:report-7', seq=1, parent=0, reason='tool_result', lsn=3)
    >>> open_effect(thread, **charge).result                  # in whatever process: the tool is not called again
    {'id': 'ch_1'}
    """
    check_rule(rule)
    check_call(index, tool, timeout_s, generation)
    digest = canonical(arguments, ("arguments",))
    engine = thread._store._engine

    def locate(reader: Reader) -> tuple[bytes, Identity, Slot, bytes, bytes]:
        prefix, head = enter(reader, thread)
        identity = _identity(reader, prefix, head, thread, decision, index, generation)
        key, call_hash = hash_call(identity, tool, digest)
        return prefix, identity, effect_slot(prefix, identity, call_hash), key, call_hash

    with engine.read() as snap:
        _, identity, slot, key, _ = locate(snap)
        intent, receipt = ledger.find(snap, slot)
    if intent is not None and intent.key == key:
        if receipt is not None:
            return Effect(thread, identity, slot, rule, intent, receipt, may_call=False)
        claimed = _claim(thread, identity, slot, intent, timeout_s)
        if claimed is not None:
            return Effect(thread, identity, slot, rule, claimed, None, may_call=True)

    packed = pack(arguments, ("arguments",))

    def write(tx: Tx) -> tuple[Identity, Slot, ledger.Begun]:
        prefix, identity, slot, key, call_hash = locate(tx)
        fresh = ledger.new_intent(
            key=key, call_hash=call_hash, tool=tool, rule=rule, arguments=packed, timeout_s=timeout_s,
            token=thread._token or ledger.NO_TOKEN, attempt=1, nonce=nonce, lsn=tx.lsn,
        )  # fmt: skip
        if identity.generation:
            _check_older_generations(tx, prefix, identity, thread)
        begun = ledger.begin(tx, slot, fresh, describe(thread, identity, tool))
        if begun.intent is not None and begun.intent.lsn == tx.lsn and begun.intent.attempt > 1:
            why = f"{begun.standing.why}; {begun.ruling.why}"
            events.record(tx, prefix, "takeover", why, call=identity, tool=tool, attempt=begun.intent.attempt)
        return identity, slot, begun

    nonce = ledger.new_nonce()
    identity, slot, begun = engine.transact(write).value
    return _begun(thread, identity, slot, rule, begun)


def _begun(thread: Thread, identity: Identity, slot: Slot, rule: str, begun: ledger.Begun) -> Effect:
    """The handle of a call that was begun, or the error that says why it was not."""
    intent, action = begun.intent, begun.ruling.action
    assert intent is not None
    if action is Action.CALL:
        return Effect(thread, identity, slot, rule, intent, None, may_call=True)
    if action is Action.RETURN:
        return Effect(thread, identity, slot, rule, intent, begun.receipt, may_call=False)
    what = describe(thread, identity, intent.tool)
    if action is Action.WAIT:
        raise EffectInFlight(
            f"{what} is in flight: {begun.standing.why}; in doubt at the latest in {begun.standing.wait_s:.0f} s",
            wait_s=begun.standing.wait_s,
        )
    raise EffectInDoubt(
        f"{what} is in doubt: {begun.standing.why}. {_WHAT_TO_DO[action]}",
        rule=begun.rule,
        effect=Effect(thread, identity, slot, begun.rule, intent, None, may_call=False),
    )


_WHAT_TO_DO: Final = {
    Action.QUERY: "Rule 'query': ask the tool about .effect.key, then .effect.receipt(answer) or .effect.retry(why)",
    Action.SKIP: "Rule 'skip': .effect.skip() records that the outcome is unknown; it is never called again",
    Action.ASK: "Rule 'ask': a person finds out: .effect.receipt(result, source='person') or .effect.not_done(why)",
}


def _claim(thread: Thread, identity: Identity, slot: Slot, intent: Intent, timeout_s: float) -> Intent | None:
    """The attempt to make, if this process stored the intent with its decision and nobody began the call yet.

    No transaction, unless the decision is so long ago that the time left to the deadline is too short for the call.
    """
    try:
        _unclaimed.remove(intent.nonce)  # one step: other threads of this process may want it, too
    except KeyError:
        return None
    now = clock.current()
    if intent.deadline_ns - now.boottime_ns() >= int(timeout_s * NS_PER_S):
        return intent

    def write(tx: Tx) -> Intent:
        enter(tx, thread)
        old = ledger.open_attempt(tx, slot, intent.nonce, describe(thread, identity, intent.tool))
        fresh = ledger.new_intent(
            key=old.key,
            call_hash=old.call_hash,
            tool=old.tool,
            rule=old.rule,
            arguments=old.arguments,
            timeout_s=timeout_s,
            token=thread._token or ledger.NO_TOKEN,
            attempt=old.attempt,
            nonce=nonce,
            lsn=tx.lsn,
        )
        ledger.put_intent(tx, slot, fresh)
        return fresh

    nonce = ledger.new_nonce()
    try:
        return thread._store._engine.transact(write).value
    except EffectClosed:
        return None  # somebody judged it in the meantime: it is theirs, or done
    except BaseException:
        _unclaimed.add(intent.nonce)  # still nobody has called the tool
        raise


def write_intents(tx: Tx, thread: Thread, seq: int, calls: Sequence[EffectCall]) -> None:
    """Store the intents of `calls` in the transaction that commits their decision as checkpoint `seq`. O(their size).

    Intents of the rule `read` are left out: nothing has to know that a call without effects began.
    """
    prefix = thread._prefix(thread._number(tx))
    uuid, token, lsn = thread._uuid, thread._token or ledger.NO_TOKEN, tx.lsn
    seen = set()
    for call in calls:
        if call.index in seen:
            raise ValueError(f"thread {shown(thread.id)}: two calls of one decision have the index {call.index}")
        seen.add(call.index)
        if call.rule == "read":
            continue
        identity = Identity(uuid, seq, call.index, call.generation)
        key, call_hash = hash_call(identity, call.tool, call.canonical)
        intent = ledger.new_intent(
            key=key,
            call_hash=call_hash,
            tool=call.tool,
            rule=call.rule,
            arguments=call.arguments,
            timeout_s=call.timeout_s,
            token=token,
            attempt=1,
            nonce=call.nonce,
            lsn=lsn,
        )
        ledger.put_intent(tx, effect_slot(prefix, identity, call_hash), intent)
        _unclaimed.add(call.nonce)


def newest_decision(thread: Thread) -> DecisionId | None:
    """The id of the newest decision on the line of the checkpoint that the handle stands on; None if there is none.

    Of a fork, the decision it stands on keeps the id it had where it was first confirmed. O(checkpoints since then).
    """
    head = thread.head
    if head is None:
        return None
    with thread._store._engine.read() as snap:
        prefix = located(snap, thread)[0]
        if lines.find(snap, prefix, head.seq, f"thread {shown(thread.id)}") is None:
            raise thread._not_there(snap, head.seq)
        return decision_at(snap, prefix, head.thread_uuid, head.seq, thread.id)


# --- finding ----------------------------------------------------------------------------


def _identity(
    reader: Reader,
    prefix: bytes,
    head: Head,
    thread: Thread,
    decision: Checkpoint | DecisionId,
    index: int,
    generation: int | None,
) -> Identity:
    if isinstance(decision, tuple):
        uuid, seq = decision
        if uuid.__class__ is not bytes or len(uuid) != 16 or seq.__class__ is not int or seq < 0:
            raise TypeError(f"the id of a decision is (16 bytes, seq), as Thread.decision has it, not {decision!r}")
    elif not isinstance(decision, Checkpoint):
        raise TypeError(
            f"a decision is a confirmed checkpoint or its id, not {decision!r}; Thread.decision is None if no commit "
            'was made with reason="decision" (or "plan")'
        )
    else:
        uuid, seq = decision.thread_uuid, decision.seq
        if decision.reason == "fork" and uuid == head.uuid:
            uuid, seq = carried_decision(reader, prefix, seq) or (uuid, seq)
    if uuid == head.uuid and seq >= head.next_seq:
        raise ValueError(
            f"thread {shown(thread.id)} has no checkpoint {seq}: a decision is confirmed before its calls run"
        )
    if generation is None and _is_first_open(reader, prefix, Identity(uuid, seq, index, 0)):
        generation = 0
    if generation is None:
        generation = max(
            _newest(reader, space, uuid, seq, index) for space in (intent_space(prefix), receipt_space(prefix))
        )
    return Identity(uuid, seq, index, generation)


def _is_first_open(reader: Reader, prefix: bytes, first: Identity) -> bool:
    """Whether generation 0 is open, so that no other can have begun: one get in the place of two scans."""
    data = reader.get(intent_space(prefix, *first))
    return data is not None and decode_intent(data).mark != MARK_NOT_DONE


def _newest(reader: Reader, space: bytes, uuid: bytes, seq: int, index: int) -> int:
    """The newest generation of a call in one of the key spaces; 0 if it has none."""
    narrow = space + keys.encode(uuid, seq, index)
    for key, _ in reader.scan(narrow, keys.end_of(narrow), reverse=True):
        return identity_of(key, space)[0].generation
    return 0


def _check_older_generations(tx: Tx, prefix: bytes, identity: Identity, thread: Thread) -> None:
    """A new generation may begin only when those before it are known to have ended."""
    space = intent_space(prefix)
    narrow = space + keys.encode(*identity[:3])
    for key, data in [*tx.scan(narrow, keys.end_of(narrow))]:
        older = identity_of(key, space)[0]
        intent = decode_intent(data)
        if older.generation < identity.generation and intent.mark != MARK_NOT_DONE:
            raise EffectInDoubt(
                f"{describe(thread, older, intent.tool)} was started and has no receipt: resolve it before generation "
                f"{identity.generation} begins",
                rule=intent.rule,
            )
