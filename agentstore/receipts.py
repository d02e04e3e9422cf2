"""Receipts outlive every retry: they go only when their decision is gone, and they are old."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from agentstore import clock, lines, records
from agentstore.effect_records import (
    Identity,
    decode_pair,
    decode_receipt,
    effect_slot,
    identity_of,
    receipt_space,
)
from agentstore.engine.api import Reader, Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.records import Head, ThreadKeys

HORIZON: Final = timedelta(days=30)
"""A receipt stays for so long at least, whatever became of the checkpoint of its decision."""
SLICE_RECEIPTS: Final = 256
"""Receipts that are removed in one transaction."""


def expire(engine: EmbeddedEngine, number: int, horizon: timedelta = HORIZON) -> int:
    """Remove the receipts of a thread whose decision was removed and that are older than `horizon`; how many.

    No checkpoint that is left can ask for them: an effect needs its decision. Those that a fork brought along stay as
    long as the thread. O(receipts).
    """
    keys = ThreadKeys(number)
    oldest_us = clock.current().wall_ns() // 1000 - horizon // timedelta(microseconds=1)
    with engine.read() as snap:
        found = _expired(snap, keys, oldest_us)
    for at in range(0, len(found), SLICE_RECEIPTS):
        part = found[at : at + SLICE_RECEIPTS]
        engine.transact(lambda tx, part=part: _remove(tx, part))  # type: ignore[misc]  # defaults of a lambda have no types
    return len(found)


def _expired(snap: Reader, keys: ThreadKeys, oldest_us: int) -> list[tuple[bytes, bytes, bytes]]:
    """(key, record, key in the index by tool and arguments or empty) of what can go."""
    raw = snap.get(keys.head)
    if raw is None:
        return []
    uuid = Head.decode(raw).uuid
    space = receipt_space(keys.prefix)
    there: dict[int, bool] = {}
    found: list[tuple[bytes, bytes, bytes]] = []
    for key, data in snap.scan(space, records.end_of(space)):
        identity, duplicate = identity_of(key, space)
        if identity.decision_uuid != uuid or _is_there(snap, keys, identity, there):
            continue
        if duplicate is not None:
            at_us, index = decode_receipt(data).at_us, b""
        else:
            intent, receipt = decode_pair(data)
            at_us, index = receipt.at_us, effect_slot(keys.prefix, identity, intent.call_hash).by_call
        if at_us < oldest_us:
            found.append((key, data, index))
    return found


def _is_there(snap: Reader, keys: ThreadKeys, identity: Identity, known: dict[int, bool]) -> bool:
    seq = identity.decision_seq
    if seq not in known:
        known[seq] = lines.find(snap, keys.prefix, seq, f"thread number {keys.number}") is not None
    return known[seq]


def _remove(tx: Tx, part: list[tuple[bytes, bytes, bytes]]) -> None:
    for key, data, index in part:
        if tx.get(key) == data:
            tx.delete(key)
            if index:
                tx.delete(index)
