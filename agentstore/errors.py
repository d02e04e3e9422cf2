"""Every exception that agentstore raises on purpose, in one tree.

A message says what happened, to which thread, segment or file, and what to do next.
Nothing here is raised for a programming error of the caller's that Python has a name
for (a wrong type is a ``TypeError``).
"""

from __future__ import annotations

from typing import Any


class AgentStoreError(Exception):
    """Base of all errors of this library."""


# --- opening a store -----------------------------------------------------------------


class OpenError(AgentStoreError):
    """The store could not be opened; nothing was changed."""


class NotAStore(OpenError):
    """The directory exists, is not empty, and is not an agentstore store."""


class StoreNotFound(OpenError):
    """There is no store at this path, and the caller asked not to create one."""


class FormatTooNew(OpenError):
    """The store was written by a newer version of agentstore."""


class StoreAlreadyOpen(OpenError):
    """This process has the store open already, with other options."""


class StoreInUse(OpenError):
    """The store is held by processes that this one cannot share it with (another pid namespace)."""


class RecoveryNeeded(OpenError):
    """The log must be replayed first, and the file system is read-only."""


class UnsupportedPlatform(OpenError):
    """This operating system or file system cannot keep the promise of durability."""


class StorePermissionError(OpenError):
    """The process may not read or write the files of the store."""


# --- the store as a whole ------------------------------------------------------------


class CorruptionError(AgentStoreError):
    """Acknowledged data is damaged. Never raised for a torn tail, never repaired silently."""


class StoreFailed(AgentStoreError):
    """A write or a sync failed: the store is out of use until every process closed it and it is opened again."""


class DiskFull(AgentStoreError):
    """No space for this write. Nothing was lost; the same call works again when there is room."""


class OutOfResources(AgentStoreError):
    """The system refused memory or another open file. Nothing was lost."""


class StoreFull(AgentStoreError):
    """The store reached the size of its memory map (``MAP_BYTES``)."""


class CommitUnknown(AgentStoreError):
    """The call was interrupted after its frame was complete: it may or may not be committed. Reload to know."""


class StoreClosed(AgentStoreError):
    """The store was closed."""


class ForkedStore(AgentStoreError):
    """The store was opened before a fork; the child must open it again."""


class ReadOnlyStore(AgentStoreError):
    """The store was opened with ``readonly=True``."""


class BackupFailed(AgentStoreError):
    """No copy was made, or its name is not durable, as the message then says. The store is as it was."""


class LimitExceeded(AgentStoreError):
    """A value is larger or deeper than a named limit."""


# --- threads and states --------------------------------------------------------------


class InvalidThreadId(AgentStoreError):
    """A thread id must be a str of 1 to 4,096 bytes of UTF-8."""


class ThreadNotFound(AgentStoreError):
    """The thread has no checkpoint yet."""


class ThreadGone(AgentStoreError):
    """The thread of this handle was deleted (and perhaps created anew: take a new handle)."""


class ThreadExists(AgentStoreError):
    """The thread to be created exists already."""


class StaleThread(AgentStoreError):
    """Somebody else moved the head of this thread; nothing was written. ``load()`` and decide again."""


class CheckpointNotFound(AgentStoreError):
    """The thread has no checkpoint with this seq."""


class CheckpointExpired(CheckpointNotFound):
    """The checkpoint was removed by retention; the message names the rule."""


class UnencodableState(AgentStoreError):
    """A value has a type that the store does not keep; the message has its path."""


class InvalidChange(AgentStoreError):
    """A change does not fit the state that it is applied to (its path is not there, not a list, …)."""


class WindowTooSmall(AgentStoreError):
    """What must be in a model's window (system prompt, first goal, pinned and newest messages) does not fit."""


# --- leases and effects --------------------------------------------------------------


class LeaseHeld(AgentStoreError):
    """Another worker holds the lease of this thread.

    `owner` is the name it gave, `expires_in_s` the seconds until anybody may take the lease.
    """

    def __init__(self, message: str, *, owner: str = "", expires_in_s: float = 0.0) -> None:
        super().__init__(message)
        self.owner = owner
        self.expires_in_s = expires_in_s


class Fenced(AgentStoreError):
    """The lease was lost: its fencing token is no longer the newest. Nothing was written, but a receipt at hand."""


class EffectError(AgentStoreError):
    """Base of the errors about effects."""


class EffectConflict(EffectError):
    """The same decision and call index came with another tool or other arguments."""


class EffectInFlight(EffectError):
    """The call is being made elsewhere, and its caller may be alive.

    `wait_s` is the number of seconds after which the call is in doubt at the latest.
    """

    def __init__(self, message: str, *, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class EffectInDoubt(EffectError):
    """The call was started and its outcome is not known; its rule must decide first.

    `rule` is that rule. `effect` is the handle to carry on with (None for `store.once`): ``effect.receipt(...)`` when
    the tool or a person knows the result, ``effect.retry(...)`` when it is known not to have happened.
    """

    def __init__(self, message: str, *, rule: str = "", effect: Any = None) -> None:
        super().__init__(message)
        self.rule = rule
        self.effect = effect


class EffectDuplicate(EffectError):
    """A receipt with another result is there already: the call was made twice. Both are kept, the first one counts.

    `result` is the first result. Nothing but the duplicate was written.
    """

    def __init__(self, message: str, *, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class EffectFailed(EffectError):
    """The recorded result of this call is a failure that is final: the tool said so when it was called."""


class EffectClosed(EffectError):
    """The handle cannot do this any more: its call has a receipt, or another caller has taken it over."""


class UnsupportedRule(EffectError):
    """The rule is not available in this version."""


# --- the runtime ---------------------------------------------------------------------


class RuntimeStateError(AgentStoreError):
    """Base of the errors about the states of a run."""


class IllegalTransition(RuntimeStateError):
    """The state machine has no such transition."""


class RunUnfinished(RuntimeStateError):
    """Another turn of this thread is unfinished; finish or cancel it before a new input."""


class RunFailed(RuntimeStateError):
    """The run reached FAILED: the state says why; the same call tries again, as often as ``max_retries`` allows."""


class CallNotWaiting(RuntimeStateError):
    """The thread has no such call waiting for a person."""
