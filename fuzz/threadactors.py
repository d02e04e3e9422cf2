"""Actors that use the whole store: one thread that all of them write, leases, packs, retention and the offline job."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final

from agentstore import Append, Retention, Store, Thread, clock, packing, position, snapshots
from agentstore.clock import NS_PER_S, Clock, Owner
from agentstore.compaction import compact
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.errors import Fenced, LeaseHeld, StaleThread, StoreInUse, ThreadNotFound
from fuzz.actors import Actor
from fuzz.campaign import Violation

THREAD: Final = "t"
TTL_S: Final = 30.0
SMALL_PACK: Final = 4
TRIES_MAX: Final = 50

Entry = tuple[int, int, int]
"""Of the history: who wrote it, the how-manieth of his it is, the fencing token that he had or 0."""


@contextmanager
def small_packs() -> Iterator[None]:
    """A few commits make a pack."""
    places = [(module, "PACK_MEMBERS") for module in (position, packing, snapshots)] + [(position, "ASK_EVERY")]
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, SMALL_PACK)
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)


class Later:
    """The clock of a process for which every lease of the others has expired."""

    def __init__(self, now: Clock) -> None:
        self._now = now

    def boottime_ns(self) -> int:
        return self._now.boottime_ns() + 3600 * NS_PER_S

    def wall_ns(self) -> int:
        return self._now.wall_ns()

    def owner(self) -> Owner:
        return self._now.owner()

    def provably_dead(self, owner: Owner) -> bool:
        return self._now.provably_dead(owner)


def history_of(thread: Thread) -> list[Entry]:
    try:
        state = thread.load()
    except ThreadNotFound:
        return []
    return [tuple(entry) for entry in state["history"]]


def heads_of(history: list[Entry]) -> dict[int, int]:
    """The number of the newest entry of each writer. AssertionError if it is not all of his, in order, or if somebody
    wrote whose lease had been taken."""
    heads: dict[int, int] = {}
    newest = 0
    for writer, number, token in history:
        if number != heads.get(writer, -1) + 1:
            raise AssertionError(f"entry {number} of actor {writer} follows entry {heads.get(writer)}: {history}")
        heads[writer] = number
        if token and token < newest:
            raise AssertionError(f"actor {writer} wrote with the token {token} after one with {newest}: {history}")
        newest = max(newest, token)
    return heads


class ThreadActor(Actor):
    """Steps on a store."""

    _store: Store
    _thread: Thread
    _token = 0
    _fenced = False

    def open_store(self) -> None:
        self._store = Store.open(self._path, background=False)
        self._store._random = random.Random(self._number)
        self._store._commit_ids = count(self._number << 32)
        self._engine = self._store._engine
        self._thread = self._store.thread(THREAD)

    def close_store(self) -> None:
        self._store.close()

    def append(self) -> None:
        """One entry, on top of whatever the others wrote; nothing once the lease is lost."""
        self._say("begun", self._number, self._next + 1)
        for _ in range(TRIES_MAX):
            if self._fenced:
                return
            try:
                done = self._thread.commit(Append("history", [self._number, self._next, self._token]))
            except StaleThread:
                self._thread.load()
            except Fenced:
                self._fenced = True
            else:
                self._next += 1
                self._say("confirmed", self._number, self._next, [done.lsn])
                return
        raise AssertionError(f"{TRIES_MAX} commits found a newer head")

    def load(self) -> None:
        self._say("reading", self._number)
        heads = heads_of(history_of(self._store.thread(THREAD)))
        self._say("seen", self._number, {str(writer): [number, 0] for writer, number in heads.items()})

    def lease(self) -> None:
        try:
            self._token = self._thread.lease(f"actor {self._number}", ttl_s=TTL_S).token
        except LeaseHeld:
            self._fenced = True

    def take_lease(self) -> None:
        """As one for whom the lease of the others has expired."""
        with clock.using(Later(clock.current())):
            self.lease()

    def pack(self) -> None:
        self._thread.load()
        keys = self._thread._keys
        assert keys is not None
        packing.pack_full(self.engine, keys.number)

    def prune(self) -> None:
        self._store.apply_retention(Retention(keep_last=2))

    def compact(self) -> None:
        """The offline job, unless somebody has the store open."""
        try:
            compact(self._path, retention=Retention(keep_last=2))
        except StoreInUse:
            pass


def look(engine: EmbeddedEngine, writers: int) -> dict[int, int]:
    """Every checkpoint loads, and the newest has whole prefixes. Raises Violation."""
    store = Store(engine)
    thread = store.thread(THREAD)
    history = history_of(thread)
    for each in thread.history():
        there = [tuple(entry) for entry in thread.load(at=each.seq)["history"]]
        if there != history[: len(there)]:
            raise Violation(f"checkpoint {each.seq} has {there}, the head {history}")
    findings = store.check()
    if findings:
        raise Violation(f"check: {findings[0]}")
    return heads_of(history)


def mark(engine: EmbeddedEngine, writer: int) -> None:
    """One more entry."""
    thread = Store(engine).thread(THREAD)
    history_of(thread)
    thread.commit(Append("history", [writer, 0, 0]))
