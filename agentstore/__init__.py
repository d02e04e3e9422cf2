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
)
from agentstore.leases import Lease
from agentstore.records import REASONS
from agentstore.rules import NotDone, Unknown, is_not_done, is_unknown
from agentstore.store import Store
from agentstore.thread import Thread

if TYPE_CHECKING:
    from agentstore.aio import AsyncStore, AsyncThread
    from agentstore.aio_effects import AsyncEffect, AsyncLease

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
    "OpenError",
    "OutOfResources",
    "ReadOnlyStore",
    "RecoveryNeeded",
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
    "Thread",
    "ThreadExists",
    "ThreadGone",
    "ThreadNotFound",
    "UnencodableState",
    "Unknown",
    "UnsupportedPlatform",
    "UnsupportedRule",
    "__version__",
    "is_not_done",
    "is_unknown",
]


def __getattr__(name: str) -> Any:
    """The classes that need asyncio, at their first use: it is a third of the time of the import otherwise."""
    if name.startswith("Async") and name in __all__:
        from agentstore import aio

        return getattr(aio, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
