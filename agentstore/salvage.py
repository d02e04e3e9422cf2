"""Out of a damaged store: every checkpoint whose state still proves itself, in a new store, and what is missing.

The records that prove themselves (`agentstore.engine.rescue`) are copied as they are. Then every thread is walked as
`Store.check` does: a checkpoint stays if its state can be built from its parent's and matches its checksums, or if a
snapshot has it (it is a root then, see `pruning`). What stands on a lost one is lost with it. Nothing is made up: what
comes out was committed once.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentstore import checking, dictionaries, fields, lines, loading, packing, packs, records, snapshots
from agentstore.backup import check_free, copy_store
from agentstore.effect_records import identity_of, intent_space, receipt_space
from agentstore.engine import keys as key_codec
from agentstore.engine.api import Reader, Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.files import default_files
from agentstore.engine.job import require_alone
from agentstore.engine.rescue import Rescued, rescue
from agentstore.errors import CorruptionError, NotAStore
from agentstore.packs import NO_PARENT, Entry, Pack
from agentstore.records import FLAG_ROOT, HEAD, VERSION, Head, ThreadKeys, int_part
from agentstore.store import Store

SLICE_BYTES = 4 * 1024 * 1024
"""Records copied in one transaction."""


@dataclass(slots=True)
class ThreadReport:
    """What came out of one thread."""

    id: str
    checkpoints: int = 0
    lost: list[int] = field(default_factory=list)
    """Seqs of checkpoints of which something was found, and not enough."""
    missing: list[int] = field(default_factory=list)
    """Seqs below the next one of which nothing was found: lost, or removed by retention before."""
    notes: list[str] = field(default_factory=list)
    """What else is not as it was: where the head was, a name that was lost."""


@dataclass(slots=True)
class Salvaged:
    """What came out of a store."""

    threads: list[ThreadReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What was damaged."""

    @property
    def whole(self) -> bool:
        """Whether nothing is known to be missing."""
        return not self.problems and not any(each.lost or each.notes for each in self.threads)


def salvage(source: str | os.PathLike[str], dest: str | os.PathLike[str]) -> Salvaged:
    """Make a store at `dest` of everything in the store at `source` that still proves itself; what is missing.

    `source` is only read, and need not be a store that can be opened. `dest` must not be there, or be empty, and gets
    its name once it is whole. `StoreInUse`; `NotAStore`: nothing of a store is at `source`; `BackupFailed`, and what a
    full or failing disk raises. O(store), and in memory.
    """
    source, dest = os.path.abspath(os.fspath(source)), os.path.abspath(os.fspath(dest))
    require_alone(source)
    check_free(default_files(), os.path.realpath(dest), source)
    found = rescue(source)
    if not found.records:
        raise NotAStore(f"there is nothing in {source} that proves to be of a store")
    done = Salvaged(problems=list(found.problems))
    work = os.path.join(os.path.dirname(dest), f".{os.path.basename(dest)}.salvage")
    shutil.rmtree(work, ignore_errors=True)
    try:
        engine = EmbeddedEngine.open(work, background=False)
        try:
            _copy(engine, found)
            _Threads(engine, found, done).run()
        finally:
            engine.close()
        with Store.open(work, create=False, background=False) as store:
            done.problems += [f"in the new store: {problem}" for problem in store.check()]
            copy_store(store, dest)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return done


def _copy(engine: EmbeddedEngine, found: Rescued) -> None:
    """All records as they are."""
    for part in _slices(found):

        def write(tx: Tx, part: list[bytes] = part) -> None:
            for key in part:
                tx.put(key, found.records[key])

        engine.transact(write)


def _slices(found: Rescued) -> Iterator[list[bytes]]:
    part: list[bytes] = []
    size = 0
    for key in sorted(found.records):
        part.append(key)
        size += len(found.records[key])
        if size >= SLICE_BYTES:
            yield part
            part, size = [], 0
    yield part


class _Threads:
    """Puts the threads of the copied records in order."""

    def __init__(self, engine: EmbeddedEngine, found: Rescued, done: Salvaged) -> None:
        self._engine = engine
        self._found = found
        self._done = done
        self._tokens = 0

    def run(self) -> None:
        """Every thread, then the indexes and counters that lead to them."""
        self._dictionaries()
        with self._engine.read() as snap:
            numbers = _numbers(snap)
            names = self._names(snap)
            gone = {records.seq_of(key, records.GONE) for key, _ in _under(snap, records.GONE)}
            following, _, floor = self._counters(snap)
        kept: dict[int, bytes] = {}
        for number in numbers:
            name = names.get(number)
            report = ThreadReport(f"salvaged-{number}" if name is None else name.decode())
            if number not in gone and _Thread(self._engine, number, name, report, self._found).run():
                kept[number] = report.id.encode()
                if name is None:
                    report.notes.append("its id was lost; perhaps it had been deleted")
            elif number not in gone and (name is not None or report.lost):
                report.notes.append("nothing of it is left")
            else:
                continue
            self._done.threads.append(report)
        self._index(kept, max([following, *(number + 1 for number in numbers)]), floor)

    def _dictionaries(self) -> None:
        """All pieces of those that can be put together; nothing of the others, whose packs are lost."""
        with self._engine.read() as snap:
            threads = {each.id: each.threads for each in dictionaries.all_of(snap)}
            for number in dictionaries.ids(snap):
                try:
                    found = dictionaries.find(snap, number)
                except CorruptionError as error:
                    self._done.problems.append(str(error).partition(";")[0])
                    self._engine.transact(lambda tx, number=number: dictionaries.remove(tx, number))  # type: ignore[misc]  # default
                    continue
                of = threads.get(number, [])
                lsn = snap.lsn
                self._engine.transact(lambda tx, found=found, of=of, at=lsn: dictionaries.put(tx, found, of, at))  # type: ignore[misc]  # defaults

    def _names(self, snap: Reader) -> dict[int, bytes]:
        """Names by number, from either index."""
        names: dict[int, bytes] = {}
        for key, value in _under(snap, records.NAMES):
            try:
                number, name = records.name_of(value)
                if records.name_key(name) == key:
                    names[number] = name
            except CorruptionError:
                continue
        for key, name in _under(snap, records.CREATED):
            try:
                name.decode()
            except UnicodeDecodeError:
                continue
            names.setdefault(records.seq_of(key, records.CREATED), name)
        return names

    def _counters(self, snap: Reader) -> tuple[int, int, int]:
        try:
            return records.counters_of(snap.get(records.COUNTERS_KEY))
        except CorruptionError:
            return 1, 0, 0

    def _index(self, kept: dict[int, bytes], following: int, floor: int) -> None:
        """The indexes anew. Of two threads of one name the younger one has it."""

        def write(tx: Tx) -> None:
            for low in (records.NAMES, records.CREATED, records.GONE):
                for key, _ in [*_under(tx, low)]:
                    tx.delete(key)
            token = floor
            for number, name in sorted(kept.items()):
                tx.put(records.name_key(name), records.name_value(number, name))
                tx.put(records.CREATED + int_part(number), name)
                token = max(token, Head.decode(tx.get(ThreadKeys(number).head) or b"").token)
            tx.put(records.COUNTERS_KEY, records.COUNTERS.pack(following, len(kept), token))

        self._engine.transact(write)


def _under(reader: Reader, low: bytes) -> Iterator[tuple[bytes, bytes]]:
    return reader.scan(low, records.end_of(low))


def _numbers(snap: Reader) -> list[int]:
    """Numbers of threads that have any record."""
    found: list[int] = []
    low, high = key_codec.encode(0), key_codec.encode(key_codec.INT_MAX) + b"\xff"
    while True:
        first = next(iter(snap.scan(low, high)), None)
        if first is None:
            return found
        size = first[0][0] - 0x10
        found.append(int.from_bytes(first[0][1 : 1 + size], "big"))
        low = records.end_of(int_part(found[-1]))


class _Thread:
    """One thread: what of it proves itself, and a head on the newest of that."""

    def __init__(
        self, engine: EmbeddedEngine, number: int, name: bytes | None, report: ThreadReport, found: Rescued
    ) -> None:
        self._engine = engine
        self._keys = ThreadKeys(number)
        self._where = f"thread {records.shown(report.id)}"
        self._report = report
        self._found = found
        self._seen: set[int] = set()

    def run(self) -> bool:
        """Drop what does not prove itself; whether anything is left."""
        self._drop_unreadable()
        good = self._good()
        while self._take_roots(good):
            good = self._good()
        self._drop_lost(good)
        self._report.checkpoints = len(good)
        self._report.lost = sorted(self._seen - good)
        if not good:
            self._forget_all()
            return False
        self._put_head(good)
        old = [key for key in self._found.perhaps_old if key.startswith(self._keys.prefix)]
        if old:
            self._report.notes.append(f"{len(old)} of its records were found where nothing led: perhaps they are old")
        return True

    # --- what cannot be read at all ------------------------------------------------------

    def _drop_unreadable(self) -> None:
        """Records that do not decode, snapshots whose bytes do not match."""
        keys, where = self._keys, self._where
        with self._engine.read() as snap:
            doomed: list[bytes] = []
            for key, raw in _under(snap, keys.checkpoints):
                seq = records.seq_of(key, keys.checkpoints)
                self._seen.add(seq)
                try:
                    lines.entry_of(seq, raw, where).ops()
                except CorruptionError:
                    doomed.append(key)
            packs_lost: list[int] = []
            whole: list[Pack] = []
            for last, raw in lines.scan_packs(snap, keys.prefix):
                self._seen.add(last)
                try:
                    pack = lines.pack_of(snap, last, raw, where)
                    pack.all_ops()
                    self._seen.update(pack.seqs())
                    whole.append(pack)
                except CorruptionError as error:
                    packs_lost.append(last)
                    self._note_pack(last, raw, error)
            packs_lost += self._overtaken(whole)
            for pack in whole:
                if pack.last not in packs_lost:
                    # Records of their own that stand in its range are of before it was made.
                    doomed += [keys.checkpoints + int_part(seq) for seq in range(pack.first, pack.last + 1)]
            low = records.snapshots(keys.prefix)
            for key, raw in _under(snap, low):
                if not self._is_whole(snap, records.seq_of(key, low), raw):
                    doomed.append(key)

        def write(tx: Tx) -> None:
            for key in doomed:
                tx.delete(key)
            for last in packs_lost:
                lines.delete_pack(tx, keys.prefix, last)

        self._engine.transact(write)

    def _overtaken(self, whole: list[Pack]) -> list[int]:
        """The last seqs of packs that others took the place of: found where nothing leads, or smaller."""

        def rank(pack: Pack) -> tuple[bool, int]:
            key = records.packs(self._keys.prefix) + int_part(pack.last)
            return key in self._found.perhaps_old, -pack.count

        taken: list[Pack] = []
        lost: list[int] = []
        for pack in sorted(whole, key=rank):
            if any(pack.first <= other.last and other.first <= pack.last for other in taken):
                lost.append(pack.last)
            else:
                taken.append(pack)
        return lost

    def _note_pack(self, last: int, raw: bytes, error: CorruptionError) -> None:
        try:
            self._seen.update(range(packs.head_of(raw, last, self._where).first, last))
        except CorruptionError:
            pass
        self._report.notes.append(f"the pack that ends with checkpoint {last} is lost: {error}")

    def _is_whole(self, snap: Reader, seq: int, raw: bytes) -> bool:
        try:
            state = loading.read_snapshot(snap, self._keys.prefix, seq, raw, self._where)
            return all(fields.verify(state, name) for name in state)
        except CorruptionError:
            return False

    # --- which states prove themselves ---------------------------------------------------

    def _good(self) -> set[int]:
        """Seqs of the checkpoints whose state can be built and matches."""
        head = Head(bytes(16), 0, key_codec.INT_MAX, 0, bytes(8))
        with self._engine.read() as snap:
            states = checking.States(snap, self._keys, self._where)
            for _ in states.walk(head, self._report.id):
                pass  # said by what is lost
            self._seen |= states.sums.keys()
            return {seq for seq, known in states.sums.items() if known is not None}

    def _take_roots(self, good: set[int]) -> bool:
        """Make a root of the oldest lost checkpoint that a snapshot has the state of; whether there was one."""
        keys, where = self._keys, self._where
        low = records.snapshots(keys.prefix)
        with self._engine.read() as snap:
            for key, raw in _under(snap, low):
                seq = records.seq_of(key, low)
                entry = None if seq in good else lines.find(snap, keys.prefix, seq, where)
                if entry is None or entry.commit_id != loading.snapshot_commit(raw) or entry.flags & FLAG_ROOT:
                    continue
                state = loading.read_snapshot(snap, keys.prefix, seq, raw, where)
                total, sums = fields.state_sum(state), fields.sums_of(state)
                pack = lines.find_pack(snap, keys.prefix, seq, where)
                puts = {seq: lines.record_of(entry, NO_PARENT, total, [], None, FLAG_ROOT)}
                if pack is not None:
                    puts |= self._alone(pack, (pack.index(seq) or 0) + 1, pack.count, fields.state_from_sums(sums))
                self._replace(pack, puts)
                return True
        return False

    def _alone(self, pack: Pack, low: int, high: int, state: fields.State) -> dict[int, bytes]:
        """Members `low` to `high` (not included) of a pack as records of their own, on `state`."""
        entries, ops = pack.entries(), pack.all_ops()
        puts = {}
        for at in range(low, high):
            made = packs.absolute(ops[at], state)
            for each in state.values():
                each.parts = None
            entry: Entry = entries[at]
            puts[entry.seq] = lines.record_of(entry, entry.parent, fields.state_sum(state), made, None, 0)
        return puts

    def _replace(self, pack: Pack | None, puts: dict[int, bytes]) -> None:
        def write(tx: Tx) -> None:
            if pack is not None:
                lines.delete_pack(tx, self._keys.prefix, pack.last)
            for seq, raw in puts.items():
                tx.put(self._keys.checkpoints + int_part(seq), raw)

        self._engine.transact(write)

    # --- leaving only those ----------------------------------------------------------------

    def _drop_lost(self, good: set[int]) -> None:
        """Remove what stands on lost checkpoints, and snapshots and pins of what is not there."""
        keys, where = self._keys, self._where
        with self._engine.read() as snap:
            pieces = [*packing.pieces(snap, keys, where)]
        for piece in pieces:
            members = [entry.seq for entry in packing.entries_of(piece)]
            if good.issuperset(members):
                continue
            if isinstance(piece, Pack) and members[0] in good:
                count = next(at for at, seq in enumerate(members) if seq not in good)
                with self._engine.read() as snap:
                    parent = piece.parent
                    state = {} if parent == NO_PARENT else loading.load_sums(snap, keys.prefix, parent, where).state
                self._replace(piece, self._alone(piece, 0, count, state))
            else:
                self._engine.transact(lambda tx, piece=piece: packing.delete(tx, keys, piece))  # type: ignore[misc]  # default

        def write(tx: Tx) -> None:
            low = records.snapshots(keys.prefix)
            snapshots.remove(tx, keys, {records.seq_of(key, low) for key, _ in _under(tx, low)} - good, where)
            named: set[tuple[int, int]] = set()
            for key, raw in _under(tx, low):
                seq = records.seq_of(key, low)
                named |= snapshots.chunks_of(loading.read_snapshot(tx, keys.prefix, seq, raw, where))
            chunks = records.chunks(keys.prefix)
            for key, _ in [*_under(tx, chunks)]:
                if key_codec.decode(key[len(chunks) :]) not in named:
                    tx.delete(key)
            low = records.pins(keys.prefix)
            for key, _ in [*_under(tx, low)]:
                if records.seq_of(key, low) not in good:
                    tx.delete(key)

        self._engine.transact(write)

    def _forget_all(self) -> None:
        def write(tx: Tx) -> None:
            for key, _ in [*_under(tx, self._keys.prefix)]:
                tx.delete(key)

        self._engine.transact(write)

    def _put_head(self, good: set[int]) -> None:
        """The head where it was, if that is left; else on the newest checkpoint."""
        with self._engine.read() as snap:
            raw = snap.get(self._keys.head)
            try:
                old = None if raw is None else Head.decode(raw)
            except CorruptionError:
                old = None
            seq = old.seq if old is not None and old.seq in good else max(good)
            entry = lines.find(snap, self._keys.prefix, seq, self._where)
            uuid = self._uuid(snap) if old is None else old.uuid
        assert entry is not None
        if old is None:
            self._report.notes.append("its head was lost: it stands on the newest checkpoint that is left")
        elif old.seq != seq:
            self._report.notes.append(f"the head was checkpoint {old.seq}, which is lost; now it is {seq}")
        following = max([0 if old is None else old.next_seq, max(self._seen) + 1])
        self._report.missing = sorted(set(range(following)) - self._seen)
        token = (0 if old is None else old.token) + 1  # a worker of before may not go on
        head = HEAD.pack(VERSION, 0, uuid, seq, following, token, entry.commit_id)
        self._engine.transact(lambda tx: tx.put(self._keys.head, head))

    def _uuid(self, snap: Reader) -> bytes:
        """The thread's uuid as its effects know it, or a new one."""
        known: set[bytes] = set()
        for space in (intent_space(self._keys.prefix), receipt_space(self._keys.prefix)):
            known |= {identity_of(key, space)[0].decision_uuid for key, _ in _under(snap, space)}
        return known.pop() if len(known) == 1 else secrets.token_bytes(16)


def as_json(done: Salvaged) -> dict[str, Any]:
    """What came out, for machines."""
    return {
        "whole": done.whole,
        "problems": done.problems,
        "threads": [
            {
                "thread": each.id,
                "checkpoints": each.checkpoints,
                "lost": each.lost,
                "missing": each.missing,
                "notes": each.notes,
            }
            for each in done.threads
        ],
    }
