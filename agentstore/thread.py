"""A handle of one thread: the place where a worker stands in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from agentstore import deleting, deltas, fields, lines, loading, pruning, records
from agentstore.changes import Change
from agentstore.checkpoint import Checkpoint
from agentstore.effect_views import TIMEOUT_S_DEFAULT
from agentstore.engine.api import Tx
from agentstore.errors import CheckpointNotFound, Fenced, StaleThread, ThreadExists, ThreadGone, ThreadNotFound
from agentstore.packs import PACK_MEMBERS
from agentstore.position import BODY_BYTES_MAX, Position
from agentstore.records import ThreadKeys, int_part, shown
from agentstore.retention import Retention

if TYPE_CHECKING:
    from agentstore.effect_views import EffectView
    from agentstore.effects import Effect, EffectCall
    from agentstore.leases import Lease

NOTE_BYTES_MAX: Final = 4096
"""Length of a pin's note, in bytes of UTF-8."""


class Thread(Position):
    """One agent run, by its id. Made by `Store.thread`.

    A handle stands on a checkpoint (the head as it was at the handle's first use, `load` or commit) and commits on
    top of it: if somebody else moved the head, the commit raises `StaleThread` and writes nothing. **Not
    thread-safe**: one handle for each thread of execution, as many handles as you like. It holds no resources and
    needs no closing.

    >>> from agentstore import Append, Set
    >>> from agentstore.testing.scratch import scratch_store
    >>> thread = scratch_store().thread("user-42:report-7")
    >>> cp = thread.commit(Append("conversation_history", {"role": "user", "content": "hi"}), Set("step", 1))
    >>> cp.seq, cp.parent, thread.load()
    (0, None, {'conversation_history': [{'role': 'user', 'content': 'hi'}], 'step': 1})
    """

    def __repr__(self) -> str:
        return f"<Thread {shown(self.id)} at {self._seq if self._opened else '?'}>"

    # --- committing --------------------------------------------------------------------

    def commit(
        self,
        *changes: Change,
        reason: str = "manual",
        step: int | None = None,
        status: str | None = None,
        metadata: dict[str, Any] | None = None,
        parent: int | None = None,
        intents: Sequence[EffectCall] = (),
    ) -> Checkpoint:
        """Apply `changes` to the state, store that as a checkpoint, and return once it is on stable storage.

        `parent`: the seq of an earlier checkpoint to go on from (time travel); the head moves to the new one. `reason`:
        one of `REASONS`. `step`, `status`, `metadata`: kept beside the state, for `history`. `intents`: the calls that
        this decision starts at once, see `effect`.

        `StaleThread`, `ThreadGone`, `Fenced`, `InvalidChange`, `UnencodableState`, `LimitExceeded`, `DiskFull`,
        `ReadOnlyStore`: nothing was written. `CommitUnknown`, `StoreFailed`: it may have been; `load` says (see
        `recovered`). O(change) and one fdatasync that concurrent commits share.

        >>> from agentstore import Append
        >>> from agentstore.testing.scratch import scratch_store
        >>> thread = scratch_store().thread("t")
        >>> for n in range(3):
        ...     cp = thread.commit(Append("notes", f"note {n}"), reason="round", step=n)
        >>> thread.commit(Append("notes", "another way"), parent=0, status="RUNNING")
        Checkpoint('t', seq=3, parent=0, reason='manual', lsn=4)
        >>> thread.load()
        {'notes': ['note 0', 'another way']}
        """
        return self._stage(
            changes, reason=reason, step=step, status=status, metadata=metadata, parent=parent, intents=intents
        ).commit()

    def commit_state(
        self,
        state: dict[str, Any],
        *,
        reason: str = "manual",
        step: int | None = None,
        status: str | None = None,
        metadata: dict[str, Any] | None = None,
        parent: int | None = None,
    ) -> Checkpoint:
        """Make `state` the state. Only what differs is stored: encoded values are compared, never objects.

        As `commit`, but O(size of the state): for callers who do not know what they changed.

        >>> from agentstore.testing.scratch import scratch_store
        >>> thread = scratch_store().thread("t")
        >>> state = {"conversation_history": ["hi"], "step": 0}
        >>> thread.commit_state(state).seq
        0
        >>> state["conversation_history"].append("hello")
        >>> thread.commit_state(state, reason="round").seq, thread.load() == state
        (1, True)
        """
        base, before, fetch = self._base(parent)
        plan = deltas.plan_state(base, state, fetch)
        return self._finish_staging(base, before, plan, reason, step, status, metadata, parent).commit()

    def load(self, at: int | None = None) -> dict[str, Any]:
        """The state as a fresh dict of plain values, every field compared with its checksum.

        Without `at`: of the head, and the handle moves there; after `StaleThread`, `CommitUnknown` or an interruption
        this is the way out (then by a transaction, which also finishes what a dead writer left), and `recovered` says
        whether the interrupted commit was written. With `at`: of that checkpoint; the handle stays where it is.

        `ThreadNotFound`, `ThreadGone`, `CheckpointNotFound`; `CorruptionError` names the thread, the checkpoint and
        the field. O(size of the state), with the deltas since the nearest snapshot.

        >>> from agentstore import Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> thread = scratch_store().thread("t")
        >>> cp = thread.commit(Set("step", 1)), thread.commit(Set("step", 2))
        >>> thread.load(), thread.load(at=0)
        ({'step': 2}, {'step': 1})
        """
        if at is not None:
            return fields.decode(self._load_at(at).state)
        pending = self._pending
        if pending is not None or self._stale:
            self._store._engine.transact(self._read_head)
        self.recovered = None
        with self._store._engine.read() as snap:
            found = self._find(snap)
            if found is None:
                self._pending = None
                raise ThreadNotFound(f"{self._where} has no checkpoint yet")
            keys, raw, head = found
            loaded = loading.load(snap, keys.prefix, head.seq, self._where)
            loading.verify(loaded, snap, keys.prefix, head.seq, self._where)
            if pending is not None and head.uuid == self._uuid:
                self.recovered = self._landed(snap, keys, pending)
        self._stand(keys, raw, head, loaded)
        state = fields.decode(loaded.state)
        fields.forget_large(loaded.state, BODY_BYTES_MAX)
        if loaded.cost.deltas >= 2 * PACK_MEMBERS and not self._store.readonly:
            self._store._upkeep.want_packs(keys.number)  # of writers that each wrote little, or were killed
        self._look_after()
        return state

    # --- looking -----------------------------------------------------------------------

    @property
    def decision(self) -> tuple[bytes, int] | None:
        """The id of the newest decision on the line of the checkpoint that this handle stands on; None without one.

        What `effect` takes as `decision` after a restart. In a fork a decision keeps the id that it had where it was
        first confirmed. O(checkpoints since then).

        >>> from agentstore import Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> thread = scratch_store().thread("t")
        >>> cp = thread.commit(Set("step", 1), reason="decision")
        >>> thread.decision == (cp.thread_uuid, 0)
        True
        """
        from agentstore import effects

        return effects.newest_decision(self)

    @property
    def head(self) -> Checkpoint | None:
        """The checkpoint that this handle stands on: of its last `load` or commit, else the head at its first use.

        None if the thread has no checkpoint. `ThreadGone`. O(1).

        >>> from agentstore import Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> thread = scratch_store().thread("t")
        >>> thread.head is None, thread.commit(Set("step", 1)) == thread.head
        (True, True)
        """
        if not self._opened:
            self._open()
        return self._checkpoint

    def history(self, limit: int | None = None, *, before: int | None = None) -> list[Checkpoint]:
        """The thread's checkpoints, newest first, those of all its branches (`Checkpoint.parent` links them).

        At most `limit`, and only those with a seq below `before`. Empty if there is no such thread. O(checkpoints
        returned).

        >>> from agentstore import Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> thread = scratch_store().thread("t")
        >>> cps = [thread.commit(Set("step", n), reason="round", step=n) for n in range(3)]
        >>> [cp.step for cp in thread.history(limit=2)]
        [2, 1]
        """
        if limit is not None and limit < 1:
            return []
        with self._store._engine.read() as snap:
            found = self._find(snap)
            if found is None:
                return []
            keys, _, head = found
            found_ones = lines.descending(
                snap, keys.prefix, head.next_seq if before is None else max(0, before), self._where
            )
            return [
                Checkpoint.from_entry(self.id, head.uuid, entry, self._where) for entry in islice(found_ones, limit)
            ]

    def checkpoint(self, seq: int) -> Checkpoint:
        """The checkpoint with this number. `CheckpointNotFound`, `ThreadNotFound`, `ThreadGone`. O(1).

        >>> from agentstore import Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> thread = scratch_store().thread("t")
        >>> cp = thread.commit(Set("step", 1), reason="plan"), thread.commit(Set("step", 2))
        >>> thread.checkpoint(0).reason
        'plan'
        """
        with self._store._engine.read() as snap:
            keys, _, head = self._found(snap)
            entry = lines.find(snap, keys.prefix, seq, self._where) if seq.__class__ is int and seq >= 0 else None
            if entry is None:
                raise self._not_there(snap, seq)
        return Checkpoint.from_entry(self.id, head.uuid, entry, self._where)

    # --- shaping -----------------------------------------------------------------------

    def fork(self, at: int | None = None, *, into: str) -> Thread:
        """Start the independent thread `into` with the state of checkpoint `at` (default: of the head); its handle.

        Its first checkpoint has the reason ``"fork"``, the step and status of the one it comes from, and says so in
        its metadata. Receipts of a decision that is still open there come along. Deleting either thread never hurts
        the other.

        `ThreadExists`, `InvalidThreadId`, `CheckpointNotFound`, `ThreadNotFound`, `ThreadGone`, and what `commit`
        raises. O(size of the state).

        >>> from agentstore import Append
        >>> from agentstore.testing.scratch import scratch_store
        >>> thread = scratch_store().thread("t")
        >>> cps = [thread.commit(Append("notes", n)) for n in range(3)]
        >>> other = thread.fork(at=1, into="t/alt")
        >>> other.load(), other.head.metadata
        ({'notes': [0, 1]}, {'fork': {'thread': 't', 'seq': 1}})
        """
        target = Thread(self._store, into)
        with self._store._engine.read() as snap:
            keys, _, head = self._found(snap)
            seq = head.seq if at is None else at
            if seq.__class__ is not int or not 0 <= seq < head.next_seq:
                raise CheckpointNotFound(f"{self._where}: there is no checkpoint {seq!r} to fork at")
            with self._naming_the_rule(snap, seq):
                loaded = loading.load(snap, keys.prefix, seq, self._where)
            loading.verify(loaded, snap, keys.prefix, seq, self._where)
            target._open_from(snap)
        if target._seq is not None:
            raise ThreadExists(f"{target._where} exists already; fork into a new id, or delete it first")
        origin = Checkpoint.from_entry(self.id, head.uuid, loaded.entry, self._where)
        staged = target._finish_staging(
            target._state,
            target._sum,
            deltas.plan_copy(loaded.state),
            "fork",
            origin.step,
            origin.status,
            {"fork": {"thread": self.id, "seq": seq}},
            None,
        )

        def write(tx: Tx) -> None:
            if tx.get(keys.head) is None:
                raise ThreadGone(f"{self._where} was deleted; take a new handle from store.thread()")
            if lines.find(tx, keys.prefix, seq, self._where) is None:
                raise self._not_there(tx, seq)
            staged.write(tx)
            written = staged.written_keys or target._keys
            assert written is not None
            effect_forks.copy_open(tx, keys.prefix, head.uuid, seq, self.id, written.prefix, staged.seq)

        from agentstore import effect_forks

        try:
            staged.confirmed(target._transact(write).lsn)
        except StaleThread:
            raise ThreadExists(f"{target._where} exists already; fork into a new id, or delete it first") from None
        return target

    def pin(self, seq: int, note: str = "") -> None:
        """Keep checkpoint `seq` whatever retention says; a second pin replaces the note.

        `note`: up to `NOTE_BYTES_MAX` bytes of text. `CheckpointNotFound`, `ThreadNotFound`, `ThreadGone`. O(1), one
        fdatasync.

        >>> from agentstore import Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> thread = scratch_store().thread("t")
        >>> cp = thread.commit(Set("step", 1))
        >>> thread.pin(0, "before the refund")
        >>> thread.pins()
        {0: 'before the refund'}
        """
        data = note.encode("utf-8", "surrogatepass")
        if len(data) > NOTE_BYTES_MAX:
            raise ValueError(f"a note has at most {NOTE_BYTES_MAX} bytes of UTF-8, this one has {len(data)}")

        def write(tx: Tx) -> None:
            keys, _, head = self._found(tx)
            if (
                seq.__class__ is not int
                or not 0 <= seq < head.next_seq
                or lines.find(tx, keys.prefix, seq, self._where) is None
            ):
                raise self._not_there(tx, seq)
            tx.put(records.pins(keys.prefix) + int_part(seq), data)

        self._store._engine.transact(write)

    def unpin(self, seq: int) -> None:
        """Take a pin away; nothing happens if there is none. `ThreadNotFound`, `ThreadGone`. O(1), one fdatasync.

        >>> from agentstore import Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> thread = scratch_store().thread("t")
        >>> cp = thread.commit(Set("step", 1))
        >>> thread.pin(0)
        >>> thread.unpin(0)
        >>> thread.pins()
        {}
        """

        def write(tx: Tx) -> None:
            keys, _, _ = self._found(tx)
            tx.delete(records.pins(keys.prefix) + int_part(seq))

        self._store._engine.transact(write)

    @property
    def retention(self) -> Retention | None:
        """The thread's own rule of what stays; None if the store's applies. `ThreadNotFound`, `ThreadGone`. O(1)."""
        with self._store._engine.read() as snap:
            keys = self._found(snap)[0]
            raw = snap.get(pruning.rule_key(keys))
        return None if raw is None else Retention.decode(raw, self._where)

    def set_retention(self, rule: Retention | None) -> None:
        """Have `rule` say what stays of this thread, in the place of the store's; None: the store's again.

        Applied behind the commits from now on, in every process, and by `Store.apply_retention`. `ThreadNotFound`,
        `ThreadGone`. O(1), one fdatasync.

        >>> from agentstore import Retention, Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> store = scratch_store()
        >>> thread = store.thread("t")
        >>> cps = [thread.commit(Set("step", n)) for n in range(5)]
        >>> thread.set_retention(Retention(keep_last=2))
        >>> [sorted(one.removed) for one in store.apply_retention()], thread.load(at=3)
        ([[0, 1, 2]], {'step': 3})
        >>> thread.load(at=0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        agentstore.errors.CheckpointExpired: thread 't': checkpoint 0 was removed by Retention(keep_last=2, ...
        """
        data = None if rule is None else rule.encode()

        def write(tx: Tx) -> None:
            key = pruning.rule_key(self._found(tx)[0])
            if data is None:
                tx.delete(key)
            else:
                tx.put(key, data)

        self._store._engine.transact(write)

    def pins(self) -> dict[int, str]:
        """The notes of the pinned checkpoints by seq. Empty if there is no such thread. O(pins)."""
        with self._store._engine.read() as snap:
            found = self._find(snap)
            if found is None:
                return {}
            low = records.pins(found[0].prefix)
            pairs = [(records.seq_of(key, low), raw) for key, raw in snap.scan(low, records.end_of(low))]
        return {seq: raw.decode("utf-8", "surrogatepass") for seq, raw in pairs}

    def delete(self) -> None:
        """Delete the thread with its checkpoints, effects, leases and pins. Its handles get `ThreadGone` from then on.

        Its forks stay. The id is free again; a new thread of that name shares nothing with the old one. The disk
        space is used again by later commits. `ThreadNotFound`, `ThreadGone`, `Fenced`. O(records), in several
        transactions if they are many; the first makes the thread unreachable.

        >>> from agentstore import Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> store = scratch_store()
        >>> thread = store.thread("t")
        >>> cp = thread.commit(Set("step", 1))
        >>> thread.delete()
        >>> thread.load()
        Traceback (most recent call last):
        agentstore.errors.ThreadGone: thread 't' was deleted; take a new handle from store.thread()
        """
        engine = self._store._engine

        def write(tx: Tx) -> ThreadKeys:
            keys, _, head = self._found(tx)
            if self._token is not None and head.token != self._token:
                raise Fenced(f"{self._where}: the lease with fencing token {self._token} was lost; nothing was deleted")
            deleting.unlink(tx, keys, self._name, head)
            return keys

        self._keys = keys = engine.transact(write).value
        self._opened = True
        while not deleting.finish(engine, keys.number):
            pass

    # --- effects and leases ------------------------------------------------------------

    def effect(
        self,
        *,
        decision: Checkpoint | tuple[bytes, int],
        index: int,
        tool: str,
        arguments: Mapping[str, Any],
        rule: str = "ask",
        timeout_s: float = TIMEOUT_S_DEFAULT,
        generation: int | None = None,
    ) -> Effect:
        """The call `index` of a decision: permission to make it now, or its result.

        `decision`: the confirmed checkpoint whose message asks for the call, or its id (see `Thread.decision`).
        `generation`: one more when an approval edited the arguments. Returns an `Effect`: with ``done`` there is a
        receipt, and the tool must not be called; else its intent is confirmed, and the caller calls the tool with
        ``effect.key`` and stores what comes of it (`Effect.receipt`). `agentstore.effects.open_effect` tells it all.

        `EffectInFlight`, `EffectInDoubt`, `EffectConflict`, `UnsupportedRule`, `Fenced`, `ThreadNotFound`,
        `ThreadGone`. O(1), one fdatasync; nothing is written if the receipt is there, or the intent was stored with
        the decision.

        >>> from agentstore import Append
        >>> from agentstore.testing.scratch import scratch_store
        >>> thread = scratch_store().thread("t")
        >>> cp = thread.commit(Append("notes", "charge 5"), reason="decision")
        >>> effect = thread.effect(decision=cp, index=0, tool="charge", arguments={"amount": 5}, rule="query")
        >>> effect.done, effect.receipt({"id": "ch_1"}, Append("notes", "charged")).seq
        (False, 1)
        >>> thread.effect(decision=cp, index=0, tool="charge", arguments={"amount": 5}, rule="query").result
        {'id': 'ch_1'}
        """
        from agentstore import effects

        return effects.open_effect(
            self,
            decision=decision,
            index=index,
            tool=tool,
            arguments=arguments,
            rule=rule,
            timeout_s=timeout_s,
            generation=generation,
        )

    def effects(self, open: bool | None = None) -> list[EffectView]:
        """The thread's effects in the order in which they began; with `open`, only those without a receipt (True) or
        with one (False). `ThreadNotFound`, `ThreadGone`. O(effects), O(open ones) with ``open=True``.

        >>> from agentstore import Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> thread = scratch_store().thread("t")
        >>> cp = thread.commit(Set("step", 1), reason="decision")
        >>> effect = thread.effect(decision=cp, index=0, tool="charge", arguments={}, rule="query")
        >>> [(view.tool, view.status) for view in thread.effects(open=True)]
        [('charge', 'in_flight')]
        """
        from agentstore import effects

        return effects.list_effects(self, open)

    def lease(self, owner: str, ttl_s: float = 30.0) -> Lease:
        """The right to write this thread for `ttl_s` seconds, renewable; `owner` is the worker's name, for messages.

        Every commit through this handle carries the lease's fencing token from now on, and gets `Fenced` once somebody
        else has taken the lease. `LeaseHeld` while another holds it, `ThreadGone`. O(1), one fdatasync.

        >>> from agentstore import Set
        >>> from agentstore.testing.scratch import scratch_store
        >>> thread = scratch_store().thread("t")
        >>> with thread.lease("worker-1", ttl_s=30):
        ...     thread.commit(Set("step", 1)).seq
        0
        """
        from agentstore import leases

        return leases.acquire(self, owner, ttl_s)
