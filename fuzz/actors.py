"""An actor: a process that takes the steps of its part of a program, and stands still at points until told to go.

It is forked by whoever says who runs, and talks with that over a socket: it says where it stands (`State`) and what
happened since, and gets the number of points that it may pass. A step is a name of a method here and its arguments.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final, NoReturn

from agentstore.engine.api import Reader, Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.files import set_default_files
from agentstore.engine.keys import encode
from agentstore.engine.writer import Request
from agentstore.testing.faults import abandon
from fuzz.points import PointFiles
from fuzz.story import certain

Step = list[Any]
State = str
"""Of an actor that does not run: "point" (it may go on), "blocked", "meet", "done", "failed"."""

COUNTER: Final = encode("counter")
FOR_EVER: Final = -1
DELETE_EVERY: Final = 3


def key_of(actor: int, number: int) -> bytes:
    return encode("of", actor, number)


def last_of(actor: int) -> bytes:
    return encode("last", actor)


def value_of(actor: int, number: int, lsn: int, size: int) -> bytes:
    return b"%d %d %d " % (actor, number, lsn) + bytes([97 + number % 26]) * size


def write(tx: Tx, actor: int, number: int, size: int) -> None:
    """Commit `number` of a writer: keys of its own, one deleted now and then, and the counter of all."""
    before = tx.get(last_of(actor))
    there = None if before is None else int(before.split()[1])
    if there != (number - 1 if number else None):
        raise AssertionError(f"commit {number} of actor {actor} was made on top of {before!r}")
    value = value_of(actor, number, tx.lsn, size)
    tx.put(key_of(actor, number), value)
    tx.put(last_of(actor), value[:40])
    tx.put(COUNTER, b"%d" % (int(tx.get(COUNTER) or 0) + 1))
    if number % DELETE_EVERY == DELETE_EVERY - 1:
        tx.delete(key_of(actor, number - 1))


def heads_in(reader: Reader, actors: int) -> dict[int, tuple[int, int]]:
    """The number and the LSN of the newest commit of each writer. AssertionError if what is there is not what they are
    supposed to have written up to these, all of it and nothing else."""
    found = dict(reader.scan(b"\x10", b"\xff"))
    heads: dict[int, tuple[int, int]] = {}
    expected: dict[bytes, bytes] = {}
    for actor in range(actors):
        raw = found.get(last_of(actor))
        if raw is None:
            continue
        number, lsn = (int(each) for each in raw.split()[1:3])
        heads[actor] = number, lsn
        expected[last_of(actor)] = raw
        for each in range(number + 1):
            deleted = each < number and (each + 1) % DELETE_EVERY == DELETE_EVERY - 1
            value = found.get(key_of(actor, each), b"")
            if not deleted:
                fields = value.split()
                right = len(fields) > 2 and value == value_of(actor, each, int(fields[2]), len(value.split(b" ", 3)[3]))
                expected[key_of(actor, each)] = value if right else b"commit %d of actor %d" % (each, actor)
    if heads:
        expected[COUNTER] = b"%d" % sum(number + 1 for number, _ in heads.values())
    if found != expected:
        wrong = [
            f"{key!r} is {found.get(key, b'gone')[:30]!r} instead of {expected.get(key, b'gone')[:30]!r}"
            for key in sorted(found.keys() | expected.keys())
            if found.get(key) != expected.get(key)
        ]
        raise AssertionError("; ".join(wrong[:3]))
    return heads


class Actor:
    """The child's side."""

    def __init__(self, number: int, actors: int, path: str, turns: str, channel: socket.socket, *, fine: bool) -> None:
        self._number = number
        self._actors = actors
        self._path: Final = path
        self._channel = channel.makefile("rw", encoding="utf-8")
        self.files = PointFiles(number, self._at, self._blocked, turns, fine=fine)
        self._left = FOR_EVER
        self._made: list[str] = []
        self._watched = False
        self._next = 0
        self._engine: EmbeddedEngine | None = None

    # --- being told -----------------------------------------------------------------------

    def _at(self, name: str) -> None:
        if not self._watched:
            return
        if self._left == 0:
            self._stand("point", name)
        self._left -= self._left > 0
        self._made.append(name)

    def _blocked(self, what: str) -> None:
        if not self._watched:
            raise AssertionError(f"blocked by {what} before anybody else began")
        self._stand("blocked", what)

    def _stand(self, state: State, where: str) -> None:
        """Say so, and wait until it goes on."""
        told = {"state": state, "where": where, "made": self._made, "events": self.files.events}
        print(json.dumps(told), file=self._channel, flush=True)
        self._made = []
        self.files.events.clear()
        line = self._channel.readline()
        if not line:
            os._exit(0)  # whoever told us is gone
        self._left = int(line)

    def _say(self, *event: Any) -> None:
        self.files.events.append(list(event))

    # --- the steps ------------------------------------------------------------------------

    def run(self, before: list[Step], steps: list[Step]) -> NoReturn:
        """Take the steps `before` freely, the others as told, and wait for the end."""
        set_default_files(self.files)
        try:
            # Epochs and names of files are random: here the same ones each time.
            with certain(self._number):
                self._take(before)
                self._stand("point", "the first step")
                self._watched = True
                self._take(steps)
        except BaseException as error:
            self._watched = False
            trace = "" if isinstance(error, AssertionError) else " in " + traceback.format_exc(limit=-3)
            self._stand("failed", f"{type(error).__name__}: {error}{trace}")
        while True:
            self._stand("done", "the end")

    def _take(self, steps: list[Step]) -> None:
        for name, *arguments in steps:
            step: Callable[..., None] = getattr(self, name)
            step(*arguments)

    @property
    def engine(self) -> EmbeddedEngine:
        assert self._engine is not None
        return self._engine

    def meet(self) -> None:
        """Wait until all others do, or are done."""
        self._stand("meet", "a meeting")

    def open(self) -> None:
        self._engine = EmbeddedEngine.open(self._path, background=False)

    def close(self, shrink: bool = False) -> None:
        self.engine.close(shrink=shrink)

    def kill(self) -> None:
        """Let go as SIGKILL would."""
        abandon(self.engine)

    def commit(self, *sizes: int) -> None:
        """A commit, or of several sizes a group, as threads make it who commit at the same moment."""
        first, self._next = self._next, self._next + len(sizes)
        requests: list[Request[None]] = []
        for number, size in enumerate(sizes, first):
            request: Request[None] = Request(lambda tx, n=number, s=size: write(tx, self._number, n, s))  # type: ignore[misc]  # defaults of a lambda have no types
            request.woken = threading.Lock()
            request.woken.acquire()
            requests.append(request)
        self._say("begun", self._number, self._next)
        self.engine._writer._queue.extend(requests[1:])
        lsns = [self.engine.transact(requests[0].fn).lsn]
        for request in requests[1:]:
            if request.error is not None:
                raise request.error
            lsns.append(request.lsn)
        self._say("confirmed", self._number, self._next, lsns)

    def read(self) -> None:
        self._say("reading", self._number)
        with self.engine.read() as snap:
            heads = heads_in(snap, self._actors)
        self._say("seen", self._number, {str(actor): list(head) for actor, head in heads.items()})

    def settle(self) -> None:
        """Read in a transaction: what the dead left there is there now, or never."""
        self._say("reading", self._number)
        heads = self.engine.transact(lambda tx: heads_in(tx, self._actors)).value
        self._say("settled", self._number, {str(actor): list(head) for actor, head in heads.items()})

    def fold(self) -> None:
        self.engine.fold()

    def look(self) -> None:
        """What the background does now and then: look how long the log is."""
        self.engine._fold_when_due()

    def prepare(self) -> None:
        """What the background does after a roll."""
        self.engine._guarded(self.engine._parts.segments.prepare_spare)

    def verify(self) -> None:
        findings = self.engine.verify()
        if findings:
            raise AssertionError(f"verify: {findings[0]}")


def start(actor: Callable[[socket.socket], Actor], before: list[Step], steps: list[Step]) -> tuple[int, socket.socket]:
    """Fork an actor: its process id and our end of the socket."""
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # what the child does not look at is not copied
    pid = os.fork()
    gc.unfreeze()
    if pid:
        theirs.close()
        return pid, ours
    try:
        gc.disable()
        ours.close()
        actor(theirs).run(before, steps)
    finally:
        os._exit(1)
