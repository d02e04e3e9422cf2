"""Bit rot: each byte of a killed store's log and base is flipped in turn: ``python -m agentstore.testing.bitflips``.

A flip may do nothing, or make the open, a read or `verify` say what is damaged. What it may never
do: another value than was written, or a commit that is missing while `verify` finds nothing; now, after
another commit and a fold, and after a close. An open that is refused changes nothing: with
the bit put right, everything is there.

Damaged files are opened in a child: LMDB trusts the pointers that it reads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from agentstore.engine.control import CONTROL_BYTES
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.keys import encode
from agentstore.engine.parts import BASE, CONTROL, WAL
from agentstore.errors import CorruptionError
from agentstore.testing.faults import abandon
from agentstore.testing.limits import small_limits
from agentstore.testing.simdisk import Image

COMMITS = 30
GROUPS_IN_DOUBT = 2
"""After a power cut, damage inside so many of the last synced groups cannot be told from a torn tail."""

Variant = Literal["log", "half folded"]


class Flip(NamedTuple):
    """One bit of one file."""

    path: str
    offset: int
    bit: int

    def __str__(self) -> str:
        return f"bit {self.bit} of byte {self.offset} of {self.path}"


def value(number: int) -> bytes:
    return (b"%d " % number) * 30


def killed_store(root: str, variant: Variant) -> Image:
    """A store of 30 commits whose process was killed: all of them in the log, or half of them in base."""
    engine = EmbeddedEngine.open(root, background=False)
    for number in range(COMMITS):
        engine.transact(lambda tx, n=number: tx.put(encode("key", n), value(n)))  # type: ignore[misc]
        if variant == "half folded" and number == COMMITS // 2:
            engine.fold()
    abandon(engine)
    image = Image.read_from(root)
    shutil.rmtree(root)
    return image


def without_power(image: Image) -> Image:
    """The same after a power cut that took what the control page knew."""
    return Image(image.directories, image.files | {CONTROL: bytes(CONTROL_BYTES)})


def flips(image: Image, every: int) -> Iterator[Flip]:
    """Every so manyth byte of log and base, zeros behind the log's end included; the bits take turns."""
    for path, content in sorted(image.files.items()):
        if path == BASE or path.startswith(WAL + os.sep):
            end = len(content) if path == BASE else min(len(content), len(content.rstrip(b"\0")) + 100)
            # What is far from any content is zero and never looked at: one page of it will do.
            for offset in range(0, end, every):
                yield Flip(path, offset, (offset // every) % 8)


def flipped(image: Image, flip: Flip) -> Image:
    content = bytearray(image.files[flip.path])
    content[flip.offset] ^= 1 << flip.bit
    return Image(image.directories, image.files | {flip.path: bytes(content)})


# --- what one flip does --------------------------------------------------------------------


def look(engine: EmbeddedEngine, commits: int) -> tuple[list[int], bool]:
    """Numbers of the commits that are missing, and whether any read said that something is damaged. Raises if wrong."""
    missing, complained = [], False
    for number in range(commits):
        try:
            with engine.read() as view:
                found = view.get(encode("key", number))
        except CorruptionError:
            complained = True
            continue
        if found is None:
            missing.append(number)
        elif found != value(number):
            raise AssertionError(f"commit {number} reads as {found[:60]!r}")
    try:
        with engine.read() as view:
            pairs = dict(view.scan(encode("key"), encode("key") + b"\xff"))
    except CorruptionError:
        return missing, True
    for key, content in pairs.items():
        if content not in (value(number) for number in range(commits) if encode("key", number) == key):
            raise AssertionError(f"a scan returns {key.hex()} = {content[:60]!r}")
    missing += [number for number in range(commits) if encode("key", number) not in pairs and number not in missing]
    return sorted(missing), complained


def outcome(image: Image, flip: Flip, root: str, *, power_cut: bool) -> str:
    """What came of this flip, in a word or two. Raises for what must never come of it."""
    flipped(image, flip).write_to(root)
    try:
        engine = EmbeddedEngine.open(root, background=False)
    except CorruptionError:
        with open(os.path.join(root, flip.path), "r+b") as file:
            file.seek(flip.offset)
            file.write(image.files[flip.path][flip.offset : flip.offset + 1])
        engine = EmbeddedEngine.open(root, background=False)
        assert look(engine, COMMITS) == ([], False), "the refused open changed the store"
        engine.close()
        return "refused"
    result = ""
    try:
        commits = COMMITS
        for _ in range(2):
            missing, complained = look(engine, commits)
            tail = list(range(COMMITS - len(missing), COMMITS))
            if missing and power_cut and missing == tail and len(missing) <= GROUPS_IN_DOUBT:
                return "torn tail"
            findings = engine.verify()
            if (missing or complained) and not findings:
                raise AssertionError(f"commits {missing} are missing, and verify finds nothing")
            now = "nothing" if not findings else "only verify says so"
            if complained:
                now = "a read says so"
            elif missing:
                now = "missing, and verify says so"
            result = result if result not in ("", "nothing") else now
            if commits == COMMITS:
                engine.transact(lambda tx: tx.put(encode("key", COMMITS), value(COMMITS)))
                commits += 1
                try:
                    engine.fold()
                except CorruptionError:
                    return "refused by a fold"
                engine.close()
                try:
                    engine = EmbeddedEngine.open(root, background=False)
                except CorruptionError:
                    return "refused later"
    finally:
        abandon(engine)
    return result


# --- many, in children ---------------------------------------------------------------------


class Result(NamedTuple):
    """What came of all flips, and those that broke the promise or the process."""

    outcomes: Counter[str]
    broken: list[str]


def run(root: Path, variant: Variant, every: int, *, power_cut: bool, only: str = "") -> Result:
    """Flip every so manyth byte (of the files whose path begins with `only`) and look."""
    with small_limits():
        image = killed_store(str(root / "store"), variant)
        if power_cut:
            image = without_power(image)
        todo = [flip for flip in flips(image, every) if flip.path.startswith(only)]
        result = Result(Counter(), [])
        while todo:
            done = in_child(lambda todo=todo: ((str(flip), _try(image, flip, root, power_cut)) for flip in todo))  # type: ignore[misc]
            for name, came in done:
                if came.startswith("!"):
                    result.broken.append(f"{name}: {came[1:]}")
                else:
                    result.outcomes[came] += 1
            todo = todo[len(done) :]
            if todo:
                result.broken.append(f"{todo[0]}: the process died")
                todo = todo[1:]
            shutil.rmtree(root / "flipped", ignore_errors=True)
    return result


def _try(image: Image, flip: Flip, root: Path, power_cut: bool) -> str:
    path = root / "flipped"
    try:
        return outcome(image, flip, str(path), power_cut=power_cut)
    except Exception as error:
        return f"!{type(error).__name__}: {error}: {traceback.format_exc(limit=-2)}"
    finally:
        shutil.rmtree(path, ignore_errors=True)


def in_child(work: Callable[[], Iterator[tuple[str, str]]]) -> list[tuple[str, str]]:
    """What `work` yields in a forked child, as far as it got."""
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hear)
        try:
            with os.fdopen(tell, "w", buffering=1) as pipe:
                for pair in work():
                    pipe.write(json.dumps(pair) + "\n")
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(hear) as pipe:
        lines = pipe.readlines()
    os.waitpid(child, 0)
    return [(name, came) for name, came in map(json.loads, lines)]


def main() -> None:
    """Both variants, with and without a power cut; exit status 1 if anything was broken."""
    parser = argparse.ArgumentParser(description="Flip every byte of a killed store in turn.")
    parser.add_argument("--every", type=int, default=1, help="flip every so manyth byte only (1)")
    options = parser.parse_args()
    broken = 0
    variants: tuple[Variant, ...] = ("log", "half folded")
    for variant in variants:
        for power_cut in (False, True):
            begun = time.monotonic()
            memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            with tempfile.TemporaryDirectory(dir=memory, prefix="agentstore-") as root:
                result = run(Path(root), variant, options.every, power_cut=power_cut)
            kind = "after a power cut" if power_cut else "after a kill"
            print(f"{variant}, {kind}: {dict(result.outcomes)} {time.monotonic() - begun:.1f} s", flush=True)
            for line in result.broken:
                print(f"  BROKEN {line}", flush=True)
            broken += len(result.broken)
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
