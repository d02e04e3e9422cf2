"""The other process of the tests of effects: python effects_worker.py ACT STORE WORLD [more].

It says what it did in one line of JSON, and then waits until its stdin ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from effects_lab import call, decide, message, open_store

from agentstore import EffectInDoubt, EffectInFlight, LeaseHeld, NotDone, StaleThread, Store, Thread, clock
from agentstore.clock import Owner, SystemClock
from agentstore.testing import crashpoints


class World:
    """What the tools did, in a file: a line for each time, with the key that it was done under."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def charge(self, key: str) -> str:
        with self.path.open("a") as file:
            file.write(key + "\n")
        return f"ch_{key[:8]}"

    def find(self, key: str) -> Any:
        return f"ch_{key[:8]}" if key in self.lines() else NotDone


class OtherBoot(SystemClock):
    """The machine's clock as it was before the last boot."""

    def owner(self) -> Owner:
        return super().owner()._replace(boot_id=bytes(16))


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def stay() -> None:
    sys.stdin.read()


def begin(store: Store, _: World, rule: str) -> None:
    """Commit a decision, begin its call under a lease, and do nothing more."""
    thread = store.thread("trip-1")
    thread.lease("worker-1", ttl_s=3600)
    effect = call(thread, decide(thread), rule=rule, timeout_s=3600)
    tell(key=effect.key, attempt=effect.attempt)
    stay()


def other_boot(store: Store, world: World, rule: str) -> None:
    with clock.using(OtherBoot()):
        begin(store, world, rule)


def race(store: Store, world: World, count: str) -> None:
    """Make every call of the decision that nobody else makes, in an order of one's own."""
    thread = store.thread("trip-1")
    head = thread.head
    assert head is not None
    tell(ready=True)
    sys.stdin.readline()
    made = []
    for n in range(int(count)):
        index = (n * 7 + os.getpid()) % int(count)
        try:
            effect = call(thread, (head.thread_uuid, 0), index=index)
        except EffectInFlight:
            continue
        if not effect.done:
            made.append(index)
            try:
                effect.receipt(world.charge(effect.key), message(str(index)))
            except StaleThread:
                thread.load()
    tell(made=made)


def once_race(store: Store, world: World, count: str) -> None:
    tell(ready=True)
    sys.stdin.readline()
    made = []
    for n in range(int(count)):
        name = f"invoice-{(n * 7 + os.getpid()) % int(count)}"

        def charge(key: str, name: str = name) -> str:
            made.append(name)
            return world.charge(key)

        try:
            store.once(name, charge)
        except EffectInFlight:
            continue
    tell(made=made)


def carry_on(store: Store, world: World, rule: str) -> None:
    """Decision, call, receipt; or what is left of it: what a run does after each start."""
    thread = store.thread("trip-1")
    try:
        lease = thread.lease("worker", ttl_s=3600)
    except LeaseHeld as error:
        tell(error=str(error))
        return
    with lease:
        if thread.head is None:
            decide(thread)
        decision = thread.decision
        assert decision is not None
        if len(thread.load()["history"]) == 1:
            finish(thread, decision, rule, world)
        tell(history=thread.load()["history"])


def finish(thread: Thread, decision: tuple[bytes, int], rule: str, world: World) -> None:
    """From the decision to the message of its call."""
    try:
        effect = call(thread, decision, rule=rule, timeout_s=3600)
    except EffectInDoubt as error:
        effect = error.effect
        answer = world.find(effect.key)
        if answer is not NotDone:
            effect.receipt(answer, message(answer), source="query")
            return
        effect.retry("the world knows nothing about it")
    if effect.done:  # stored alone: its message is still to come
        thread.commit(message(effect.result), reason="tool_result")
    else:
        result = world.charge(effect.key)
        effect.receipt(result, message(result))


def main(act: str, path: str, world: str, *more: str) -> None:
    if act == "crash":
        point, nth, act = more[:3]
        more = more[3:]
        crashpoints.install(point, int(nth))
    with open_store(Path(path)) as store:
        globals()[act](store, World(world), *more)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main(*sys.argv[1:])
