"""What is done behind the commits: packs, snapshots and what deletions left, a short slice at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from agentstore import deleting, dictionaries, packing, pruning, snapshots
from agentstore.engine.api import Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.errors import AgentStoreError, ReadOnlyStore
from agentstore.packs import PACK_MEMBERS

logger = logging.getLogger("agentstore")

CLOSE_THREADS_MAX: Final = 1000
"""At close the rests of so many threads are packed, those written last: closing takes a second or two at most."""
CLOSE_SLICE: Final = 32
"""Threads whose rests are packed in one transaction."""


class Upkeep:
    """The chores of one engine's threads, in the background where it has one. Thread-safe."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._snapshots: dict[int, tuple[int, bytes]] = {}
        self._packs: dict[int, None] = {}
        self._written: dict[int, int] = {}
        """Threads that were written, in the order of their first commit, with the seq that packing begins at."""
        self._handles: dict[int, int] = {}
        """How many handles of a thread have written."""
        self._gone = deleting.Sweeper(engine)

    # --- asking ------------------------------------------------------------------------

    def wrote(self, number: int) -> None:
        """A handle made its first commit: what is left of the thread at close is packed, or what many handles left."""
        with self._lock:
            self._written.setdefault(number, 0)
            self._handles[number] = handles = self._handles.get(number, 0) + 1
        if handles % PACK_MEMBERS == 0:
            self.want_packs(number)

    def want_snapshot(self, number: int, seq: int, commit_id: bytes) -> None:
        """Have a snapshot of this checkpoint taken, now or soon. Errors are logged: nothing depends on a snapshot."""
        with self._lock:
            self._snapshots[number] = (seq, commit_id)
        self._begin()

    def want_packs(self, number: int) -> None:
        """Have the full packs of a thread made, now or soon. Errors are logged: nothing depends on a pack."""
        with self._lock:
            self._packs[number] = None
        self._begin()

    def _begin(self) -> None:
        if self._engine.has_background:
            self._engine.poke()
        else:
            while self.run():
                pass

    # --- doing -------------------------------------------------------------------------

    def run(self) -> bool:
        """One slice of what was asked for; whether there was one."""
        with self._lock:
            pack = next(iter(self._packs), None)
            if pack is not None:
                del self._packs[pack]
            asked = None if pack is not None else next(iter(self._snapshots), None)
            seq, commit_id = (0, b"") if asked is None else self._snapshots.pop(asked)
        if pack is not None:
            self._logged(f"no pack of thread number {pack}", lambda: self._pack(pack))
        elif asked is not None:
            self._logged(
                f"no snapshot of thread number {asked} at checkpoint {seq}",
                lambda: self._snapshot(asked, seq, commit_id),
            )
        else:
            return self._gone.run()
        return True

    def _pack(self, number: int) -> None:
        settled = packing.pack_full(self._engine, number, self._written.get(number, 0))
        with self._lock:
            self._written[number] = settled
        for _ in pruning.apply(self._engine, None, [number]):
            pass

    def _snapshot(self, number: int, seq: int, commit_id: bytes) -> None:
        if snapshots.take(self._engine, number, seq, commit_id):
            snapshots.thin(self._engine, number)

    def _logged(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except ReadOnlyStore:
            pass
        except AgentStoreError as error:
            logger.warning("%s: %s", what, error)

    def close(self) -> None:
        """Pack the rests of what was written, and apply retention to what was packed. Errors are logged."""
        with self._lock:
            written = list(self._written)[-CLOSE_THREADS_MAX:]
            self._written.clear()
            self._handles.clear()
        for at in range(0, len(written), CLOSE_SLICE):
            self._logged("the rests were not packed", lambda slice=written[at : at + CLOSE_SLICE]: self._rests(slice))  # type: ignore[misc]  # defaults of a lambda have no types

    def _rests(self, numbers: list[int]) -> None:
        with self._engine.read() as snap:
            swaps = [swap for number in numbers for swap in packing.rest(snap, number, dictionaries.newest(snap))]

        def write(tx: Tx) -> None:
            for swap in swaps:
                swap.write(tx)

        if swaps:
            self._engine.transact(write)
        # Not at every close: as with the full packs, a plan of the whole thread is made once for several commits.
        for _ in pruning.apply(self._engine, None, dict.fromkeys([swap.keys.number for swap in swaps])):
            pass
