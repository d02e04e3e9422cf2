"""A commit between its two halves: staged outside of all locks, written inside a transaction.

    staged = thread._stage(changes, …)         encode, diff, compress
    staged.write(tx)                           guards and puts; runs as often as the engine runs the transaction
    staged.confirmed(lsn)                      the handle moves; only now there is a Checkpoint

``staged.commit()`` is the three lines around the last two that a plain commit needs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from agentstore import records
from agentstore.checkpoint import Checkpoint
from agentstore.codec import cbor
from agentstore.engine.api import Tx
from agentstore.errors import AgentStoreError, CommitUnknown, Fenced, StaleThread, StoreFailed, ThreadGone
from agentstore.records import CHECKPOINT, HEAD, VERSION, Head, ThreadKeys, int_part, shown

if TYPE_CHECKING:
    from agentstore.deltas import Plan
    from agentstore.effects import EffectCall
    from agentstore.fields import State
    from agentstore.position import Position

Guard = Callable[[Tx], None]
"""Runs inside the transaction, before the puts; raises if the commit must not be."""


class Staged:
    """One commit on its way. Used by the thread of its handle, once."""

    __slots__ = (
        "_created_us",
        "_guard",
        "_intents",
        "_meta",
        "_meta_bytes",
        "_reason",
        "_reason_code",
        "_thread",
        "base",
        "body",
        "commit_id",
        "flags",
        "parent",
        "plan",
        "seq",
        "state_sum",
        "written_head",
        "written_keys",
        "written_token",
    )

    def __init__(
        self,
        thread: Position,
        base: State,
        plan: Plan,
        *,
        seq: int,
        parent: int | None,
        state_sum: int,
        created_us: int,
        commit_id: bytes,
        flags: int,
        reason: str,
        meta: tuple[int | None, str | None, dict[str, Any]],
        meta_bytes: int,
        body: bytes,
        intents: Sequence[EffectCall],
        guard: Guard | None,
    ) -> None:
        self.seq = seq
        self.parent = parent
        self.commit_id = commit_id
        self._thread = thread
        self.base = base
        self.plan = plan
        self.state_sum = state_sum
        self._created_us = created_us
        self.flags = flags
        self._reason = reason
        self._reason_code = records.REASON_CODES[reason]
        self._meta = meta
        self._meta_bytes = meta_bytes
        self.body = body
        self._intents = intents
        self._guard = guard
        self.written_keys: ThreadKeys | None = None
        self.written_head = b""
        self.written_token = 0

    # --- inside the transaction ------------------------------------------------------

    def write(self, tx: Tx) -> None:
        """Check that the thread is as it was when this was staged, then put the records. One get, two puts.

        StaleThread, ThreadGone, Fenced; then the transaction must not be committed.
        """
        thread = self._thread
        keys = thread._keys
        if keys is None:
            keys, token = self._create(tx)
            self.written_keys = keys
        else:
            raw = tx.get(keys.head)
            if raw == thread._head_raw and (thread._token is None or thread._token == thread._head_token):
                token = thread._head_token
            else:
                token = self._check(raw)
        if self._guard is not None:
            self._guard(tx)
        seq = self.seq
        parent = self.parent
        tx.put(
            keys.checkpoints + int_part(seq),
            CHECKPOINT.pack(
                VERSION, self.flags, self._reason_code, 0, self._meta_bytes, 0 if parent is None else parent + 1,
                self._created_us, tx.lsn, self.commit_id, self.state_sum,
            )
            + self.body,
        )  # fmt: skip
        self.written_head = head = HEAD.pack(VERSION, 0, thread._uuid, seq, seq + 1, token, self.commit_id)
        self.written_token = token
        tx.put(keys.head, head)
        if self._intents:
            from agentstore import effects

            effects.write_intents(tx, thread, seq, self._intents)  # type: ignore[arg-type]  # only a Thread is a Position
        # From here on the commit may be there whatever becomes of the call.
        thread._pending = self

    def _create(self, tx: Tx) -> tuple[ThreadKeys, int]:
        """Give the thread its number; its keys and the fencing token it begins with."""
        thread = self._thread
        named = tx.get(thread._name_key)
        if named is None:
            if thread._token is not None:
                self._check_early_lease(tx)
            number, token = records.create_thread(tx, thread._name, thread._name_key)
            return ThreadKeys(number), token
        raise StaleThread(
            f"thread {shown(thread.id)}: somebody created it since this handle looked; nothing was written."
            " load() and decide again"
        )

    def _check_early_lease(self, tx: Tx) -> None:
        """A lease that was taken before there was a thread must still be the newest."""
        from agentstore import leases

        thread = self._thread
        record = leases._newest(tx, thread)  # type: ignore[arg-type]  # only a Thread is a Position
        newest = thread._token if record is None else record.token
        if newest != thread._token:
            raise Fenced(
                f"thread {shown(thread.id)}: the lease with fencing token {thread._token} was lost, the newest token is"
                f" {newest}; nothing was written. Take the lease again and load()"
            )

    def _check(self, raw: bytes | None) -> int:
        """The fencing token of a head record that is not exactly the expected one, if it still allows the commit."""
        thread = self._thread
        if raw is None or (head := Head.decode(raw)).uuid != thread._uuid:
            raise ThreadGone(f"thread {shown(thread.id)} was deleted; take a new handle from store.thread()")
        if thread._token is not None and head.token != thread._token:
            raise Fenced(
                f"thread {shown(thread.id)}: the lease with fencing token {thread._token} was lost, the newest token is"
                f" {head.token}; nothing was written. Take the lease again and load()"
            )
        if head.seq != thread._seq or head.commit_id != thread._commit_id:
            raise StaleThread(
                f"thread {shown(thread.id)}: somebody moved the head, and this handle stands on {thread._seq};"
                " nothing was written. load() and decide again"
            )
        return head.token

    # --- around it -------------------------------------------------------------------

    def confirmed(self, lsn: int) -> Checkpoint:
        """The checkpoint, once `transact` returned; moves the handle to it. O(change)."""
        thread = self._thread
        step, status, metadata = self._meta
        checkpoint = Checkpoint(
            thread.id,
            thread._uuid,
            self.seq,
            self.parent,
            lsn,
            self._created_us,
            self.commit_id,
            self._reason,
            step,
            status,
            metadata,
        )
        thread._advance(self, checkpoint)
        return checkpoint

    def commit(self, around: Guard | None = None) -> Checkpoint:
        """Write in a transaction of its own, with what `around` writes first, and confirm."""

        def fn(tx: Tx) -> None:
            if around is not None:
                around(tx)
            self.write(tx)

        return self.confirmed(self._thread._transact(self.write if around is None else fn).lsn)


_META_OF_STEP = struct.Struct(">BBI")


def encode_meta(step: int | None, status: str | None, metadata: dict[str, Any] | None) -> tuple[bytes, dict[str, Any]]:
    """The meta part of a checkpoint record, and the metadata as it is kept, not shared with the caller."""
    if status is None and not metadata and step.__class__ is int and 0 <= step < 1 << 32:
        return _META_OF_STEP.pack(0x83, 0x1A, step) + b"\xf6\xf6", {}  # what `records.pack` makes, four times as fast
    if step is not None and step.__class__ is not int:
        raise TypeError(f"step is an int or None, not {step!r}")
    if status is not None and status.__class__ is not str:
        raise TypeError(f"status is a str or None, not {status!r}")
    if not metadata and (status is None or status.isascii()):
        return records.pack([step, status, None]), {}
    if metadata is not None and metadata.__class__ is not dict:
        raise TypeError(f"metadata is a dict or None, not {type(metadata).__name__}")
    kept = cbor.encode(metadata or None, ("metadata",))
    return cbor.encode([step, status, None])[:-1] + kept, cbor.decode(kept) or {}


def written_nothing(error: BaseException) -> bool:
    """Whether an exception out of a transaction says for certain that nothing was written."""
    return isinstance(error, AgentStoreError) and not isinstance(error, (CommitUnknown, StoreFailed))
