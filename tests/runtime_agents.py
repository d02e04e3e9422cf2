"""What the tests of the runtime share: scripted models, messages, and an outside world that counts."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from agentstore.runtime import Reply

Message = dict[str, Any]


def say(text: str) -> Message:
    """An assistant message without calls."""
    return {"role": "assistant", "content": text}


def ask(*calls: tuple[str, dict[str, Any]] | tuple[str, str], ids: Sequence[str | None] | None = None) -> Message:
    """An assistant message with calls: (tool, arguments)."""
    entries = []
    for index, (name, arguments) in enumerate(calls):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        call_id = f"call_{index}" if ids is None else ids[index]
        entries.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": text}})
    return {"role": "assistant", "content": None, "tool_calls": entries}


def script(*says: Message | Reply | Exception | None) -> Callable[..., Reply]:
    """A model that says these things in order, by the number of model messages that it is shown: any process goes on.

    None: it has nothing to say.
    """

    def model(messages: list[Message], _tools: Any) -> Reply:
        said = sum(message["role"] == "assistant" for message in messages)
        now = says[said]
        if isinstance(now, Exception):
            raise now
        return now if isinstance(now, Reply) else Reply(now)

    return model


class World:
    """An outside world in SQLite: every effect is a row, committed at once, that no crash takes back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as db:
            db.execute("CREATE TABLE IF NOT EXISTS effects (tool TEXT, key TEXT, what TEXT)")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=30)) as db, db:
            yield db

    def do(self, tool: str, key: str, what: str) -> None:
        """An effect, each time it is asked for."""
        with self._open() as db:
            db.execute("INSERT INTO effects VALUES (?, ?, ?)", (tool, key, what))

    def do_once(self, tool: str, key: str, what: str) -> None:
        """An effect that honours its key."""
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            if not db.execute("SELECT 1 FROM effects WHERE key = ?", (key,)).fetchone():
                db.execute("INSERT INTO effects VALUES (?, ?, ?)", (tool, key, what))

    def find(self, key: str) -> str | None:
        """What was done under a key."""
        with self._open() as db:
            row = db.execute("SELECT what FROM effects WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def done(self, tool: str) -> list[str]:
        """All effects of a tool, in order."""
        with self._open() as db:
            return [row[0] for row in db.execute("SELECT what FROM effects WHERE tool = ? ORDER BY rowid", (tool,))]
