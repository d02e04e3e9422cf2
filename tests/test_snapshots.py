"""Snapshots: when they are taken, what they cost, that nothing depends on them, and that they are thinned with care."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentstore import Append, CorruptionError, Set, Splice, Store, Thread, lines, loading, records, snapshots
from agentstore.engine.api import Reader
from agentstore.records import ThreadKeys


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Without a background thread: packs and snapshots are made by the commits that ask for them, and early."""
    monkeypatch.setattr(snapshots, "LOAD_US_MIN", 300)
    with Store.open(tmp_path / "store", background=False) as opened:
        yield opened


def message(n: int, size: int = 300) -> dict[str, Any]:
    return {"role": "tool", "n": n, "content": random.Random(n).randbytes(size // 2).hex()}


def draft(n: int) -> str:
    """What is set again at every commit: the deltas outweigh their state, so snapshots are due."""
    return random.Random(f"draft {n}").randbytes(1000).hex()


def grow(thread: Thread, count: int, start: int = 0, size: int = 300) -> None:
    for n in range(start, start + count):
        thread.commit(Append("history", message(n, size)), Set("draft", draft(n)), Set("step", n))


def state_at(n: int, size: int = 300) -> dict[str, Any]:
    return {"history": [message(each, size) for each in range(n + 1)], "draft": draft(n), "step": n}


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


def us_between(store: Store, thread: Thread, at: int) -> float:
    return snapshots.cost_us(loaded(store, thread, at).cost)


def reading_us(store: Store, thread: Thread, at: int) -> float:
    """What a load costs at the least, by the same model: the state out of a snapshot."""
    size = sum(field.size for field in loaded(store, thread, at).state.values())
    return snapshots._state_us(size)


def test_loading_costs_about_twice_the_reading_of_the_state_at_most(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 1500)
    slack = snapshots.LOAD_US_MIN + 16 * 6  # the handle looks every 16 commits
    for at in (100, 300, 700, 1100, 1499):
        assert us_between(store, thread, at) <= 2 * reading_us(store, thread, at) + 2 * slack, at
    for at in (0, 63, 64, 700, 1499):
        assert thread.load(at=at) == state_at(at)
    assert store.check() == []


def test_a_thread_that_only_appends_gets_no_snapshot_and_holds_each_byte_once(store: Store) -> None:
    thread = store.thread("t")
    sizes = []
    for part in range(4):
        for n in range(500 * part, 500 * (part + 1)):
            thread.commit(Append("history", message(n)), Set("step", n))
        store._upkeep.close()
        sizes.append(sum(stored_bytes(store, thread, kind(b"")) for kind in KINDS))
    assert not seqs(store, thread)
    each = [b - a for a, b in pairwise([0, *sizes])]
    assert max(each) < 1.1 * min(each)
    assert sizes[-1] < 0.7 * sum(len(repr(message(n))) for n in range(2000))  # hex: half of it is entropy
    assert thread.load()["history"] == [message(n) for n in range(2000)]


KINDS = (records.checkpoints, records.packs, records.snapshots, records.chunks)


def test_snapshots_grow_with_what_happened_and_not_with_its_square(store: Store) -> None:
    thread = store.thread("t")
    sizes = []
    for part in range(4):
        grow(thread, 500, start=500 * part)
        deltas = sum(stored_bytes(store, thread, kind(b"")) for kind in KINDS[:2])
        kept = sum(stored_bytes(store, thread, kind(b"")) for kind in KINDS[2:])
        sizes.append(kept / deltas)
    assert all(0 < size < 0.5 for size in sizes), sizes
    assert sizes[3] < sizes[0] * 1.5


def test_a_small_state_with_many_commits_stays_small(store: Store) -> None:
    thread = store.thread("t")
    for n in range(3000):
        thread.commit(Set("step", n))
    assert len(seqs(store, thread)) > 3
    assert stored_bytes(store, thread, records.snapshots(b"")) < stored_bytes(store, thread, records.packs(b"")) / 4
    assert us_between(store, thread, 2999) < snapshots.LOAD_US_MIN + 16


def test_a_large_state_of_which_little_changes_is_not_written_over_and_over(store: Store) -> None:
    thread = store.thread("t")
    thread.commit(Set("table", {str(n): random.Random(n).random() for n in range(50_000)}))
    table = stored_bytes(store, thread, records.checkpoints(b""))
    for n in range(1500):
        thread.commit(Set("step", n), Set("table2", n))
    assert sum(stored_bytes(store, thread, kind(b"")) for kind in KINDS) < 2.2 * table
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
    state |= {"draft": draft(1255), "step": 1255}
    assert seqs(store, thread)[-1] > last
    assert stored_bytes(store, thread, records.chunks(b"")) < 2.2 * before
    assert thread.load() == state
    assert store.check() == []


def test_a_branch_uses_the_snapshots_of_its_line_only(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 400)
    assert len(seqs(store, thread)) >= 2
    first = seqs(store, thread)[0]
    thread.commit(Append("history", "branch"), parent=first - 10)
    branch = thread.load()
    assert branch["history"] == [*[message(n) for n in range(first - 9)], "branch"]
    assert loaded(store, thread, 400).snapshot_seq in (None, 400)
    grow(thread, 300, start=1000)
    assert loaded(store, thread, 700).snapshot_seq in [seq for seq in seqs(store, thread) if seq > 400]
    assert thread.load()["history"] == branch["history"] + [message(n) for n in range(1000, 1300)]
    assert thread.load(at=399) == state_at(399)
    assert store.check() == []


def test_loading_alone_has_a_snapshot_taken_where_many_writers_came_and_went(store: Store) -> None:
    for n in range(150):
        store.thread("t").commit(Set("draft", draft(n)))  # a new handle each time
    thread = store.thread("t")
    assert thread.load() == {"draft": draft(149)}
    assert seqs(store, thread)


def test_the_background_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "LOAD_US_MIN", 300)
    with Store.open(tmp_path / "store") as store:
        thread = store.thread("t")
        grow(thread, 300)
        assert store._engine.has_background
        while store._upkeep.run():  # what is still waiting, now: no test waits for a clock
            pass
        thread.load()
        assert seqs(store, thread)
        assert thread.load() == state_at(299)


def test_nothing_depends_on_snapshots(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 400)
    state = thread.load()
    low, high = records.snapshots(keys_of(thread).prefix), records.end_of(records.snapshots(keys_of(thread).prefix))

    def lose(tx: Any) -> None:
        for key in [key for key, _ in tx.scan(low, high)]:
            tx.delete(key)

    assert seqs(store, thread)
    store._engine.transact(lose)
    assert loaded(store, thread, 399).snapshot_seq is None
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
    assert max(gaps) <= snapshots.GAP_MIN
    assert store.check() == []


def test_a_dropped_snapshot_takes_only_its_own_chunks(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 900)
    number = keys_of(thread).number
    [first, *_, last] = seqs(store, thread)
    for seq in seqs(store, thread)[:-1]:
        assert snapshots.drop(store._engine, number, seq)
    assert seqs(store, thread) == [last] and first != last
    assert thread.load(at=899) == state_at(899)
    assert store.check() == []
    assert snapshots.drop(store._engine, number, last)
    assert stored_bytes(store, thread, records.chunks(b"")) == 0
    assert store.check() == []


def test_a_snapshot_that_the_deltas_do_not_lead_to_is_kept(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 300)
    keys = keys_of(thread)
    [first, *_] = seqs(store, thread)
    with store._engine.read() as snap:
        pack = lines.find_pack(snap, keys.prefix, first - 1, "t")
    assert pack is not None and pack.last >= first - 1

    def damage(tx: Any) -> None:
        raw = lines.get_pack(tx, keys.prefix, pack.last)
        assert raw is not None
        lines.put_pack(tx, keys.prefix, pack.last, raw[:200] + bytes((raw[200] ^ 1,)) + raw[201:])

    store._engine.transact(damage)
    assert not snapshots.drop(store._engine, keys.number, first)
    assert first in seqs(store, thread)
    assert thread.load() == state_at(299)  # still loads: through a snapshot that was kept
    with pytest.raises(CorruptionError):
        thread.load(at=first - 1)


def test_a_snapshot_whose_base_is_thinned_meanwhile_is_not_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = store.thread("t")
    grow(thread, 340)
    number = keys_of(thread).number
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
    monkeypatch.setattr(snapshots, "is_due", lambda *_: True)
    assert snapshots.take(store._engine, number, 399, thread._commit_id)
    assert snapshots.drop(store._engine, number, 299)
    assert not snapshots.take(store._engine, number, 299, commit_id)
    assert thread.load() == state_at(399, 1000)
    assert store.check() == []


def test_no_snapshot_of_a_thread_that_was_deleted_meanwhile(store: Store) -> None:
    thread = store.thread("t")
    grow(thread, 100)
    number, seq, commit_id = keys_of(thread).number, thread._seq, thread._commit_id
    thread.delete()
    assert seq is not None
    assert not snapshots.take(store._engine, number, seq, commit_id)
    assert store.check() == []
