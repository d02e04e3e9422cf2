"""What recovery decided about a thread and why, kept with the thread; and the story that `agentstore events` tells.

An event is written in the transaction of what it is about (a takeover, a retry, an answer), so there is none
without its deed and no deed without it. Key: prefix, "v", LSN, n. Value, in CBOR:

    [1, at us, kind, why, decision uuid or empty, decision seq, call, generation, tool, attempt, owner]

The story of a thread is its decisions, intents, receipts, duplicates and these events, in the order of their LSNs.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from agentstore import clock
from agentstore.codec.cbor import decode, encode
from agentstore.effect_forks import DECISION_REASONS
from agentstore.effect_records import (
    Identity,
    Intent,
    Receipt,
    decode_intent,
    decode_pair,
    decode_receipt,
    identity_of,
    intent_space,
    receipt_space,
)
from agentstore.engine import keys
from agentstore.engine.api import Reader, Tx
from agentstore.errors import CorruptionError
from agentstore.fencing import enter, located

if TYPE_CHECKING:
    from agentstore.thread import Thread

RECORD_VERSION: Final = 1

KINDS: Final = ("retry", "takeover", "doubt", "answer", "lease", "recovery")
"""Kinds of the events that are written: a call made again by its caller; one taken over after its caller; one that its
caller gave up; one that is said not to have happened; a lease taken from a dead or expired owner; the runtime's own."""

_EVENTS: Final = keys.encode("v")
_NOBODY: Final = b""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Event(NamedTuple):
    """One thing that happened to a thread."""

    lsn: int
    at: datetime
    """Wall time, UTC."""
    kind: str
    """``decision``, ``intent``, ``receipt``, ``duplicate``, or one of `KINDS`."""
    what: str
    """In words: the reason of the checkpoint, the outcome, what was decided and why."""
    seq: int | None
    """Seq of the checkpoint, where the event is one or was committed with one."""
    call: Identity | None
    tool: str
    attempt: int
    key: str
    """Key of the effect in hex, where the event has one."""


def record(
    tx: Tx,
    prefix: bytes,
    kind: str,
    why: str,
    *,
    call: Identity | None = None,
    tool: str = "",
    attempt: int = 0,
) -> None:
    """Write an event of the thread under `prefix` in `tx`. One get and one put."""
    if kind not in KINDS:
        raise ValueError(f"there is no kind of event {kind!r}; the kinds are {', '.join(KINDS)}")
    now = clock.current()
    uuid, seq, index, generation = call if call is not None else (_NOBODY, 0, 0, 0)
    value = encode(
        [
            RECORD_VERSION,
            now.wall_ns() // 1000,
            kind,
            why,
            uuid,
            seq,
            index,
            generation,
            tool,
            attempt,
            now.owner().pack(),
        ]
    )
    n = 0
    while tx.get(key := prefix + _EVENTS + keys.encode(tx.lsn, n)) is not None:
        n += 1
    tx.put(key, value)


def recoveries(reader: Reader, prefix: bytes) -> Iterator[Event]:
    """The events that were written for the thread under `prefix`, oldest first. Lazy, O(events)."""
    space = prefix + _EVENTS
    for key, data in reader.scan(space, keys.end_of(space)):
        lsn = keys.decode(key[len(space) :])[0]
        parts = decode(data)
        if parts.__class__ is not list or len(parts) != 11 or parts[0] != RECORD_VERSION or not isinstance(lsn, int):
            raise CorruptionError(f"the record {key.hex()} has not the shape of an event; run `agentstore verify`")
        _, at_us, kind, why, uuid, seq, call, generation, tool, attempt, _ = parts
        identity = Identity(uuid, seq, call, generation) if uuid else None
        yield Event(lsn, _time(at_us), kind, why, None, identity, tool, attempt, "")


def of_thread(thread: Thread) -> list[Event]:
    """Decisions, intents, receipts, duplicates and recoveries of `thread`, oldest first. O(all of them).

    Of an intent whose call was attempted again, the newest attempt is there; the ones before are told by their
    ``retry`` and ``takeover`` events. Raises ThreadNotFound for a thread without a checkpoint.

    >>> from agentstore import EffectCall, Set
    >>> from agentstore.testing.scratch import scratch_store
    >>> thread = scratch_store().thread("t")
    >>> calls = [EffectCall(0, "charge", {"amount": 5}, rule="replay")]
    >>> cp = thread.commit(Set("step", 1), reason="decision", intents=calls)
    >>> effect = thread.effect(decision=cp, index=0, tool="charge", arguments={"amount": 5}, rule="replay")
    >>> cp = effect.receipt("ch_1", Set("step", 2))
    >>> [(event.kind, event.tool, event.what) for event in of_thread(thread)]
    [('decision', '', 'decision'), ('intent', 'charge', 'rule replay'), ('receipt', 'charge', 'result (call)')]
    """
    with thread._store._engine.read() as snap:
        prefix = located(snap, thread)[0]
        found = [*recoveries(snap, prefix), *_effects(snap, prefix)]
    found.extend(_decisions(thread))
    # Within one transaction: the decision, then its intents; the receipt, then what it means.
    found.sort(key=lambda event: (event.lsn, _ORDER.get(event.kind, len(_ORDER)), event.call or ()))
    return found


_ORDER: Final = {"decision": 0, "intent": 1, "receipt": 2, "duplicate": 3}


def _effects(snap: Reader, prefix: bytes) -> Iterator[Event]:
    space = intent_space(prefix)
    for key, data in snap.scan(space, keys.end_of(space)):
        yield _of_intent(identity_of(key, space)[0], decode_intent(data))
    space = receipt_space(prefix)
    intents: dict[Identity, Intent] = {}
    for key, data in snap.scan(space, keys.end_of(space)):
        identity, receipt_id = identity_of(key, space)
        if receipt_id is not None:
            yield _of_receipt("duplicate", identity, intents.get(identity), decode_receipt(data))
            continue
        intent, receipt = decode_pair(data)
        intents = {identity: intent}  # a duplicate comes right behind its first receipt
        if intent.lsn:
            yield _of_intent(identity, intent)
        yield _of_receipt("receipt", identity, intent, receipt)


def _of_intent(identity: Identity, intent: Intent) -> Event:
    what = f"rule {intent.rule}" + (f"; {intent.why}" if intent.why else "")
    return Event(
        intent.lsn,
        _time(intent.started_us),
        "intent",
        what,
        None,
        identity,
        intent.tool,
        intent.attempt,
        intent.key.hex(),
    )


def _of_receipt(kind: str, identity: Identity, intent: Intent | None, receipt: Receipt) -> Event:
    what = f"{receipt.outcome} ({receipt.source})" + (f": {receipt.error}" if receipt.error else "")
    tool, key = (intent.tool, intent.key.hex()) if intent is not None else ("", "")
    return Event(receipt.lsn, _time(receipt.at_us), kind, what, receipt.seq, identity, tool, receipt.attempt, key)


def _decisions(thread: Thread) -> Iterator[Event]:
    for checkpoint in thread.history():
        if checkpoint.reason in DECISION_REASONS:
            yield Event(
                checkpoint.lsn, checkpoint.created_at, "decision", checkpoint.reason, checkpoint.seq, None, "", 0, ""
            )


def note(thread: Thread, why: str) -> None:
    """Write down what a recovery found and does about it, in a transaction of its own. Fenced, ThreadNotFound."""

    def write(tx: Tx) -> None:
        record(tx, enter(tx, thread)[0], "recovery", why)

    thread._store._engine.transact(write)


def _time(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)
