"""Who may act on a thread: the guards of whatever is written beside the checkpoints (effects, leases, events)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentstore.engine.api import Reader
from agentstore.errors import Fenced, ThreadNotFound
from agentstore.records import Head, shown

if TYPE_CHECKING:
    from agentstore.thread import Thread


def located(reader: Reader, thread: Thread) -> tuple[bytes, Head]:
    """Key prefix and head of a thread. ThreadNotFound if it has no record yet, ThreadGone if it was deleted. O(1)."""
    found = thread._find(reader)
    if found is None:
        raise ThreadNotFound(f"thread {shown(thread.id)} does not exist: its first checkpoint must be committed before")
    return found[0].prefix, found[2]


def enter(reader: Reader, thread: Thread) -> tuple[bytes, Head]:
    """As `located`, for whoever is about to act: Fenced if the handle's lease is not the newest any more. O(1)."""
    prefix, head = located(reader, thread)
    if thread._token is not None and thread._token != head.token:
        raise Fenced(
            f"thread {shown(thread.id)}: the lease with fencing token {thread._token} was lost, the newest token is "
            f"{head.token}; nothing was written. Take the lease again and load()"
        )
    return prefix, head
