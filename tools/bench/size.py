"""`agentstore bench size`: what transcripts take on disk, one commit a message, before and after the offline job.

For comparison the same transcripts in LangGraph's SqliteSaver, if it is installed: one `put` a message, whose
checkpoint has all messages so far, as a graph's would.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

from agentstore import Append, Set, Store
from agentstore.compaction import compact
from agentstore.engine.job import disk_bytes

from .frame import machine, percentile

LOADS = 200
PEER_BYTES_MAX = 2 * 1024 * 1024 * 1024
"""The peer grows with the square of a conversation: it stops once its file has so many bytes."""


def run(directory: str, files: Sequence[str], *, peer_bytes_max: int = PEER_BYTES_MAX) -> dict[str, Any]:
    """The scenario in the empty `directory` with JSONL transcripts, a message a line; a result for JSON."""
    threads = {os.path.basename(file): _messages(file) for file in files}
    json_bytes = sum(os.path.getsize(file) for file in files)
    store = os.path.join(directory, "store")
    result: dict[str, Any] = {
        "scenario": "size",
        "machine": machine(directory),
        "transcripts": len(threads),
        "messages": sum(len(messages) for messages in threads.values()),
        "json_bytes": json_bytes,
    }
    _fill(store, threads)
    result["closed"] = _looked_at(store, threads, json_bytes)
    begin = time.perf_counter()
    compact(store)
    result["compact_s"] = round(time.perf_counter() - begin, 1)
    result["compacted"] = _looked_at(store, threads, json_bytes)
    result["langgraph"] = _langgraph(os.path.join(directory, "langgraph.sqlite"), threads, files, peer_bytes_max)
    return result


def _messages(file: str) -> list[Any]:
    with open(file, "rb") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def _fill(path: str, threads: dict[str, list[Any]]) -> None:
    with Store.open(path) as store:
        for name, messages in threads.items():
            thread = store.thread(name)
            for step, message in enumerate(messages):
                changes = Append("conversation_history", message), Set("step", step)
                thread.commit(*changes, reason="round", step=step)


def _looked_at(path: str, threads: dict[str, list[Any]], json_bytes: int) -> dict[str, Any]:
    """Size on disk of the closed store, then random checkpoints loaded and compared with their files."""
    size = disk_bytes(path)
    rng = random.Random(1)
    wall: list[int] = []
    names = sorted(threads)
    with Store.open(path, create=False) as store:
        kinds = {name: kind.bytes for name, kind in store.sizes(0).kinds.items()}
        for _ in range(LOADS):
            name = rng.choice(names)
            at = rng.randrange(len(threads[name]))
            begin = time.perf_counter_ns()
            state = store.thread(name).load(at=at)
            wall.append(time.perf_counter_ns() - begin)
            if state != {"conversation_history": threads[name][: at + 1], "step": at}:
                raise AssertionError(f"checkpoint {at} of {name} is not what was committed")
    return {
        "disk_bytes": size,
        "ratio": round(size / json_bytes, 4),
        "load_p50_ms": round(percentile(wall, 50) / 1e6, 2),
        "load_max_ms": round(max(wall) / 1e6, 2),
        "kinds": kinds,
    }


def _langgraph(path: str, threads: dict[str, list[Any]], files: Sequence[str], bytes_max: int) -> dict[str, Any] | None:
    """The peer's file, as far as it may grow; None if it is not installed."""
    if importlib.util.find_spec("langgraph") is None or importlib.util.find_spec("langgraph.checkpoint.sqlite") is None:
        return None
    saver_type = importlib.import_module("langgraph.checkpoint.sqlite").SqliteSaver
    empty = importlib.import_module("langgraph.checkpoint.base").empty_checkpoint
    connection = sqlite3.connect(path, check_same_thread=False)
    saver = saver_type(connection)
    saver.setup()
    connection.execute("PRAGMA synchronous=FULL")
    puts = transcripts = json_bytes = 0
    for file in sorted(files, key=os.path.getsize):
        name = os.path.basename(file)
        config: dict[str, Any] = {"configurable": {"thread_id": name, "checkpoint_ns": ""}}
        for step in range(len(threads[name])):
            checkpoint = empty() | {
                "channel_values": {"messages": threads[name][: step + 1], "step": step},
                "channel_versions": {"messages": str(step), "step": str(step)},
            }
            metadata = {"source": "loop", "step": step, "parents": {}}
            config = saver.put(config, checkpoint, metadata, checkpoint["channel_versions"])
            puts += 1
        transcripts += 1
        json_bytes += os.path.getsize(file)
        if os.path.getsize(path) > bytes_max:
            break
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    size = os.stat(path).st_blocks * 512
    return {"transcripts": transcripts, "puts": puts, "disk_bytes": size, "ratio": round(size / json_bytes, 2)}
