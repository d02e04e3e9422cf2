"""`agentstore bench load`: loading a thread of many messages, and opening a store whose writer was killed."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import cbor2

from agentstore import Store

from .frame import machine, message, percentile
from .processes import Writer, rss_anon_bytes
from .writer import GROW_THREAD, MESSAGE_BYTES


def run(
    directory: str, *, messages: int = 10_000, loads: int = 60, opens: int = 3, blob_bytes: int | None = None
) -> dict[str, Any]:
    """The whole scenario in the empty `directory`; a result for JSON.

    `opens`: how many killed stores are opened (an open empties the log); `blob_bytes`: what their logs are full of
    instead of messages.
    """
    store_path = os.path.join(directory, "store")
    writer = Writer("grow", store_path, "--count", str(messages))
    with writer.sample_memory() as memory:
        writer.go()
        wrote = writer.result()
    result: dict[str, Any] = {
        "scenario": "load",
        "machine": machine(directory),
        "messages": messages,
        "message_bytes": MESSAGE_BYTES,
        "write_s": round(wrote["seconds"], 2),
        "writer_rss_anon_bytes": memory.max_bytes,
    }
    result |= _loads(store_path, messages, loads)
    killed = [os.path.join(directory, f"killed-{turn}") for turn in range(opens)]
    result["open_after_kill"] = [_open_after_kill(path, blob_bytes) for path in killed]
    return result


def _loads(store_path: str, messages: int, loads: int) -> dict[str, Any]:
    """Newest and random older checkpoints in turns, every state compared whole with what was written."""
    wanted = [message(step, MESSAGE_BYTES) for step in range(1, messages + 1)]
    rng = random.Random(0)
    newest, older, decoded = [], [], []
    with Store.open(store_path, create=False) as store:
        bytes_of = store.stats()
        encoded = cbor2.dumps({"conversation_history": wanted, "step": messages})
        for _ in range(loads):
            # A new handle: nothing that an earlier load left in one may help.
            newest.append(_timed_load(store, None, messages, wanted))
            older.append(_timed_load(store, rng.randrange(messages), None, wanted))
            decoded.append(_timed_decode(encoded))
        return {
            "decode_alone_p50_ms": round(percentile(decoded, 50) / 1e6, 2),
            "newest_p50_ms": round(percentile(newest, 50) / 1e6, 2),
            "newest_p99_ms": round(percentile(newest, 99) / 1e6, 2),
            "older_p50_ms": round(percentile(older, 50) / 1e6, 2),
            "older_p99_ms": round(percentile(older, 99) / 1e6, 2),
            "older_max_ms": round(max(older) / 1e6, 2),
            "base_bytes": bytes_of["base_bytes"],
            "reader_rss_anon_bytes": rss_anon_bytes(),
        }


def _timed_decode(encoded: bytes) -> int:
    """Nanoseconds of what no load can do without: cbor2 making the objects of the newest state, as one value."""
    begin = time.perf_counter_ns()
    cbor2.loads(encoded)
    return time.perf_counter_ns() - begin


def _timed_load(store: Store, at: int | None, steps: int | None, wanted: list[dict[str, object]]) -> int:
    """Nanoseconds of one load, of which every message is then compared."""
    thread = store.thread(GROW_THREAD)
    begin = time.perf_counter_ns()
    state = thread.load(at=at)
    took = time.perf_counter_ns() - begin
    step = steps if at is None else at  # checkpoint n holds n messages
    if state["step"] != step or state["conversation_history"] != wanted[:step]:
        raise AssertionError(f"the state of checkpoint {at} is not what was written")
    return took


def _open_after_kill(store_path: str, blob_bytes: int | None) -> dict[str, float]:
    """Milliseconds to open a store whose writer died with a full log, and how much there was to replay."""
    blobs = [] if blob_bytes is None else ["--blob-bytes", str(blob_bytes)]
    writer = Writer("full-log", store_path, *blobs)
    writer.go()
    status = writer.died()
    if status != -signal.SIGKILL:
        raise RuntimeError(f"the writer ended with status {status}")
    wal = os.path.join(store_path, "wal")
    log_bytes = sum(entry.stat().st_size for entry in os.scandir(wal))
    begin = time.perf_counter()
    with Store.open(store_path, create=False) as store:
        opened = time.perf_counter() - begin
        lsn = store.stats()["lsn"]
    return {"open_ms": round(opened * 1000, 1), "wal_bytes": log_bytes, "lsn": lsn}
