"""Snapshots: when they are taken, what they cost, that nothing depends on them, and that they are thinned with care."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentstore import Append, CorruptionError, Set, Splice, Store, Thread, loading, records, snapshots
from agentstore.engine.api import Reader
from agentstore.records import ThreadKeys, int_part


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """Without a background thread: snapshots are taken by the commits that ask for them."""
    with Store.open(tmp_path / "store", background=False) as opened:
        yield opened


def message(n: int, size: int = 300) -> dict[str, Any]:
    return {"role": "tool", "n": n, "content": random.Random(n).randbytes(size // 2).hex()}


def grow(thread: Thread, count: int, start: int = 0, size: int = 300) -> None:
    for n in range(start, start + count):
        thread.commit(Append("history", message(n, size)), Set("step", n))


def keys_of(thread: Thread) -> ThreadKeys:
    keys = thread._keys
    assert keys is not None
    return keys


def snapshot_seqs(reader: Reader, thread: Thread) -> list[int]:
    low = records.snapshots(keys_of(thread).prefix)
    return [records.seq_of(key, low) for key, _ in reader.scan(low, records.end_of(low))]


def seqs(store: Store, thread: Thread) -> list[int]:
    with store._engine.read() as snap:
        return snapshot_seqs(snap, thread)


def stored_bytes(store: Store, thread: Thread, part: bytes) -> int:
    low = keys_of(thread).prefix + part
    with store._engine.read() as snap:
        return sum(len(raw) for _, raw in snap.scan(low, records.end_of(low)))


def loaded(store: Store, thread: Thread, at: int) -> loading.Loaded:
    with store._engine.read() as snap:
        return loading.load(snap, keys_of(thread).prefix, at, "thread")


def test_loading_never_reads_more_than_a_few_hundred_deltas(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 1500)
    assert max(loaded(store, thread, at).deltas for at in range(1500)) <= 2 * snapshots.DELTAS_MAX
    assert loaded(store, thread, 1499).deltas <= snapshots.DELTAS_MAX
    for at in (0, 63, 64, 700, 1499):
        assert thread.load(at=at) == {"history": [message(n) for n in range(at + 1)], "step": at}
    assert store.check() == []


def test_snapshots_grow_with_what_happened_and_not_with_its_square(store: Store) -> None:
    thread = store.thread("t")
    sizes = []
    for part in range(4):
        grow(thread, 600, start=600 * part)
        deltas = stored_bytes(store, thread, records.checkpoints(b""))
        kept = stored_bytes(store, thread, records.snapshots(b"")) + stored_bytes(store, thread, records.chunks(b""))
        sizes.append(kept / deltas)
    assert all(0.3 < size < 1.5 for size in sizes), sizes
    assert sizes[3] < sizes[0] * 1.5


def test_a_small_state_with_many_commits_stays_small(store: Store) -> None:
    thread = store.thread("t")
    for n in range(2000):
        thread.commit(Set("step", n))
    assert (
        stored_bytes(store, thread, records.snapshots(b"")) < stored_bytes(store, thread, records.checkpoints(b"")) / 4
    )
    assert loaded(store, thread, 1999).deltas <= snapshots.DELTAS_MAX


def test_a_large_state_of_which_little_changes_is_not_written_over_and_over(store: Store) -> None:
    thread = store.thread("t")
    thread.commit(Set("table", {str(n): random.Random(n).random() for n in range(50_000)}))
    table = stored_bytes(store, thread, records.checkpoints(b""))
    for n in range(1500):
        thread.commit(Set("step", n), Set("table2", n))
    kept = stored_bytes(store, thread, records.snapshots(b"")) + stored_bytes(store, thread, records.chunks(b""))
    assert kept < 2 * table
    assert len(thread.load()["table"]) == 50_000


def test_a_splice_keeps_the_chunks_before_it(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 600)
    [*_, last] = seqs(store, thread)
    before = stored_bytes(store, thread, records.chunks(b""))
    state = thread.load()
    thread.commit(Splice("history", 590, 5, ["summary"]))
    state["history"][590:595] = ["summary"]
    grow(thread, 256, start=1000)
    state["history"] += [message(n) for n in range(1000, 1256)]
    state["step"] = 1255
    assert seqs(store, thread)[-1] > last
    assert stored_bytes(store, thread, records.chunks(b"")) < 2.2 * before
    assert thread.load() == state
    assert store.check() == []


def test_a_branch_uses_the_snapshots_of_its_line_only(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 300)
    assert len(seqs(store, thread)) >= 2
    first = seqs(store, thread)[0]
    thread.commit(Append("history", "branch"), parent=first - 10)
    branch = thread.load()
    assert branch["history"] == [*[message(n) for n in range(first - 9)], "branch"]
    assert loaded(store, thread, 300).snapshot_seq is None
    grow(thread, 300, start=1000)
    assert loaded(store, thread, 600).snapshot_seq in seqs(store, thread)
    assert thread.load()["history"] == branch["history"] + [message(n) for n in range(1000, 1300)]
    assert thread.load(at=299)["step"] == 299
    assert store.check() == []


def test_loading_alone_has_a_snapshot_taken_where_many_writers_came_and_went(store: Store) -> None:
    for n in range(150):
        store.thread("t").commit(Set("step", n))  # a new handle each time
    thread = store.thread("t")
    assert thread.load() == {"step": 149}
    assert seqs(store, thread)


def test_the_background_takes_them(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        thread = store.thread("t")
        grow(thread, 300)
        assert store._engine.has_background
        store._snapshots.run()  # what is still waiting, now: no test waits for a clock
        assert seqs(store, thread)
        assert thread.load()["step"] == 299


def test_nothing_depends_on_snapshots(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 400)
    state = thread.load()
    low, high = records.snapshots(keys_of(thread).prefix), records.end_of(records.snapshots(keys_of(thread).prefix))

    def lose(tx: Any) -> None:
        for key in [key for key, _ in tx.scan(low, high)]:
            tx.delete(key)

    store._engine.transact(lose)
    assert loaded(store, thread, 399).deltas == 400
    assert thread.load() == state


# --- thinning --------------------------------------------------------------------------------


def test_thinning_keeps_the_newest_and_lets_gaps_grow(store: Store) -> None:
    thread = store.thread("t")
    for n in range(3000):
        thread.commit(Set("step", n))
        if n % 50 == 49:
            snapshots.take(store._engine, keys_of(thread).number, n, thread._commit_id)
    number = keys_of(thread).number
    snapshots.thin(store._engine, number)
    before = seqs(store, thread)
    for seq in snapshots.to_drop(before):
        assert snapshots.drop(store._engine, number, seq)
    after = seqs(store, thread)
    assert after[-snapshots.DENSE_SNAPSHOTS :] == before[-snapshots.DENSE_SNAPSHOTS :]
    assert after[0] == before[0] and len(after) < len(before)
    gaps = [b - a for a, b in pairwise(after)]
    assert max(gaps) <= 2 * snapshots.DELTAS_MAX
    assert store.check() == []


def test_a_dropped_snapshot_takes_only_its_own_chunks(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 700)
    number = keys_of(thread).number
    [first, *_, last] = seqs(store, thread)
    for seq in seqs(store, thread)[:-1]:
        assert snapshots.drop(store._engine, number, seq)
    assert seqs(store, thread) == [last] and first != last
    assert thread.load(at=699)["history"] == [message(n) for n in range(700)]
    assert store.check() == []
    assert snapshots.drop(store._engine, number, last)
    assert stored_bytes(store, thread, records.chunks(b"")) == 0
    assert store.check() == []


def test_a_snapshot_that_the_deltas_do_not_lead_to_is_kept(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 300)
    keys = keys_of(thread)
    [first, *_] = seqs(store, thread)
    key = keys.checkpoints + int_part(first - 1)

    def damage(tx: Any) -> None:
        raw = tx.get(key)
        tx.put(key, raw[:200] + bytes((raw[200] ^ 1,)) + raw[201:])  # inside the message that it appends

    store._engine.transact(damage)
    assert not snapshots.drop(store._engine, keys.number, first)
    assert first in seqs(store, thread)
    assert thread.load()["step"] == 299  # still loads: through the snapshot that was kept
    with pytest.raises(CorruptionError):
        thread.load(at=first - 1)


def test_a_snapshot_whose_base_is_thinned_meanwhile_is_not_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = store.thread("t")
    grow(thread, 300)
    number = keys_of(thread).number
    grow(thread, 40, start=300)
    [*_, base] = seqs(store, thread)
    assert base < 339
    divide = snapshots._divide

    def thinned_just_then(*args: Any) -> Any:
        made = divide(*args)
        monkeypatch.setattr(snapshots, "_divide", divide)
        between.append(True)
        return made

    between: list[bool] = []
    monkeypatch.setattr(snapshots, "_divide", thinned_just_then)
    transact = store._engine.transact

    def drop_first(fn: Any) -> Any:
        if between:
            between.clear()
            assert snapshots.drop(store._engine, number, base)
        return transact(fn)

    monkeypatch.setattr(store._engine, "transact", drop_first)
    assert not snapshots.take(store._engine, number, 339, thread._commit_id)
    assert store.check() == []


def test_two_processes_that_take_the_same_snapshot(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are named by their snapshot's seq: the second must not put others under the first one's names."""
    thread = store.thread("t")
    grow(thread, 300, size=1000)
    number, commit_id = keys_of(thread).number, thread._commit_id
    transact = store._engine.transact

    def first_the_other(fn: Any) -> Any:
        monkeypatch.setattr(store._engine, "transact", transact)
        monkeypatch.setattr(snapshots, "CHUNK_BYTES_MAX", 17_000)  # so that it divides differently
        assert snapshots.take(store._engine, number, 299, commit_id)
        return transact(fn)

    monkeypatch.setattr(store._engine, "transact", first_the_other)
    assert not snapshots.take(store._engine, number, 299, commit_id)
    assert store.check() == []
    # Nor may one come back after it was thinned, while later snapshots still name its chunks.
    grow(thread, 100, start=300, size=1000)
    assert snapshots.drop(store._engine, number, 299)
    assert not snapshots.take(store._engine, number, 299, commit_id)
    assert thread.load()["history"] == [message(n, 1000) for n in range(400)]
    assert store.check() == []


def test_no_snapshot_of_a_thread_that_was_deleted_meanwhile(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 100)
    number, seq, commit_id = keys_of(thread).number, thread._seq, thread._commit_id
    thread.delete()
    assert seq is not None
    assert not snapshots.take(store._engine, number, seq, commit_id)
    assert store.check() == []
