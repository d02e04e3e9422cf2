"""One schedule of a program: who of its actors runs, for how many points, and what has to be true meanwhile and after.

Exactly one actor runs at a time. A schedule is a list of choices, ``[actor, points]`` or ``[actor, points, "kill"]``;
after the last one whoever runs goes on until it is blocked or done, then the next who can. So a schedule and a program
decide all that happens.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import dataclass, field
from typing import Any

from fuzz.actors import FOR_EVER, Actor, State, Step, start
from fuzz.campaign import Violation
from fuzz.points import PAUSE

Choice = list[Any]

HANG_S = 60.0
"""An actor that neither stands still nor ends for so long hangs in a call that is no point."""
POINTS_MAX = 20_000
"""Of one schedule: more is an endless loop."""


@dataclass
class Watch:
    """What a crash at this moment would leave, and whether that is all that was confirmed."""

    applied: int = 0
    """What base holds."""
    frames: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By LSN: the segment's file, and "written", "synced", or "spoiled": its sync may have failed, which the kernel
    told only to a process that is dead, and counts the pages as clean."""
    syncing: dict[int, str] = field(default_factory=dict)
    """By actor: the segment that it syncs next."""
    acknowledged: int = 0
    """The newest LSN that somebody heard of."""
    begun: dict[int, int] = field(default_factory=dict)
    confirmed: dict[int, int] = field(default_factory=dict)
    """By writer: how many commits."""
    reading: dict[int, dict[int, int]] = field(default_factory=dict)
    """By reader: what was confirmed when its read began."""
    dead: set[int] = field(default_factory=set)

    def hear(self, event: list[Any]) -> None:
        """Take one event of an actor. Raises Violation."""
        getattr(self, f"_{event[0]}")(*event[1:])

    def _frames(self, path: str, lsns: list[int]) -> None:
        for lsn in lsns:
            there = self.frames.get(lsn)
            # Written again by who found a sync unfinished: the same bytes.
            self.frames[lsn] = path, "synced" if there == (path, "synced") else "written"

    def _synced(self, path: str) -> None:
        for lsn, there in list(self.frames.items()):
            if there == (path, "written"):
                self.frames[lsn] = path, "synced"

    def _syncing(self, actor: int, path: str) -> None:
        self.syncing[actor] = path

    def die(self, actor: int, where: str) -> None:
        """An actor is killed at a point. Of a sync that it was in nobody knows how it ended."""
        self.dead.add(actor)
        path = self.syncing.get(actor, "")
        for lsn, there in list(self.frames.items()):
            if where == "sync segment" and there == (path, "written"):
                self.frames[lsn] = path, "spoiled"

    def _gone(self, path: str) -> None:
        for lsn, (there, _) in list(self.frames.items()):
            if there == path:
                del self.frames[lsn]
                if self.applied < lsn <= self.acknowledged:
                    raise Violation(f"LSN {lsn} was confirmed, base ends at {self.applied}, its segment is given up")

    def _applied(self, lsn: int) -> None:
        for each in range(self.applied + 1, lsn + 1):
            if self.frames.get(each, ("", "written"))[1] == "written":
                raise Violation(f"LSN {each} is in base and was never synced")
        if lsn < self.applied:
            raise Violation(f"base went back from LSN {self.applied} to {lsn}")
        self.applied = lsn

    def _begun(self, actor: int, commits: int) -> None:
        self.begun[actor] = commits

    def _confirmed(self, actor: int, commits: int, lsns: list[int]) -> None:
        for lsn in lsns:
            self._heard(lsn, f"a commit of actor {actor}")
        self.confirmed[actor] = commits

    def _heard(self, lsn: int, what: str) -> None:
        if lsn > self.applied and self.frames.get(lsn, ("", ""))[1] != "synced":
            raise Violation(f"LSN {lsn} was told to {what} and is on no disk")
        self.acknowledged = max(self.acknowledged, lsn)

    def _reading(self, actor: int) -> None:
        self.reading[actor] = dict(self.confirmed)

    def _seen(self, actor: int, heads: dict[str, list[int]]) -> None:
        for writer, (number, lsn) in heads.items():
            self._heard(lsn, f"a read of actor {actor}")
            # Who writes has not heard of it yet, and others act on it.
            self.confirmed[int(writer)] = max(self.confirmed.get(int(writer), 0), number + 1)
        for each, commits in self.reading[actor].items():
            if heads.get(str(each), [-1])[0] + 1 < commits:
                raise Violation(f"actor {actor} does not read the confirmed commit {commits - 1} of actor {each}")

    def _settled(self, actor: int, heads: dict[str, list[int]]) -> None:
        self._seen(actor, heads)
        for writer in self.dead:
            # A transaction acts on what is not there: it must not come later.
            self.begun[writer] = min(self.begun.get(writer, 0), heads.get(str(writer), [-1])[0] + 1)


@dataclass
class Standing:
    """An actor as whoever tells it sees it."""

    pid: int
    channel: socket.socket
    lines: Any
    state: State = "point"
    where: str = ""
    retry: bool = True
    """Whether somebody else went on since it was refused."""

    @property
    def over(self) -> bool:
        return self.state in ("done", "dead")

    def hear(self) -> dict[str, Any]:
        line = self.lines.readline()
        if not line:
            raise Violation("an actor died")
        told: dict[str, Any] = json.loads(line)
        self.state, self.where = told["state"], told["where"]
        return told

    def end(self) -> None:
        """SIGKILL."""
        if self.pid:
            pid, self.pid = self.pid, 0
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.lines.close()
            self.channel.close()
        self.state = "dead"


@dataclass
class Stretch:
    """An actor ran so far without anybody else."""

    actor: int
    points: list[str]
    runnable: list[int]
    """Who could have run instead, at its beginning and until its end."""
    chosen: bool
    """By a choice, rather than since nothing else was left."""


class Schedule:
    """Runs a program once. `stretches` is what came of it."""

    def __init__(
        self, kind: type[Actor], path: str, turns: str, before: list[Step], parts: list[list[Step]], watch: Watch
    ) -> None:
        self._kind = kind
        self._args = path, turns
        self._before = before
        self._parts = parts
        self.watch = watch
        self.stretches: list[Stretch] = []
        self._standing: list[Standing] = []
        self._points = 0

    def run(self, choices: list[Choice], *, fine: bool = False) -> None:
        """Start the actors, run them, kill them. Raises Violation."""
        try:
            for number, steps in enumerate(self._parts):
                self._start(number, steps, fine)
            for actor, points, *how in choices:
                self._choose(actor, points, bool(how))
            self._finish(choices[-1][0] if choices else 0)
        finally:
            for each in self._standing:
                each.end()

    def _start(self, number: int, steps: list[Step], fine: bool) -> None:
        path, turns = self._args

        def actor(channel: socket.socket) -> Actor:
            for each in self._standing:
                each.channel.close()
            return self._kind(number, len(self._parts) + 2, path, turns, channel, fine=fine)

        pid, channel = start(actor, self._before, steps)
        channel.settimeout(HANG_S)
        standing = Standing(pid, channel, channel.makefile("rw", encoding="utf-8"))
        self._standing.append(standing)
        self._listen(number)

    def _listen(self, number: int) -> list[str]:
        """Wait until an actor stands still; the points that it passed."""
        standing = self._standing[number]
        try:
            told = standing.hear()
        except TimeoutError as error:
            raise Violation(f"actor {number} hangs behind {standing.where}") from error
        for event in told["events"]:
            self.watch.hear(event)
        if standing.state == "failed":
            raise Violation(f"actor {number}: {standing.where}")
        made: list[str] = told["made"]
        return made

    def _can_run(self, number: int) -> bool:
        standing = self._standing[number]
        return standing.state == "point" or (standing.state == "blocked" and standing.retry)

    def _choose(self, actor: int, points: int, kill: bool) -> None:
        if self._standing[actor].over:
            return
        if self._can_run(actor) and points:
            self._go(actor, points, chosen=True)
        if kill and not self._standing[actor].over:
            self.watch.die(actor, self._standing[actor].where)
            self._standing[actor].end()
            self._went_on(actor)

    def _go(self, actor: int, points: int, *, chosen: bool) -> None:
        standing = self._standing[actor]
        others = [each for each in range(len(self._parts)) if each != actor and self._can_run(each)]
        print(points, file=standing.lines, flush=True)
        made = self._listen(actor)
        # Who only pauses tries again by himself, but others go first.
        standing.retry = bool(made) and standing.where == PAUSE
        self.stretches.append(Stretch(actor, made, others, chosen))
        self._points += len(made)
        if self._points > POINTS_MAX:
            raise Violation(f"no end after {POINTS_MAX} points")
        if made or standing.state != "blocked":
            self._went_on(actor)

    def _went_on(self, actor: int) -> None:
        for number, each in enumerate(self._standing):
            each.retry = each.retry or number != actor
        waiting = [each for each in self._standing if not each.over]
        if waiting and all(each.state == "meet" for each in waiting):
            for each in waiting:
                each.state = "point"

    def _finish(self, actor: int) -> None:
        """Nobody chooses any more."""
        count = len(self._parts)
        while True:
            runnable = [number for number in range(count) if self._can_run(number)]
            if not runnable:
                break
            if actor not in runnable or self._standing[actor].state == "blocked":
                actor = min(runnable, key=lambda number: (number - actor - 1) % count)
            self._go(actor, FOR_EVER, chosen=False)
        waiting = [f"actor {n} for {each.where}" for n, each in enumerate(self._standing) if not each.over]
        if waiting:
            raise Violation("all wait: " + ", ".join(waiting))
