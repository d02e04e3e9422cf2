"""The offline job: retention, cold packs, dictionaries, and the disk space back.

Every step is a transaction of its own, so it can be killed at any moment and run again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from agentstore import dictionaries, packing, pruning, records, snapshots
from agentstore.codec import zstd
from agentstore.engine.api import Reader, Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.job import JobLock, disk_bytes, require_alone, require_room
from agentstore.errors import CorruptionError
from agentstore.extractive import ExtractiveSummarizer
from agentstore.packing import Piece, Single, Swap
from agentstore.packs import Pack
from agentstore.records import ThreadKeys
from agentstore.retention import Retention
from agentstore.sizes import sizes
from agentstore.store import Store
from agentstore.summarizing import summarize
from agentstore.summary import Summarized

COLD_LEVEL: Final = 19
COLD_MEMBERS: Final = 4096
"""A cold pack has at most so many checkpoints (and `packing.CONTENT_BYTES_MAX` bytes): what a load reads at least."""

SAMPLE_BYTES_MAX: Final = 8 * 1024 * 1024
"""A dictionary is trained on at most so many bytes, taken evenly from all threads."""
SAMPLE_OF_THREAD_MAX: Final = 1024 * 1024
SAMPLE_THREADS_MAX: Final = 2000
"""So many threads are read for it, taken evenly from all, or fewer than twice as many."""
CONTENT_BYTES_MIN: Final = 512 * 1024
"""Of less than so many bytes nothing is to be learnt."""
DICTIONARY_SHARE: Final = 14
"""A dictionary has one byte for so many of what it is for, and at most `DICTIONARY_BYTES_MAX`."""
DICTIONARY_BYTES_MAX: Final = 512 * 1024

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it is, and how much there is."""


@dataclass(slots=True)
class Compacted:
    """What a job did."""

    bytes_before: int
    """Of the directory, as blocks of the disk."""
    bytes_after: int = 0
    kinds_before: dict[str, int] = field(default_factory=dict)
    """Bytes of keys and values by kind of record, see `Store.sizes`."""
    kinds_after: dict[str, int] = field(default_factory=dict)
    summarized: dict[str, int] = field(default_factory=dict)
    """How many messages a summary took the place of, by thread."""
    expired: list[pruning.Expiry] = field(default_factory=list)
    packs: int = 0
    """Packs that were written."""
    dictionary: int | None = None
    """Id of the dictionary that was trained, if one was."""
    damaged: list[str] = field(default_factory=list)
    """Threads that were left as they are, and why."""
    shrunk: bool = False
    """Whether nobody else had the store open at the end, so that its files could give their free pages back."""


def _nothing(_what: str, _done: int, _all: int) -> None:
    pass


def compact(
    path: str | os.PathLike[str],
    *,
    retention: Retention | None = None,
    level: int = COLD_LEVEL,
    jobs: int = 1,
    online: bool = False,
    dry_run: bool = False,
    summarize_over: int | None = None,
    progress: Progress = _nothing,
) -> Compacted:
    """Apply retention, make large packs of what is cold, and give disk space back; what was done.

    `retention`: for threads without a rule of their own, in the place of the store's. `level`: of zstd, 1 to 19.
    `jobs`: threads that compress. `online`: beside others who have the store open (files shrink only once they
    closed it). `dry_run`: only say what retention would remove. `summarize_over`: first put extractive summaries in
    the place of the oldest part of every conversation that has more tokens than that, so that half as many stay;
    `ValueError` with `online`, since it moves heads.

    `StoreInUse`: somebody has the store open, or another job runs. `DiskFull` before anything is done. What is damaged
    is left as it is and listed. Memory: a few packs. O(store).
    """
    path = os.path.abspath(os.fspath(path))
    if summarize_over is not None and online:
        raise ValueError("conversations are summarized only while nobody else has the store open")
    with JobLock(path):
        if not online and not dry_run:
            require_alone(path)
        if not dry_run:
            require_room(path)
        done = Compacted(disk_bytes(path))
        if summarize_over is not None and not dry_run:
            _summarize(path, summarize_over, done, progress)
        engine = EmbeddedEngine.open(path, create=False, readonly=dry_run, background=False)
        try:
            done.kinds_before = _kinds(engine)
            damaged: dict[int, str] = {}
            for expiry in pruning.apply(engine, retention, dry_run=dry_run, damaged=damaged):
                done.expired.append(expiry)
                progress("retention", len(done.expired), 0)
            done.damaged += damaged.values()
            if not dry_run:
                _Packer(engine, level, jobs, done, damaged.keys(), progress).run()
            done.kinds_after = _kinds(engine)
        finally:
            done.shrunk = engine.close(shrink=not dry_run)
        done.bytes_after = disk_bytes(path)
    return done


def _kinds(engine: EmbeddedEngine) -> dict[str, int]:
    return {name: kind.bytes for name, kind in sizes(engine, 0).kinds.items()}


def _summarize(path: str, over: int, done: Compacted, progress: Progress) -> None:
    """Summarize what is over; what cannot be is left as it is."""
    summarizer = ExtractiveSummarizer()
    with Store.open(path, create=False, background=False) as store:
        for at, name in enumerate(store.threads(), 1):
            progress("summaries", at, 0)
            try:
                made = summarize(store.thread(name), summarizer, keep_tokens=over // 2, high_water=over)
            except (CorruptionError, TypeError) as error:  # TypeError: its history is no list
                done.damaged.append(f"thread {records.shown(name)}: {error}")
                continue
            if isinstance(made, Summarized):
                done.summarized[name] = made.messages


class _Packer:
    """Makes the cold packs of a whole store."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        level: int,
        jobs: int,
        done: Compacted,
        said: Collection[int],
        progress: Progress,
    ) -> None:
        """`said`: numbers of threads whose damage is in `done` already."""
        self._engine = engine
        self._level = level
        self._jobs = jobs
        self._done = done
        self._said = said
        self._progress = progress
        self._dictionary: zstd.Dictionary | None = None

    def run(self) -> None:
        """Train if need be, pack every thread, forget the dictionaries that nothing needs any more."""
        numbers = self._numbers()
        self._dictionary = self._have_dictionary(numbers)
        with ThreadPoolExecutor(self._jobs) as pool:
            for at, found in enumerate(pool.map(self._thread, numbers), 1):
                if numbers[at - 1] not in self._said:
                    self._done.damaged += found
                self._progress("packs", at, len(numbers))
        self._forget_dictionaries()

    def _numbers(self) -> list[int]:
        with self._engine.read() as snap:
            low = records.CREATED
            return [records.seq_of(key, low) for key, _ in snap.scan(low, records.end_of(low))]

    # --- packs -------------------------------------------------------------------------

    def _thread(self, number: int) -> list[str]:
        """Pack one thread; what is damaged in it."""
        keys = ThreadKeys(number)
        with self._engine.read() as snap:
            name = snap.get(records.CREATED + records.int_part(number))
        where = f"thread number {number}" if name is None else f"thread {records.shown(name.decode())}"
        try:
            for low in self._runs(keys, where):
                self._pack(keys, low, where)
        except CorruptionError as error:
            return [str(error)]
        return []

    def _runs(self, keys: ThreadKeys, where: str) -> list[tuple[int, int]]:
        """First and last seq of the runs that are worth writing anew."""
        with self._engine.read() as snap:
            found = packing.runs(
                packing.pieces(snap, keys, where),
                COLD_MEMBERS,
                takes_root=lambda root: self._fits(snap, keys, root, where),
            )
            return [(run[0].first, run[-1].last) for run in found if self._is_due(run)]

    def _fits(self, snap: Reader, keys: ThreadKeys, root: Single, where: str) -> bool:
        """Whether the state of a root is small enough for a pack: else it stays in its snapshot."""
        size = snapshots.state_bytes(snap, keys, root.first, where)
        return size is not None and size <= packing.CONTENT_BYTES_MAX

    def _is_due(self, run: list[Piece]) -> bool:
        if packing.is_root(run[0]):
            return True
        if len(run) == 1:
            piece = run[0]
            return isinstance(piece, Pack) and (not piece.is_cold or self._is_other(piece.dictionary))
        if any(isinstance(piece, Single) or not piece.is_cold or self._is_other(piece.dictionary) for piece in run):
            return True
        return self._merges(run)

    def _merges(self, run: list[Piece]) -> bool:
        """Cold packs are put together only where that makes them half as many: else the last would grow for ever."""
        return sum([piece.count for piece in run]) >= 2 * max(piece.count for piece in run)

    def _is_other(self, dictionary: int) -> bool:
        """Whether a pack was made with another dictionary than the one of now, or with none."""
        return dictionary != (0 if self._dictionary is None else self._dictionary.id)

    def _pack(self, keys: ThreadKeys, span: tuple[int, int], where: str) -> None:
        with self._engine.read() as snap:
            # Only what is in the span is read: a long thread has many runs.
            run = [piece for piece in packing.pieces(snap, keys, where, span[0], span[1] + 1) if piece.first >= span[0]]
            swap = self._make(snap, keys, run, where)
        if swap is not None and self._engine.transact(swap.write).value:
            self._done.packs += 1

    def _make(self, snap: Reader, keys: ThreadKeys, run: list[Piece], where: str) -> Swap | None:
        forced = any(isinstance(piece, Pack) and self._is_other(piece.dictionary) for piece in run)
        return packing.make(
            snap, keys, run, where, level=self._level, dictionary=self._dictionary, cold=True, forced=forced
        )

    # --- dictionaries ------------------------------------------------------------------

    def _have_dictionary(self, numbers: list[int]) -> zstd.Dictionary | None:
        """The newest dictionary that may stay, else a new one if there is enough to learn from."""
        with self._engine.read() as snap:
            lsn = snap.lsn
            newest = dictionaries.newest(snap)
            for each in dictionaries.all_of(snap) if newest is not None else ():
                if newest is not None and each.id == newest.id and not self._is_stale(snap, each, set(numbers)):
                    return newest
        samples, threads, content = self._samples(numbers)
        if content < CONTENT_BYTES_MIN:
            return None
        trained = zstd.train(samples, min(DICTIONARY_BYTES_MAX, content // DICTIONARY_SHARE))
        if trained is None:
            return None

        def write(tx: Tx) -> None:
            assert trained is not None
            dictionaries.put(tx, trained, threads, lsn)

        self._engine.transact(write)
        self._done.dictionary = trained.id
        return trained

    def _is_stale(self, snap: Reader, trained: dictionaries.Trained, there: set[int]) -> bool:
        """Whether a thread that it was trained on is gone, or forgot something since."""
        return any(
            number not in there or pruning.forgot_at(snap, ThreadKeys(number)) > trained.lsn
            for number in trained.threads
        )

    def _samples(self, numbers: list[int]) -> tuple[list[bytes], list[int], int]:
        """(bodies, the threads they are of, bytes of all bodies as far as they were read).

        Every n-th body, with n doubled whenever there are too many: evenly from all, in memory that does not grow.
        """
        kept: list[tuple[int, bytes]] = []
        taken = content = read = 0
        every = 1
        step = max(1, len(numbers) // SAMPLE_THREADS_MAX)
        for number in numbers[::step]:
            share = 0
            for body in self._bodies(number):
                content += len(body)
                if share >= SAMPLE_OF_THREAD_MAX:
                    continue
                share += len(body)
                if read % every == 0:
                    kept.append((number, body))
                    taken += len(body)
                read += 1
                if taken > SAMPLE_BYTES_MAX:
                    kept, every = kept[::2], 2 * every
                    taken = sum([len(body) for _, body in kept])
        return [body for _, body in kept], sorted({number for number, _ in kept}), content * step

    def _bodies(self, number: int) -> Iterator[bytes]:
        """What the checkpoints of a thread added."""
        keys, where = ThreadKeys(number), f"thread number {number}"
        try:
            with self._engine.read() as snap:
                for piece in packing.pieces(snap, keys, where):
                    if (
                        isinstance(piece, Single)
                        and packing.is_root(piece)
                        and not self._fits(snap, keys, piece, where)
                    ):
                        continue
                    ops = piece.all_ops() if isinstance(piece, Pack) else [packing.ops_of(snap, keys, piece, where)]
                    yield from (op[2] for each in ops for op in each if len(op) == 5 and len(op[2]) >= 64)
        except CorruptionError:
            return  # said when it is packed

    def _forget_dictionaries(self) -> None:
        """Remove those that no pack names. O(packs)."""
        with self._engine.read() as snap:
            there = {each.id for each in dictionaries.all_of(snap)}
            there.discard(0 if self._dictionary is None else self._dictionary.id)
            for number in self._numbers() if there else ():
                there -= packing.dictionaries_named(snap, ThreadKeys(number))

        def write(tx: Tx) -> None:
            for number in there:
                dictionaries.remove(tx, number)

        if there:
            self._engine.transact(write)


def as_json(done: Compacted) -> dict[str, Any]:
    """What a job did, for machines."""
    return {
        "bytes_before": done.bytes_before,
        "bytes_after": done.bytes_after,
        "kinds_before": done.kinds_before,
        "kinds_after": done.kinds_after,
        "summarized": done.summarized,
        "packs": done.packs,
        "dictionary": done.dictionary,
        "shrunk": done.shrunk,
        "damaged": done.damaged,
        "expired": [
            {
                "thread": each.thread,
                "removed": {str(seq): why for seq, why in each.removed.items()},
                "kept": {str(seq): why for seq, why in each.kept.items()},
                "bytes": each.bytes,
                "whole": each.whole,
            }
            for each in done.expired
        ],
    }
