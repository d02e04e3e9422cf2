"""What to look at before a store goes into production: findings, each with what to do."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from agentstore import EffectView, Store, Thread, health
from agentstore.errors import AgentStoreError, NotAStore, StoreNotFound, ThreadGone, ThreadNotFound
from agentstore.leases import holder
from agentstore.transfer import NAME_WHILE_ARRIVING

from .options import existing_store

OK, LOOK, PROBLEM = "ok", "look at this", "problem"

SYNCS: Final = 200
"""Syncs that are measured."""
SYNC_FAST_S: Final = 15e-6
"""No disk is faster: a sync below this many seconds reaches none."""
SYNC_SLOW_S: Final = 0.02
FREE_BYTES_MIN: Final = 64 * 1024 * 1024
"""The log alone may take half of it before it is folded."""
FREE_BYTES_FEW: Final = 1024 * 1024 * 1024
CHECKSUM_SLOW: Final = 100e6
"""Bytes a second; below, checksums are most of a commit."""
STILL: Final = timedelta(hours=1)
"""A thread that is unfinished and was not written for so long may be forgotten."""
NAMES_SHOWN: Final = 5

MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs"})
FINISHED: Final = frozenset({"COMPLETED", "FAILED"})


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    level: str
    """`OK`, `LOOK` or `PROBLEM`."""
    what: str
    todo: str = ""


def examine(path: str) -> Iterator[Finding]:
    """Findings about the store at `path` and the machine under it. `StoreNotFound`, `NotAStore`. O(effects)."""
    if not os.path.isdir(path):
        raise StoreNotFound(f"there is no store at {os.path.abspath(path)}")
    try:
        with existing_store(path) as store:
            opened = Finding("store", OK, f"opens; {store.stats()['threads']:,} threads")
            seen = _look(store)
            size = store.stats()["base_bytes"]
    except (NotAStore, StoreNotFound):
        raise
    except AgentStoreError as error:
        opened, seen, size = Finding("store", PROBLEM, f"cannot be read: {error}", "Do what the message says."), None, 0
    yield _versions()
    yield _checksum()
    yield _file_system(path)
    yield from _machine(path, size)
    yield opened
    if seen is not None:
        yield from _threads(seen)
        yield from _effects(seen)
        yield _leases(seen)


# --- the machine ----------------------------------------------------------------------------


def _versions() -> Finding:
    found = health.versions()
    return Finding("versions", OK, ", ".join(f"{name} {version}" for name, version in found.items()))


def _checksum() -> Finding:
    found = health.checksum()
    what = f"{found.implementation}, {found.bytes_per_s / 1e9:.2f} GB/s"
    install = "Install google-crc32c: pip install 'agentstore-wal[fast]'."
    if found.bytes_per_s < CHECKSUM_SLOW:
        return Finding("checksum", PROBLEM, what, install)
    return Finding("checksum", OK, what) if "google" in what else Finding("checksum", LOOK, what, install)


def _file_system(path: str) -> Finding:
    kind, network = health.file_system(path)
    if network:
        return Finding("file system", PROBLEM, f"{kind} is on a network", "Choose a directory on a local disk.")
    if kind in MEMORY_FILE_SYSTEMS:
        return Finding("file system", PROBLEM, f"{kind} is memory", "Choose a directory on a disk.")
    if kind == "overlay":
        return Finding(
            "file system", LOOK, "overlay: it goes with its container", "Mount a volume of the host and put it there."
        )
    if not kind:
        return Finding("file system", LOOK, "its type is not known here", "Make sure that it is on a local disk.")
    return Finding("file system", OK, kind)


def _machine(path: str, size: int) -> Iterator[Finding]:
    try:
        yield _sync(path)
        yield _free(path, size)
        yield _permissions(path)
    except OSError as error:
        yield Finding("directory", PROBLEM, f"{path}: {error.strerror or error}", "Make it readable and writable.")


def _sync(path: str) -> Finding:
    taken = health.sync_seconds(path, SYNCS)
    p50, p99 = statistics.median(taken), sorted(taken)[int(len(taken) * 0.99)]
    what = f"p50 {p50 * 1e6:,.0f} µs, p99 {p99 * 1e6:,.0f} µs of {len(taken)} syncs of 4 KiB"
    if p50 < SYNC_FAST_S:
        return Finding(
            "sync", LOOK, f"{what}: no disk is so fast", "Find out what swallows it: eatmydata, a VM's cache, memory."
        )
    if p50 > SYNC_SLOW_S:
        return Finding("sync", LOOK, what, "Each commit waits for one: put the store on a faster disk.")
    return Finding("sync", OK, what)


def _free(path: str, size: int) -> Finding:
    free = health.free_bytes(path)
    what = f"{free:,} bytes free, the store has {size:,}"
    if free < FREE_BYTES_MIN:
        return Finding("space", PROBLEM, what, "Free some: commits end with DiskFull when there is none.")
    if free < max(FREE_BYTES_FEW, size):
        return Finding("space", LOOK, what, "Have room for the store once more: a backup and a check need it.")
    return Finding("space", OK, what)


def _permissions(path: str) -> Finding:
    found = health.ownership(path)
    what = f"directory {found.mode:04o}"
    if found.foreign:
        named = _listed(found.foreign)
        return Finding(
            "permissions",
            PROBLEM,
            f"{what}; of another user: {named}",
            "Run every process that uses the store, this command too, as the user who owns it, and chown the files.",
        )
    if found.mode & 0o077:
        return Finding("permissions", PROBLEM, f"{what}: others may look inside", f"chmod 700 {path}")
    if found.open_files:
        return Finding(
            "permissions", LOOK, f"{what}; others may read {_listed(found.open_files)}", "chmod 600 these files."
        )
    return Finding("permissions", OK, f"{what}, files 0600")


# --- the store --------------------------------------------------------------------------------


@dataclass
class _Seen:
    """What the threads of a store showed."""

    threads: int = 0
    unfinished: list[str] = field(default_factory=list)
    still: list[str] = field(default_factory=list)
    arriving: list[str] = field(default_factory=list)
    in_doubt: list[str] = field(default_factory=list)
    in_flight: int = 0
    duplicates: int = 0
    effects: int = 0
    asks: dict[str, int] = field(default_factory=dict)
    held: int = 0
    stale: list[str] = field(default_factory=list)


def _look(store: Store) -> _Seen:
    seen = _Seen()
    now = datetime.now(UTC)
    for thread_id in store.threads():
        try:
            _look_at(store.thread(thread_id), now, seen)
        except (ThreadGone, ThreadNotFound):
            continue  # deleted meanwhile
    return seen


def _look_at(thread: Thread, now: datetime, seen: _Seen) -> None:
    head = thread.head
    if head is None:
        return
    seen.threads += 1
    if thread.id.startswith(NAME_WHILE_ARRIVING):
        seen.arriving.append(thread.id)
    if head.status is not None and head.status not in FINISHED:
        seen.unfinished.append(f"{thread.id} ({head.status})")
        if now - head.created_at > STILL:
            seen.still.append(f"{thread.id} ({head.status} since {head.created_at:%Y-%m-%d %H:%M} UTC)")
    for effect in thread.effects():
        _look_at_effect(thread.id, effect, seen)
    held = holder(thread)
    if held is not None and held.free:
        seen.stale.append(f"{thread.id} (of {held.name}: {held.free})")
    elif held is not None:
        seen.held += 1


def _look_at_effect(thread_id: str, effect: EffectView, seen: _Seen) -> None:
    seen.effects += 1
    seen.duplicates += effect.duplicates
    seen.in_flight += effect.status == "in_flight"
    if effect.status == "in_doubt":
        seen.in_doubt.append(f"{effect.tool} of {thread_id}")
    if effect.rule == "ask":
        seen.asks[effect.tool] = seen.asks.get(effect.tool, 0) + 1


def _threads(seen: _Seen) -> Iterator[Finding]:
    if seen.still:
        yield Finding(
            "threads",
            LOOK,
            f"{len(seen.unfinished):,} unfinished, {len(seen.still):,} of them not written for an hour: "
            + _listed(seen.still),
            "Run their agents again, answer what they wait for, or delete them.",
        )
    else:
        yield Finding("threads", OK, f"{seen.threads:,}, {len(seen.unfinished):,} of them unfinished")
    if seen.arriving:
        yield Finding(
            "imports",
            LOOK,
            f"{len(seen.arriving):,} threads of an import that did not end",
            "Run the import again; it completes them.",
        )


def _effects(seen: _Seen) -> Iterator[Finding]:
    if seen.in_doubt:
        yield Finding(
            "effects",
            LOOK,
            f"{len(seen.in_doubt):,} in doubt: {_listed(seen.in_doubt)}",
            "Run the agent again, which follows the tool's rule, or answer with `agentstore resolve`.",
        )
    else:
        yield Finding("effects", OK, f"{seen.effects:,}, {seen.in_flight:,} in flight, none in doubt")
    if seen.duplicates:
        yield Finding(
            "duplicates",
            PROBLEM,
            f"{seen.duplicates:,} calls were made once too often",
            "Find them with `agentstore events`; give workers leases that outlast the tools' timeouts.",
        )
    if seen.asks:
        tools = _listed([f"{tool} ({count:,} calls)" for tool, count in sorted(seen.asks.items())])
        yield Finding(
            "tools",
            LOOK,
            f"without a rule, or with the rule ask: {tools}",
            "Declare read, replay, query or skip where one is true: ask stops the thread until a person answers.",
        )


def _leases(seen: _Seen) -> Finding:
    if seen.stale:
        return Finding(
            "leases",
            LOOK,
            f"{len(seen.stale):,} stale: {_listed(seen.stale)}",
            "Their workers ended without giving them back; any worker may take them.",
        )
    return Finding("leases", OK, f"{seen.held:,} held, none stale")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(name if len(name) <= 80 else f"{name[:79]}…" for name in names[:NAMES_SHOWN]) + more
