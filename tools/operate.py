"""The operator's commands: look at a store, answer a waiting thread, check every invariant.

None of them makes a store, and all but `resolve` only read.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from agentstore import Checkpoint, NotDone, Thread
from agentstore.errors import ThreadNotFound
from agentstore.events import Event, of_thread
from agentstore.runtime import ToolError, calls_of
from agentstore.runtime import resolve as resolve_call
from agentstore.sizes import Sizes

from .options import STORE_DEFAULT, JsonId, JsonOutput, StorePath, ThreadId, existing_store, thread_id_of
from .output import console, print_json, print_pairs, print_table, printable, shortened, timestamp
from .plain import to_json

EXIT_PROBLEMS = 1
"""Exit status of `verify` when an invariant does not hold."""


class Order(StrEnum):
    """How `ls` sorts."""

    NAME = "name"
    CREATED = "created"


def ls(
    store: StorePath = STORE_DEFAULT,
    prefix: Annotated[str, typer.Option(help="Only threads whose id begins so.")] = "",
    order: Annotated[Order, typer.Option(help="created: newest first.")] = Order.NAME,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    json_output: JsonOutput = False,
) -> None:
    """List threads with where they stand."""
    with existing_store(store) as opened:
        listed = opened.threads(prefix=prefix, order=order.value, limit=limit)
        heads = [head for thread_id in listed if (head := opened.thread(thread_id).head) is not None]
    if json_output:
        print_json([{"id": head.thread_id, **_checkpoint(head)} for head in heads])
        return
    print_table(
        ["thread", "seq", "step", "status", "reason", "written (UTC)"],
        [(one.thread_id, one.seq, one.step, one.status, one.reason, timestamp(one.created_at)) for one in heads],
        empty="No threads.",
    )


def show(
    thread: ThreadId,
    store: StorePath = STORE_DEFAULT,
    at: Annotated[int | None, typer.Option(min=0, metavar="SEQ", help="An earlier checkpoint.")] = None,
    json_id: JsonId = False,
    json_output: JsonOutput = False,
) -> None:
    """Show the state of a thread; with --json all of it, else one line for each message and field."""
    with existing_store(store) as opened:
        handle = opened.thread(thread_id_of(thread, json_id))
        state = handle.load(at=at)
        checkpoint = handle.head if at is None else handle.checkpoint(at)
        assert checkpoint is not None  # load found one
    if json_output:
        print_json({"id": handle.id, "checkpoint": _checkpoint(checkpoint), "state": state})
        return
    out = console()
    out.print(f"{printable(handle.id)}  {_line(checkpoint)}", style="bold")
    for name, value in state.items():
        if name == "conversation_history" and isinstance(value, list):
            out.print(f"{name}: {len(value)} messages")
            for number, message in enumerate(value):
                out.print(f"  {number:>4}  {_message(message)}")
        else:
            out.print(f"{printable(str(name))}: {shortened(_compact(value))}")


def history(
    thread: ThreadId,
    store: StorePath = STORE_DEFAULT,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    json_id: JsonId = False,
    json_output: JsonOutput = False,
) -> None:
    """List the checkpoints of a thread, newest first."""
    with existing_store(store) as opened:
        checkpoints = _existing(opened.thread(thread_id_of(thread, json_id))).history(limit=limit)
    if json_output:
        print_json([_checkpoint(checkpoint) for checkpoint in checkpoints])
        return
    print_table(
        ["seq", "parent", "reason", "step", "status", "lsn", "written (UTC)", "metadata"],
        [
            (
                one.seq,
                one.parent,
                one.reason,
                one.step,
                one.status,
                one.lsn,
                timestamp(one.created_at),
                shortened(_compact(one.metadata), 60) if one.metadata else None,
            )
            for one in checkpoints
        ],
        empty="No checkpoints.",
    )


def events(
    thread: ThreadId, store: StorePath = STORE_DEFAULT, json_id: JsonId = False, json_output: JsonOutput = False
) -> None:
    """Tell what happened to a thread: decisions, intents, receipts, and what recovery did and why."""
    with existing_store(store) as opened:
        told = of_thread(_existing(opened.thread(thread_id_of(thread, json_id))))
    if json_output:
        print_json([_event(event) for event in told])
        return
    print_table(
        ["time (UTC)", "lsn", "event", "tool", "call", "attempt", "key", "what"],
        [
            (
                timestamp(event.at),
                event.lsn,
                event.kind,
                event.tool,
                _call(event),
                event.attempt or None,
                event.key[:12],
                shortened(event.what),
            )
            for event in told
        ],
        empty="Nothing happened yet.",
    )


def resolve(
    thread: ThreadId,
    call: Annotated[
        str | None,
        typer.Argument(metavar="CALL", help="Its key (or how that begins) or id."),
    ] = None,
    happened: Annotated[
        str | None, typer.Option(metavar="JSON", help="It happened, and this is its result, as JSON.")
    ] = None,
    not_done: Annotated[bool, typer.Option("--not-done", help="It did not happen: it is called again.")] = False,
    failed: Annotated[
        str | None, typer.Option(metavar="TEXT", help="It did not happen and never will, for this reason.")
    ] = None,
    store: StorePath = STORE_DEFAULT,
    json_id: JsonId = False,
    json_output: JsonOutput = False,
) -> None:
    """Answer for a call that nobody but a person knows the outcome of; without CALL list the calls that wait."""
    thread_id = thread_id_of(thread, json_id)
    if call is None:
        _list_open(store, thread_id, json_output)
        return
    if (happened is not None) + not_done + (failed is not None) != 1:
        raise typer.BadParameter("say one of --happened JSON, --not-done and --failed TEXT")
    answer: Any = NotDone if failed is None else ToolError(failed)
    if happened is not None:
        try:
            answer = json.loads(happened)
        except ValueError as error:
            raise typer.BadParameter(f"not JSON: {error} (a text needs its quotation marks)") from error
    with existing_store(store, readonly=False) as opened:
        resolve_call(opened, thread_id, call, happened=answer)
    if json_output:
        print_json({"id": thread_id, "call": call, "happened": happened is not None})
    else:
        console().print(f"Recorded. Run the agent again with thread {printable(thread_id)}: it goes on from here.")


def verify(store: StorePath = STORE_DEFAULT, json_output: JsonOutput = False) -> None:
    """Check every invariant of the store. Exit status 0: all hold; 1: some do not; 2: it cannot even be opened."""
    with existing_store(store) as opened:
        problems = opened.check()
    if json_output:
        print_json({"ok": not problems, "problems": problems})
    else:
        for problem in problems:
            console().print(printable(problem), style="red")
        console().print(f"{len(problems)} problems." if problems else "Every invariant holds.")
    raise typer.Exit(EXIT_PROBLEMS if problems else 0)


def stats(
    directory: Annotated[str | None, typer.Argument(metavar="[DIR]", help="The store, instead of --store.")] = None,
    store: StorePath = STORE_DEFAULT,
    threads: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Also bytes by kind of record, and the N largest threads: reads all."),
    ] = 0,
    json_output: JsonOutput = False,
) -> None:
    """Print sizes and counters of the store; with --threads N where its bytes are."""
    with existing_store(store if directory is None else directory) as opened:
        counted = opened.stats()
        sizes = opened.sizes(threads) if threads else None
    if json_output:
        print_json(counted if sizes is None else {**counted, **_sizes(sizes)})
        return
    print_pairs([(name.replace("_", " "), value) for name, value in counted.items()])
    if sizes is None:
        return
    console().print()
    rows = [(kind, size.records, size.bytes) for kind, size in sizes.kinds.items()]
    print_table(["kind", "records", "bytes"], [*rows, ("all", sizes.records, sizes.bytes)], empty="")
    print_table(["thread", "records", "bytes"], [tuple(each) for each in sizes.threads], empty="No threads.")


def _sizes(sizes: Sizes) -> dict[str, Any]:
    return {
        "records": sizes.records,
        "record_bytes": sizes.bytes,
        "kinds": {kind: {"records": size.records, "bytes": size.bytes} for kind, size in sizes.kinds.items()},
        "largest_threads": [
            {"id": each.thread_id, "records": each.records, "bytes": each.bytes} for each in sizes.threads
        ],
    }


COMMANDS = (ls, show, history, events, resolve, verify, stats)


def _existing(thread: Thread) -> Thread:
    """`thread`, which has a checkpoint; ThreadNotFound otherwise."""
    if thread.head is None:
        raise ThreadNotFound(f"thread {thread.id!r} does not exist: it has no checkpoint yet")
    return thread


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "seq": checkpoint.seq,
        "parent": checkpoint.parent,
        "reason": checkpoint.reason,
        "step": checkpoint.step,
        "status": checkpoint.status,
        "lsn": checkpoint.lsn,
        "created_at": checkpoint.created_at.isoformat(),
        "metadata": checkpoint.metadata or {},
    }


def _line(checkpoint: Checkpoint) -> str:
    step = "" if checkpoint.step is None else f", step {checkpoint.step}"
    status = f", {checkpoint.status}" if checkpoint.status else ""
    return f"checkpoint {checkpoint.seq} ({checkpoint.reason}{step}{status}), {timestamp(checkpoint.created_at)} UTC"


def _event(event: Event) -> dict[str, Any]:
    return {
        "at": event.at.isoformat(),
        "lsn": event.lsn,
        "kind": event.kind,
        "what": event.what,
        "seq": event.seq,
        "tool": event.tool,
        "decision": None if event.call is None else event.call.decision_seq,
        "call": None if event.call is None else event.call.call,
        "generation": None if event.call is None else event.call.generation,
        "attempt": event.attempt,
        "key": event.key,
    }


def _call(event: Event) -> str | None:
    """Which call: seq of its decision and index in it."""
    return None if event.call is None else f"{event.call.decision_seq}.{event.call.call}"


def _message(message: Any) -> str:
    """One chat message on one line."""
    if not isinstance(message, dict):
        return shortened(_compact(message))
    role = str(message.get("role", "?"))
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else _compact(content)
    calls = ", ".join(f"{call.name}({_compact(call.arguments)})" for call in calls_of(message))
    return shortened(f"{role:<9} {text}{' -> ' if calls else ''}{calls}", 160)


def _compact(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(to_json(value), ensure_ascii=False, allow_nan=False)


def _list_open(store: str, thread_id: str, json_output: bool) -> None:
    """The calls of a thread that have no receipt."""
    with existing_store(store) as opened:
        waiting = _existing(opened.thread(thread_id)).effects(open=True)
    if json_output:
        print_json(
            [
                {
                    "key": effect.key,
                    "tool": effect.tool,
                    "arguments": effect.arguments,
                    "decision": effect.identity.decision_seq,
                    "call": effect.index,
                    "rule": effect.rule,
                    "status": effect.status,
                    "why": effect.why,
                    "attempt": effect.attempt,
                    "started_at": effect.started_at.isoformat(),
                }
                for effect in waiting
            ]
        )
        return
    print_table(
        ["key", "tool", "call", "rule", "status", "why", "arguments"],
        [
            (
                effect.key[:12],
                effect.tool,
                f"{effect.identity.decision_seq}.{effect.index}",
                effect.rule,
                effect.status,
                effect.why,
                shortened(_compact(effect.arguments), 60),
            )
            for effect in waiting
        ],
        empty="No call is open.",
    )
