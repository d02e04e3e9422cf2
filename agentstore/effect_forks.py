"""Effects and the shape of a thread: decisions that a fork carries along, and moving the head away from what is open.

A fork's first checkpoint stands on a line that goes on in another thread. The calls of the decision on which it stands
keep the identity, and so the key, that they had there: a tool that honours keys sees one call, not two. Key:
prefix, "d", seq of the fork's first checkpoint. Value: CBOR of [decision uuid, decision seq].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from agentstore.codec.cbor import decode, encode
from agentstore.effect_records import (
    MARK_FORKED,
    MARK_NOT_DONE,
    Identity,
    Intent,
    decode_intent,
    decode_pair,
    effect_slot,
    encode_intent,
    encode_pair,
    identity_of,
    intent_space,
    receipt_space,
)
from agentstore.engine import keys
from agentstore.engine.api import Reader, Tx
from agentstore.errors import CorruptionError, EffectInDoubt
from agentstore.lines import Line
from agentstore.packs import NO_PARENT
from agentstore.records import int_part, seq_of, shown

DecisionId = tuple[bytes, int]
"""Uuid of the thread and seq of the checkpoint where a decision was first confirmed."""

DECISION_REASONS: Final = frozenset({"decision", "plan"})
"""Reasons of the checkpoints whose message may have started calls."""

_CARRIED: Final = keys.encode("d")


def carried_decision(reader: Reader, prefix: bytes, seq: int) -> DecisionId | None:
    """The decision of another thread that checkpoint `seq`, the first of a fork, stands on. One get."""
    data = reader.get(prefix + _CARRIED + int_part(seq))
    if data is None:
        return None
    parts = decode(data)
    if parts.__class__ is not list or [type(part) for part in parts] != [bytes, int]:
        raise CorruptionError(f"the decision carried by fork checkpoint {seq} is damaged; run `agentstore verify`")
    return parts[0], parts[1]


def carry(tx: Tx, prefix: bytes, seq: int, decision: DecisionId) -> None:
    """Have checkpoint `seq`, the first that is here of its line, stand on `decision`. One put."""
    tx.put(prefix + _CARRIED + int_part(seq), encode([*decision]))


def carriers(reader: Reader, prefix: bytes, decision: DecisionId) -> Iterator[int]:
    """The first checkpoints of forks that stand on this decision of another thread."""
    low = prefix + _CARRIED
    for key, _ in reader.scan(low, keys.end_of(low)):
        seq = seq_of(key, low)
        if carried_decision(reader, prefix, seq) == decision:
            yield seq


def decision_at(reader: Reader, prefix: bytes, uuid: bytes, seq: int, name: str) -> DecisionId | None:
    """The newest decision on the line that ends with checkpoint `seq`; None if there is none.

    O(checkpoints since then); of a line without decisions all of it.
    """
    return decision_node(reader, prefix, uuid, seq, name)[1]


def decision_node(reader: Reader, prefix: bytes, uuid: bytes, seq: int, name: str) -> tuple[int, DecisionId | None]:
    """`decision_at`, with the checkpoint of this thread that says so: the decision itself, or the first of a fork."""
    line = Line(reader, prefix, f"thread {shown(name)}")
    while True:
        entry = line.entry(seq)
        if entry.reason in DECISION_REASONS:
            return seq, (uuid, seq)
        if entry.parent == NO_PARENT or entry.reason == "fork":
            return seq, carried_decision(reader, prefix, seq)
        seq = entry.parent


def copy_open(
    tx: Tx, source: bytes, source_uuid: bytes, at: int, source_name: str, target: bytes, target_seq: int = 0
) -> None:
    """Take along, into a fork whose first checkpoint is `target_seq`, what belongs to the decision it stands on.

    `source` and `target` are the key prefixes of the two threads, `at` is the checkpoint that is forked. Receipts
    are copied, so that a call which the source has finished is not made again; an intent without a receipt becomes
    one that only a person can decide about (`ask`), since its caller works for the source. O(calls of the decision).
    """
    decision = decision_at(tx, source, source_uuid, at, source_name)
    if decision is None:
        return
    carry(tx, target, target_seq, decision)
    narrow = intent_space(source, *decision)
    for key, data in [*tx.scan(narrow, keys.end_of(narrow))]:
        identity, _ = identity_of(key, intent_space(source))
        intent = decode_intent(data)
        if intent.mark != MARK_NOT_DONE:
            slot = effect_slot(target, identity, intent.call_hash)
            tx.put(slot.intent, encode_intent(_inherited(intent, source_name, tx.lsn)))
    narrow = receipt_space(source, *decision)
    for key, data in [*tx.scan(narrow, keys.end_of(narrow))]:
        identity, receipt_id = identity_of(key, receipt_space(source))
        if receipt_id is None:  # duplicates are the source's story
            intent, receipt = decode_pair(data)
            slot = effect_slot(target, identity, intent.call_hash)
            copied = receipt._replace(seq=None, token=0, lsn=tx.lsn)
            tx.put(slot.receipt, encode_pair(intent._replace(token=0, lsn=0), copied))
            tx.put(slot.by_call, b"\xf5")


def _inherited(intent: Intent, source_name: str, lsn: int) -> Intent:
    why = f"started in thread {shown(source_name)} before the fork, and may have happened there"
    return intent._replace(rule="ask", token=0, mark=MARK_FORKED, why=why, lsn=lsn)


def guard_move(tx: Tx, prefix: bytes, uuid: bytes, parent: int, name: str) -> None:
    """Refuse to move the head to `parent` (a rewind) while a call is open that the new line does not know.

    Raises EffectInDoubt naming the call: resolve it first (`Effect.receipt`, `not_done`, `skip`). O(open calls), and
    the line since the oldest of their decisions if there are any.
    """
    space = intent_space(prefix)
    for key, data in [*tx.scan(space, keys.end_of(space))]:
        identity, _ = identity_of(key, space)
        intent = decode_intent(data)
        if intent.mark == MARK_NOT_DONE or _is_on_line(tx, prefix, uuid, parent, identity):
            continue
        raise EffectInDoubt(
            f"thread {shown(name)}: the head cannot move to checkpoint {parent}, since {identity} ({intent.tool}) was "
            f"started and has no receipt. Resolve it first: store its receipt, or say that it did not happen",
            rule=intent.rule,
        )


def _is_on_line(reader: Reader, prefix: bytes, uuid: bytes, tip: int, identity: Identity) -> bool:
    """Whether the decision of `identity` is an ancestor of checkpoint `tip`, or `tip` itself."""
    line = Line(reader, prefix, "the line of a call's decision")
    at = tip
    while True:
        if identity.decision_uuid == uuid and at <= identity.decision_seq:
            return at == identity.decision_seq  # a parent's seq is always smaller than its child's
        entry = line.get(at)
        if entry is None:
            return False
        if entry.parent == NO_PARENT or entry.reason == "fork":
            return carried_decision(reader, prefix, at) == (identity.decision_uuid, identity.decision_seq)
        at = entry.parent
