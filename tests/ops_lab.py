"""Stores for the tests of backup, export and import, and what makes two of them equal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from agentstore import Append, EffectCall, Set, Store
from agentstore.engine.files import Files, set_default_files

ODD_IDS = [
    "nul\x00inside",
    "\x00",
    "emoji 🦊👩‍👩‍👧",
    "new\nline\r\n\ttab",
    "é" * 2048,  # 4,096 bytes, the limit
    "../../etc/passwd",
    "/absolute/path",
    "--json",
    "-",
    "$bytes",
    "\u2028\u202e",
]


def fill(store: Store) -> None:
    """Threads with branches, effects in every condition, pins, a fork, and ids of all kinds."""
    thread = store.thread("main")
    thread.commit(Append("conversation_history", {"role": "user", "content": "hi"}), reason="input", step=0)
    calls = [EffectCall(n, f"tool-{n}", {"n": n}, rule=rule) for n, rule in enumerate(("query", "replay", "ask"))]
    decision = thread.commit(
        Append("conversation_history", {"role": "assistant"}),
        reason="decision",
        step=1,
        status="RUNNING",
        metadata={"model": "m", "at": (1, b"\x00")},
        intents=calls,
    )
    effect = thread.effect(decision=decision, index=0, tool="tool-0", arguments={"n": 0}, rule="query")
    effect.receipt({"ok": [1, (2,)]}, Append("conversation_history", {"role": "tool"}), step=2)
    failing = thread.effect(decision=decision, index=1, tool="tool-1", arguments={"n": 1}, rule="replay")
    failing.fail("no such card", Append("conversation_history", {"role": "tool", "content": "no"}))
    thread.commit(Set("note", {1: "one", "nan": float("nan"), "s": {1, 2}}), status="WAITING")
    thread.fork(into="main/fork")
    thread.pin(0, "the \ud800 first")
    undone = store.thread("undone")
    decision = undone.commit(Set("x", 1), reason="decision")
    undone.effect(decision=decision, index=0, tool="t", arguments={}, rule="ask").not_done("a person said so")
    branches = store.thread("branches")
    for n in range(4):
        branches.commit(Append("notes", n), Set("last", n), step=n)
    branches.commit(Append("notes", "again"), parent=1, metadata={"rewind": True})
    branches.commit(Set("last", None))
    for name in ODD_IDS:
        store.thread(name).commit(Set("id", name), Set("$only", b"\xff"), reason="plan")


def content(store: Store, *, lsn: bool = True) -> dict[str, Any]:
    """All that can be asked of a store, as texts that are equal only for equal values of equal types."""
    found: dict[str, Any] = {}
    for name in store.threads():
        thread = store.thread(name)
        assert thread.head is not None
        found[name] = {
            "head": (thread.head.seq, thread.head.thread_uuid, thread.decision),
            "pins": thread.pins(),
            "checkpoints": [
                (
                    cp.seq,
                    cp.parent,
                    cp.reason,
                    cp.step,
                    cp.status,
                    cp.created_at,
                    repr(cp.metadata),
                    repr(thread.load(at=cp.seq)),
                    cp.lsn if lsn else None,
                )
                for cp in thread.history()
            ],
            "effects": sorted(
                (
                    *one.identity,
                    one.key,
                    one.tool,
                    one.rule,
                    one.attempt,
                    one.outcome,
                    one.source,
                    one.error,
                    one.seq,
                    repr(one.result) if one.outcome == "result" else None,
                    repr(one.arguments),
                    one.started_at,
                    one.finished_at,
                )
                for one in thread.effects()
            ),
        }
    return found


def in_child(act: Callable[[], object], files: Files | None = None) -> int:
    """Run `act` in a forked child, with these system calls; how it ended: -9 killed, 0 done, 7 an exception."""
    pid = os.fork()
    if pid == 0:
        _child(act, files)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _child(act: Callable[[], object], files: Files | None) -> NoReturn:
    status = 7
    try:
        signal.alarm(60)
        if files is not None:
            set_default_files(files)
        act()
        status = 0
    finally:
        os._exit(status)
