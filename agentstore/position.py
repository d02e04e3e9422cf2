"""Where a handle stands in its thread: what it knows of the head, and how it stages, moves, and finds out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from agentstore import clock, deltas, fields, lines, loading, pruning, records
from agentstore.changes import Change
from agentstore.checkpoint import Checkpoint
from agentstore.deltas import Plan
from agentstore.engine.api import Confirmed, Reader, Tx
from agentstore.errors import CheckpointNotFound, CorruptionError, StaleThread, ThreadGone, ThreadNotFound
from agentstore.fields import State
from agentstore.packs import PACK_MEMBERS
from agentstore.records import FLAG_SUMS, REASON_CODES, Head, ThreadKeys, shown
from agentstore.snapshots import is_due
from agentstore.staging import Guard, Staged, encode_meta, written_nothing

if TYPE_CHECKING:
    from agentstore.effects import EffectCall
    from agentstore.store import Store

T = TypeVar("T")

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
"""A handle keeps the encoded bytes of a field up to this size, in bytes, so that the next difference reads nothing."""

ASK_EVERY: Final = 16
"""After so many more checkpoints the handle looks again whether packs or a snapshot are due."""

SUMS_EVERY: Final = 16
"""Every so many checkpoints one has the checksums of all fields (of states with very many fields: fewer do)."""


class Position:
    """The part of a `Thread` that nobody outside of the store uses, but for effects and leases. Not thread-safe."""

    def __init__(self, store: Store, thread_id: str) -> None:
        self._name = records.thread_id_bytes(thread_id)
        self.id: Final = thread_id
        """The caller's id of the thread."""
        self._store = store
        self._name_key = records.name_key(self._name)
        self._keys: ThreadKeys | None = None  # None: not looked up, or there is no such thread
        self._uuid = store._random_bytes(16)  # of the thread if this handle creates it
        self._opened = False
        self._seq: int | None = None
        self._next_seq = 0
        self._commit_id = bytes(8)
        self._head_raw: bytes | None = None
        self._head_token = 0
        self._checkpoint: Checkpoint | None = None
        self._state: State = {}
        self._sum = 0
        self._size = 0
        self._since_sums = 0
        self._cost = loading.Cost()  # of what stands between the newest snapshot and here, if all lines were one
        self._unpacked = 0
        self._has_large = False  # bytes of fields above the limit are in memory until the next commit
        self._token: int | None = None  # of the lease that this handle holds
        self._pending: Staged | None = None  # written in a transaction whose outcome is not known yet
        self._stale = False
        self.recovered: Checkpoint | None = None
        """After `load`: the checkpoint of this handle's last commit, if that ended in an error and was written."""

    def _stage(
        self,
        changes: tuple[Change, ...],
        *,
        reason: str = "manual",
        step: int | None = None,
        status: str | None = None,
        metadata: dict[str, Any] | None = None,
        parent: int | None = None,
        extra_guard: Guard | None = None,
        intents: Sequence[EffectCall] = (),
    ) -> Staged:
        """Encode, diff and compress a commit, holding no locks."""
        base, before, fetch = self._base(parent)
        plan = deltas.plan(base, changes, fetch)
        return self._finish_staging(base, before, plan, reason, step, status, metadata, parent, extra_guard, intents)

    def _finish_staging(
        self,
        base: State,
        before: int,
        plan: Plan,
        reason: str,
        step: int | None,
        status: str | None,
        metadata: dict[str, Any] | None,
        parent: int | None,
        guard: Guard | None = None,
        intents: Sequence[EffectCall] = (),
    ) -> Staged:
        if reason not in REASON_CODES:
            raise ValueError(f"there is no reason {reason!r}; the reasons are {', '.join(REASON_CODES)}")
        if step is None and status is None and not metadata:
            meta = b""
            kept: dict[str, Any] = {}
        else:
            meta, kept = encode_meta(step, status, metadata)
        if base is not self._state:
            guard = self._rewind_guard(parent, guard)
        size = self._size if base is self._state else sum([field.size for field in base.values()])
        if size + plan.grown > fields.STATE_BYTES_MAX:
            fields.check_size(size + plan.grown, f"thread {shown(self.id)}")
        since = self._since_sums
        flags = 0
        sums: list[Any] | None = None
        if base is not self._state or (since >= SUMS_EVERY and since * 8 >= len(base)):
            flags = FLAG_SUMS
            sums = deltas.sums_after(base, plan)
        zipped, blob = records.squeeze(records.pack_payload(plan.ops, sums))
        return Staged(
            self,
            base,
            plan,
            seq=self._next_seq,
            parent=self._seq if parent is None else parent,
            state_sum=plan.sum_after(before, base),
            created_us=clock.current().wall_ns() // 1000,
            commit_id=self._store._commit_id(),
            flags=flags | zipped,
            reason=reason,
            meta=(step, status, kept),
            meta_bytes=len(meta),
            body=meta + blob if meta else blob,
            intents=intents,
            guard=guard,
        )

    def _rewind_guard(self, parent: int | None, guard: Guard | None) -> Guard:
        """`guard`, and no call may be open that the line of `parent` does not know."""
        from agentstore import effect_forks

        keys = self._keys
        assert keys is not None and parent is not None

        def check(tx: Tx) -> None:
            if lines.find(tx, keys.prefix, parent, self._where) is None:
                raise self._not_there(tx, parent)
            effect_forks.guard_move(tx, keys.prefix, self._uuid, parent, self.id)
            if guard is not None:
                guard(tx)

        return check

    def _base(self, parent: int | None) -> tuple[State, int, deltas.Fetch]:
        """The state to commit on, its checksum, and a reader of its bytes."""
        if not self._opened:
            self._open()
        if self._pending is not None:
            self._settle()
        if parent is None or parent == self._seq:
            return self._state, self._sum, self._fetch
        keys = self._keys
        where = self._where
        if keys is None or parent.__class__ is not int or not 0 <= parent < self._next_seq:
            raise CheckpointNotFound(f"{where}: there is no checkpoint {parent!r} to commit on")
        with self._store._engine.read() as snap, self._naming_the_rule(snap, parent):
            found = loading.load_sums(snap, keys.prefix, parent, where)
        base = found.state

        def fetch(name: str) -> bytes:
            self._read_bodies(base, parent)
            return base[name].body()

        return base, fields.state_sum(base), fetch

    def _fetch(self, name: str) -> bytes:
        assert self._seq is not None
        try:
            self._read_bodies(self._state, self._seq)
        except CheckpointNotFound as error:
            self._stale = True
            raise StaleThread(
                f"{self._where}: this handle stands on {self._seq}, from which somebody moved the head and which"
                " retention removed; nothing was written. load() and decide again"
            ) from error
        return self._state[name].body()

    def _read_bodies(self, state: State, at: int) -> None:
        """Complete a state of which only the checksums are known."""
        keys = self._keys
        assert keys is not None
        with self._store._engine.read() as snap:
            found = loading.load(snap, keys.prefix, at, self._where)
            loading.verify(found, snap, keys.prefix, at, self._where)
        for name, field in found.state.items():
            state[name].parts = field.parts
        self._has_large = True

    # --- the transaction and after -----------------------------------------------------

    def _transact(self, fn: Callable[[Tx], T]) -> Confirmed[T]:
        """`engine.transact`, and the handle remembers if the outcome is not known."""
        try:
            return self._store._engine.transact(fn)
        except BaseException as error:
            if written_nothing(error):
                self._pending = None
            if isinstance(error, StaleThread):
                self._stale = True
            raise

    def _advance(self, staged: Staged, checkpoint: Checkpoint) -> None:
        """Move to a commit that was confirmed. O(change)."""
        self._pending = None
        base, plan = staged.base, staged.plan
        if self._keys is None:
            self._keys = staged.written_keys
            if self._token is not None:
                self._token = staged.written_token
        if base is self._state:
            self._size += plan.grown
        else:
            self._state = base
            self._size = sum([field.size for field in base.values()]) + plan.grown
        deltas.adopt(base, plan, BODY_BYTES_MAX)
        if self._has_large:
            fields.forget_large(base, BODY_BYTES_MAX)
            self._has_large = False
        self._sum = staged.state_sum
        self._seq = staged.seq
        self._next_seq = staged.seq + 1
        self._commit_id = staged.commit_id
        self._head_raw = staged.written_head
        self._head_token = staged.written_token
        self._checkpoint = checkpoint
        self._since_sums = 0 if staged.flags & FLAG_SUMS else self._since_sums + 1
        cost = self._cost
        cost.deltas += 1
        cost.content_bytes += len(staged.body)
        self._unpacked += 1
        if self._unpacked % ASK_EVERY == 1:
            self._look_after()

    def _look_after(self) -> None:
        """Have packs made, and a snapshot taken if loading has become too expensive."""
        keys = self._keys
        if keys is None or self._seq is None or self._store.readonly:
            return
        upkeep = self._store._upkeep
        if self._unpacked == 1:
            upkeep.wrote(keys.number)
        elif self._unpacked > PACK_MEMBERS:
            self._unpacked = 1
            upkeep.want_packs(keys.number)
        if is_due(self._cost, self._size):
            self._cost = loading.Cost()
            upkeep.want_snapshot(keys.number, self._seq, self._commit_id)

    def _settle(self) -> None:
        """Find out what became of a commit that was interrupted, by a transaction: that finishes what others left."""
        pending = self._pending
        assert pending is not None
        raw = self._store._engine.transact(self._read_head).value
        if raw != self._head_raw:
            raise StaleThread(
                f"{self._where}: the commit of checkpoint {pending.seq} was interrupted and the head has moved;"
                " load() tells in .recovered whether it was written"
            )
        self._pending = None

    def _read_head(self, reader: Reader) -> bytes | None:
        if self._keys is not None:
            return reader.get(self._keys.head)
        named = reader.get(self._name_key)
        return None if named is None else reader.get(ThreadKeys(records.name_of(named)[0]).head)

    # --- opening and loading -----------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"thread {shown(self.id)}"

    def _number(self, reader: Reader) -> int:
        """The thread's number, as `reader` sees it. ThreadNotFound, ThreadGone. At most one get."""
        if self._keys is not None:
            return self._keys.number
        named = reader.get(self._name_key)
        if named is None:
            raise ThreadNotFound(f"{self._where} does not exist: it has no checkpoint yet")
        return records.name_of(named)[0]

    def _prefix(self, number: int) -> bytes:
        """The beginning of all the thread's keys."""
        return (
            self._keys.prefix if self._keys is not None and self._keys.number == number else ThreadKeys(number).prefix
        )

    def _find(self, reader: Reader) -> tuple[ThreadKeys, bytes, Head] | None:
        """Keys and head record of the thread; None if there is none. ThreadGone if this handle's was deleted."""
        keys = self._keys
        if keys is None:
            named = reader.get(self._name_key)
            if named is None:
                return None
            keys = ThreadKeys(records.name_of(named)[0])
        raw = reader.get(keys.head)
        if raw is None:
            raise ThreadGone(f"{self._where} was deleted; take a new handle from store.thread()")
        return keys, raw, Head.decode(raw)

    def _open(self) -> None:
        """Stand on the head as it is now, knowing the checksums of the state. O(1) reads."""
        with self._store._engine.read() as snap:
            self._open_from(snap)

    def _open_from(self, snap: Reader) -> None:
        found = self._find(snap)
        if found is not None:
            keys, raw, head = found
            self._stand(keys, raw, head, loading.load_sums(snap, keys.prefix, head.seq, self._where))
            # What a load would read, nearly: branches are counted as if they were one line.
            self._cost.deltas = head.seq - loading.snapshot_before(snap, keys.prefix, head.seq + 1)[0]
        self._opened = True

    def _stand(self, keys: ThreadKeys, raw: bytes, head: Head, found: loading.Loaded) -> None:
        """Take over what was read of the head."""
        self._keys = keys
        self._uuid = head.uuid
        self._seq = head.seq
        self._next_seq = head.next_seq
        self._commit_id = head.commit_id
        self._head_raw = raw
        self._head_token = head.token
        self._opened = True
        self._stale = False
        self._pending = None
        if found.entry.commit_id != head.commit_id:
            raise CorruptionError(f"{self._where}: the head record and checkpoint {head.seq} are not of one commit")
        self._state = found.state
        self._sum = fields.state_sum(found.state)
        self._size = sum([field.size for field in found.state.values()])
        self._since_sums = found.since_sums
        self._cost = found.cost
        self._checkpoint = Checkpoint.from_entry(self.id, self._uuid, found.entry, self._where)

    def _landed(self, reader: Reader, keys: ThreadKeys, pending: Staged) -> Checkpoint | None:
        """The checkpoint of an interrupted commit, if it was written."""
        entry = lines.find(reader, keys.prefix, pending.seq, self._where)
        if entry is None or entry.commit_id != pending.commit_id:
            return None
        return Checkpoint.from_entry(self.id, self._uuid, entry, self._where)

    def _load_at(self, at: int) -> loading.Loaded:
        if at.__class__ is not int or at < 0:
            raise CheckpointNotFound(f"{self._where}: there is no checkpoint {at!r}; they are numbered from 0")
        with self._store._engine.read() as snap, self._naming_the_rule(snap, at):
            prefix = self._found(snap)[0].prefix
            loaded = loading.load(snap, prefix, at, self._where)
            loading.verify(loaded, snap, prefix, at, self._where)
        return loaded

    @contextmanager
    def _naming_the_rule(self, reader: Reader, seq: int) -> Iterator[None]:
        """A checkpoint that is not there is said to be removed by retention, if it was."""
        try:
            yield
        except CheckpointNotFound as error:
            raise self._not_there(reader, seq) from error

    def _not_there(self, reader: Reader, seq: object) -> CheckpointNotFound:
        keys, _, head = self._found(reader)
        return pruning.not_there(reader, keys, head, seq, self._where)

    def _found(self, reader: Reader) -> tuple[ThreadKeys, bytes, Head]:
        """`_find`, of a thread that has a checkpoint. ThreadNotFound, ThreadGone."""
        found = self._find(reader)
        if found is None:
            raise ThreadNotFound(f"{self._where} has no checkpoint yet")
        return found
