"""Lines and transcripts into a store: what `agentstore import` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import IO, Any, TypeVar, cast

from agentstore import (
    Append,
    CheckpointNotFound,
    InvalidChange,
    InvalidThreadId,
    LimitExceeded,
    Store,
    ThreadExists,
    UnencodableState,
)
from agentstore.effect_views import TIMEOUT_S_DEFAULT
from agentstore.transfer import Arrival, Ended

from . import lines, tagged
from .lines import LineError, State
from .transcript import Transcript, difference, printable_path

V = TypeVar("V")

HISTORY = "conversation_history"
"""The field that a transcript's messages become."""

_REFUSED = (
    CheckpointNotFound,
    InvalidChange,
    InvalidThreadId,
    LimitExceeded,
    ThreadExists,
    UnencodableState,
    ValueError,
    TypeError,
    OverflowError,
)
"""What a store or a decoder says to a line that no export wrote. A full disk or a damaged store is no such thing."""


@dataclass
class Imported:
    """What came into the store."""

    threads: int = 0
    checkpoints: int = 0
    effects: int = 0
    pins: int = 0
    there: int = 0
    """Threads that an import before had brought."""

    bare: int = 0
    """Checkpoints without a state, which cannot come: the export was made without --all."""

    opened: int = 0
    """Effects without a receipt, which wait for a person now."""


# --- exports ------------------------------------------------------------------------------


def import_lines(
    store: Store, path: str, done: Imported, on_bytes: Callable[[int], object] = lambda count: None
) -> None:
    """Read the export at `path` into `store`, thread by thread; count in `done`. `on_bytes` is told of progress.

    A thread is there once all its lines are, or not at all; one that is there already is left alone, so that an import
    which was killed is made again. `LineError` names file and line. O(size), one fdatasync a checkpoint.
    """
    shown = printable_path(path)
    try:
        with open(path, "rb") as file:
            _import_file(store, file, shown, done, on_bytes)
    except OSError as error:
        if error.filename != path and error.filename is not None:
            raise
        raise LineError(f"{shown}: cannot be read: {error.strerror or error}") from error


def _import_file(store: Store, file: IO[bytes], shown: str, done: Imported, on_bytes: Callable[[int], object]) -> None:
    records = _records(file, shown, on_bytes)
    header, where = next(records, ({}, f"{shown}:1"))
    if header.get("record") != "export":
        raise LineError(f"{where}: not an export: its first line is none; transcripts need --transcripts")
    if header.get("version") != lines.VERSION:
        raise LineError(f"{where}: version {header.get('version')!r}; this agentstore reads {lines.VERSION}")
    for record, where in records:
        if record.get("record") == "end":
            for _, after in records:
                raise LineError(f"{after}: there is a line behind the end")
            return
        if record.get("record") != "thread":
            raise LineError(f"{where}: the line of a thread was expected, not {str(record.get('record'))[:40]!r}")
        _import_thread(store, record, where, records, done)
    raise LineError(f"{shown}: ends without its last line: it was cut short; the threads before are in the store")


def _records(file: IO[bytes], shown: str, on_bytes: Callable[[int], object]) -> Iterator[tuple[dict[str, Any], str]]:
    number = 0
    while line := file.readline(lines.LINE_BYTES_MAX + 1):
        number += 1
        where = f"{shown}:{number}"
        yield lines.parse(line, where), where
        on_bytes(len(line))


def _import_thread(
    store: Store,
    record: dict[str, Any],
    where: str,
    records: Iterator[tuple[dict[str, Any], str]],
    done: Imported,
) -> None:
    with _Telling(where):
        thread_id = _of(record, "thread", str, where)
        uuid = bytes.fromhex(_of(record, "uuid", str, where))
        head = _of(record, "head", int, where)
        arrival = _Skipped() if _is_there(store, thread_id, uuid, head, where) else _Arriving(store, thread_id, uuid)
    counts = [(kind, _of(record, f"{kind}s", int, where)) for kind in ("checkpoint", "effect", "pin")]
    decision = record.get("decision")
    with arrival:
        for kind, count in counts:
            for _ in range(count):
                line, where = next(records, ({}, where))
                if line.get("record") == "gone" and line.get("thread") == thread_id:
                    return
                if line.get("record") != kind or line.get("thread") != thread_id:
                    raise LineError(f"{where}: a {kind} of thread {thread_id[:80]!r} was expected, of {count} in all")
                with _Telling(where):
                    arrival.take(kind, line, where, decision)
        with _Telling(where):
            arrival.finish(head, where, done)


def _is_there(store: Store, thread_id: str, uuid: bytes, head: int, where: str) -> bool:
    there = store.thread(thread_id).head
    if there is None:
        return False
    if there.thread_uuid != uuid:
        raise LineError(f"{where}: the store has another thread {thread_id[:80]!r}; delete it, or use another store")
    if there.seq < head:
        raise LineError(
            f"{where}: the store has thread {thread_id[:80]!r} at the earlier checkpoint {there.seq}; delete it, or "
            "use another store"
        )
    return True


class _Skipped:
    """The lines of a thread that is there."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def take(self, kind: str, line: dict[str, Any], where: str, decision: Any) -> None:
        pass

    def finish(self, head: int, where: str, done: Imported) -> None:
        done.there += 1


class _Arriving:
    """The lines of a thread that comes; nothing of it stays if the block is left before `finish`."""

    def __init__(self, store: Store, thread_id: str, uuid: bytes) -> None:
        self._arrival = Arrival(store, thread_id, uuid)
        self._state: State = {}
        self._at: int | None = None
        self._seqs: set[int] = set()
        self._counts = Imported()
        self._whole = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._whole:
            self._arrival.discard()

    def take(self, kind: str, line: dict[str, Any], where: str, decision: Any) -> None:
        """One line of the thread."""
        {"checkpoint": self._checkpoint, "effect": self._effect, "pin": self._pin}[kind](line, where, decision)

    def finish(self, head: int, where: str, done: Imported) -> None:
        """The thread is there from now on."""
        if self._at != head:
            raise LineError(f"{where}: the head is checkpoint {head}, but the last line of one is of {self._at}")
        self._arrival.publish()
        self._whole = True
        done.threads += 1
        done.checkpoints += self._counts.checkpoints
        done.effects += self._counts.effects
        done.pins += self._counts.pins
        done.opened += self._counts.opened
        done.bare += self._counts.bare

    def _checkpoint(self, line: dict[str, Any], where: str, decision: Any) -> None:
        if "state" not in line and "changes" not in line:
            self._counts.bare += 1
            return
        seq = _of(line, "seq", int, where)
        # The parent of the first one is not here: its state was not exported.
        parent = _of(line, "parent", int, where, optional=True) if self._seqs else None
        if parent is not None and parent not in self._seqs:
            raise LineError(f"{where}: its parent {parent} has no line before")
        if "state" in line:
            state = _of(line, "state", dict, where)
        else:
            if parent is not None and parent != self._at:
                self._state = lines.encode_state(self._arrival.load(parent))
            state = lines.apply(self._state, line.get("changes"), where)
        texts = lines.texts_of(state)
        if lines.digest(texts) != _of(line, "sha256", str, where):
            raise LineError(f"{where}: the state has another sha256 than the line says")
        self._arrival.commit(
            seq,
            lines.decode_state(state),
            parent=parent,
            reason=_of(line, "reason", str, where),
            step=tagged.decode(line.get("step")),
            status=tagged.decode(line.get("status")),
            metadata=tagged.decode(line.get("metadata")),
            created_at=_time(line, "created_at", where),
            decision=None if self._seqs or decision is None else _decision(decision, where),
        )
        self._state, self._at = state, seq
        self._seqs.add(seq)
        self._counts.checkpoints += 1

    def _effect(self, line: dict[str, Any], where: str, _: Any) -> None:
        ended = None
        if line.get("outcome") is not None:
            ended = Ended(
                outcome=_of(line, "outcome", str, where),
                source=_of(line, "source", str, where),
                result=tagged.decode(line.get("result")),
                error=tagged.decode(line.get("error")) or "",
                seq=_of(line, "seq", int, where, optional=True),
                at=_time(line, "finished_at", where),
            )
        key = self._arrival.effect(
            _decision(line.get("decision"), where),
            _of(line, "call", int, where),
            _of(line, "generation", int, where),
            tool=tagged.decode(line.get("tool")),
            arguments=tagged.decode(line.get("arguments")),
            rule=_of(line, "rule", str, where),
            timeout_s=TIMEOUT_S_DEFAULT,
            attempt=_of(line, "attempt", int, where),
            started_at=_time(line, "started_at", where),
            status=_of(line, "status", str, where),
            why=tagged.decode(line.get("why")) or "",
            ended=ended,
        )
        if key != line.get("key"):
            raise LineError(f"{where}: the key of the effect is not that of its decision, tool and arguments")
        self._counts.effects += 1
        self._counts.opened += ended is None

    def _pin(self, line: dict[str, Any], where: str, _: Any) -> None:
        seq = _of(line, "seq", int, where)
        if self._counts.bare and seq not in self._seqs:
            return
        self._arrival.pin(seq, tagged.decode(line.get("note")))
        self._counts.pins += 1


class _Telling:
    """What is wrong with a line, with the line's place."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RecursionError):
            raise LineError(f"{self._where}: not readable: nested too deeply") from error
        if isinstance(error, _REFUSED):
            raise LineError(f"{self._where}: {error}") from error


def _of(record: dict[str, Any], name: str, kind: type[V], where: str, *, optional: bool = False) -> V:
    """A value of a line, of its type. None where it is `optional` and not there; `LineError` for anything else."""
    value = record.get(name)
    if value.__class__ is kind or (optional and value is None):
        return cast(V, value)
    raise LineError(f"{where}: {name!r} is {'missing' if name not in record else f'no {kind.__name__}'}")


def _time(record: dict[str, Any], name: str, where: str) -> datetime:
    at = datetime.fromisoformat(_of(record, name, str, where))
    if at.tzinfo is None:
        raise LineError(f"{where}: {name!r} has no offset from UTC")
    return at


def _decision(value: Any, where: str) -> tuple[bytes, int]:
    match value:
        case [str(uuid), int(seq)]:
            return bytes.fromhex(uuid), seq
    raise LineError(f"{where}: a decision is the uuid of a thread and a seq")


# --- transcripts ----------------------------------------------------------------------------


def import_transcript(
    store: Store, transcript: Transcript, done: Imported, on_message: Callable[[], object] = lambda: None
) -> None:
    """One thread, one commit a message; a thread that has the first messages already goes on behind them.

    `LineError` for a thread of that id with other messages. O(messages), one fdatasync each.
    """
    thread = store.thread(transcript.thread_id)
    recorded = transcript.messages
    stored: Any = [] if thread.head is None else thread.load().get(HISTORY)
    told = printable_path(transcript.path)
    if not isinstance(stored, list) or len(stored) > len(recorded):
        raise LineError(f"{told}: the store has another thread {transcript.thread_id!r}; delete it, or rename the file")
    different = difference(recorded[: len(stored)], stored)
    if different is not None:
        raise LineError(f"{told}: the store has thread {transcript.thread_id!r} with another message: {different}")
    if stored and len(stored) == len(recorded):
        done.there += 1
        return
    for index in range(len(stored), len(recorded)):
        with _Telling(f"{told}: message {index + 1}"):
            thread.commit(Append(HISTORY, recorded[index]), reason=_reason(recorded[index]), step=index)
        done.checkpoints += 1
        on_message()
    done.threads += bool(recorded)


def _reason(message: dict[str, Any]) -> str:
    role = message.get("role")
    if role == "assistant":
        return "decision" if message.get("tool_calls") or message.get("function_call") else "round"
    return "tool_result" if role in ("tool", "function") else "input"


def size_of(path: str) -> int:
    """Bytes of a file, for a progress bar; 0 where that is not known."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
