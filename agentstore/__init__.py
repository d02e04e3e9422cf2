"""agentstore: a checkpoint store on a write-ahead log, for agents that must not start over.

>>> from agentstore import Append, Set, Store
>>> import tempfile
>>> with tempfile.TemporaryDirectory() as directory, Store.open(directory + "/agents") as store:
...     thread = store.thread("user-42:report-7")
...     cp = thread.commit(Append("conversation_history", {"role": "user", "content": "hi"}), Set("step", 1))
...     thread.load()
{'conversation_history': [{'role': 'user', 'content': 'hi'}], 'step': 1}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentstore.changes import Append, Change, Delete, Set, Splice
from agentstore.checkpoint import Checkpoint
from agentstore.effect import Effect
from agentstore.effect_views import EffectView
from agentstore.effects import EffectCall
from agentstore.errors import (
    AgentStoreError,
    BackupFailed,
    CallNotWaiting,
    CheckpointExpired,
    CheckpointNotFound,
    CommitUnknown,
    CorruptionError,
    DiskFull,
    EffectClosed,
    EffectConflict,
    EffectDuplicate,
    EffectError,
    EffectFailed,
    EffectInDoubt,
    EffectInFlight,
    Fenced,
    ForkedStore,
    FormatTooNew,
    IllegalTransition,
    InvalidChange,
    InvalidThreadId,
    LeaseHeld,
    LimitExceeded,
    NotAStore,
    OpenError,
    OutOfResources,
    ReadOnlyStore,
    RecoveryNeeded,
    RunFailed,
    RuntimeStateError,
    RunUnfinished,
    StaleThread,
    StoreAlreadyOpen,
    StoreClosed,
    StoreFailed,
    StoreFull,
    StoreInUse,
    StoreNotFound,
    StorePermissionError,
    ThreadExists,
    ThreadGone,
    ThreadNotFound,
    UnencodableState,
    UnsupportedPlatform,
    UnsupportedRule,
    WindowTooSmall,
)
from agentstore.leases import Lease
from agentstore.pruning import Expiry
from agentstore.records import REASONS
from agentstore.retention import Retention
from agentstore.rules import NotDone, Unknown, is_not_done, is_unknown
from agentstore.store import Store
from agentstore.thread import Thread

if TYPE_CHECKING:
    from agentstore.aio import AsyncStore, AsyncThread
    from agentstore.aio_effects import AsyncEffect, AsyncLease
    from agentstore.context import legal_cuts, window
    from agentstore.extractive import ExtractiveSummarizer
    from agentstore.summarizing import originals, summarize
    from agentstore.summary import NotSummarized, Summarized, Summary
    from agentstore.tokens import Reported, count_tokens, estimate_message, text_counter

__version__ = "0.1.0"

__all__ = [
    "REASONS",
    "AgentStoreError",
    "Append",
    "AsyncEffect",
    "AsyncLease",
    "AsyncStore",
    "AsyncThread",
    "BackupFailed",
    "CallNotWaiting",
    "Change",
    "Checkpoint",
    "CheckpointExpired",
    "CheckpointNotFound",
    "CommitUnknown",
    "CorruptionError",
    "Delete",
    "DiskFull",
    "Effect",
    "EffectCall",
    "EffectClosed",
    "EffectConflict",
    "EffectDuplicate",
    "EffectError",
    "EffectFailed",
    "EffectInDoubt",
    "EffectInFlight",
    "EffectView",
    "Expiry",
    "ExtractiveSummarizer",
    "Fenced",
    "ForkedStore",
    "FormatTooNew",
    "IllegalTransition",
    "InvalidChange",
    "InvalidThreadId",
    "Lease",
    "LeaseHeld",
    "LimitExceeded",
    "NotAStore",
    "NotDone",
    "NotSummarized",
    "OpenError",
    "OutOfResources",
    "ReadOnlyStore",
    "RecoveryNeeded",
    "Reported",
    "Retention",
    "RunFailed",
    "RunUnfinished",
    "RuntimeStateError",
    "Set",
    "Splice",
    "StaleThread",
    "Store",
    "StoreAlreadyOpen",
    "StoreClosed",
    "StoreFailed",
    "StoreFull",
    "StoreInUse",
    "StoreNotFound",
    "StorePermissionError",
    "Summarized",
    "Summary",
    "Thread",
    "ThreadExists",
    "ThreadGone",
    "ThreadNotFound",
    "UnencodableState",
    "Unknown",
    "UnsupportedPlatform",
    "UnsupportedRule",
    "WindowTooSmall",
    "__version__",
    "count_tokens",
    "estimate_message",
    "is_not_done",
    "is_unknown",
    "legal_cuts",
    "originals",
    "summarize",
    "text_counter",
    "window",
]


_LATER = {
    "ExtractiveSummarizer": "extractive",
    "NotSummarized": "summary",
    "Reported": "tokens",
    "Summarized": "summary",
    "Summary": "summary",
    "count_tokens": "tokens",
    "estimate_message": "tokens",
    "legal_cuts": "context",
    "originals": "summarizing",
    "summarize": "summarizing",
    "text_counter": "tokens",
    "window": "context",
}
"""Names that few programs need, and the modules that have them."""


def __getattr__(name: str) -> Any:
    """What needs asyncio (it is a third of the time of the import otherwise) or is about windows, at its first use."""
    if name.startswith("Async") and name in __all__:
        from agentstore import aio

        return getattr(aio, name)
    if name in _LATER:
        import importlib

        return getattr(importlib.import_module(f"agentstore.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
