"""Writers whose every step can be worked out again, and the check of a store against what they were promised.

Step n of a writer is a function of (seed, writer, n), so what must be in the store after it is
known without asking the store. A step adds a record of its own, overwrites and deletes a few slots, moves the writer's
head and counts one up in a counter that all writers share: if any of this is there, all of it must be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from agentstore.engine import keys
from agentstore.engine.api import Reader, Tx
from agentstore.testing.acknowledged import Promise

SLOTS = 60
"""Keys of a writer that its steps overwrite and delete."""

COUNTER = keys.encode("counter")
WRITERS = keys.encode("w")

Writes = list[tuple[bytes, bytes | None]]


class Sizes(NamedTuple):
    """How large values are: (share of all, smallest, largest) in bytes."""

    classes: tuple[tuple[float, int, int], ...]

    def draw(self, rng: random.Random) -> int:
        at = rng.random()
        for share, low, high in self.classes:
            if at < share:
                return rng.randint(low, high)
            at -= share
        return rng.randint(*self.classes[0][1:])


USUAL = Sizes(((0.86, 0, 700), (0.12, 700, 20_000), (0.019, 20_000, 300_000), (0.001, 300_000, 5_000_000)))
"""What agents write: mostly small, a few that fill a segment of the log or are larger than one."""

SMALL = Sizes(((0.95, 0, 700), (0.05, 700, 10_000)))
"""For a disk that is nearly full."""


def prefix(writer: str) -> bytes:
    """The common beginning of all keys of `writer`."""
    return keys.encode("w", writer)


def head_key(writer: str) -> bytes:
    return keys.encode("w", writer, "head")


def decode_number(raw: bytes | None) -> int:
    """A head or the counter; -1 (head) if there is none."""
    return -1 if raw is None else int(raw)


def writes_of(seed: int, writer: str, step: int, sizes: Sizes = USUAL) -> Writes:
    """What step `step` of `writer` puts and deletes, the counter excepted."""
    rng = random.Random(f"{seed}/{writer}/{step}")
    writes: Writes = [(keys.encode("w", writer, "record", step), rng.randbytes(rng.randint(0, 600)))]
    for _ in range(rng.randint(0, 3)):
        slot = keys.encode("w", writer, "slot", rng.randrange(SLOTS))
        writes.append((slot, None if rng.random() < 0.2 else _bytes(rng, sizes.draw(rng))))
    writes.append((head_key(writer), b"%d" % step))
    return writes


def _bytes(rng: random.Random, size: int) -> bytes:
    if size <= 4096:
        return rng.randbytes(size)
    return (rng.randbytes(997) * (size // 997 + 1))[:size]


def take_step(tx: Tx, seed: int, writer: str, step: int, sizes: Sizes = USUAL) -> None:
    """Do step `step` of `writer` in a transaction; AssertionError if the one before it is not there."""
    head = decode_number(tx.get(head_key(writer)))
    if head != step - 1:
        raise AssertionError(f"writer {writer} is at step {head}, not at {step - 1}")
    for key, value in writes_of(seed, writer, step, sizes):
        if value is None:
            tx.delete(key)
        else:
            tx.put(key, value)
    tx.put(COUNTER, b"%d" % (max(decode_number(tx.get(COUNTER)), 0) + 1))


class Model:
    """What a store must hold of one writer; it only moves forwards."""

    def __init__(self, seed: int, writer: str, sizes: Sizes = USUAL) -> None:
        self.writer = writer
        self.step = -1
        self.state: dict[bytes, bytes] = {}
        self._seed = seed
        self._sizes = sizes

    def advance(self, step: int) -> None:
        """Take all steps up to `step`."""
        while self.step < step:
            self.step += 1
            for key, value in writes_of(self._seed, self.writer, self.step, self._sizes):
                if value is None:
                    self.state.pop(key, None)
                else:
                    self.state[key] = value


class Models:
    """The models of all writers of a store, made when they are needed."""

    def __init__(self, seed: int, sizes: Sizes = USUAL) -> None:
        self._seed = seed
        self._sizes = sizes
        self._models: dict[str, Model] = {}

    def of(self, writer: str) -> Model:
        if writer not in self._models:
            self._models[writer] = Model(self._seed, writer, self._sizes)
        return self._models[writer]


def faults(
    view: Reader,
    models: Models,
    before: dict[str, Promise],
    after: Callable[[], dict[str, Promise]],
) -> list[str]:
    """Everything in `view` that is not as it was promised, as sentences.

    `before` is what the diaries said before the view was opened: all of it must be there. `after` reads them
    again: what is there must have been asked for by then. What is there of a writer is its steps
    up to its head, all of them, byte for byte, and nothing else.
    """
    pairs = list(view.scan(WRITERS, keys.end_of(WRITERS)))
    counter = max(decode_number(view.get(COUNTER)), 0)
    asked = after()
    found: list[str] = []
    by_writer: dict[str, dict[bytes, bytes]] = {}
    for key, value in pairs:
        by_writer.setdefault(str(keys.decode(key)[1]), {})[key] = value
    heads = {writer: decode_number(there.get(head_key(writer))) for writer, there in by_writer.items()}
    for writer, promise in before.items():
        head = heads.get(writer, -1)
        if head < promise.confirmed:
            found.append(f"writer {writer}: step {promise.confirmed} was acknowledged, its head is {head}")
        for other, step in promise.saw.items():
            if heads.get(other, -1) < step:
                found.append(f"writer {writer} saw step {step} of writer {other}, whose head is {heads.get(other, -1)}")
    for writer, there in by_writer.items():
        if writer not in asked or heads[writer] > asked[writer].asked:
            limit = asked[writer].asked if writer in asked else "nothing"
            found.append(f"writer {writer}: its head is {heads[writer]}, asked for was {limit}")
            continue
        model = models.of(writer)
        model.advance(heads[writer])
        found += _differences(writer, there, model.state)
    if counter != sum(head + 1 for head in heads.values()):
        found.append(f"the counter is {counter}, the heads say {heads}")
    return [*found, *_lookups(view, by_writer)]


def _differences(writer: str, there: dict[bytes, bytes], wanted: dict[bytes, bytes]) -> Iterable[str]:
    if there == wanted:
        return
    for key in sorted(there.keys() | wanted.keys()):
        if there.get(key) != wanted.get(key):
            yield (
                f"writer {writer}: key {keys.decode(key)!r} holds {_short(there.get(key))}, "
                f"it should hold {_short(wanted.get(key))}"
            )


def _short(value: bytes | None) -> str:
    return "nothing" if value is None else f"{len(value)} bytes ({value[:12].hex()}…)"


def _lookups(view: Reader, by_writer: dict[str, dict[bytes, bytes]]) -> Iterable[str]:
    """The other ways to the same data agree with the scan: `get`, and the scan backwards."""
    for writer, there in by_writer.items():
        backwards = list(view.scan(prefix(writer), keys.end_of(prefix(writer)), reverse=True))
        if backwards != sorted(there.items(), reverse=True):
            yield f"writer {writer}: a scan backwards shows other pairs than a scan forwards"
        for slot in range(SLOTS):
            key = keys.encode("w", writer, "slot", slot)
            if view.get(key) != there.get(key):
                yield f"writer {writer}: get and scan disagree about key {keys.decode(key)!r}"
