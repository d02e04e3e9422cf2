"""Commit one value, read one value: for tests of what stands around it."""

from __future__ import annotations

from agentstore.engine import keys
from agentstore.engine.embedded import EmbeddedEngine

KEY = keys.encode("k")


def put(engine: EmbeddedEngine, key: bytes, value: bytes) -> int:
    """Commit it; its LSN."""
    return engine.transact(lambda tx: tx.put(key, value)).lsn


def get(engine: EmbeddedEngine, key: bytes) -> bytes | None:
    """By a snapshot."""
    with engine.read() as view:
        return view.get(key)
