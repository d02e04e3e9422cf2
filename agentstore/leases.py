"""Leases: the right of one worker to write a thread, and the fencing token that proves it.

A lease is a promise about time, and time alone proves nothing: a worker can stand still for an hour between looking
at its lease and writing. So each acquisition raises the *fencing token* in the thread's head record, every commit
through the handle compares it there, in the transaction that writes, and whoever lost the lease gets `Fenced`. The
lease itself only keeps workers from disturbing each other.

A lease whose owner is provably dead (another boot; or same boot and pid namespace and the pid is gone or has another
start time) is free at once, any other when it expires, on the boot clock. Tokens never go back, also not when the
thread is deleted and created anew.

Key: prefix, "l". Value, in CBOR: [1, name of the worker, owner, token, ttl ms, expires ns on the boot clock of the
owner's boot, acquired us, nonce].

A thread without a checkpoint has no records, and a worker wants its lease before it starts one. Such an *early* lease
stands under "w" and the key of the name, with the token that the thread will begin with (the store's token floor), and
moves to the thread at the first renewal after its first commit. Taking one over from an owner that may be alive raises
the floor, so that the old owner is fenced as always.
"""

from __future__ import annotations

from os import urandom
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agentstore import clock, events
from agentstore.clock import NS_PER_S, Owner
from agentstore.codec.cbor import decode, encode
from agentstore.engine import keys
from agentstore.engine.api import Reader, Tx
from agentstore.errors import AgentStoreError, CommitUnknown, CorruptionError, Fenced, LeaseHeld, ThreadGone
from agentstore.records import COUNTERS, COUNTERS_KEY, counters_of, shown

if TYPE_CHECKING:
    from types import TracebackType

    from agentstore.thread import Thread

RECORD_VERSION: Final = 1

TTL_S_DEFAULT: Final = 30.0
TTL_S_MAX: Final = 31 * 24 * 3600.0
"""Longest lease, in seconds; above the longest timeout of a call, so that a lease can outlast it."""
OWNER_BYTES_MAX: Final = 200
"""Longest name of a worker, in bytes of UTF-8."""

_LEASE: Final = keys.encode("l")
_EARLY: Final = keys.encode("w")


class Record(NamedTuple):
    """What stands in the store about a lease."""

    name: str
    owner: bytes
    token: int
    ttl_ms: int
    expires_ns: int
    acquired_us: int
    nonce: bytes


class Holder(NamedTuple):
    """Who has the lease of a thread, as `holder` found it."""

    name: str
    """The name that the worker gave."""
    process: Owner
    token: int
    """Its fencing token."""
    expires_in_s: float
    """Seconds until it expires; 0 if it is free already."""
    free: str
    """Why anybody may take it now; empty while nobody may."""


class Lease:
    """A lease that this process holds. Not thread-safe, as the `Thread` it belongs to; `renew` before it expires.

    As a context manager it is released at the end of the block. The handle keeps its token after that: what it still
    writes is fenced as soon as somebody else has taken the lease.

    >>> from agentstore import Set
    >>> from agentstore.testing.scratch import scratch_store
    >>> thread = scratch_store().thread("user-42:report-7")
    >>> with thread.lease("worker-1", ttl_s=30) as lease:
    ...     cp = thread.commit(Set("step", 1))
    ...     lease.ensure(20) > 20
    True
    """

    __slots__ = ("_record", "_released", "_thread", "owner")

    def __init__(self, thread: Thread, record: Record) -> None:
        self._thread = thread
        self._record = record
        self._released = False
        self.owner: Final = record.name
        """The name of the worker."""

    @property
    def token(self) -> int:
        """The fencing token: above that of every lease of this thread before."""
        return self._record.token

    @property
    def remaining_s(self) -> float:
        """Seconds until it expires, negative behind that; 0 after `release`. Says nothing about who holds it then."""
        if self._released:
            return 0.0
        return (self._record.expires_ns - clock.current().boottime_ns()) / NS_PER_S

    @property
    def ttl_s(self) -> float:
        """Seconds that an acquisition or a renewal lasts."""
        return self._record.ttl_ms / 1000

    def renew(self, ttl_s: float | None = None) -> None:
        """Let it last `ttl_s` seconds from now (None: as long as before). One transaction.

        Also after it expired, as long as nobody else took it: the token is still the newest then. Raises Fenced if
        somebody did, or after `release`.
        """
        if self._released:
            raise Fenced(f"thread {shown(self._thread.id)}: the lease of {self.owner!r} was released; take a new one")
        ttl_s = self.ttl_s if ttl_s is None else _checked_ttl(ttl_s)
        expires_ns = clock.current().boottime_ns() + int(ttl_s * NS_PER_S)
        renewed = self._record._replace(ttl_ms=round(ttl_s * 1000), expires_ns=expires_ns)

        def write(tx: Tx) -> Record:
            key, token = self._mine(tx)
            record = renewed._replace(token=token)
            tx.put(key, _encode(record))
            return record

        self._record = self._thread._store._engine.transact(write).value
        self._thread._token = self._record.token

    def ensure(self, seconds: float) -> float:
        """Make sure that it lasts `seconds` longer; return for how long it does. Before a call: its timeout and margin.

        Renews, with at least the usual time, only if it must: no transaction otherwise. Raises Fenced as `renew`.
        """
        if self.remaining_s < seconds:
            self.renew(max(self.ttl_s, seconds))
        return self.remaining_s

    def release(self) -> None:
        """Give it back: anybody may take it at once. Nothing happens if it was lost or given back. One transaction."""
        if self._released:
            return

        def write(tx: Tx) -> None:
            try:
                key, _ = self._mine(tx)
            except (Fenced, ThreadGone):
                return  # it is somebody else's by now: not ours to give back
            if key == _early_key(self._thread):
                # Kept, as expired: whoever comes next must get another token than this handle goes on having.
                tx.put(key, _encode(self._record._replace(expires_ns=0)))
            else:
                tx.delete(key)

        self._thread._store._engine.transact(write)
        self._released = True

    def _mine(self, tx: Tx) -> tuple[bytes, int]:
        """Where the record of this lease belongs now and its token, if it is the newest; Fenced if not."""
        found = self._thread._find(tx)
        early_key = _early_key(self._thread)
        early = tx.get(early_key)
        if early is not None and _decode(early).nonce == self._record.nonce:
            if found is None:
                return early_key, self.token
            tx.delete(early_key)  # the thread exists by now: its lease moves there
            return found[0].prefix + _LEASE, found[2].token
        if found is None or found[2].token != self.token:
            newest = "" if found is None else f", the newest token is {found[2].token}"
            raise Fenced(
                f"thread {shown(self._thread.id)}: the lease with fencing token {self.token} was lost{newest}; nothing "
                "was written. Take the lease again and load()"
            )
        return found[0].prefix + _LEASE, self.token

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except AgentStoreError as failure:
            if error is None:
                raise
            # What ended the block is what the caller has to know; the lease expires by itself.
            error.add_note(f"and the lease of thread {shown(self._thread.id)} could not be released: {failure}")

    def __repr__(self) -> str:
        state = "released" if self._released else f"{self.remaining_s:.1f} s left"
        return f"<Lease {self.owner!r} of {shown(self._thread.id)}, token {self.token}, {state}>"


def acquire(thread: Thread, owner: str, ttl_s: float = TTL_S_DEFAULT) -> Lease:
    """Take the lease of a thread for `ttl_s` seconds: what `Thread.lease` does. One transaction.

    `owner` is a name for messages; who it is, the store knows from boot id, pid and start time. From now on every
    commit through this handle carries the new fencing token. The thread need not exist yet. Raises LeaseHeld with the
    time to wait, ThreadGone, ReadOnlyStore.
    """
    if not isinstance(owner, str) or not 1 <= len(owner.encode("utf-8", "surrogatepass")) <= OWNER_BYTES_MAX:
        raise ValueError(f"the name of a worker is a str of 1 to {OWNER_BYTES_MAX} bytes, not {shown(owner)}")
    _checked_ttl(ttl_s)
    fresh = Record(owner, b"", 0, round(ttl_s * 1000), 0, 0, urandom(8))

    def write(tx: Tx) -> tuple[Record, bytes, bytes]:
        now = clock.current()
        mine = fresh._replace(
            owner=now.owner().pack(),
            expires_ns=now.boottime_ns() + int(ttl_s * NS_PER_S),
            acquired_us=now.wall_ns() // 1000,
        )
        found = thread._find(tx)
        if found is None:
            return _acquire_early(tx, thread, mine), b"", b""
        thread_keys, raw, head = found
        lease_key, early_key = thread_keys.prefix + _LEASE, _early_key(thread)
        early = tx.get(early_key)
        for data in (tx.get(lease_key), early):
            # An early lease below the head's token is of a name that was deleted since: nobody's any more.
            if data is not None and (before := _decode(data)).token >= head.token:
                free = _check_free(thread, before)
                events.record(tx, thread_keys.prefix, "lease", f"taken from {before.name!r}: {free}")
        if early is not None:
            tx.delete(early_key)
        head.token += 1
        mine = mine._replace(token=head.token)
        encoded = head.encode()
        tx.put(thread_keys.head, encoded)
        tx.put(lease_key, _encode(mine))
        return mine, raw, encoded

    try:
        record, raw, encoded = thread._store._engine.transact(write).value
    except CommitUnknown:
        landed = thread._store._engine.transact(lambda tx: _newest(tx, thread)).value
        if landed is None or landed.nonce != fresh.nonce:
            raise
        record, raw, encoded = landed, b"", b""
    thread._token = record.token
    if raw and thread._head_raw == raw:
        # Only the token changed, and by us: the next commit need not look closer.
        thread._head_raw, thread._head_token = encoded, record.token
    return Lease(thread, record)


def holder(thread: Thread) -> Holder | None:
    """Who has the lease of a thread, whether or not it is still theirs; None if nobody has. One snapshot."""
    with thread._store._engine.read() as snap:
        record = _newest(snap, thread)
    if record is None:
        return None
    free = _why_free(record)
    left_s = 0.0 if free else (record.expires_ns - clock.current().boottime_ns()) / NS_PER_S
    return Holder(record.name, Owner.unpack(record.owner), record.token, left_s, free)


def check(reader: Reader, prefix: bytes, token: int, name: str) -> list[str]:
    """Every invariant of the lease under a thread's prefix that does not hold, as sentences. O(1)."""
    data = reader.get(prefix + _LEASE)
    if data is None:
        return []
    try:
        record = _decode(data)
    except CorruptionError as error:
        return [f"thread {shown(name)}: {error}"]
    if record.token != token:
        return [f"thread {shown(name)}: its lease has fencing token {record.token}, its head {token}"]
    return []


def _acquire_early(tx: Tx, thread: Thread, mine: Record) -> Record:
    """Take the lease of a thread that does not exist yet."""
    key = _early_key(thread)
    number, threads, floor = counters_of(tx.get(COUNTERS_KEY))
    data = tx.get(key)
    if data is not None:
        before = _decode(data)
        _check_free(thread, before)
        if not clock.current().provably_dead(Owner.unpack(before.owner)):
            floor += 1
            tx.put(COUNTERS_KEY, COUNTERS.pack(number, threads, floor))
    mine = mine._replace(token=floor)
    tx.put(key, _encode(mine))
    return mine


def _early_key(thread: Thread) -> bytes:
    return _EARLY + thread._name_key


def _newest(reader: Reader, thread: Thread) -> Record | None:
    """The record of the thread's newest lease, wherever it stands; None if it was given back."""
    found = thread._find(reader)
    data = None if found is None else reader.get(found[0].prefix + _LEASE)
    if data is None:
        data = reader.get(_early_key(thread))
    return None if data is None else _decode(data)


def _check_free(thread: Thread, record: Record) -> str:
    """Why a lease that was not given back may be taken; LeaseHeld if it may not."""
    free = _why_free(record)
    if not free:
        left_s = (record.expires_ns - clock.current().boottime_ns()) / NS_PER_S
        raise LeaseHeld(
            f"thread {shown(thread.id)}: {record.name!r} ({Owner.unpack(record.owner)}) holds the lease and may be "
            f"alive; it expires in {left_s:.1f} s unless it is renewed. Wait for it, or take another thread",
            owner=record.name,
            expires_in_s=left_s,
        )
    return free


def _why_free(record: Record) -> str:
    """Why anybody may take the lease; empty while nobody may."""
    now = clock.current()
    process = Owner.unpack(record.owner)
    if process.boot_id != now.owner().boot_id:
        return f"its owner ({process}) ran before the last boot"
    if now.provably_dead(process):
        return f"its owner ({process}) is dead"
    if now.boottime_ns() >= record.expires_ns:
        return "it expired"
    return ""


def _checked_ttl(ttl_s: float) -> float:
    if not 0 < ttl_s <= TTL_S_MAX:
        raise ValueError(f"a lease lasts above 0 and at most {TTL_S_MAX:.0f} s, not {ttl_s!r}")
    return ttl_s


def _encode(record: Record) -> bytes:
    return encode([RECORD_VERSION, *record])


_TYPES: Final = [int, str, bytes, int, int, int, int, bytes]
assert len(_TYPES) == 1 + len(Record._fields)


def _decode(data: bytes) -> Record:
    parts: Any = decode(data)
    if parts.__class__ is not list or [type(part) for part in parts] != _TYPES or parts[0] != RECORD_VERSION:
        raise CorruptionError("the record of a lease has not the shape of one; run `agentstore verify`")
    return Record(*parts[1:])
