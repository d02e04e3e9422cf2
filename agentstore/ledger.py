"""The effect ledger inside a transaction: what is known about a call, and the three steps it can take.

Everything here runs inside the function of a transaction (which may run more than once), or on a
snapshot; nothing is confirmed yet. `agentstore.effects` and `agentstore.once` put it into transactions.

    begin()    look first: receipt there → nothing to do; in flight → leave it; in doubt → its rule; else an intent
    finish()   intent out, receipt in, if absent; a second one is kept as a duplicate
    mark()     what the caller, the tool or a person says about an open call
"""

from __future__ import annotations

from os import urandom
from typing import Final, NamedTuple

from agentstore import clock
from agentstore.clock import NS_PER_S, Owner
from agentstore.effect_records import (
    MARK_FORKED,
    MARK_NOT_DONE,
    MARK_STARTED,
    Intent,
    Receipt,
    Slot,
    decode_intent,
    decode_pair,
    decode_receipt,
    encode_intent,
    encode_pair,
    encode_receipt,
    join_pair,
)
from agentstore.engine import keys
from agentstore.engine.api import Reader, Tx
from agentstore.errors import EffectClosed, EffectConflict
from agentstore.rules import Action, EffectState, Ruling, decide

DEADLINE_MARGIN_S: Final = 5.0
"""Added to a tool's timeout: the time its caller has to store the receipt before others may judge the call."""

NONCE_BYTES: Final = 8
NO_TOKEN: Final = 0
"""The token of a caller without a lease."""

NS_PER_US: Final = 1000


class Found(NamedTuple):
    """The records of one call."""

    intent: Intent | None
    receipt: Receipt | None


class Standing(NamedTuple):
    """How far a call has come at this moment."""

    state: EffectState
    why: str
    wait_s: float
    """Seconds until a call in flight is in doubt at the latest."""


class Begun(NamedTuple):
    """What `begin` found and did: the attempt that may now call its tool, or what stands in its way."""

    ruling: Ruling
    standing: Standing
    intent: Intent | None
    receipt: Receipt | None
    rule: str
    """The rule that was followed; `ask` for a call that a fork inherited open, whatever the tool declares."""


def find(reader: Reader, slot: Slot) -> Found:
    """The records of the call at `slot`. Two gets; CorruptionError if a record is damaged."""
    data = reader.get(slot.receipt)
    if data is not None:
        return Found(*decode_pair(data))
    data = reader.get(slot.intent)
    return Found(None if data is None else decode_intent(data), None)


def first_receipt(reader: Reader, slot: Slot) -> Receipt | None:
    """The receipt that counts, if there is one. One get."""
    data = reader.get(slot.receipt)
    return None if data is None else decode_pair(data)[1]


def standing(found: Found) -> Standing:
    """Judge a call by its records and the clock. O(1), and a look at /proc for a call that is open.

    It is in flight until its caller is provably dead or, where that cannot be known, until its deadline: an attempt
    that ran over its deadline in a living process counts as in doubt, since nobody can tell a slow one from a lost one.
    """
    intent, receipt = found
    if receipt is not None:
        return Standing(EffectState.DONE, "there is a receipt", 0.0)
    if intent is None:
        return Standing(EffectState.NOT_STARTED, "there is no intent", 0.0)
    if intent.mark == MARK_NOT_DONE:
        return Standing(EffectState.NOT_STARTED, intent.why, 0.0)
    if intent.mark != MARK_STARTED:
        return Standing(EffectState.IN_DOUBT, intent.why, 0.0)
    owner = Owner.unpack(intent.owner)
    now = clock.current()
    if owner.boot_id != now.owner().boot_id:
        return Standing(EffectState.IN_DOUBT, f"its caller ({owner}) ran before the last boot", 0.0)
    if now.provably_dead(owner):
        return Standing(EffectState.IN_DOUBT, f"its caller ({owner}) is dead", 0.0)
    left_ns = intent.deadline_ns - now.boottime_ns()
    if left_ns <= 0:
        return Standing(EffectState.IN_DOUBT, f"its deadline passed {-left_ns / NS_PER_S:.1f} s ago", 0.0)
    return Standing(EffectState.IN_FLIGHT, f"its caller ({owner}) may be alive", left_ns / NS_PER_S)


def new_intent(
    *, key: bytes, call_hash: bytes, tool: str, rule: str, arguments: bytes, timeout_s: float, token: int, attempt: int,
    nonce: bytes, lsn: int,
) -> Intent:  # fmt: skip
    """The intent of an attempt that begins now, by this process."""
    now = clock.current()
    return Intent(
        key, call_hash, tool, rule, arguments, round(timeout_s * 1000), now.owner().pack(), token, attempt, nonce,
        now.boottime_ns() + int((timeout_s + DEADLINE_MARGIN_S) * NS_PER_S), now.wall_ns() // NS_PER_US, lsn,
        MARK_STARTED, "",
    )  # fmt: skip


def begin(tx: Tx, slot: Slot, fresh: Intent, what: str) -> Begun:
    """Start the call whose first attempt would be `fresh`, if nothing stands in its way.

    Writes at most one intent: `fresh`, its attempt raised above the one before. `what` names the call in messages.
    Raises EffectConflict if the same identity was started with another tool or other arguments.
    """
    found = find(tx, slot)
    intent, receipt = found
    if intent is not None and intent.key != fresh.key:
        raise EffectConflict(
            f"{what}: started before as {intent.tool!r} with key {intent.key.hex()[:12]}…, now as {fresh.tool!r} with "
            f"{fresh.key.hex()[:12]}…. Other arguments need an approval, which raises the generation"
        )
    rule = "ask" if intent is not None and intent.mark == MARK_FORKED else fresh.rule
    now = standing(found)
    ruling = decide(now.state, rule)
    if ruling.action is not Action.CALL:
        return Begun(ruling, now, intent, receipt, rule)
    if intent is not None:
        fresh = fresh._replace(attempt=intent.attempt + 1)
    if rule == "read":
        return Begun(
            ruling, now, fresh._replace(lsn=0), None, rule
        )  # calling it twice harms nobody: nothing is written
    put_intent(tx, slot, fresh)
    return Begun(ruling, now, fresh, None, rule)


def put_intent(tx: Tx, slot: Slot, intent: Intent) -> None:
    """Make `intent` the open attempt of its call. The caller has looked at what was there."""
    tx.put(slot.intent, encode_intent(intent))


def finish(tx: Tx, slot: Slot, intent: Intent, receipt: Receipt) -> Receipt | None:
    """Store `receipt` if the call has none yet; return the one that was there before, else None.

    `intent` is kept with it where the call has no open one in the store (a `read`). If the one before has another id,
    `receipt` is kept beside it as a duplicate: evidence that the call was made twice. If it has the same id, its writer
    is trying again and nothing changes, except that a receipt which was stored alone learns the seq of its checkpoint.
    """
    data = tx.get(slot.receipt)
    if data is not None:
        kept, before = decode_pair(data)
        if before.id != receipt.id:
            tx.put(slot.receipt + keys.encode(receipt.id), encode_receipt(receipt))
        elif before.seq is None and receipt.seq is not None:
            tx.put(slot.receipt, encode_pair(kept, before._replace(seq=receipt.seq)))
        return before
    open_data = tx.get(slot.intent)
    if open_data is None:
        open_data = encode_intent(intent)
    else:
        tx.delete(slot.intent)
    tx.put(slot.receipt, join_pair(open_data, receipt))
    if slot.by_call:
        tx.put(slot.by_call, _TRUE)
    return None


def mark(tx: Tx, slot: Slot, nonce: bytes, value: int, why: str, what: str) -> None:
    """Write down what is known about the open attempt with `nonce`.

    Raises EffectClosed if the call has a receipt, or another attempt than this one is open.
    """
    tx.put(slot.intent, encode_intent(open_attempt(tx, slot, nonce, what)._replace(mark=value, why=why)))


def open_attempt(tx: Tx, slot: Slot, nonce: bytes, what: str) -> Intent:
    """The intent of the open attempt with `nonce`; EffectClosed if it is not open any more."""
    intent, receipt = find(tx, slot)
    if receipt is not None:
        raise EffectClosed(f"{what} has a receipt by now; open the effect again for its result")
    if intent is None or intent.nonce != nonce:
        raise EffectClosed(f"{what} was taken over by another caller; open the effect again to see how it stands")
    return intent


_TRUE: Final = b"\xf5"


def duplicates(reader: Reader, slot: Slot) -> list[Receipt]:
    """The receipts of a call after its first, in no order. O(duplicates)."""
    space = slot.receipt
    # The key of a duplicate goes on behind that of the first receipt; no other key does, since the parts of keys end.
    return [decode_receipt(data) for key, data in reader.scan(space, keys.end_of(space)) if len(key) > len(space)]


def new_nonce() -> bytes:
    """8 random bytes for an attempt or a receipt."""
    return urandom(NONCE_BYTES)
