"""A thread put into a store as it was in another one: what `agentstore import` stands on.

    arrival = Arrival(store, "t", uuid)
    arrival.commit(7, state, parent=3, …)      with the seqs, parents and times that they had
    arrival.effect(…)                          the ledger: receipts, and what was open
    arrival.publish()                          only now there is a thread "t"

Until `publish` the records belong to a thread of another name (`name_while_arriving`), so nobody meets a half of it;
that name is there after a crash, and the next arrival of the same id removes it. The thread keeps its uuid, so that
decisions keep their ids and effects their keys. Fencing tokens, leases, events and duplicates of receipts stay behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agentstore import clock, effect_forks, ledger, records
from agentstore.codec.cbor import canonical
from agentstore.effect_forks import DecisionId
from agentstore.effect_records import (
    MARK_FORKED,
    MARK_NOT_DONE,
    SOURCES,
    Identity,
    Intent,
    Receipt,
    effect_slot,
    hash_call,
    pack,
)
from agentstore.effect_views import check_call
from agentstore.engine.api import Tx
from agentstore.errors import ThreadExists, ThreadGone
from agentstore.fencing import located
from agentstore.records import int_part, shown
from agentstore.rules import RULES
from agentstore.thread import NOTE_BYTES_MAX, Thread

if TYPE_CHECKING:
    from agentstore.checkpoint import Checkpoint
    from agentstore.store import Store

SLICE_EFFECTS: Final = 200
SLICE_BYTES: Final = 4 * 1024 * 1024
"""Effects written in one transaction: at most so many, until they have so many bytes."""

OUTCOMES: Final = ("result", "failed", "unknown")
SEQ_MAX: Final = 2**53 - 1
ATTEMPT_MAX: Final = 2**31
NAME_WHILE_ARRIVING: Final = "agentstore-import:"
"""How the id of a thread begins that is not whole yet."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Ended(NamedTuple):
    """How a call ended: its receipt."""

    outcome: str
    """``result``, ``failed`` or ``unknown``."""
    source: str
    result: Any
    error: str
    seq: int | None
    at: datetime


class Past:
    """The machine's clock, but with another wall time: what is committed under it has that time."""

    def __init__(self, real: clock.Clock, at: datetime) -> None:
        self._real = real
        self._wall_ns = _microseconds(at) * 1000

    def boottime_ns(self) -> int:
        return self._real.boottime_ns()

    def wall_ns(self) -> int:
        return self._wall_ns

    def owner(self) -> clock.Owner:
        return self._real.owner()

    def provably_dead(self, owner: clock.Owner) -> bool:
        return self._real.provably_dead(owner)


def name_while_arriving(thread_id: str) -> str:
    """The id under which a thread stands until it is whole.

    >>> name_while_arriving("t")
    'agentstore-import:e3b98a4da31a127d'
    """
    return f"{NAME_WHILE_ARRIVING}{hashlib.sha256(records.thread_id_bytes(thread_id)).hexdigest()[:16]}"


class Arrival:
    """One thread on its way in. Not thread-safe. Two at once of the same id: one of them gets an error of `commit`.

    >>> from datetime import UTC, datetime
    >>> from agentstore.testing.scratch import scratch_store
    >>> store = scratch_store()
    >>> arrival = Arrival(store, "t", bytes(16))
    >>> cp = arrival.commit(7, {"step": 1}, created_at=datetime(2020, 1, 1, tzinfo=UTC))
    >>> arrival.publish().head
    Checkpoint('t', seq=7, reason='manual', lsn=1)
    """

    def __init__(self, store: Store, thread_id: str, uuid: bytes) -> None:
        """Remove what an arrival that was killed left. `ThreadExists` if there is a thread of this id."""
        if len(uuid) != 16:
            raise ValueError(f"the uuid of a thread has 16 bytes, not {len(uuid)}")
        self._store = store
        self._final = Thread(store, thread_id)
        if self._final.head is not None:
            raise ThreadExists(
                f"thread {shown(thread_id)} exists already; delete it first, or import into another store"
            )
        self.discard()
        self._thread = Thread(store, name_while_arriving(thread_id))
        self._thread._uuid = uuid
        self._uuid = uuid
        self._waiting: list[tuple[Identity, Intent, Receipt | None]] = []
        self._waiting_bytes = 0
        self._carried: tuple[int, DecisionId] | None = None
        self._pins: list[tuple[int, bytes]] = []

    def discard(self) -> None:
        """Remove all of it. O(records)."""
        left = Thread(self._store, name_while_arriving(self._final.id))
        if left.head is not None:
            left.delete()

    def commit(
        self,
        seq: int,
        state: dict[str, Any],
        *,
        parent: int | None = None,
        reason: str = "manual",
        step: int | None = None,
        status: str | None = None,
        metadata: dict[str, Any] | None = None,
        created_at: datetime | None = None,
        decision: DecisionId | None = None,
    ) -> Checkpoint:
        """Store `state` as the checkpoint `seq`, above all before, with the time it had. As `Thread.commit_state`.

        The first one has no `parent`, all others have; and the first may stand on a `decision` that is not here (as
        `decision_of` says): its calls are known by that. `ValueError` for a seq or parent that cannot be.
        """
        thread = self._thread
        head = thread.head
        if not _is_seq(seq) or (head is not None and seq <= head.seq):
            raise ValueError(f"a seq is an int above the one before, not {seq!r}")
        if (parent is None) != (head is None):
            raise ValueError(f"checkpoint {seq} has no parent" if head else "the first checkpoint has no parent here")
        # Seqs that retention removed, or that were not exported, are not given again: as in the store they come from.
        thread._next_seq = seq
        with _at(created_at):
            committed = thread.commit_state(
                state, reason=reason, step=step, status=status, metadata=metadata, parent=parent
            )
        if head is None and decision is not None:
            _check_decision(decision)
            self._carried = seq, decision
        return committed

    def load(self, at: int) -> dict[str, Any]:
        """The state of a checkpoint that arrived. `CheckpointNotFound`."""
        return self._thread.load(at=at)

    def effect(
        self,
        decision: DecisionId,
        index: int,
        generation: int,
        *,
        tool: str,
        arguments: Any,
        rule: str,
        timeout_s: float,
        attempt: int,
        started_at: datetime,
        status: str,
        why: str = "",
        ended: Ended | None = None,
    ) -> str:
        """Put a call with its receipt into the ledger, or one that is open; its key in hex, 64 digits.

        An open call is for a person to decide, as in a fork, whatever its rule: nobody here knows what became of its
        caller. One that is known not to have happened (`status` ``not_started``) stays that. Written by `publish`.
        """
        check_call(index, tool, timeout_s, generation)
        _check_decision(decision)
        _insist(isinstance(why, str), f"why is a text, not {why!r}")
        _insist(rule in RULES, f"there is no rule {rule!r}")
        _insist(attempt.__class__ is int and 0 < attempt <= ATTEMPT_MAX, f"no attempt is {attempt!r}")
        identity = Identity(*decision, index, generation)
        key, call_hash = hash_call(identity, tool, canonical(arguments, ("arguments",)))
        mark, reason = MARK_FORKED, f"imported without a receipt; it was {status}" + (f": {why}" if why else "")
        if status == "not_started":
            mark, reason = MARK_NOT_DONE, why
        owner = clock.current().owner().pack()
        intent = Intent(
            key, call_hash, tool, rule, pack(arguments, ("arguments",)), round(timeout_s * 1000), owner,
            ledger.NO_TOKEN, attempt, ledger.new_nonce(), 0, _microseconds(started_at), 0,
            mark if ended is None else 0, reason if ended is None else why,
        )  # fmt: skip
        receipt = None if ended is None else _receipt(ended, owner, attempt)
        self._waiting.append((identity, intent, receipt))
        self._waiting_bytes += len(intent.arguments) + (0 if receipt is None else len(receipt.result))
        if len(self._waiting) >= SLICE_EFFECTS or self._waiting_bytes >= SLICE_BYTES:
            self._write()
        return key.hex()

    def pin(self, seq: int, note: str) -> None:
        """Pin a checkpoint that arrived. Written by `publish`."""
        _insist(isinstance(note, str), f"a note is a text, not {note!r}")
        data = note.encode("utf-8", "surrogatepass")
        _insist(len(data) <= NOTE_BYTES_MAX, f"a note has at most {NOTE_BYTES_MAX} bytes")
        self._thread.checkpoint(seq)
        self._pins.append((seq, data))

    def publish(self) -> Thread:
        """Give the thread its name: from now on it is there, and was not before. `ThreadExists` if that is taken."""
        self._write()
        thread, final = self._thread, self._final

        def write(tx: Tx) -> None:
            prefix = self._enter(tx)
            number = thread._number(tx)
            if tx.get(final._name_key) is not None:
                raise ThreadExists(f"thread {shown(final.id)} was made by somebody else meanwhile")
            if self._carried is not None:
                effect_forks.carry(tx, prefix, *self._carried)
            for seq, note in self._pins:
                tx.put(records.pins(prefix) + int_part(seq), note)
            tx.delete(thread._name_key)
            tx.put(final._name_key, records.name_value(number, final._name))
            tx.put(records.CREATED + int_part(number), final._name)

        self._store._engine.transact(write)
        return Thread(self._store, final.id)

    def _write(self) -> None:
        """Write the effects that wait, in one transaction."""
        waiting = self._waiting

        def write(tx: Tx) -> None:
            prefix = self._enter(tx)
            for identity, intent, receipt in waiting:
                slot = effect_slot(prefix, identity, intent.call_hash)
                # A `read` has no intent of its own: 0, as where it was made.
                numbered = intent._replace(lsn=0 if intent.rule == "read" else tx.lsn)
                if receipt is None:
                    ledger.put_intent(tx, slot, numbered)
                else:
                    ledger.finish(tx, slot, numbered, receipt._replace(lsn=tx.lsn))

        if waiting:
            self._store._engine.transact(write)
            self._waiting, self._waiting_bytes = [], 0

    def _enter(self, tx: Tx) -> bytes:
        """The prefix of the thread, which must be as this arrival left it."""
        thread = self._thread
        found = thread._find(tx)
        if found is None or found[2].uuid != self._uuid or found[2].commit_id != thread._commit_id:
            raise ThreadGone(f"thread {shown(self._final.id)}: another import of it is under way")
        return found[0].prefix


def _receipt(ended: Ended, owner: bytes, attempt: int) -> Receipt:
    _insist(ended.outcome in OUTCOMES, f"there is no outcome {ended.outcome!r}")
    _insist(ended.source in SOURCES, f"there is no source {ended.source!r}")
    _insist(isinstance(ended.error, str), f"an error is a text, not {ended.error!r}")
    _insist(ended.seq is None or _is_seq(ended.seq), f"no seq is {ended.seq!r}")
    result = pack(ended.result if ended.outcome == "result" else None, ("result",))
    return Receipt(
        ledger.new_nonce(), ended.outcome, ended.source, result, ended.error, ended.seq, owner, ledger.NO_TOKEN,
        attempt, _microseconds(ended.at), 0,
    )  # fmt: skip


def decision_of(thread: Thread, seq: int) -> DecisionId | None:
    """The decision on whose line checkpoint `seq` stands, as `Thread.decision` says it of the head. None if there is
    none. O(checkpoints since then)."""
    with thread._store._engine.read() as snap:
        prefix, head = located(snap, thread)
        return effect_forks.decision_at(snap, prefix, head.uuid, seq, thread.id)


def _check_decision(decision: DecisionId) -> None:
    uuid, seq = decision
    _insist(len(uuid) == 16 and _is_seq(seq), f"no decision is {decision!r}")


def _is_seq(seq: object) -> bool:
    return isinstance(seq, int) and seq.__class__ is int and 0 <= seq <= SEQ_MAX


def _insist(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _microseconds(at: datetime) -> int:
    # By integers: a float of seconds has not microseconds enough.
    delta = at - _EPOCH
    _insist(delta.days >= 0, f"a time is not before 1970, as {at.isoformat()} is")
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


@contextmanager
def _at(created_at: datetime | None) -> Iterator[None]:
    if created_at is None:
        yield
        return
    with clock.using(Past(clock.current(), created_at)):
        yield
