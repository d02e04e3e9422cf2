"""A checkpoint as callers see it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from agentstore.codec import cbor
from agentstore.errors import CorruptionError, LimitExceeded
from agentstore.packs import NO_PARENT, Entry


class Checkpoint:
    """One committed state of a thread. There is one only after the write was confirmed. Immutable, for any thread.

    Two are equal when they are the same commit of the same thread.

    >>> from agentstore import Set
    >>> from agentstore.testing.scratch import scratch_store
    >>> scratch_store().thread("t").commit(Set("step", 1), reason="round", step=1)
    Checkpoint('t', seq=0, reason='round', lsn=1)
    """

    __slots__ = (
        "_created_us",
        "commit_id",
        "lsn",
        "metadata",
        "parent",
        "reason",
        "seq",
        "status",
        "step",
        "thread_id",
        "thread_uuid",
    )

    def __init__(
        self,
        thread_id: str,
        thread_uuid: bytes,
        seq: int,
        parent: int | None,
        lsn: int,
        created_us: int,
        commit_id: bytes,
        reason: str,
        step: int | None,
        status: str | None,
        metadata: dict[str, Any],
    ) -> None:
        self.thread_id: Final = thread_id
        """The thread's name."""
        self.thread_uuid: Final = thread_uuid
        """16 random bytes that no other thread has, not even a later one of the same name."""
        self.seq: Final = seq
        """Number in the thread: 0, 1, 2 …, never given twice."""
        self.parent: Final = parent
        """The seq that it was built on; None for the first one."""
        self.lsn: Final = lsn
        """Number of the log frame that confirmed it."""
        self.reason: Final = reason
        """Why it was taken; one of `agentstore.REASONS`."""
        self.step: Final = step
        """The caller's step, if it gave one."""
        self.status: Final = status
        """The caller's status (``"RUNNING"``), if it gave one."""
        self.metadata: Final = metadata
        """What the caller wants to find beside it; empty if nothing."""
        self.commit_id: Final = commit_id
        """8 random bytes of its writer: how a retry recognises its own commit."""
        self._created_us: Final = created_us

    @property
    def created_at(self) -> datetime:
        """Wall-clock time at which it was staged, UTC, to the microsecond. Nothing is decided by it."""
        seconds, micros = divmod(self._created_us, 1_000_000)
        return datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros)

    @classmethod
    def from_entry(cls, thread_id: str, thread_uuid: bytes, entry: Entry, where: str) -> Checkpoint:
        """The checkpoint of what was read. CorruptionError if its meta part is damaged."""
        meta = entry.meta
        try:
            step, status, metadata = cbor.decode(meta) if meta else (None, None, None)
        except (CorruptionError, LimitExceeded, ValueError, TypeError) as error:
            raise CorruptionError(
                f"{where}, checkpoint {entry.seq}: its step, status and metadata are damaged: {error}"
            ) from error
        return cls(
            thread_id,
            thread_uuid,
            entry.seq,
            None if entry.parent == NO_PARENT else entry.parent,
            entry.lsn,
            entry.created_us,
            entry.commit_id,
            entry.reason,
            step,
            status,
            metadata or {},
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return (self.thread_uuid, self.seq, self.commit_id) == (other.thread_uuid, other.seq, other.commit_id)

    def __hash__(self) -> int:
        return hash((self.thread_uuid, self.seq, self.commit_id))

    def __repr__(self) -> str:
        parent = "" if self.parent is None else f", parent={self.parent}"
        return f"Checkpoint({self.thread_id!r}, seq={self.seq}{parent}, reason={self.reason!r}, lsn={self.lsn})"
