"""A store as lines: what `agentstore export --jsonl` writes. See `lines` for their shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agentstore import Checkpoint, EffectView, Store, Thread, ThreadGone, ThreadNotFound
from agentstore.transfer import decision_of

from . import lines, tagged
from .lines import dump


@dataclass
class Exported:
    """How much was written."""

    threads: int = 0
    checkpoints: int = 0
    effects: int = 0
    pins: int = 0
    once: int = 0
    """Records of `Store.once`, which have no thread and are not written."""

    duplicates: int = 0
    """Second receipts, of which only the number is written."""


def export(
    store: Store,
    write: Callable[[str], object],
    *,
    everything: bool,
    on_thread: Callable[[], object] = lambda: None,
) -> Exported:
    """Hand every line of the store to `write`, without its newline. `everything`: every state, not only the heads'.

    Each thread is written as it stood at one moment; threads that come or go meanwhile may or may not be there.
    O(store), with `everything` O(checkpoints · state): every state is built.
    """
    done = Exported()
    kinds = store.sizes(0).kinds
    done.once = kinds["once"].records if "once" in kinds else 0
    write(
        dump(
            {
                "record": "export",
                "version": lines.VERSION,
                "all": everything,
                "threads": store.stats()["threads"],
                "at": datetime.now(UTC).isoformat(),
            }
        )
    )
    for thread_id in store.threads():
        begun = False
        try:
            for line in _thread(store.thread(thread_id), everything, done):
                write(dump(line))
                begun = True
            done.threads += 1
        except (ThreadGone, ThreadNotFound):
            if begun:
                write(dump({"record": "gone", "thread": thread_id}))
        on_thread()
    write(dump({"record": "end", "threads": done.threads}))
    return done


def _thread(thread: Thread, everything: bool, done: Exported) -> Iterator[dict[str, Any]]:
    """The lines of one thread. The head is read first, so that no receipt of what led to it is missing."""
    states = _States(thread)
    head = thread.head
    if head is None:
        raise ThreadNotFound(f"thread {thread.id!r} does not exist")
    # LSNs tell what was there when the head was read.
    checkpoints = [each for each in reversed(thread.history()) if each.lsn <= head.lsn]
    effects = thread.effects()
    seqs = {each.seq for each in checkpoints}
    pins = {seq: note for seq, note in thread.pins().items() if seq in seqs}
    first = checkpoints[0].seq if everything else head.seq
    decision = decision_of(thread, first)
    yield {
        "record": "thread",
        "thread": thread.id,
        "uuid": head.thread_uuid.hex(),
        "head": head.seq,
        "decision": None if decision is None or decision == (head.thread_uuid, first) else _decision(decision),
        "checkpoints": len(checkpoints),
        "effects": len(effects),
        "pins": len(pins),
    }
    there: set[int] = set()
    for checkpoint in checkpoints:
        line = checkpoint_line(checkpoint)
        if everything or checkpoint.seq == head.seq:
            line |= states.of(checkpoint, there)
            there.add(checkpoint.seq)
        yield line
        done.checkpoints += 1
    for effect in effects:
        yield {"record": "effect", "thread": thread.id, **effect_line(effect)}
        done.effects += 1
        done.duplicates += effect.duplicates
    for seq, note in pins.items():
        yield {"record": "pin", "thread": thread.id, "seq": seq, "note": tagged.encode(note)}
        done.pins += 1


class _States:
    """The states of one thread, each as the shorter of itself and its changes from its parent's."""

    def __init__(self, thread: Thread) -> None:
        self._thread = thread
        self._at: int | None = None
        self._texts: dict[str, str | list[str]] = {}

    def of(self, checkpoint: Checkpoint, there: set[int]) -> dict[str, Any]:
        """The keys of a checkpoint's line that say its state. `there`: seqs whose lines are written."""
        state = lines.encode_state(self._thread.load(at=checkpoint.seq))
        texts = lines.texts_of(state)
        parent = checkpoint.parent
        found = None
        if parent is not None and parent in there:
            if parent != self._at:
                self._texts = lines.texts_of(lines.encode_state(self._thread.load(at=parent)))
            found = lines.changes(self._texts, texts, state)
        self._at, self._texts = checkpoint.seq, texts
        told: dict[str, Any] = {"state": state} if found is None else {"changes": found}
        return {**told, "sha256": lines.digest(texts)}


def checkpoint_line(checkpoint: Checkpoint) -> dict[str, Any]:
    """What stands beside a state."""
    return {
        "record": "checkpoint",
        "thread": checkpoint.thread_id,
        "seq": checkpoint.seq,
        "parent": checkpoint.parent,
        "reason": checkpoint.reason,
        "step": tagged.encode(checkpoint.step),
        "status": tagged.encode(checkpoint.status),
        "created_at": checkpoint.created_at.isoformat(),
        "metadata": tagged.encode(checkpoint.metadata),
    }


def effect_line(effect: EffectView) -> dict[str, Any]:
    """A call and its receipt, if it has one."""
    finished = effect.finished_at
    return {
        "decision": _decision(effect.decision),
        "call": effect.index,
        "generation": effect.generation,
        "key": effect.key,
        "tool": tagged.encode(effect.tool),
        "arguments": tagged.encode(effect.arguments),
        "rule": effect.rule,
        "attempt": effect.attempt,
        "started_at": effect.started_at.isoformat(),
        "status": effect.status,
        "why": tagged.encode(effect.why),
        "outcome": effect.outcome,
        "source": effect.source,
        "result": tagged.encode(effect.result) if effect.outcome == "result" else None,
        "error": tagged.encode(effect.error),
        "seq": effect.seq,
        "finished_at": None if finished is None else finished.isoformat(),
        "duplicates": effect.duplicates,
    }


def _decision(decision: tuple[bytes, int]) -> list[Any]:
    return [decision[0].hex(), decision[1]]
