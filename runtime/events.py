"""What a run tells whoever watches it, while it runs.

The durable record of the same is in the store (``agentstore events THREAD``); this is for
progress on a screen and for counting. An observer that raises stops nothing: it is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger("agentstore.runtime")


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One thing that happened in a run.

    `kind`: ``input``, ``resumed``, ``decision``, ``intent``, ``call``, ``receipt``, ``result``, ``retry``,
    ``state``, ``malformed``, ``duplicate``; of recovery: ``skip``, ``query``, ``replay``, ``asked``, ``wait``.
    `seq` is the newest confirmed checkpoint when it happened.
    """

    kind: str
    thread_id: str
    seq: int
    tool: str = ""
    index: int | None = None
    key: str = ""
    detail: str = ""


Observer = Callable[[RunEvent], Any]


def tell(observer: Observer | None, event: RunEvent) -> None:
    """Hand `event` to `observer`, if there is one."""
    if observer is None:
        return
    try:
        observer(event)
    except Exception:
        _log.exception("the observer of thread %r failed at a %r event", event.thread_id, event.kind)
