"""One call of a tool: the handle that `Thread.effect` gives, and how what becomes of the call is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from agentstore import clock, events, ledger
from agentstore.clock import NS_PER_S
from agentstore.effect_records import (
    MARK_IN_DOUBT,
    MARK_NOT_DONE,
    SOURCES,
    Identity,
    Intent,
    Receipt,
    Slot,
    pack,
    unpack,
)
from agentstore.effect_views import check_call, describe, result_of
from agentstore.engine.api import Tx
from agentstore.errors import (
    CheckpointNotFound,
    EffectClosed,
    EffectDuplicate,
    EffectInDoubt,
    Fenced,
    InvalidChange,
    LimitExceeded,
    StaleThread,
    UnencodableState,
)
from agentstore.fencing import enter, located

if TYPE_CHECKING:
    from agentstore.checkpoint import Checkpoint
    from agentstore.staging import Staged
    from agentstore.thread import Thread


class Effect:
    """One call of a tool: permission to make it, or its result. Not thread-safe, as the `Thread` it belongs to.

    As a context manager it tells the store when the block ends in an exception: the call is in doubt at once then,
    instead of at its deadline.
    """

    __slots__ = ("_intent", "_may_call", "_receipt", "_receipt_id", "_slot", "_thread", "duplicate", "identity", "rule")

    def __init__(
        self,
        thread: Thread,
        identity: Identity,
        slot: Slot,
        rule: str,
        intent: Intent,
        receipt: Receipt | None,
        *,
        may_call: bool,
    ) -> None:
        self._thread = thread
        self._slot = slot
        self._intent = intent
        self._receipt = receipt
        self._receipt_id = ledger.new_nonce()
        self._may_call = may_call
        self.identity = identity
        self.rule = rule
        self.duplicate = False
        """Whether another receipt was there when this handle stored its own: the tool was called twice."""

    # --- what it is ------------------------------------------------------------------

    @property
    def key(self) -> str:
        """Idempotency key, 64 hex digits: the same for every attempt, in every process, in forks."""
        return self._intent.key.hex()

    @property
    def tool(self) -> str:
        """Name of the tool."""
        return self._intent.tool

    @property
    def arguments(self) -> Any:
        """The arguments, decoded afresh. O(size)."""
        return unpack(self._intent.arguments)

    @property
    def attempt(self) -> int:
        """1 for the first call, raised with every call that is made again."""
        return self._intent.attempt

    @property
    def timeout_s(self) -> float:
        """How long the tool may take, in seconds."""
        return self._intent.timeout_ms / 1000

    @property
    def deadline(self) -> float:
        """Second on the boot clock from which others may judge the call: timeout plus `DEADLINE_MARGIN_S`."""
        return self._intent.deadline_ns / NS_PER_S

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, negative behind it."""
        return (self._intent.deadline_ns - clock.current().boottime_ns()) / NS_PER_S

    @property
    def done(self) -> bool:
        """Whether there is a receipt. The tool must not be called then."""
        return self._receipt is not None

    @property
    def outcome(self) -> str | None:
        """``result``, ``failed`` or ``unknown``; None while there is no receipt."""
        return None if self._receipt is None else self._receipt.outcome

    @property
    def source(self) -> str | None:
        """Who said so: ``call``, ``query``, ``person`` or ``rule``; None while there is no receipt."""
        return None if self._receipt is None else self._receipt.source

    @property
    def error(self) -> str | None:
        """What the tool said when it failed for good; None otherwise."""
        return None if self._receipt is None or self._receipt.outcome != "failed" else self._receipt.error

    @property
    def result(self) -> Any:
        """The recorded result, decoded afresh; `Unknown` if the outcome is. O(size).

        Raises EffectFailed if the recorded result is a failure, EffectClosed while there is none.
        """
        if self._receipt is None:
            raise EffectClosed(f"{self._what} has no result yet; call its tool, then store the receipt")
        return result_of(self._receipt, self._what)

    @property
    def seq(self) -> int | None:
        """Seq of the checkpoint that was committed with the receipt; None if the receipt was stored alone."""
        return None if self._receipt is None else self._receipt.seq

    @property
    def _what(self) -> str:
        return describe(self._thread, self.identity, self._intent.tool)

    def __repr__(self) -> str:
        state = self._receipt.outcome if self._receipt is not None else "to be called" if self._may_call else "in doubt"
        return f"<Effect {self._intent.tool} {self.key[:12]} {state}, attempt {self.attempt}>"

    def __enter__(self) -> Effect:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._receipt is None and self._may_call:
            self.doubt(f"its caller ended with {type(error).__name__}: {error}")

    # --- what it comes to -------------------------------------------------------------

    def receipt(self, result: Any, *changes: Any, source: str = "call", **commit: Any) -> Checkpoint:
        """Store the result, the changes and their checkpoint in one transaction; return the checkpoint.

        `commit` takes `reason` (default ``"tool_result"``), `step`, `status` and `metadata`, as `Thread.commit` does.

        If the checkpoint cannot be committed (StaleThread, Fenced, or changes that do not fit) the receipt alone is
        stored, and then the error is raised: what the tool did stays known. If another receipt is there (the tool was
        called twice), this one is kept as a duplicate: with an equal result the commit goes on and `duplicate` is
        True, with another result EffectDuplicate is raised with the first, which counts. Called again after an error
        it recognises its own receipt. Raises UnencodableState, with nothing stored, for a result that the store does
        not keep.
        """
        return self._finish("result", result, "", source, changes, commit)

    def fail(self, error: BaseException | str, *changes: Any, source: str = "call", **commit: Any) -> Checkpoint:
        """Store a failure that is final as the result: the tool said that it did not happen and never will.

        Anything else that a tool raises leaves the outcome open: see `doubt`. Otherwise as `receipt`.
        """
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        return self._finish("failed", None, text, source, changes, commit)

    def skip(self, *changes: Any, **commit: Any) -> Checkpoint:
        """Store "outcome unknown" as the result (rule ``skip``). The tool is never called again. As `receipt`."""
        return self._finish("unknown", None, "", "rule", changes, commit)

    def doubt(self, why: str, *changes: Any, **commit: Any) -> Checkpoint | None:
        """The caller gave up without knowing the outcome: in doubt from now on, not only at the deadline.

        With changes or anything for their commit (``status="WAITING"``) a checkpoint is committed in the same
        transaction and returned. Only for a caller that has really ended: a tool that still runs in a thread is in
        flight. Raises EffectClosed if the call was taken over.
        """
        return self._mark(MARK_IN_DOUBT, why, changes, commit)

    def not_done(self, why: str, *changes: Any, **commit: Any) -> Checkpoint | None:
        """The tool or a person said that it did not happen: the next `Thread.effect` calls it again. As `doubt`."""
        return self._mark(MARK_NOT_DONE, why, changes, commit)

    def retry(self, why: str, timeout_s: float | None = None) -> None:
        """Begin another attempt with the same key; the tool may be called when this returns.

        For a tool that may be called twice (``read``, ``replay``), or of which it is known that it did not happen.
        Raises EffectClosed if the call has a receipt by now or was taken over, Fenced if the lease is lost. One
        transaction; none for a ``read``.
        """
        old = self._intent
        timeout_s = old.timeout_ms / 1000 if timeout_s is None else timeout_s
        check_call(self.identity.call, old.tool, timeout_s, self.identity.generation)
        fresh = ledger.new_intent(
            key=old.key,
            call_hash=old.call_hash,
            tool=old.tool,
            rule=self.rule,
            arguments=old.arguments,
            timeout_s=timeout_s,
            token=self._thread._token or ledger.NO_TOKEN,
            attempt=old.attempt + 1,
            nonce=ledger.new_nonce(),
            lsn=0,
        )
        if self.rule != "read":

            def write(tx: Tx) -> Intent:
                prefix = enter(tx, self._thread)[0]
                ledger.open_attempt(tx, self._slot, old.nonce, self._what)
                stored = fresh._replace(lsn=tx.lsn)
                ledger.put_intent(tx, self._slot, stored)
                kind = "retry" if self._may_call else "takeover"
                events.record(tx, prefix, kind, why, call=self.identity, tool=old.tool, attempt=stored.attempt)
                return stored

            fresh = self._thread._store._engine.transact(write).value
        self._intent = fresh
        self._may_call = True

    # --- how it is written ------------------------------------------------------------

    def _finish(
        self,
        outcome: str,
        result: Any,
        error: str,
        source: str,
        changes: tuple[Any, ...],
        commit: dict[str, Any],
    ) -> Checkpoint:
        if source not in SOURCES:
            raise ValueError(f"there is no source {source!r}; a result comes from {', '.join(SOURCES)}")
        now = clock.current()
        receipt = Receipt(
            self._receipt_id, outcome, source, pack(result, ("result",)), error, None, now.owner().pack(),
            self._thread._token or ledger.NO_TOKEN, self._intent.attempt, now.wall_ns() // ledger.NS_PER_US, 0,
        )  # fmt: skip
        try:
            return self._commit(receipt, self._thread._stage(changes, **{"reason": "tool_result", **commit}))
        except _RECEIPT_ALONE:
            self._finish_alone(receipt)
            raise

    def _commit(self, receipt: Receipt, staged: Staged) -> Checkpoint:
        """Receipt and checkpoint in one transaction, as far as the receipt that may be there allows."""

        def write(tx: Tx) -> tuple[Receipt, Receipt | None]:
            mine = receipt._replace(lsn=tx.lsn)
            before = ledger.first_receipt(tx, self._slot)
            if (
                before is None
                or (before.seq is None and before.id == mine.id)
                or (before.id != mine.id and _says_the_same(before, mine))
            ):
                staged.write(tx)
                mine = mine._replace(seq=staged.seq)
            ledger.finish(tx, self._slot, self._intent, mine)
            return mine, before

        confirmed = self._thread._transact(write)
        mine, before = confirmed.value
        self._may_call = False
        if before is None:
            self._receipt = mine
            return staged.confirmed(confirmed.lsn)
        self._receipt = before
        if before.id == mine.id:
            if before.seq is not None:  # an earlier try had been committed, and its caller could not know
                return self._thread.checkpoint(before.seq)
            self._receipt = before._replace(seq=mine.seq)
            return staged.confirmed(confirmed.lsn)
        self.duplicate = True
        if _says_the_same(before, mine):
            return staged.confirmed(confirmed.lsn)
        raise EffectDuplicate(
            f"{self._what} has a receipt with another result, from attempt {before.attempt}: the tool was called twice."
            " The first result counts (see .result); this one is kept as a duplicate, its changes were not committed",
            result=None if before.outcome != "result" else unpack(before.result),
        )

    def _finish_alone(self, receipt: Receipt) -> None:
        """The receipt without a checkpoint: it is evidence of what happened, and needs no right to the thread."""

        def write(tx: Tx) -> Receipt | None:
            located(tx, self._thread)
            return ledger.finish(tx, self._slot, self._intent, receipt._replace(lsn=tx.lsn))

        before = self._thread._store._engine.transact(write).value
        self._may_call = False
        self._receipt = receipt if before is None else before
        self.duplicate = before is not None and before.id != receipt.id

    def _mark(self, value: int, why: str, changes: tuple[Any, ...], commit: dict[str, Any]) -> Checkpoint | None:
        staged = self._thread._stage(changes, **commit) if changes or commit else None

        def write(tx: Tx) -> None:
            prefix = enter(tx, self._thread)[0]
            if staged is not None:
                staged.write(tx)
            if self.rule != "read":
                ledger.mark(tx, self._slot, self._intent.nonce, value, why, self._what)
                kind = "answer" if value == MARK_NOT_DONE else "doubt"
                events.record(tx, prefix, kind, why, call=self.identity, tool=self.tool, attempt=self.attempt)

        confirmed = self._thread._transact(write)
        self._intent = self._intent._replace(mark=value, why=why)
        self._may_call = False
        return None if staged is None else staged.confirmed(confirmed.lsn)


_RECEIPT_ALONE: Final = (
    StaleThread,
    Fenced,
    InvalidChange,
    UnencodableState,
    LimitExceeded,
    CheckpointNotFound,
    EffectInDoubt,
    TypeError,
    ValueError,
)
"""Errors of a commit after which its receipt is stored alone: the checkpoint cannot be, the store is fine."""


def _says_the_same(one: Receipt, other: Receipt) -> bool:
    return (one.outcome, one.result, one.error) == (other.outcome, other.result, other.error)
