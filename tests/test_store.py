"""The store: ids and their order, listings, sharing, deletion in slices, numbers."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentstore import (
    InvalidThreadId,
    NotAStore,
    Set,
    StaleThread,
    Store,
    StoreAlreadyOpen,
    StoreClosed,
    StoreNotFound,
    deleting,
    records,
)
from agentstore.engine import keys
from agentstore.engine.api import KEY_BYTES_MAX
from agentstore.testing.scratch import scratch_store

COMMON = "n" * 400


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", background=False) as opened:
        yield opened


# --- ids -----------------------------------------------------------------------------------------

IDS = [
    "a",
    "user-42:report-7/alt",
    "ünïcode ☃ 😀",
    " leading and trailing ",
    "line\nbreak\ttab",
    "../../etc/passwd",
    "nul\0inside",
    "\0",
    "\0" * 4096,
    "x" * 4096,
    "é" * 2048,
    COMMON,
    COMMON + "1",
    COMMON + "2",
    COMMON + "1" * 100,
    COMMON[:-1] + "\0",
    COMMON[:-1] + "\0" + "1",
    COMMON[:-1] + "é",
    "\U0010ffff",
]


def test_any_text_is_an_id(store: Store) -> None:
    for number, name in enumerate(IDS):
        store.thread(name).commit(Set("number", number))
    for number, name in enumerate(IDS):
        assert store.thread(name).load() == {"number": number}
    assert list(store.threads()) == sorted(IDS)
    assert list(store.threads(order="created")) == IDS[::-1]
    assert store.check() == []


@pytest.mark.parametrize("name", ["", "x" * 4097, "é" * 2049, "\ud800", "a\udfffb"])
def test_what_is_no_text_of_that_size_is_no_id(store: Store, name: str) -> None:
    with pytest.raises(InvalidThreadId, match="UTF-8"):
        store.thread(name)


@pytest.mark.parametrize("name", [None, 1, b"a", ["a"]])
def test_an_id_is_a_str(store: Store, name: Any) -> None:
    with pytest.raises(InvalidThreadId, match="str"):
        store.thread(name)


names = st.binary(min_size=1, max_size=12) | st.builds(
    lambda size, byte, tail: byte * size + tail,
    st.integers(395, 402),
    st.sampled_from([b"n", b"\0"]),
    st.binary(max_size=4),
)


@given(names, names)
@example(b"n" * 399 + b"\0", b"n" * 399 + b"\x01")
@example(b"n" * 399 + b"\0z", b"n" * 399)
def test_keys_sort_as_names_do_but_within_one_long_beginning(one: bytes, two: bytes) -> None:
    for name in (one, two):
        assert len(records.name_key(name)) <= KEY_BYTES_MAX
        cut = records.cut_name(name)
        assert name.startswith(cut) and len(keys.encode(cut)) <= records.NAME_KEY_BYTES_MAX + 2
    if one != two:
        assert records.name_key(one) != records.name_key(two)
    if records.cut_name(one) != records.cut_name(two):
        assert (records.name_key(one) < records.name_key(two)) == (one < two)


# --- listing ----------------------------------------------------------------------------------------


def test_listing_by_prefix_order_and_limit(store: Store) -> None:
    rng = random.Random(1)
    names = [f"user-{rng.randrange(30)}:task-{n}" for n in range(700)]
    for name in names:
        store.thread(name).commit(Set("n", 1))
    for prefix in ("", "user-2", "user-2:", "user-29:task-", "nobody", "user-2:task-1", "zzz"):
        wanted = [name for name in names if name.startswith(prefix)]
        assert list(store.threads(prefix)) == sorted(wanted)
        assert list(store.threads(prefix, order="created")) == wanted[::-1]
        assert list(store.threads(prefix, limit=3)) == sorted(wanted)[:3]
        assert list(store.threads(prefix, order="created", limit=3)) == wanted[::-1][:3]
    assert list(store.threads(limit=0)) == []
    with pytest.raises(ValueError, match="order"):
        list(store.threads(order="size"))  # type: ignore[arg-type]  # the point


def test_listing_by_what_is_no_text(store: Store) -> None:
    with pytest.raises(TypeError, match="a prefix of thread ids is a str"):
        store.threads(None)  # type: ignore[arg-type]


def test_listing_long_names_with_one_beginning(store: Store) -> None:
    names = [COMMON + str(n) for n in range(400)] + [COMMON[:-1], COMMON, "a", "z"]
    random.Random(2).shuffle(names)
    for name in names:
        store.thread(name).commit(Set("n", 1))
    for prefix in ("", COMMON[:100], COMMON, COMMON + "1", COMMON + "39", COMMON + "x"):
        assert list(store.threads(prefix)) == sorted(name for name in names if name.startswith(prefix))


def test_listing_holds_no_snapshot_and_bears_changes_meanwhile(store: Store) -> None:
    for n in range(1000):
        store.thread(f"{n:04}").commit(Set("n", n))
    seen = []
    for name in store.threads():
        seen.append(name)
        store.thread(name).delete()
    assert seen == [f"{n:04}" for n in range(1000)]
    assert list(store.threads()) == [] and store.stats()["threads"] == 0
    assert store.check() == []


def test_listing_the_newest_reads_little(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(1500):
        store.thread(f"{n:04}").commit(Set("n", n))
    read = 0
    real = store._engine.read

    class Counting:
        def __enter__(self) -> Any:
            self.context = real()
            self.snap = self.context.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.context.__exit__(*error)

        def scan(self, *args: Any, **options: Any) -> Iterator[tuple[bytes, bytes]]:
            nonlocal read
            for pair in self.snap.scan(*args, **options):
                read += 1
                yield pair

    monkeypatch.setattr(store._engine, "read", Counting)
    assert list(store.threads(order="created", limit=20)) == [f"{n:04}" for n in range(1499, 1479, -1)]
    assert list(store.threads(limit=20)) == [f"{n:04}" for n in range(20)]
    assert read <= 2 * 21


# --- deleting -------------------------------------------------------------------------------------------


def test_deleting_many_records_goes_in_slices_and_is_finished_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleting, "SLICE_RECORDS", 10)
    with Store.open(tmp_path / "s", background=False) as store:
        thread = store.thread("t")
        for n in range(95):
            thread.commit(Set("n", n))
        monkeypatch.setattr(deleting, "finish", lambda engine, number: True)  # the process ends after the first slice
        thread.delete()
        monkeypatch.undo()
        assert list(store.threads()) == []
        assert deleting.leftovers(store._engine) == [1]
        assert store.check() == []
        store.thread("t").commit(Set("n", "new"))
    monkeypatch.setattr(deleting, "SLICE_RECORDS", 10)
    with Store.open(tmp_path / "s", background=False) as store:
        assert deleting.leftovers(store._engine) == []
        with store._engine.read() as snap:
            assert next(iter(snap.scan(keys.encode(1), records.end_of(keys.encode(1)))), None) is None
        assert store.thread("t").load() == {"n": "new"}
        assert store.check() == []


def test_the_background_finishes_deletions(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deleting, "SLICE_RECORDS", 10)
    monkeypatch.setattr(store._upkeep, "want_packs", lambda number: None)
    thread = store.thread("t")
    for n in range(95):
        thread.commit(Set("n", n))
    real = deleting.finish
    monkeypatch.setattr(deleting, "finish", lambda engine, number: True)
    thread.delete()
    monkeypatch.setattr(deleting, "finish", real)
    sweeper = deleting.Sweeper(store._engine)
    slices = 0
    while sweeper.run():
        slices += 1
    assert slices >= 8 and deleting.leftovers(store._engine) == []
    assert store.check() == []


# --- opening ------------------------------------------------------------------------------------------------


def test_open_makes_a_store_or_says_why_not(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound):
        Store.open(tmp_path / "s", create=False)
    with Store.open(tmp_path / "s") as store:
        assert store.path == str(tmp_path / "s") and not store.readonly
        with pytest.raises(StoreAlreadyOpen):
            Store.open(tmp_path / "s", background=False)
        # The same options share what is open; it closes with the last.
        with Store.open(str(tmp_path / "s")) as second:
            second.thread("t").commit(Set("n", 1))
        second.close()
        assert store.thread("t").load() == {"n": 1}
    store.close()
    thread = store.thread("t")
    for call in (thread.load, thread.commit, lambda: list(store.threads()), store.stats):
        with pytest.raises(StoreClosed):
            call()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(NotAStore):
        Store.open(tmp_path / "other")


def test_threads_of_a_process_write_side_by_side(store: Store) -> None:
    """Store is thread-safe: own handles on own threads lose nothing, on one thread exactly one wins each round."""
    written: dict[str, int] = {}
    start = threading.Barrier(6)

    def own(name: str) -> None:
        thread = store.thread(name)
        start.wait()
        for n in range(30):
            thread.commit(Set("n", n))
        written[name] = 30

    def shared(name: str) -> None:
        thread = store.thread("shared")
        start.wait()
        won = 0
        while won < 20:
            try:
                thread.commit(Set(name, won))
                won += 1
            except StaleThread:
                thread.load()
        written[name] = won

    workers = [threading.Thread(target=own, args=(f"own-{n}",)) for n in range(3)]
    workers += [threading.Thread(target=shared, args=(f"by-{n}",)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(written) == 6
    assert store.thread("shared").load() == {f"by-{n}": 19 for n in range(3)} or set(store.thread("shared").load()) == {
        "by-0",
        "by-1",
        "by-2",
    }
    head = store.thread("shared").head
    assert head is not None and head.seq == 59
    for n in range(3):
        assert store.thread(f"own-{n}").load() == {"n": 29}
    assert store.check() == []


def test_a_scratch_store_is_gone_when_nobody_uses_it() -> None:
    store = scratch_store()
    path = Path(store.path)
    store.thread("t").commit(Set("n", 1))
    assert path.is_dir()
    store.close()
    del store
    assert not path.exists()
