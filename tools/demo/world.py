"""The demo's outside world: flights, seats, cards and mail in a SQLite file that counts what really happened.

Nothing in here knows about agentstore. It stands for what an agent's tools reach over a network:

=================  ==========================================  =========================
what               how it treats a repeated request            the tool's rule
=================  ==========================================  =========================
search flights     reads only                                  ``read``
reserve a seat     takes a key: the same key, the same seat    ``replay``
charge a card      charges again; can be asked about a key     ``query``
send a mail        sends again; knows no keys                  ``ask``
=================  ==========================================  =========================

Every request that arrives is written down in the transaction that carries it out, so a
kill of the caller leaves either both or none, and the count is the truth.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

_SCHEMA = """
CREATE TABLE IF NOT EXISTS flights(
    flight TEXT PRIMARY KEY, origin TEXT, destination TEXT, day TEXT, departs TEXT, fare_cents INTEGER);
CREATE TABLE IF NOT EXISTS seats(
    id INTEGER PRIMARY KEY, key TEXT UNIQUE, flight TEXT, seat TEXT, passenger TEXT);
CREATE TABLE IF NOT EXISTS charges(
    id INTEGER PRIMARY KEY, key TEXT, card TEXT, amount_cents INTEGER, purpose TEXT);
CREATE INDEX IF NOT EXISTS charges_by_key ON charges(key);
CREATE TABLE IF NOT EXISTS mails(
    id INTEGER PRIMARY KEY, recipient TEXT, subject TEXT, body TEXT);
CREATE TABLE IF NOT EXISTS requests(
    id INTEGER PRIMARY KEY, tool TEXT, subject TEXT, key TEXT);
"""

_FLIGHTS = [
    ("TP 531", "BER", "LIS", "Monday", "06:10", 13900),
    ("LH 1172", "BER", "LIS", "Monday", "11:45", 18450),
    ("FR 1142", "BER", "LIS", "Monday", "19:20", 9900),
    ("TP 534", "LIS", "BER", "Friday", "10:05", 12700),
    ("LH 1173", "LIS", "BER", "Friday", "16:40", 20100),
    ("U2 7641", "LIS", "BER", "Friday", "21:15", 8800),
]

BUSY_TIMEOUT_S = 30.0
"""How long a request waits while another process writes, in seconds."""

Wanted = tuple[str, str]
"""One effect that the story wants to happen exactly once: (tool, what it is about)."""


@dataclass(frozen=True, slots=True)
class Count:
    """What became of one tool's effects. `requests` may be above `executed`: a key that was sent twice."""

    wanted: int
    executed: int
    duplicated: int
    lost: int
    unwanted: int
    requests: int


class OutsideWorld:
    """The world at `path`; made when it is not there. Thread-safe: a lock per object, SQLite's between processes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, OutsideWorld(f"{folder}/world.sqlite") as world:
    ...     first = world.reserve_seat("key-1", "TP 531", "12A", "Ada")
    ...     again = world.reserve_seat("key-1", "TP 531", "12A", "Ada")
    ...     world.charge_card("key-2", "Ada's card", 13900, "Ada on TP 531")
    ...     world.charge_card("key-2", "Ada's card", 13900, "Ada on TP 531")
    ...     counts = world.count([("reserve_seat", "Ada on TP 531"), ("charge_card", "Ada on TP 531")])
    {'charged': 'Ada on TP 531', 'amount_cents': 13900}
    {'charged': 'Ada on TP 531', 'amount_cents': 13900}
    >>> first == again, counts["reserve_seat"].duplicated, counts["charge_card"].duplicated
    (True, 0, 1)
    """

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        self._db.executemany("INSERT OR IGNORE INTO flights VALUES(?,?,?,?,?,?)", _FLIGHTS)

    def __enter__(self) -> OutsideWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    # --- what the tools reach ------------------------------------------------------------

    def search_flights(self, origin: str, destination: str, day: str) -> list[dict[str, object]]:
        """Flights of the day, cheapest first."""
        with self._transaction():
            self._request("search_flights", f"{origin}-{destination} {day}", None)
            rows = self._db.execute(
                "SELECT flight, departs, fare_cents FROM flights WHERE origin=? AND destination=? AND day=? "
                "ORDER BY fare_cents",
                (origin, destination, day),
            ).fetchall()
        return [{"flight": flight, "departs": departs, "fare_cents": fare} for flight, departs, fare in rows]

    def reserve_seat(self, key: str, flight: str, seat: str, passenger: str) -> dict[str, object]:
        """Reserve; a key that was seen before gives the reservation that is there."""
        subject = f"{passenger} on {flight}"
        with self._transaction():
            self._request("reserve_seat", subject, key)
            self._db.execute(
                "INSERT INTO seats(key, flight, seat, passenger) VALUES(?,?,?,?) ON CONFLICT(key) DO NOTHING",
                (key, flight, seat, passenger),
            )
            row = self._db.execute("SELECT flight, seat, passenger FROM seats WHERE key=?", (key,)).fetchone()
        return {"flight": row[0], "seat": row[1], "passenger": row[2]}

    def charge_card(self, key: str, card: str, amount_cents: int, purpose: str) -> dict[str, object]:
        """Charge, every time it is asked to; the key is only noted, see `find_charge`."""
        with self._transaction():
            self._request("charge_card", purpose, key)
            self._db.execute(
                "INSERT INTO charges(key, card, amount_cents, purpose) VALUES(?,?,?,?)",
                (key, card, amount_cents, purpose),
            )
        return {"charged": purpose, "amount_cents": amount_cents}

    def find_charge(self, key: str) -> dict[str, object] | None:
        """The charge that was made under this key, if one was."""
        with self._transaction():
            row = self._db.execute("SELECT purpose, amount_cents FROM charges WHERE key=? LIMIT 1", (key,)).fetchone()
        return None if row is None else {"charged": row[0], "amount_cents": row[1]}

    def send_mail(self, recipient: str, subject: str, body: str) -> dict[str, object]:
        """Send, every time it is asked to. There is no way to ask about it."""
        with self._transaction():
            self._request("send_confirmation", subject, None)
            self._db.execute("INSERT INTO mails(recipient, subject, body) VALUES(?,?,?)", (recipient, subject, body))
        return {"sent_to": recipient}

    # --- what a person can see by looking --------------------------------------------------

    def look_for_mail(self, recipient: str, subject: str) -> bool:
        """Whether such a mail lies in the outbox: a person can look, the tool cannot ask."""
        with self._transaction():
            row = self._db.execute(
                "SELECT 1 FROM mails WHERE recipient=? AND subject=?", (recipient, subject)
            ).fetchone()
        return row is not None

    def count(self, wanted: Iterable[Wanted]) -> dict[str, Count]:
        """What happened against what was `wanted`, by tool."""
        wanted_of: dict[str, Counter[str]] = {}
        for tool, about in wanted:
            wanted_of.setdefault(tool, Counter())[about] += 1
        with self._transaction():
            happened = {
                "reserve_seat": self._counter("SELECT passenger || ' on ' || flight FROM seats"),
                "charge_card": self._counter("SELECT purpose FROM charges"),
                "send_confirmation": self._counter("SELECT subject FROM mails"),
            }
            requests = self._counter("SELECT tool FROM requests")
        return {
            tool: _compare(wanted_of.get(tool, Counter()), found, requests[tool]) for tool, found in happened.items()
        }

    def _counter(self, query: str) -> Counter[str]:
        return Counter(about for (about,) in self._db.execute(query))

    def _request(self, tool: str, subject: str, key: str | None) -> None:
        self._db.execute("INSERT INTO requests(tool, subject, key) VALUES(?,?,?)", (tool, subject, key))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            # IMMEDIATE: a transaction that reads first and then writes would fail as "database is locked".
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


def _compare(wanted: Counter[str], happened: Counter[str], requests: int) -> Count:
    return Count(
        wanted=wanted.total(),
        executed=happened.total(),
        duplicated=sum(max(0, times - max(1, wanted[about])) for about, times in happened.items()),
        lost=(wanted - happened).total(),
        unwanted=sum(about not in wanted for about in happened),
        requests=requests,
    )
