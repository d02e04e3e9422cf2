"""Power cuts of the engine on a simulated disk, by the thousand: ``python -m agentstore.testing.crashsim``.

Each workload runs once on a `SimDisk`. For every prefix of what it asked of the disk, every
state (or a sample of them) that a power cut may leave is made real and opened. Then:

* it opens, without a complaint;
* it holds the first n transactions of the workload, all of them and nothing else, where n is at least
  what was confirmed before the cut and at most what was begun;
* after one more commit and a kill it opens again and holds the same and that commit; and so after a close;
* with `deeper`: the recovery itself is cut off, and so is the commit after it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentstore.engine.api import Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.files import Files
from agentstore.engine.keys import encode
from agentstore.engine.writer import Request
from agentstore.testing.faults import abandon
from agentstore.testing.limits import SMALL_SEGMENT_BYTES, small_limits
from agentstore.testing.simdisk import Image, SimDisk

MARK = encode("mark")
LAST = encode("last")

State = dict[bytes, bytes]


def _value(number: int, size: int) -> bytes:
    return (b"%d " % number) * (size // 3 + 1)


def transaction(number: int, size: int) -> Callable[[Tx], None]:
    """The transaction with this number: a key of its own, one that all write, and the delete of an older one."""

    def write(tx: Tx) -> None:
        tx.put(encode("n", number), _value(number, size))
        tx.put(LAST, b"%d" % number)
        if number >= 2:
            tx.delete(encode("n", number - 2))

    return write


def after(sizes: list[int]) -> State:
    """What a store holds after the transactions 0, 1, ... of these sizes."""
    state: State = {}
    for number, size in enumerate(sizes):
        state[encode("n", number)] = _value(number, size)
        state[LAST] = b"%d" % number
        if number >= 2:
            del state[encode("n", number - 2)]
    return state


class Script:
    """A workload under way: an engine on the simulated disk, and the numbers of its transactions."""

    def __init__(self, disk: SimDisk, sizes: Sequence[int] = ()) -> None:
        self.disk = disk
        self.sizes = list(sizes)
        self.engine: EmbeddedEngine = self._open()

    def _open(self) -> EmbeddedEngine:
        return EmbeddedEngine.open(self.disk.root, background=False, files=self.disk)

    def commit(self, *sizes: int) -> None:
        """One group of transactions: written one after the other, synced once."""
        requests = self._requests(sizes)
        number = len(self.sizes)
        self.engine._writer._queue.extend(requests[1:])
        self.engine.transact(requests[0].fn)
        self._confirmed(requests[1:], number)

    def commit_during_sync(self, first: tuple[int, ...], second: tuple[int, ...]) -> None:
        """A group, and another one that is written while the first one is being synced."""
        requests: list[Request[None]] = []

        def while_syncing() -> None:
            requests.extend(self._requests(second))
            written = self.engine._writer._write_some(requests, 0)
            assert written == len(requests)

        self.disk.during_sync = while_syncing
        self.commit(*first)
        assert requests
        self.engine._syncer.sync(requests[-1].lsn)
        self._confirmed(requests, len(self.sizes))

    def _requests(self, sizes: tuple[int, ...]) -> list[Request[None]]:
        requests = []
        for size in sizes:
            request = Request(transaction(len(self.sizes), size))
            request.woken = threading.Lock()
            request.woken.acquire()
            requests.append(request)
            self.sizes.append(size)
            self.disk.note(f"begun {len(self.sizes)}")
        return requests

    def _confirmed(self, requests: list[Request[None]], number: int) -> None:
        for request in requests:
            assert request.error is None
        self.disk.note(f"confirmed {number}")

    def fold(self) -> None:
        self.engine.fold()

    def prepare(self) -> None:
        assert self.engine._parts.segments.prepare_spare()

    def close(self) -> None:
        self.engine.close()

    def kill(self) -> None:
        abandon(self.engine)

    def reopen(self) -> None:
        self.engine = self._open()


def create(script: Script) -> None:
    for _ in range(3):
        script.commit(40)
    script.close()


def groups(script: Script) -> None:
    script.commit(40, 700, 40)
    script.commit_during_sync((40, 40), (40, 600))
    script.commit(40)


def folds(script: Script) -> None:
    script.commit(40)
    script.fold()
    script.commit(40)
    script.commit(700)
    script.fold()
    script.commit(40, 40)


def rolls(script: Script) -> None:
    """Three segments, the third in the file of the first."""
    half = SMALL_SEGMENT_BYTES * 2 // 5
    script.commit(half)
    script.commit(half)
    script.commit(half)
    script.fold()
    script.commit(40)
    script.commit(half, half)
    script.commit(40)


def spare(script: Script) -> None:
    script.commit(40)
    script.prepare()
    script.commit(SMALL_SEGMENT_BYTES - 9000)
    script.commit(SMALL_SEGMENT_BYTES - 9000)
    script.close()


def oversize(script: Script) -> None:
    script.commit(40)
    script.commit(2 * SMALL_SEGMENT_BYTES)
    script.commit(40, 2 * SMALL_SEGMENT_BYTES, 40)
    script.fold()
    script.commit(40)


def kills(script: Script) -> None:
    """Every life begins with a recovery and a roll."""
    script.commit(40)
    script.kill()
    script.reopen()
    script.commit(40, 40)
    script.kill()
    script.reopen()
    script.fold()
    script.commit(40)
    script.kill()
    script.reopen()
    script.close()
    script.reopen()
    script.commit(40)


WORKLOADS: dict[str, Callable[[Script], None]] = {
    each.__name__: each for each in (create, groups, folds, rolls, spare, oversize, kills)
}


@dataclass
class Tally:
    """What was tried."""

    points: int = 0
    combinations: int = 0
    """Of writes that may be lost, over all points of the cut."""
    complete: int = 0
    """Points of which all of them were made."""
    images: int = 0
    """Different directories that were opened."""
    deeper: int = 0
    """Of these, after a cut during the recovery from another one."""
    torn: int = 0
    """With fewer transactions than were begun."""


class Lost(AssertionError):
    """The engine broke its promise."""


@dataclass
class Simulation:
    """One workload with all its power cuts. `root` is an empty directory, best in memory."""

    name: str
    root: Path
    rng: random.Random
    limit: int
    """Images made of each point of the cut."""
    deeper: float = 0.0
    """The part of the images whose recovery is cut off, too."""
    lies: Callable[[str], bool] | None = None
    tally: Tally = field(default_factory=Tally)

    def run(self) -> Tally:
        """Record the workload, then cut. Raises `Lost`."""
        with small_limits():
            disk = SimDisk(str(self.root / "recorded"), lies=self.lies)
            script = Script(disk)
            WORKLOADS[self.name](script)
            script.kill()
            disk.end()
            shutil.rmtree(disk.root)
            self._cut(disk, script.sizes, confirmed=0, limit=self.limit, deeper=self.deeper)
        return self.tally

    def _cut(self, disk: SimDisk, sizes: list[int], *, confirmed: int, limit: int, deeper: float) -> None:
        """Cut after each event of the journal."""
        tally, begun = self.tally, confirmed
        platter = disk.platter(0)
        seen: set[tuple[bytes, int, int]] = set()
        for event in disk.journal:
            platter.apply(event)
            if event.name == "note":
                kind, _, number = event.data.decode().partition(" ")
                begun, confirmed = (int(number), confirmed) if kind == "begun" else (begun, int(number))
            count = platter.count()
            tally.points += 1
            tally.combinations += count
            tally.complete += count <= limit
            for image in platter.images(limit, self.rng):
                key = (image.digest(), begun, confirmed)
                if key in seen:
                    continue
                seen.add(key)
                tally.images += 1
                there = self._check(image, sizes[:begun], confirmed, str(event))
                if deeper and self.rng.random() < deeper:
                    before = tally.images
                    self._cut_recovery(image, sizes[:there])
                    tally.deeper += tally.images - before

    def _cut_recovery(self, image: Image, sizes: list[int]) -> None:
        """Cut while this image is being recovered, and during the next commit."""
        disk = SimDisk(str(self.root / "again"), image)
        image.write_to(disk.root)
        script = Script(disk, sizes)
        script.commit(40)
        script.kill()
        disk.end()
        shutil.rmtree(disk.root)
        self._cut(disk, script.sizes, confirmed=len(sizes), limit=2, deeper=0.0)

    def _check(self, image: Image, sizes: list[int], confirmed: int, point: str) -> int:
        """Open what the cut left; how many transactions are there."""
        root = str(self.root / "cut")
        image.write_to(root)
        try:
            there = self._opened(root, sizes, confirmed)
        except Exception as error:
            raise Lost(
                f"{self.name}: power cut after {point[:200]}, {confirmed} confirmed, {len(sizes)} begun: "
                f"{type(error).__name__}: {error}"
            ) from error
        shutil.rmtree(root)
        self.tally.torn += there < len(sizes)
        return there

    def _opened(self, root: str, sizes: list[int], confirmed: int) -> int:
        engine = EmbeddedEngine.open(root, background=False, files=UnsyncedFiles())
        try:
            found = contents(engine)
            for there in range(len(sizes), confirmed - 1, -1):
                state = after(sizes[:there])
                if found == state:
                    break
            else:
                raise Lost(f"the store holds no prefix of what was written: {sorted(found)}")
            engine.transact(lambda tx: tx.put(MARK, b"1"))
            state[MARK] = b"1"
            abandon(engine)
            engine = EmbeddedEngine.open(root, background=False, files=UnsyncedFiles())
            _same(engine, state)
            findings = engine.verify()
            if findings:
                raise Lost(f"verify: {findings}")
            engine.close()
            if self.rng.random() < THIRD_OPEN:
                engine = EmbeddedEngine.open(root, background=False, files=UnsyncedFiles())
                _same(engine, state)
        finally:
            abandon(engine)
        return there


THIRD_OPEN = 0.2
"""Of the images this part is opened once more, after the close."""


def contents(engine: EmbeddedEngine) -> State:
    """All that a store holds."""
    with engine.read() as view:
        return dict(view.scan(b"\x10", b"\xff"))


def _same(engine: EmbeddedEngine, state: State) -> None:
    found = contents(engine)
    if found != state:
        raise Lost(f"after another open the store holds {sorted(found)} instead of {sorted(state)}")


class UnsyncedFiles(Files):
    """Real files without the syncs: what is only looked at needs none."""

    def fdatasync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass

    def sync_map(self, page: object) -> None:
        pass


def in_memory() -> str | None:
    """A directory that is kept in memory, or None for wherever temporary files go."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main() -> None:
    """Run all workloads; print what was tried."""
    parser = argparse.ArgumentParser(description="Power cuts of the engine on a simulated disk.")
    parser.add_argument("--limit", type=int, default=64, help="images of each point of the cut (64)")
    parser.add_argument("--deeper", type=float, default=0.05, help="part of them whose recovery is cut, too (0.05)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    options = parser.parse_args()
    for name in options.workloads:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(dir=in_memory(), prefix="agentstore-") as root:
            rng = random.Random(f"{options.seed} {name}")
            tally = Simulation(name, Path(root), rng, options.limit, options.deeper).run()
        print(f"{name:10} {tally} {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
