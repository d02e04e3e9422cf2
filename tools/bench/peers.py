"""What the store is measured against: the least that a durable write can cost, SQLite and LMDB.

Every peer makes its write durable before it returns, as a commit of the store does.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import lmdb

from agentstore import Append, Set, Store

from .frame import Contender, Operation, message

_FILE_BYTES = 4 * 1024 * 1024  # as large as a segment of the WAL
_PREPARED = 512  # messages made before the clock starts; then they come again


def prepared_messages() -> list[dict[str, object]]:
    return [message(number) for number in range(_PREPARED)]


def bare_loop(frame_bytes: int) -> Contender:
    """`pwrite` + `fdatasync` of `frame_bytes` into a zero-filled, synced file: the floor."""

    @contextmanager
    def opened(directory: str) -> Iterator[Operation]:
        descriptor = os.open(os.path.join(directory, "bare.log"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, bytes(_FILE_BYTES), 0)
            os.fsync(descriptor)
            payload = os.urandom(frame_bytes)
            offset = 0

            def operation() -> None:
                nonlocal offset
                if offset + frame_bytes > _FILE_BYTES:
                    offset = 0
                os.pwrite(descriptor, payload, offset)
                os.fdatasync(descriptor)
                offset += frame_bytes

            yield operation
        finally:
            os.close(descriptor)

    return Contender("bare", f"pwrite + fdatasync of {frame_bytes} bytes, zero-filled file", opened)


def agentstore_commit(thread_id: str = "bench") -> Contender:
    """One commit of a ~600-byte message and a step number."""

    @contextmanager
    def opened(directory: str) -> Iterator[Operation]:
        messages = prepared_messages()
        with Store.open(os.path.join(directory, "store")) as store:
            thread = store.thread(thread_id)
            thread.commit(Set("conversation_history", []), Set("step", 0), reason="input")
            steps = count(1)

            def operation() -> None:
                step = next(steps)
                thread.commit(
                    Append("conversation_history", messages[step % _PREPARED]),
                    Set("step", step),
                    reason="round",
                    step=step,
                )

            yield operation

    return Contender("agentstore", 'commit(Append(600-byte message), Set("step", n))', opened)


def sqlite_full() -> Contender:
    """The same message as a row of JSON: SQLite, WAL, synchronous=FULL."""

    @contextmanager
    def opened(directory: str) -> Iterator[Operation]:
        messages = [json.dumps(one) for one in prepared_messages()]
        database = sqlite3.connect(os.path.join(directory, "peer.sqlite"), isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            database.execute("CREATE TABLE messages(step INTEGER PRIMARY KEY, body TEXT)")
            steps = count(1)

            def operation() -> None:
                step = next(steps)
                database.execute("INSERT INTO messages VALUES(?,?)", (step, messages[step % _PREPARED]))

            yield operation
        finally:
            database.close()

    return Contender(
        "sqlite", f"SQLite {sqlite3.sqlite_version}, journal_mode=WAL, synchronous=FULL, one INSERT", opened
    )


def apsw_full() -> Contender:
    """As `sqlite_full`, with the SQLite that the package apsw brings: Python's own is often years old."""
    apsw = importlib.import_module("apsw")

    @contextmanager
    def opened(directory: str) -> Iterator[Operation]:
        messages = [json.dumps(one) for one in prepared_messages()]
        database = apsw.Connection(os.path.join(directory, "peer-apsw.sqlite"))
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            database.execute("CREATE TABLE messages(step INTEGER PRIMARY KEY, body TEXT)")
            steps = count(1)

            def operation() -> None:
                step = next(steps)
                database.execute("INSERT INTO messages VALUES(?,?)", (step, messages[step % _PREPARED]))

            yield operation
        finally:
            database.close()

    return Contender("apsw", f"SQLite {apsw.sqlite_lib_version()} (apsw), otherwise as sqlite", opened)


def peers() -> list[Contender]:
    """Every peer but the bare loop that can run here."""
    found = [sqlite_full(), lmdb_sync()]
    return [*found, apsw_full()] if importlib.util.find_spec("apsw") is not None else found


def lmdb_sync() -> Contender:
    """The same message as a value: LMDB, one synchronous write transaction each."""

    @contextmanager
    def opened(directory: str) -> Iterator[Operation]:
        messages = [json.dumps(one).encode() for one in prepared_messages()]
        environment = lmdb.open(
            os.path.join(directory, "peer.mdb"), subdir=False, map_size=2**30, sync=True, metasync=True, lib_version=0
        )
        try:
            steps = count(1)

            def operation() -> None:
                step = next(steps)
                with environment.begin(write=True) as transaction:
                    transaction.put(step.to_bytes(8, "big"), messages[step % _PREPARED], append=True)

            yield operation
        finally:
            environment.close()

    return Contender("lmdb", "LMDB 0.9, sync=True, metasync=True (its meta page is written O_DSYNC), one put", opened)
