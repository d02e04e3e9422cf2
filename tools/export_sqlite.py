"""A store as an SQLite file: what `agentstore export --sqlite` writes, for queries with ordinary tools.

Times are ISO 8601 texts in UTC; `metadata`, `arguments`, `result` and `state` are JSON texts as `plain.to_json` makes
them, for `json_extract`. The schema is `SCHEMA`; its version is SQLite's `user_version`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from typing import Any, Final

from agentstore import Checkpoint, EffectView, Store, Thread, ThreadGone, ThreadNotFound
from agentstore.events import Event, of_thread

from .export import Exported
from .plain import to_json

SCHEMA_VERSION: Final = 1

SCHEMA: Final = """
CREATE TABLE threads (
    number       INTEGER PRIMARY KEY,   -- in the order of the ids
    id           TEXT NOT NULL UNIQUE,
    uuid         TEXT NOT NULL,         -- hex
    head         INTEGER NOT NULL,      -- seq of the newest checkpoint
    step         INTEGER,
    status       TEXT,
    updated_at   TEXT NOT NULL,
    state        TEXT NOT NULL          -- of the head
);
CREATE TABLE checkpoints (
    thread       INTEGER NOT NULL REFERENCES threads(number),
    seq          INTEGER NOT NULL,
    parent       INTEGER,
    reason       TEXT NOT NULL,
    step         INTEGER,
    status       TEXT,
    created_at   TEXT NOT NULL,
    lsn          INTEGER NOT NULL,
    metadata     TEXT NOT NULL,
    PRIMARY KEY (thread, seq)
) WITHOUT ROWID;
CREATE TABLE effects (
    thread        INTEGER NOT NULL REFERENCES threads(number),
    key           TEXT NOT NULL,        -- what the tool was given, hex
    decision_uuid TEXT NOT NULL,
    decision_seq  INTEGER NOT NULL,
    call          INTEGER NOT NULL,
    generation    INTEGER NOT NULL,
    tool          TEXT NOT NULL,
    arguments     TEXT NOT NULL,
    rule          TEXT NOT NULL,
    status        TEXT NOT NULL,        -- in_flight, in_doubt, not_started, done
    why           TEXT NOT NULL,
    attempt       INTEGER NOT NULL,
    duplicates    INTEGER NOT NULL,     -- how often the tool was called once too often
    started_at    TEXT NOT NULL,
    finished_at   TEXT,
    outcome       TEXT,                 -- result, failed, unknown
    source        TEXT,                 -- call, query, person, rule
    seq           INTEGER,              -- checkpoint that was committed with the receipt
    result        TEXT,
    error         TEXT,
    PRIMARY KEY (thread, decision_uuid, decision_seq, call, generation)
) WITHOUT ROWID;
CREATE TABLE pins (
    thread       INTEGER NOT NULL REFERENCES threads(number),
    seq          INTEGER NOT NULL,
    note         TEXT NOT NULL,
    PRIMARY KEY (thread, seq)
) WITHOUT ROWID;
CREATE TABLE events (
    thread       INTEGER NOT NULL REFERENCES threads(number),
    lsn          INTEGER NOT NULL,
    at           TEXT NOT NULL,
    kind         TEXT NOT NULL,
    tool         TEXT NOT NULL,
    attempt      INTEGER NOT NULL,
    key          TEXT NOT NULL,
    what         TEXT NOT NULL
);
"""

INDEXES: Final = """
CREATE INDEX threads_by_status ON threads(status, updated_at);
CREATE INDEX checkpoints_by_time ON checkpoints(created_at);
CREATE INDEX checkpoints_by_reason ON checkpoints(reason);
CREATE INDEX effects_by_tool ON effects(tool, status);
CREATE INDEX effects_by_key ON effects(key);
CREATE INDEX effects_by_time ON effects(started_at);
CREATE INDEX events_by_thread ON events(thread, lsn);
"""

INT_MAX: Final = 2**63 - 1


def export_sqlite(store: Store, path: str, on_thread: Callable[[], object] = lambda: None) -> Exported:
    """Fill the empty file at `path`. `sqlite3.Error` as the library raises it. O(store), a transaction."""
    done = Exported()
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        # Nobody else has the file, and it is thrown away if this does not end: no journal is needed.
        connection.execute("PRAGMA journal_mode=OFF")
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.executescript(SCHEMA)
        connection.execute("BEGIN")
        for thread_id in store.threads():
            try:
                _thread(connection, store.thread(thread_id), done)
            except (ThreadGone, ThreadNotFound):
                continue  # deleted since its name was read; all of it was read before the first row
            on_thread()
        connection.execute("COMMIT")
        connection.executescript(INDEXES)
    finally:
        connection.close()
    return done


def _thread(connection: sqlite3.Connection, thread: Thread, done: Exported) -> None:
    state = thread.load()
    head = thread.head
    assert head is not None  # load found one
    checkpoints = [each for each in reversed(thread.history()) if each.lsn <= head.lsn]
    effects, events = thread.effects(), of_thread(thread)
    seqs = {each.seq for each in checkpoints}
    pins = [(seq, note) for seq, note in thread.pins().items() if seq in seqs]
    number = done.threads + 1
    _insert(
        connection,
        "threads",
        [(number, thread.id, head.thread_uuid.hex(), head.seq, head.step, head.status, _at(head), _json(state))],
    )
    _insert(connection, "checkpoints", [_checkpoint(number, each) for each in checkpoints])
    _insert(connection, "effects", [_effect(number, each) for each in effects])
    _insert(connection, "pins", [(number, seq, note) for seq, note in pins])
    _insert(connection, "events", [_event(number, each) for each in events])
    done.threads += 1
    done.checkpoints += len(checkpoints)
    done.effects += len(effects)
    done.pins += len(pins)


def _insert(connection: sqlite3.Connection, table: str, rows: list[tuple[Any, ...]]) -> None:
    if rows:
        marks = ",".join("?" * len(rows[0]))
        connection.executemany(f"INSERT INTO {table} VALUES ({marks})", [tuple(map(_cell, row)) for row in rows])


def _cell(value: Any) -> Any:
    """What SQLite can hold: lone surrogates as their escapes, ints beyond 64 bits as text."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not -INT_MAX <= value <= INT_MAX:
        return hex(value)
    return value


def _at(checkpoint: Checkpoint) -> str:
    return checkpoint.created_at.isoformat()


def _json(value: Any) -> str:
    return json.dumps(to_json(value), allow_nan=False)


def _checkpoint(number: int, one: Checkpoint) -> tuple[Any, ...]:
    return (
        number, one.seq, one.parent, one.reason, one.step, one.status, _at(one), one.lsn, _json(one.metadata),
    )  # fmt: skip


def _effect(number: int, one: EffectView) -> tuple[Any, ...]:
    finished = one.finished_at
    return (
        number, one.key, one.decision[0].hex(), one.decision[1], one.index, one.generation, one.tool,
        _json(one.arguments), one.rule, one.status, one.why, one.attempt, one.duplicates, one.started_at.isoformat(),
        None if finished is None else finished.isoformat(), one.outcome, one.source, one.seq,
        _json(one.result) if one.outcome == "result" else None, one.error,
    )  # fmt: skip


def _event(number: int, one: Event) -> tuple[Any, ...]:
    return number, one.lsn, one.at.isoformat(), one.kind, one.tool, one.attempt, one.key, one.what
