"""Removing what retention lets go, a record at a time, from the newest to the oldest.

So that at every moment each checkpoint has its parent: what is removed has no child left but those that are rewritten
in the same transaction to stand on their nearest kept ancestor, as the difference of the two states; or, where none is
kept, as a root whose state is a snapshot. What cannot be reached any more is then in no record.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from agentstore import (
    clock,
    deleting,
    deltas,
    effect_forks,
    fields,
    lines,
    loading,
    packing,
    packs,
    receipts,
    records,
    snapshots,
)
from agentstore.codec import zstd
from agentstore.effect_records import MARK_NOT_DONE, decode_intent, identity_of, intent_space
from agentstore.engine import keys as key_codec
from agentstore.engine.api import Reader, Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.errors import CheckpointExpired, CheckpointNotFound, CorruptionError
from agentstore.fields import Op, State
from agentstore.packing import Piece, Single
from agentstore.packs import NO_PARENT, Entry
from agentstore.records import FLAG_ROOT, VERSION, Head, ThreadKeys, int_part
from agentstore.retention import Retention, kept_parents

logger = logging.getLogger("agentstore")

NEW_COMMITS_MAX: Final = 256
"""After so many commits since a plan was made it is made again."""
PLANS_MAX: Final = 20
"""So often a plan is made again because somebody was faster; then the rest waits for the next time."""

RULE: Final = key_codec.encode("m", "retention")
_EXPIRED: Final = key_codec.encode("x")
_RULE: Final = key_codec.encode("y")


@dataclass(frozen=True, slots=True)
class Expiry:
    """What would go of a thread, or went."""

    thread: str
    removed: dict[int, str]
    """Why each checkpoint goes, by seq; of a thread that goes whole, all of them."""
    kept: dict[int, str]
    """Why each of the others stays."""
    bytes: int
    """Stored bytes of what goes; a little of it comes back as differences between what stays."""
    whole: bool = False
    """Whether the thread itself is deleted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a rule says of a thread as it was read."""

    keys: ThreadKeys
    name: str
    rule: str
    next_seq: int
    entries: list[Entry]
    kept: dict[int, str]
    parents: dict[int, int]
    """The parent that each kept checkpoint gets."""
    head: int
    is_over: bool
    """Whether the whole thread goes."""
    mark: bytes | None
    """What was removed last. Another one since then: somebody has another plan, and new parents for what is kept."""

    @property
    def dead(self) -> set[int]:
        return {entry.seq for entry in self.entries if entry.seq not in self.kept}


def rule_key(keys: ThreadKeys) -> bytes:
    """The key of a thread's own rule."""
    return keys.prefix + _RULE


def rule_of(reader: Reader, keys: ThreadKeys, where: str, default: Retention | None = None) -> Retention | None:
    """The rule for a thread: its own, else `default`, else the store's; None if nothing is ever removed."""
    raw = reader.get(rule_key(keys))
    if raw is not None:
        return Retention.decode(raw, where)
    if default is not None:
        return default
    raw = reader.get(RULE)
    return None if raw is None else Retention.decode(raw, "the store")


# --- planning --------------------------------------------------------------------------


def plan(reader: Reader, keys: ThreadKeys, name: str, rule: Retention) -> Plan | None:
    """What `rule` says of a thread; None if it is gone. O(checkpoints)."""
    where = f"thread {records.shown(name)}"
    raw = reader.get(keys.head)
    if raw is None:
        return None
    head = Head.decode(raw)
    entries = [entry.alone() for piece in packing.pieces(reader, keys, where) for entry in packing.entries_of(piece)]
    now_us = clock.current().wall_ns() // 1000
    held = _held(reader, keys, head, name)
    kept = rule.why_kept(entries, head=head.seq, held=held, now_us=now_us)
    is_over = any(rule.is_over(entry, now_us) for entry in entries if entry.seq == head.seq)
    if is_over:
        is_over = not _is_in_use(reader, keys)
    mark = reader.get(keys.prefix + _EXPIRED)
    return Plan(
        keys, name, repr(rule), head.next_seq, entries, kept, kept_parents(entries, kept), head.seq, is_over, mark
    )


def _is_in_use(reader: Reader, keys: ThreadKeys) -> bool:
    """Whether a thread that is finished stays: a call of it is open, or a checkpoint is pinned."""
    low = records.pins(keys.prefix)
    return any(True for _ in reader.scan(low, records.end_of(low))) or any(True for _ in _open_calls(reader, keys))


def _held(reader: Reader, keys: ThreadKeys, head: Head, name: str) -> dict[int, str]:
    """What stays whatever the rule is."""
    held: dict[int, str] = {}
    node, decision = effect_forks.decision_node(reader, keys.prefix, head.uuid, head.seq, name)
    if decision is not None:
        held[node] = "the newest decision"
    for seq in _open_decisions(reader, keys, head.uuid):
        held[seq] = "the decision of an open call"
    low = records.pins(keys.prefix)
    for key, _ in reader.scan(low, records.end_of(low)):
        held[records.seq_of(key, low)] = "pinned"
    return held


def _open_decisions(reader: Reader, keys: ThreadKeys, uuid: bytes) -> Iterator[int]:
    """The checkpoints that have, or as the first of a fork carry, the decision of a call without a receipt."""
    for decision in _open_calls(reader, keys):
        if decision[0] == uuid:
            yield decision[1]
        else:
            yield from effect_forks.carriers(reader, keys.prefix, decision)


def _open_calls(reader: Reader, keys: ThreadKeys) -> Iterator[tuple[bytes, int]]:
    """The ids of the decisions of the calls without a receipt."""
    space = intent_space(keys.prefix)
    for key, data in reader.scan(space, records.end_of(space)):
        identity, _ = identity_of(key, space)
        if decode_intent(data).mark != MARK_NOT_DONE:
            yield identity.decision_uuid, identity.decision_seq


def expiry_of(made: Plan) -> Expiry:
    """The plan as users see it."""
    removed = {entry.seq: made.rule for entry in made.entries if entry.seq not in made.kept}
    size = sum(entry.stored_bytes for entry in made.entries if entry.seq not in made.kept)
    return Expiry(made.name, removed, dict(made.kept), size)


# --- doing -----------------------------------------------------------------------------


def prune(engine: EmbeddedEngine, number: int, name: str, rule: Retention, removed: set[int]) -> None:
    """Remove what `rule` lets go of a thread; the checkpoints are added to `removed`, also before an error.

    A transaction for each record that changes.

    O(checkpoints), and O(size of the state) for each kept one whose parent goes. CorruptionError: what is damaged
    stays as it is, with all that stands on it.
    """
    for _ in range(PLANS_MAX):
        with engine.read() as snap:
            made = plan(snap, ThreadKeys(number), name, rule)
        if made is None or not made.dead or _carry_out(engine, made, removed):
            break


def _carry_out(engine: EmbeddedEngine, made: Plan, removed: set[int]) -> bool:
    """Whether all of the plan was done; what was is added to `removed`."""
    where, dead, mark = f"thread {records.shown(made.name)}", made.dead, made.mark
    with engine.read() as snap:
        places = [(piece.last, isinstance(piece, Single)) for piece in packing.pieces(snap, made.keys, where)]
    for last, alone in reversed(places):
        with engine.read() as snap:
            if snap.get(made.keys.prefix + _EXPIRED) != mark:
                return False
            piece = packing.piece_at(snap, made.keys, last, alone, where)
            if piece is None:
                return False
            going = {entry.seq for entry in packing.entries_of(piece)} & dead
            if not going and not _has_dead_parent(piece, dead):
                continue
            if piece.last >= made.next_seq:
                return False  # packed meanwhile with what the plan does not know
            rewritten = _Rewriting(snap, made, piece, where).run()
        try:
            now = engine.transact(lambda tx, r=rewritten, g=going, m=mark: r.write(tx, g, dead, m)).value  # type: ignore[misc]  # defaults of a lambda have no types
        except _Again:
            return False
        if now is None:
            return False
        mark = now
        removed |= going
    return True


def _has_dead_parent(piece: Piece, dead: set[int]) -> bool:
    return any(entry.parent in dead for entry in packing.entries_of(piece))


class _Rewriting:
    """One record, as it is without what goes and with new parents for what stays."""

    def __init__(self, reader: Reader, made: Plan, piece: Piece, where: str) -> None:
        self._reader = reader
        self._plan = made
        self._piece = piece
        self._where = where
        self._keys = made.keys
        self._state: State = {}
        self._at = NO_PARENT
        self._run: list[Entry] = []
        self._ops: list[list[Op]] = []
        self._before = 0
        self._size = 0
        self._dictionary: zstd.Dictionary | None = None
        self.puts: dict[bytes, bytes] = {}
        self.packs: dict[int, bytes] = {}
        self.roots: dict[int, snapshots.Prepared | None] = {}
        """The snapshots of new roots; None where it is there already."""

    def run(self) -> _Rewriting:
        """Work out what is to be written. O(size of the record), and of the states of what gets another parent."""
        piece = self._piece
        if not isinstance(piece, Single) and piece.dictionary:
            self._dictionary = lines.dictionaries_of(self._reader)(piece.dictionary)
        ops = None if isinstance(piece, Single) else piece.all_ops()
        for at, entry in enumerate(packing.entries_of(piece)):
            if entry.seq not in self._plan.kept:
                continue
            parent = self._plan.parents[entry.seq]
            if entry.flags & FLAG_ROOT:
                self._end_run()
                self.puts[self._keys.checkpoints + int_part(entry.seq)] = piece.raw
            elif parent == NO_PARENT and entry.parent != NO_PARENT:
                self._root(entry)
            else:
                known = None if ops is None else ops[at]
                self._keep(entry, parent, known if parent == entry.parent else self._difference(entry, parent))
        self._end_run()
        return self

    def _keep(self, entry: Entry, parent: int, ops: list[Op] | None) -> None:
        ops = entry.ops() if ops is None else ops
        size = packs.size_of(ops)
        # A difference may be as large as the state where what it takes the place of was small.
        if not self._run or self._run[-1].seq != parent or self._size + size > packing.CONTENT_BYTES_MAX:
            self._end_run()
            if self._at != parent or parent == NO_PARENT:
                self._state = self._sums(parent)
            self._before, self._size = fields.state_sum(self._state), 0
        self._size += size
        self._ops.append(packs.relative(ops, self._state))
        for field in self._state.values():
            field.parts = None
        self._run.append(entry.with_parent(parent))
        self._at = entry.seq
        if entry.state_sum is not None and fields.state_sum(self._state) != entry.state_sum:
            raise CorruptionError(f"{self._where}, checkpoint {entry.seq}: the fields do not match their checksum")

    def _sums(self, seq: int) -> State:
        if seq == NO_PARENT:
            return {}
        return loading.load_sums(self._reader, self._keys.prefix, seq, self._where).state

    def _difference(self, entry: Entry, parent: int) -> list[Op]:
        """The ops from a kept ancestor's state to this one's."""
        old, new = self._load(parent).state, self._load(entry.seq).state
        return deltas.plan_between(old, new).ops

    def _load(self, seq: int) -> loading.Loaded:
        loaded = loading.load(self._reader, self._keys.prefix, seq, self._where, check_each=True)
        loading.verify(loaded, self._reader, self._keys.prefix, seq, self._where)
        return loaded

    def _root(self, entry: Entry) -> None:
        """Nothing before it stays: its state becomes a snapshot, and its record says so."""
        self._end_run()
        loaded = loading.load(self._reader, self._keys.prefix, entry.seq, self._where, check_each=True)
        for name in loaded.state:
            if not fields.verify_parts(loaded.state[name]):
                raise CorruptionError(
                    f"{self._where}, checkpoint {entry.seq}: field {name!r} does not match its checksum"
                )
        total = fields.state_sum(loaded.state)
        if loaded.state_sum not in (None, total):
            raise CorruptionError(f"{self._where}, checkpoint {entry.seq}: the fields do not match their checksum")
        there = loaded.snapshot_seq == entry.seq
        self.roots[entry.seq] = None if there else snapshots.prepare(self._keys, loaded)
        record = lines.record_of(entry, NO_PARENT, total, [], None, FLAG_ROOT)
        self.puts[self._keys.checkpoints + int_part(entry.seq)] = record
        self._state = fields.state_from_sums(fields.sums_of(loaded.state))
        self._at = entry.seq

    def _end_run(self) -> None:
        """Have the run that ends here written, as a pack if it is one."""
        run, ops = self._run, self._ops
        self._run, self._ops = [], []
        if not run:
            return
        after, sums = fields.state_sum(self._state), fields.sums_of(self._state)
        if len(run) == 1:
            absolute = packs.absolute(ops[0], self._sums_before(run[0]))
            record = lines.record_of(run[0], run[0].parent, after, absolute, sums, 0)
            self.puts[self._keys.checkpoints + int_part(run[0].seq)] = record
            return
        few = len(sums) <= packing.SUMS_FIELDS_PER_MEMBER * len(run)
        self.packs[run[-1].seq] = packs.encode(
            run,
            ops,
            before=self._before,
            after=after,
            sums=sums if few else None,
            level=packing.PACK_LEVEL,
            dictionary=self._dictionary,
        )

    def _sums_before(self, entry: Entry) -> State:
        return self._sums(entry.parent)

    # --- in the transaction --------------------------------------------------------------

    def write(self, tx: Tx, going: set[int], dead: set[int], mark: bytes | None) -> bytes | None:
        """Swap the record, if everything is as it was planned for; the new mark, or None if it is not. O(record)."""
        made, keys = self._plan, self._keys
        if tx.get(keys.prefix + _EXPIRED) != mark or packing.raw_of(tx, keys, self._piece) != self._piece.raw:
            return None
        if not _still_holds(tx, made, going, dead, self._where):
            return None
        packing.delete(tx, keys, self._piece)
        for key, value in self.puts.items():
            tx.put(key, value)
        for last, raw in self.packs.items():
            lines.put_pack(tx, keys.prefix, last, raw)
        low = records.snapshots(keys.prefix)
        for seq, root in self.roots.items():
            if tx.get(low + int_part(seq)) is None if root is None else not root.write(tx):
                raise _Again
        snapshots.remove(tx, keys, going, self._where)
        record = _expired_record(tx, made.rule)
        tx.put(keys.prefix + _EXPIRED, record)
        return record


class _Again(Exception):
    """Somebody took or dropped the snapshot meanwhile: nothing of this transaction is to stay."""


def _still_holds(tx: Tx, made: Plan, going: set[int], dead: set[int], where: str) -> bool:
    """Whether nothing began since the plan that needs what goes: a child, a pin, an open call."""
    raw = tx.get(made.keys.head)
    if raw is None:
        return False
    head = Head.decode(raw)
    if head.seq in dead or head.next_seq - made.next_seq > NEW_COMMITS_MAX:
        return False
    prefix = made.keys.prefix
    parents: dict[int, int] = {}
    for seq in range(made.next_seq, head.next_seq):
        entry = lines.find(tx, prefix, seq, where)
        if entry is not None:
            if entry.parent in dead:
                return False
            parents[seq] = entry.parent
    at = head.seq
    while at >= made.next_seq:
        at = parents.get(at, NO_PARENT)
    if at != made.head:
        return False  # the head is on another line, whose newest decision is another one
    low = records.pins(prefix)
    if any(tx.get(low + int_part(seq)) is not None for seq in going):
        return False
    return not any(seq in dead for seq in _open_decisions(tx, made.keys, head.uuid))


# --- all threads -----------------------------------------------------------------------


def apply(
    engine: EmbeddedEngine,
    default: Retention | None,
    numbers: Iterable[int] | None = None,
    *,
    dry_run: bool = False,
    damaged: dict[int, str] | None = None,
) -> Iterator[Expiry]:
    """Apply to each thread its own rule, else `default`, else the store's; what went (`dry_run`: would go) of each.

    Lazy, a thread at a time. What is damaged is left as it is, and logged, and said in `damaged` by its number.
    """
    for number in _numbers(engine) if numbers is None else numbers:
        keys = ThreadKeys(number)
        found, text = None, f"number {number}"
        try:
            with engine.read() as snap:
                name = snap.get(records.CREATED + int_part(number))
                if name is None:
                    continue
                text = name.decode()
                rule = rule_of(snap, keys, f"thread {records.shown(text)}", default)
                made = None if rule is None else plan(snap, keys, text, rule)
            if made is not None and rule is not None:
                found = _carry_through(engine, made, rule, dry_run, damaged)
        except CorruptionError as error:
            _leave(error, number, text, damaged)
        if found is not None:
            yield found


def _leave(error: CorruptionError, number: int, name: str, damaged: dict[int, str] | None) -> None:
    where = f"thread {records.shown(name)}"
    said = str(error) if where in str(error) else f"{where}: {error}"
    logger.warning("retention leaves a damaged thread as it is: %s", said)
    if damaged is not None:
        damaged[number] = said


def _carry_through(
    engine: EmbeddedEngine, made: Plan, rule: Retention, dry_run: bool, damaged: dict[int, str] | None
) -> Expiry | None:
    if made.is_over and (dry_run or _delete(engine, made)):
        everything = dict.fromkeys([entry.seq for entry in made.entries], made.rule)
        size = sum([entry.stored_bytes for entry in made.entries])
        return Expiry(made.name, everything, {}, size, whole=True)
    found = expiry_of(made)
    if dry_run:
        return found if found.removed else None
    removed: set[int] = set()
    try:
        if found.removed:
            prune(engine, made.keys.number, made.name, rule, removed)
        receipts.expire(engine, made.keys.number)
    except CorruptionError as error:
        _leave(error, made.keys.number, made.name, damaged)
    return _as_it_went(made, found, removed) if removed else None


def _as_it_went(made: Plan, found: Expiry, removed: set[int]) -> Expiry:
    """What went: less than was planned where somebody or something was in the way, or more."""
    if removed == found.removed.keys():
        return found
    kept = {
        entry.seq: made.kept.get(entry.seq, "it was needed meanwhile, or is damaged")
        for entry in made.entries
        if entry.seq not in removed
    }
    size = sum([entry.stored_bytes for entry in made.entries if entry.seq in removed])
    return Expiry(made.name, dict.fromkeys(sorted(removed), made.rule), kept, size)


def _delete(engine: EmbeddedEngine, made: Plan) -> bool:
    """Delete a whole thread, if its head is the one that was read, no call of it is open, and nothing is pinned."""
    commit_ids = {entry.commit_id for entry in made.entries if entry.seq == made.head}

    def write(tx: Tx) -> bool:
        raw = tx.get(made.keys.head)
        if raw is None:
            return False
        now = Head.decode(raw)
        if now.commit_id not in commit_ids or _is_in_use(tx, made.keys):
            return False
        deleting.unlink(tx, made.keys, made.name.encode(), now)
        return True

    if not engine.transact(write).value:
        return False
    while not deleting.finish(engine, made.keys.number):
        pass
    return True


def _numbers(engine: EmbeddedEngine) -> list[int]:
    with engine.read() as snap:
        low = records.CREATED
        return [records.seq_of(key, low) for key, _ in snap.scan(low, records.end_of(low))]


# --- what was removed ------------------------------------------------------------------


def _expired_record(tx: Tx, rule: str) -> bytes:
    return records.pack([VERSION, rule, clock.current().wall_ns() // 1000, tx.lsn])


def not_there(reader: Reader, keys: ThreadKeys, head: Head, seq: object, where: str) -> CheckpointNotFound:
    """The error for a checkpoint that is not there: never was, or was removed, and by which rule. Raise it."""
    if seq.__class__ is int and 0 <= seq < head.next_seq:
        raw = reader.get(keys.prefix + _EXPIRED)
        if raw is not None:
            _, rule, at_us, _ = records.unpack(raw, where)
            at = datetime.fromtimestamp(at_us // 1_000_000, UTC).isoformat().replace("+00:00", " UTC")
            return CheckpointExpired(
                f"{where}: checkpoint {seq} was removed by {rule}, last applied at {at}; `history` has those that stay"
            )
    return CheckpointNotFound(f"{where}: there is no checkpoint {seq!r}")


def forgot_at(reader: Reader, keys: ThreadKeys) -> int:
    """The LSN at which retention removed something of a thread last; 0 if never."""
    raw = reader.get(keys.prefix + _EXPIRED)
    return 0 if raw is None else int(records.unpack(raw, "what was removed last")[3])
