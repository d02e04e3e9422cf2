"""States and messages far over the usual: they are stored, packed, kept by retention and copied like any other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from agentstore import Append, LimitExceeded, Retention, Set, Store
from agentstore.backup import restore
from agentstore.compaction import compact

MESSAGE_BYTES = 20_000_000
STATE_BYTES = 50_000_000


def text(size: int, seed: int) -> str:
    """Words, so that it is neither all the same nor noise."""
    rng = random.Random(seed)
    words = [f"{rng.getrandbits(40):x}" for _ in range(4096)]
    unit = " ".join(rng.choice(words) for _ in range(size // 400))
    return (unit * (size // len(unit) + 1))[:size]


def large_message(seed: int) -> dict[str, Any]:
    return {"role": "tool", "content": text(MESSAGE_BYTES, seed)}


def check(path: Path, states: dict[int, Any]) -> None:
    with Store.open(path) as store:
        for seq, state in states.items():
            assert store.thread("t").load(at=seq) == state, seq
        assert store.check() == []


def life_of(path: Path, states: dict[int, Any]) -> None:
    """Reopened, compacted, backed up and restored, and with only the head kept: always the same."""
    check(path, states)
    compact(path)
    check(path, states)
    with Store.open(path) as store:
        store.backup(path.with_name("copy"))
    restore(path.with_name("copy"), path.with_name("back"))
    check(path.with_name("back"), states)
    compact(path, retention=Retention(keep_last=1))
    check(path, {max(states): states[max(states)]})


def test_a_single_message_of_20_mb(tmp_path: Path) -> None:
    path = tmp_path / "agents"
    states = {}
    with Store.open(path) as store:
        thread = store.thread("t")
        history: list[Any] = []
        for seq in range(3):
            message = large_message(seq) if seq == 1 else {"role": "user", "content": f"{seq}"}
            thread.commit(Append("conversation_history", message))
            history = [*history, message]
            states[seq] = {"conversation_history": history}
    life_of(path, states)


def test_a_state_of_50_mb(tmp_path: Path) -> None:
    """It grows by messages of 1 MB, and has a large field of its own that is replaced."""
    path = tmp_path / "agents"
    states: dict[int, Any] = {}
    with Store.open(path) as store:
        thread = store.thread("t")
        history: list[Any] = []
        count = STATE_BYTES * 4 // 5 // 1_000_000
        for seq in range(count):
            history = [*history, {"role": "user", "content": text(1_000_000, seq)}]
            thread.commit(Append("conversation_history", history[-1]))
        states[count - 1] = {"conversation_history": history}
        for seq in (count, count + 1):
            page = text(STATE_BYTES // 5, seq)
            thread.commit(Set("page", page))
            states[seq] = {"conversation_history": history, "page": page}
        thread.commit_state({**states[count + 1], "step": 1})
        states[count + 2] = {**states[count + 1], "step": 1}
    assert len(str(states[count + 2])) >= STATE_BYTES
    life_of(path, states)


def test_what_is_too_large_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    with Store.open(tmp_path / "agents", background=False) as store:
        thread = store.thread("t")
        thread.commit(Set("step", 1))
        with pytest.raises(LimitExceeded, match="limit"):
            thread.commit(Set("page", "x" * 300_000_000))
        assert thread.load() == {"step": 1}
        thread.commit(Set("step", 2))
        assert thread.load() == {"step": 2}
