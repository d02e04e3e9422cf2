"""Deliberately broken variants of the product, each with the class of fuzzing that must find it.

``python -m fuzz.mutants [NAME ...]`` breaks the code in memory, one variant at a time, runs the smoke of its class, and
says what was found. A variant that is not found is a hole in its class.

Not among them is what changes nothing that can be seen: an epoch that stays the same (the chain of CRCs and the zeros
of a new segment end its log as well), base's LSN in a transaction *behind* its writes (replay writes the same again; in
front of them it is `applied_lsn_first`), and looking for damage twice.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from agentstore import effect, once, pruning, staging
from agentstore.engine import (
    base,
    fold,
    lmdbfile,
    log,
    opening,
    segment,
    segments,
    shrink,
    sync,
    tail,
    view,
    writer,
)
from agentstore.engine.base import Position
from agentstore.engine.files import Files
from agentstore.engine.tail import ENTRY, ENTRY_BYTES, POSITION_KEY
from fuzz.campaign import Campaign, Case, Counts, failing
from fuzz.driving import campaign
from fuzz.interleave import InterleaveCampaign
from fuzz.patches import Patches
from fuzz.states import PHASES, STATES_MAX
from fuzz.story import Step


@dataclass(frozen=True)
class Mutant:
    """One broken variant."""

    breaks: Callable[[Patches], None]
    campaign: str
    """The class that must find it, by name."""
    cases: Callable[[Campaign], Iterable[Case]]
    """The smoke of that class."""

    @property
    def name(self) -> str:
        return self.breaks.__name__

    def find(self) -> tuple[str | None, int]:
        """What its class says of it (None: nothing), and how many cases that took."""
        running = campaign(self.campaign)
        number = 0
        with Patches() as patches:
            self.breaks(patches)
            for number, case in enumerate(self.cases(running), 1):
                message = failing(running, case, Counts())
                if message is not None:
                    return message, number
        return None, number


# --- syncs ------------------------------------------------------------------------------------


def log_sync_removed(patches: Patches) -> None:
    patches.set(sync.Syncer, "_flush", lambda self, file, end: None)


def acknowledged_before_the_sync(patches: Patches) -> None:
    """Every third commit syncs, for those before it, too, which were told already."""
    flush = sync.Syncer._flush
    commits = itertools.count()

    def late(self: sync.Syncer, file: int, end: int) -> None:
        if next(commits) % 3 == 2:
            flush(self, file, end)

    patches.set(sync.Syncer, "_flush", late)


def syncs_of_names_and_files_removed(patches: Patches) -> None:
    patches.set(Files, "sync_directory", lambda self, path: None)
    patches.set(Files, "fdatasync", lambda self, fd: None)


def directory_sync_removed(patches: Patches) -> None:
    patches.set(Files, "sync_directory", lambda self, path: None)


def logs_directory_not_synced(patches: Patches) -> None:
    patches.edit(segments.Segments, "take", ("self.files.sync_directory(self.directory)", "pass"))


def stores_directory_not_synced(patches: Patches) -> None:
    patches.edit(
        opening.Opening, "_recover", ("        files.sync_directory(self._path)\n        uuid =", "        uuid =")
    )


def format_before_base(patches: Patches) -> None:
    """The name that says "this is a store" may be there before what it stands for."""
    patches.edit(
        opening.Opening, "_create_store", ("control.close()\n        files.sync_directory(path)", "control.close()")
    )


def swap_without_a_sync(patches: Patches) -> None:
    """The copy of base takes its place before it is on the disk."""
    patches.edit(shrink, "_copy", ("copy.sync(True)", "pass"), ("files.fdatasync(fd)", "pass"))


# --- the log ------------------------------------------------------------------------------------


def crc_not_checked(patches: Patches) -> None:
    patches.edit(segment, "frame_at", (" != crc:", " is None:"))


def torn_tail_is_damage(patches: Patches) -> None:
    """A frame that was never confirmed and is not whole stops the store from opening."""
    patches.edit(
        log.LogReader, "__init__", ("max([base.applied_lsn, durable_lsn,", "max([base.applied_lsn + 1, durable_lsn,")
    )


def applied_lsn_first(patches: Patches) -> None:
    """Base says what it holds, and holds it a transaction later."""
    patches.edit(
        base.Base,
        "apply",
        (
            "            for key in sorted(writes):\n",
            "            txn.put(META_KEY, _encode_meta(uuid, reached))\n            txn.commit()\n"
            "            txn = self.env.begin(write=True)\n            for key in sorted(writes):\n",
        ),
    )


def replay_forgets_deletes(patches: Patches) -> None:
    patches.edit(base.Base, "apply", ("txn.delete(key)", "pass"))


def a_write_past_the_seam(patches: Patches) -> None:
    flush = sync.Syncer._flush

    def flush_and_write(self: sync.Syncer, file: int, end: int) -> None:
        fd = os.open(self._parts.path, os.O_RDONLY)
        os.close(fd)
        with open(os.path.join(self._parts.path, "note"), "wb") as note:
            note.write(b"x")
        flush(self, file, end)

    patches.set(sync.Syncer, "_flush", flush_and_write)


def frames_written_late(patches: Patches) -> None:
    """A frame waits in memory for the next one."""
    waiting: dict[int, tuple[bytes, int]] = {}

    def pwrite(self: Files, fd: int, data: bytes | memoryview, offset: int) -> None:
        if fd in waiting:
            os.pwrite(fd, *waiting.pop(fd))
        if offset >= segment.FRAMES_AT:
            waiting[fd] = bytes(data), offset
        else:
            os.pwrite(fd, data, offset)

    patches.set(Files, "pwrite", pwrite)


def a_refused_write_is_taken_for_written(patches: Patches) -> None:
    write = Files.pwrite

    def careless(self: Files, fd: int, data: bytes | memoryview, offset: int) -> None:
        with suppress(OSError):
            write(self, fd, data, offset)

    patches.set(Files, "pwrite", careless)


def lock_files_have_holes(patches: Patches) -> None:
    def sparse(files: Files, path: str) -> None:
        fd = files.open(path + "-lock", os.O_RDWR | os.O_CREAT)
        files.truncate(fd, lmdbfile.LOCK_BYTES)
        files.close(fd)

    patches.set(lmdbfile, "prepare_lock_file", sparse)


# --- effects, threads, retention ------------------------------------------------------------------


def receipt_apart_from_its_checkpoint(patches: Patches) -> None:
    patches.edit(
        effect.Effect,
        "_commit",
        ("staged.write(tx)\n", "pass\n"),
        (
            "confirmed = self._thread._transact(write)",
            "self._thread._transact(staged.write)\n        confirmed = self._thread._transact(write)",
        ),
    )


def call_before_its_intent(patches: Patches) -> None:
    """`once` calls the world, then writes that it will."""
    patches.edit(
        once,
        "once",
        (
            "passed = _passed(fn, given, call.key.hex())\n",
            "passed = _passed(fn, given, call.key.hex())\n    early = fn(**passed)\n    fn = lambda: early\n",
        ),
    )


def pins_are_not_held(patches: Patches) -> None:
    """Neither by the plan of what goes nor when it goes."""
    patches.edit(pruning, "_held", ('held[records.seq_of(key, low)] = "pinned"', "pass"))
    patches.edit(pruning, "_still_holds", ("tx.get(low + int_part(seq)) is not None", "False"))


def open_calls_are_not_held(patches: Patches) -> None:
    patches.set(pruning, "_open_decisions", lambda reader, keys, uuid: iter(()))


def guard_skipped(patches: Patches) -> None:
    """A commit does not look whether the head is where it was."""
    patches.edit(staging.Staged, "_check", ("head.seq != thread._seq or head.commit_id != thread._commit_id", "False"))


def fencing_token_not_checked(patches: Patches) -> None:
    patches.edit(staging.Staged, "_check", ("thread._token is not None and head.token != thread._token", "False"))


# --- several processes ------------------------------------------------------------------------------


def stale_list(patches: Patches) -> None:
    """A segment that became active just now is taken for a retired one."""
    patches.edit(segments.Segments, "live_bytes", ("if found.header.number > position.segment:", "if False:"))


def fold_from_tail(patches: Patches) -> None:
    def replay(self: fold.Folder) -> None:
        parts = self._parts
        with parts.tail.env.begin() as txn:
            position = tail.decode_position(txn.get(POSITION_KEY))
            entries = [(key, raw) for key, raw in txn.cursor() if key != POSITION_KEY]
        base = parts.base.settled_position()
        writes = {
            key: raw[ENTRY_BYTES:] if raw[8] else None
            for key, raw in entries
            if ENTRY.unpack_from(raw)[0] > base.applied_lsn
        }
        reached = Position(position.lsn, position.segment, position.epoch, position.offset, position.crc)
        if position.lsn > base.applied_lsn:
            parts.base.apply(writes, reached, base.applied_lsn + 1)

    patches.set(fold.Folder, "_replay", replay)


def tail_by_key_only(patches: Patches) -> None:
    patches.edit(tail.Tail, "drop_folded", ("ENTRY.unpack_from(cursor.value())[0] <= applied_lsn", "applied_lsn"))


def target_after_sync(patches: Patches) -> None:
    """What was written while the disk synced is told to be durable."""
    patches.edit(
        sync.Syncer,
        "_lead",
        (
            "self._flush(position.file, position.offset)\n",
            "self._flush(position.file, position.offset)\n        position = self._position()\n",
        ),
    )


def base_before_tail(patches: Patches) -> None:
    patches.edit(
        view.View,
        "__init__",
        (
            "tail = parts.tail.env.begin()\n            base = self._base.begin()",
            "base = self._base.begin()\n            tail = parts.tail.env.begin()",
        ),
    )


def base_not_looked_at_again(patches: Patches) -> None:
    patches.edit(view.View, "__init__", ("if self._base.meta(base)[1].applied_lsn <= self.lsn:", "if True:"))


def roll_without_sync(patches: Patches) -> None:
    patches.set(sync.Syncer, "sync_retired", lambda self, file, end: None)


def reuse_unfolded(patches: Patches) -> None:
    patches.edit(segments.Segments, "reusable", (" and self.last_lsn(found) <= applied_lsn", ""))


def close_clears_unseen(patches: Patches) -> None:
    """What was committed after the fold of who closes last is cleared away."""
    patches.edit(
        opening, "_clear", ("for _ in reader:\n            return False", "for _ in ():\n            return False")
    )


def control_not_cleared(patches: Patches) -> None:
    """A recovery that is cut off leaves the page saying that others may join."""
    patches.edit(opening.Opening, "_recover", ("control.words[READY] = 0", "pass"))


def dead_not_finished(patches: Patches) -> None:
    patches.set(writer.Writer, "_finish_dead", lambda self, txn, position: False)


def syncing_ignored(patches: Patches) -> None:
    patches.edit(sync.Syncer, "_flush", ("if words[SYNCING]:", "if False:"))


def fold_unlocked(patches: Patches) -> None:
    """Two folds at once."""
    patches.edit(
        fold.Folder,
        "fold",
        ("if not lock.acquire(wait=wait):\n                return False", "pass"),
        ("lock.release()", "pass"),
    )


# --- which class finds which -------------------------------------------------------------------------


def drawn(count: int) -> Callable[[Campaign], Iterator[Case]]:
    """The first cases of seed 1."""
    return lambda running: itertools.islice(running.cases(1), count)


def telling(*steps: Step, begin: int = -1) -> Callable[[Campaign], Iterator[Case]]:
    """This story, cut from the step `begin` on."""
    case = {"seed": 1, "steps": list(steps), "images": STATES_MAX, "deeper": 0.05, "states": 160, "begin": begin}
    return lambda running: iter([case])


def at(phase: str, *steps: Step) -> Callable[[Campaign], Iterator[Case]]:
    """This story at one phase of a store's life."""
    return telling(*PHASES[phase], *steps)


def program(name: str) -> Callable[[Campaign], Iterator[Case]]:
    """Orders of this program."""
    return lambda running: itertools.islice(InterleaveCampaign().orders(name, 1), 500)


SMALL: Final[Step] = ["commit", "a", 40, "round"]
LARGE: Final[Step] = ["commit", "a", 9000, "round"]

MUTANTS: Final = [
    Mutant(log_sync_removed, "disk", telling(SMALL, SMALL)),
    Mutant(acknowledged_before_the_sync, "disk", telling(SMALL, SMALL, SMALL)),
    Mutant(logs_directory_not_synced, "disk", telling(SMALL)),
    Mutant(stores_directory_not_synced, "states", at("create", SMALL)),
    Mutant(format_before_base, "states", at("create", SMALL)),
    Mutant(swap_without_a_sync, "disk", telling(SMALL, ["compact"], begin=1)),
    Mutant(crc_not_checked, "states", at("in the middle", ["commit", "a", 3000, "round"])),
    Mutant(torn_tail_is_damage, "states", at("first commit", SMALL)),
    Mutant(applied_lsn_first, "states", at("fold", ["fold"])),
    Mutant(replay_forgets_deletes, "disk", telling(SMALL, ["fold"], ["delete", "a"], ["kill"])),
    Mutant(receipt_apart_from_its_checkpoint, "states", at("in the middle", ["finish", "a"])),
    Mutant(call_before_its_intent, "states", at("first commit", ["once", "x"])),
    Mutant(pins_are_not_held, "disk", telling(SMALL, ["pin", "a"], SMALL, SMALL, ["keep", 1], ["prune"])),
    Mutant(
        open_calls_are_not_held,
        "disk",
        telling(["decide", "a"], ["intend", "a"], ["decide", "a"], SMALL, ["keep", 1], ["prune"], begin=5),
    ),
    Mutant(directory_sync_removed, "strace", drawn(3)),
    Mutant(a_write_past_the_seam, "strace", drawn(3)),
    Mutant(a_refused_write_is_taken_for_written, "fulldisk", drawn(60)),
    Mutant(lock_files_have_holes, "fulldisk", drawn(60)),
    Mutant(syncs_of_names_and_files_removed, "powercut", drawn(40)),
    Mutant(frames_written_late, "kill", drawn(10)),
    Mutant(stale_list, "interleave", program("stale list")),
    Mutant(fold_from_tail, "interleave", program("fold")),
    Mutant(tail_by_key_only, "interleave", program("fold")),
    Mutant(target_after_sync, "interleave", program("two writers")),
    Mutant(base_before_tail, "interleave", program("reader")),
    Mutant(base_not_looked_at_again, "interleave", program("reader")),
    Mutant(roll_without_sync, "interleave", program("rolls")),
    Mutant(reuse_unfolded, "interleave", program("reuse")),
    Mutant(close_clears_unseen, "interleave", program("close and die")),
    Mutant(control_not_cleared, "interleave", program("recovery")),
    Mutant(dead_not_finished, "interleave", program("the dead")),
    Mutant(syncing_ignored, "interleave", program("two writers")),
    Mutant(guard_skipped, "interleave", program("thread")),
    Mutant(fencing_token_not_checked, "interleave", program("leases")),
    Mutant(fold_unlocked, "interleave", program("two folds")),
]


def _first_line(message: str | None) -> str:
    return "NOT FOUND" if message is None else message.splitlines()[0][:160]


def main(names: list[str]) -> int:
    """Find the named variants, or all. The exit status: 1 if one was not found."""
    missed = 0
    logging.getLogger("agentstore").setLevel(logging.CRITICAL)
    for mutant in MUTANTS:
        if names and mutant.name not in names:
            continue
        missing = campaign(mutant.campaign).missing()
        begun = time.monotonic()
        message, cases = (f"skipped: {missing}", 0) if missing else mutant.find()
        spent = f"{time.monotonic() - begun:5.1f} s, {cases:3} cases"
        print(f"{mutant.campaign:10} {mutant.name:38} {spent}  {_first_line(message)}", flush=True)
        missed += message is None
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
