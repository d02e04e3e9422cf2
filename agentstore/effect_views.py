"""Effects as they are looked at: lists for recovery and for people, and the index of receipts.

Nothing here changes anything; all of it works on one snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from agentstore import ledger
from agentstore.clock import NS_PER_S, Owner
from agentstore.codec.cbor import canonical
from agentstore.effect_checks import check
from agentstore.effect_records import (
    Identity,
    Intent,
    Receipt,
    decode_intent,
    decode_pair,
    effect_slot,
    hash_call,
    identity_of,
    index_space,
    intent_space,
    receipt_space,
    unpack,
)
from agentstore.engine import keys
from agentstore.engine.api import Reader
from agentstore.errors import CorruptionError, EffectClosed, EffectFailed
from agentstore.fencing import located
from agentstore.records import shown
from agentstore.rules import Unknown

if TYPE_CHECKING:
    from agentstore.thread import Thread

__all__ = [
    "EffectView",
    "check",
    "check_call",
    "describe",
    "find_receipts",
    "finished_effects",
    "list_effects",
    "open_effects",
    "result_of",
]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

TIMEOUT_S_DEFAULT: Final = 60.0
TIMEOUT_S_MAX: Final = 30 * 24 * 3600.0
"""A month: longer waits belong into WAITING, not into a call."""
TOOL_NAME_BYTES_MAX: Final = 200
"""Limit of a tool's name in UTF-8 bytes: it stands in records and messages."""
CALL_INDEX_MAX: Final = 100_000


class EffectView:
    """One effect as it stood when it was read. Immutable, for any thread; values are decoded at use."""

    __slots__ = ("_intent", "_receipt", "duplicates", "identity", "status", "wait_s", "why")

    def __init__(self, identity: Identity, intent: Intent, receipt: Receipt | None, duplicates: int) -> None:
        standing = ledger.standing(ledger.Found(intent, receipt))
        self._intent = intent
        self._receipt = receipt
        self.identity: Final = identity
        """Decision uuid, decision seq, call index, generation."""
        self.status: Final = standing.state.value
        """``in_flight``, ``in_doubt``, ``not_started`` (it is known not to have happened) or ``done``."""
        self.why: Final = standing.why
        """What the status was concluded from."""
        self.wait_s: Final = standing.wait_s
        """Seconds until an effect in flight is in doubt at the latest."""
        self.duplicates: Final = duplicates
        """Number of receipts beside the first: how often the tool was called once too often."""

    @property
    def decision(self) -> tuple[bytes, int]:
        """The decision id, as `Thread.effect` takes it."""
        return self.identity.decision_uuid, self.identity.decision_seq

    @property
    def index(self) -> int:
        """Index of the call in its decision."""
        return self.identity.call

    @property
    def generation(self) -> int:
        """0, or higher when an approval edited the arguments."""
        return self.identity.generation

    @property
    def key(self) -> str:
        """Idempotency key, 64 hex digits."""
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
    def rule(self) -> str:
        """The rule that the tool had declared when the newest attempt began."""
        return self._intent.rule

    @property
    def attempt(self) -> int:
        """Number of the newest attempt, from 1."""
        return self._intent.attempt

    @property
    def owner(self) -> Owner:
        """The process that made the newest attempt."""
        return Owner.unpack(self._intent.owner)

    @property
    def token(self) -> int:
        """Fencing token of its lease; 0 without one."""
        return self._intent.token

    @property
    def deadline(self) -> float:
        """Second on the boot clock of the owner's boot from which others may judge the call."""
        return self._intent.deadline_ns / NS_PER_S

    @property
    def started_at(self) -> datetime:
        """Wall time at which the newest attempt began, UTC."""
        return _EPOCH + timedelta(microseconds=self._intent.started_us)

    @property
    def finished_at(self) -> datetime | None:
        """Wall time of the receipt, UTC; None while there is none."""
        return None if self._receipt is None else _EPOCH + timedelta(microseconds=self._receipt.at_us)

    @property
    def outcome(self) -> str | None:
        """``result``, ``failed`` or ``unknown``; None while there is no receipt."""
        return None if self._receipt is None else self._receipt.outcome

    @property
    def source(self) -> str | None:
        """Who said so: ``call``, ``query``, ``person`` or ``rule``."""
        return None if self._receipt is None else self._receipt.source

    @property
    def error(self) -> str | None:
        """What the tool said when it failed for good."""
        return None if self._receipt is None or self._receipt.outcome != "failed" else self._receipt.error

    @property
    def seq(self) -> int | None:
        """Checkpoint that was committed with the receipt; None if it was stored alone, or is not there."""
        return None if self._receipt is None else self._receipt.seq

    @property
    def result(self) -> Any:
        """The recorded result, as `Effect.result`."""
        what = f"{self.identity} ({self.tool})"
        if self._receipt is None:
            raise EffectClosed(f"{what} has no result yet: {self.why}")
        return result_of(self._receipt, what)

    def __repr__(self) -> str:
        return f"<EffectView {self.tool} {self.key[:12]} {self.outcome or self.status}, attempt {self.attempt}>"


def result_of(receipt: Receipt, what: str) -> Any:
    """What a receipt says: the result, `Unknown`, or EffectFailed. O(size)."""
    if receipt.outcome == "failed":
        raise EffectFailed(f"{what} failed for good: {receipt.error}")
    return Unknown if receipt.outcome == "unknown" else unpack(receipt.result)


def list_effects(thread: Thread, open: bool | None = None) -> list[EffectView]:
    """The effects of a thread in the order in which they began.

    ``open=True``: those without a receipt, in O(open); ``open=False``: those with one; None: all, O(effects).
    Raises ThreadNotFound for a thread without a checkpoint.
    """
    with thread._store._engine.read() as snap:
        prefix = located(snap, thread)[0]
        found: list[tuple[Identity, Intent, Receipt | None, int]] = []
        if open is not False:
            found.extend((identity, intent, None, 0) for identity, intent in open_effects(snap, prefix))
        if open is not True:
            found.extend(finished_effects(snap, prefix))
    # A `read` has no intent of its own (LSN 0); it began before its receipt, no matter how long.
    found.sort(key=lambda one: (one[1].lsn or (one[2].lsn if one[2] is not None else 0), one[0]))
    return [EffectView(*one) for one in found]


def find_receipts(thread: Thread, tool: str, arguments: Any) -> list[EffectView]:
    """The finished calls of `tool` with just these arguments in this thread, whatever decision they belonged to.

    For rewinds: on a new line the model may ask again for what was done on the line that was left. O(matches).
    """
    call_hash = hash_call(Identity(b"", 0, 0, 0), tool, canonical(arguments, ("arguments",)))[1]
    views = []
    with thread._store._engine.read() as snap:
        prefix = located(snap, thread)[0]
        space = index_space(prefix)
        narrow = index_space(prefix, call_hash)
        for key, _ in [*snap.scan(narrow, keys.end_of(narrow))]:
            _, *parts = keys.decode(key[len(space) :])
            identity = Identity(*parts)  # type: ignore[arg-type]  # the types it was written with
            slot = effect_slot(prefix, identity, call_hash)
            intent, receipt = ledger.find(snap, slot)
            if intent is None or receipt is None:
                raise CorruptionError(f"{identity} ({tool}) is indexed and has no receipt; run `agentstore verify`")
            views.append(EffectView(identity, intent, receipt, len(ledger.duplicates(snap, slot))))
    return views


def open_effects(reader: Reader, prefix: bytes) -> Iterator[tuple[Identity, Intent]]:
    """The calls under `prefix` without a receipt. Lazy."""
    space = intent_space(prefix)
    for key, data in reader.scan(space, keys.end_of(space)):
        yield identity_of(key, space)[0], decode_intent(data)


def finished_effects(reader: Reader, prefix: bytes) -> Iterator[tuple[Identity, Intent, Receipt, int]]:
    """The calls under `prefix` with a receipt, and how many duplicates each has. Lazy."""
    space = receipt_space(prefix)
    last: tuple[Identity, Intent, Receipt] | None = None
    count = 0
    for key, data in reader.scan(space, keys.end_of(space)):
        identity, receipt_id = identity_of(key, space)
        if receipt_id is not None:
            count += 1  # duplicates stand right behind the first receipt
            continue
        if last is not None:
            yield (*last, count)
        last, count = (identity, *decode_pair(data)), 0
    if last is not None:
        yield (*last, count)


def describe(thread: Thread, identity: Identity, tool: str) -> str:
    """A call as messages name it."""
    return f"thread {shown(thread.id)}: {identity} ({tool})"


def check_call(index: int, tool: str, timeout_s: float, generation: int | None) -> None:
    """Raise ValueError for parts of a call that are out of their limits."""
    if index.__class__ is not int or not 0 <= index <= CALL_INDEX_MAX:
        raise ValueError(f"the index of a call is an int from 0 to {CALL_INDEX_MAX}, not {index!r}")
    if tool.__class__ is not str or not 1 <= len(tool.encode("utf-8", "surrogatepass")) <= TOOL_NAME_BYTES_MAX:
        raise ValueError(f"the name of a tool is a str of 1 to {TOOL_NAME_BYTES_MAX} bytes, not {shown(tool)}")
    if not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise ValueError(f"the timeout of a call is above 0 and at most {TIMEOUT_S_MAX:.0f} s, not {timeout_s!r}")
    if generation is not None and (generation.__class__ is not int or not 0 <= generation <= CALL_INDEX_MAX):
        raise ValueError(f"the generation of a call is an int from 0 to {CALL_INDEX_MAX}, not {generation!r}")
