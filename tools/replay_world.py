"""The world of a replay: it notes every call that reaches it, and answers whether it saw a key.

It stands for the tools of the recorded agent. Like the demo's world it counts what
happened: an *execution* is the first time a key arrives, every arrival is a *request*.
"""

from __future__ import annotations

import sqlite3
from types import TracebackType

_SCHEMA = """
CREATE TABLE IF NOT EXISTS executions(
    key TEXT PRIMARY KEY, thread TEXT, position INTEGER, call INTEGER, requests INTEGER) WITHOUT ROWID;
"""

BUSY_TIMEOUT_S = 60.0


class ReplayWorld:
    """The world in the SQLite file at `path`, shared by all workers. Not thread-safe: one object per thread.

    >>> with ReplayWorld(":memory:") as world:
    ...     world.request("k1", "thread", position=4, call=0)
    ...     world.request("k1", "thread", position=4, call=0)
    ...     (world.find("k1"), world.find("k2"), world.totals())
    ((4, 0), None, {'executions': 1, 'requests': 2, 'calls': 1})
    """

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")  # processes are killed here, not the machine
        self._db.executescript(_SCHEMA)

    def __enter__(self) -> ReplayWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def request(self, key: str, thread: str, *, position: int, call: int) -> None:
        """A call arrives: call number `call` of the message at `position`."""
        self._db.execute(
            "INSERT INTO executions VALUES(?,?,?,?,1) ON CONFLICT(key) DO UPDATE SET requests = requests + 1",
            (key, thread, position, call),
        )

    def find(self, key: str) -> tuple[int, int] | None:
        """Where the call with this key stands: position of its message, number of the call. None: none arrived."""
        row = self._db.execute("SELECT position, call FROM executions WHERE key=?", (key,)).fetchone()
        return None if row is None else (row[0], row[1])

    def totals(self) -> dict[str, int]:
        """`executions` (keys), `requests` (arrivals), `calls` (places in the transcripts that were called).

        More executions than calls: a call was made under two keys, that is, done twice.
        """
        executions, requests = self._db.execute(
            "SELECT COUNT(*), COALESCE(SUM(requests), 0) FROM executions"
        ).fetchone()
        (calls,) = self._db.execute(
            "SELECT COUNT(*) FROM (SELECT DISTINCT thread, position, call FROM executions)"
        ).fetchone()
        return {"executions": executions, "requests": requests, "calls": calls}
