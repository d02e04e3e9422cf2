"""Store.check: for each rule a damage that breaks it, and the sentence that says so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentstore import (
    Append,
    CorruptionError,
    Set,
    Store,
    Thread,
    checking,
    dictionaries,
    lines,
    packing,
    packs,
    records,
    snapshots,
)
from agentstore.codec import zstd
from agentstore.engine import keys
from agentstore.engine.api import Tx
from agentstore.records import CHECKPOINT, Head, ThreadKeys, int_part
from agentstore.upkeep import Upkeep


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store with two threads: `t` with snapshots, a branch and a pin, `other` a fork of it. Nothing is packed."""
    monkeypatch.setattr(Upkeep, "want_packs", lambda *_: None)
    monkeypatch.setattr(snapshots, "is_due", lambda *_: False)
    yield from filled(tmp_path)


@pytest.fixture
def packed(tmp_path: Path) -> Iterator[Store]:
    """The same in packs of 64, the last 8 checkpoints of the line and the branch alone."""
    yield from filled(tmp_path)


def filled(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", background=False) as opened:
        thread = opened.thread("t")
        for n in range(200):
            made = thread.commit(Append("history", {"n": n, "text": text(n)}), Set("step", n), step=n)
            if n in (63, 127):
                assert snapshots.take(opened._engine, 1, n, made.commit_id)
        thread.commit(Set("branch", True), parent=150)
        thread.pin(10, "note")
        thread.fork(into="other")
        assert opened.check() == []
        yield opened


def text(n: int) -> str:
    return random.Random(n).randbytes(150).hex()


T = ThreadKeys(1)
SNAPSHOTS = records.snapshots(T.prefix)
CHUNKS = records.chunks(T.prefix)


def checkpoint(seq: int) -> bytes:
    return T.checkpoints + int_part(seq)


def first(tx: Tx, prefix: bytes) -> bytes:
    return next(key for key, _ in tx.scan(prefix, records.end_of(prefix)))


def change(key: bytes, edit: Callable[[bytes], bytes]) -> Callable[[Tx], None]:
    def write(tx: Tx) -> None:
        raw = tx.get(key)
        assert raw is not None
        tx.put(key, edit(raw))

    return write


def change_first(prefix: bytes, edit: Callable[[bytes], bytes]) -> Callable[[Tx], None]:
    return lambda tx: change(first(tx, prefix), edit)(tx)


def replace(at: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + new + raw[at + len(new) :]


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + bytes((raw[at] ^ 1,)) + raw[at + 1 :]


def head(**changed: Any) -> Callable[[bytes], bytes]:
    def edit(raw: bytes) -> bytes:
        decoded = Head.decode(raw)
        for name, value in changed.items():
            setattr(decoded, name, value)
        return decoded.encode()

    return edit


def remove(key: bytes) -> Callable[[Tx], None]:
    return lambda tx: tx.delete(key)


def counters(number: int, threads: int) -> Callable[[Tx], None]:
    return lambda tx: tx.put(records.COUNTERS_KEY, records.COUNTERS.pack(number, threads, 0))


DAMAGE: dict[str, tuple[Callable[[Tx], None], str]] = {
    "name without creation": (remove(records.CREATED + int_part(1)), "missing in the creation index"),
    "creation without name": (remove(records.name_key(b"t")), "the name index does not"),
    "name under another key": (
        lambda tx: tx.put(records.name_key(b"u"), records.name_value(1, b"t")),
        "under the key of another name",
    ),
    "number with two names": (
        lambda tx: tx.put(records.name_key(b"u"), records.name_value(1, b"u")),
        "the number 1 has two names",
    ),
    "short name record": (lambda tx: tx.put(records.name_key(b"u"), b"x"), "a record of the name index is damaged"),
    "wrong count of threads": (counters(3, 7), "the counters say 7 threads, the name index has 2"),
    "number given again": (counters(2, 2), "the counter would give it again"),
    "short counters": (lambda tx: tx.put(records.COUNTERS_KEY, b"x"), "the thread counters are damaged"),
    "no head": (remove(T.head), "'t' has no head"),
    "damaged head": (change(T.head, lambda raw: raw[:-1]), "a head record is damaged"),
    "head without checkpoint": (
        change(T.head, head(seq=999, next_seq=1000)),
        "names checkpoint 999, which is not there",
    ),
    "head of another commit": (change(T.head, head(commit_id=b"12345678")), "are not of one commit"),
    "next seq too small": (change(T.head, head(next_seq=200)), "the head says that the next one is 200"),
    "records of no thread": (
        lambda tx: tx.put(ThreadKeys(77).head, b"x"),
        "the thread number 77, which does not exist",
    ),
    "record of no kind": (
        lambda tx: tx.put(T.prefix + keys.encode("?"), b"x"),
        "is of no kind that this version writes",
    ),
    "checkpoint missing": (remove(checkpoint(100)), "checkpoint 101: its parent 100 is damaged or not there"),
    "checkpoint cut short": (
        change(checkpoint(100), lambda raw: raw[:20]),
        "checkpoint 100: the checkpoint record is damaged",
    ),
    "checkpoint of a newer format": (change(checkpoint(100), flip(0)), "of another format"),
    "unknown reason": (change(checkpoint(100), replace(2, b"\xff")), "checkpoint record is damaged"),
    "damaged meta": (change(checkpoint(100), replace(CHECKPOINT.size, b"\xff")), "checkpoint 100"),
    "parent from the future": (
        change(checkpoint(100), replace(8, (150).to_bytes(8, "little"))),
        "checkpoint 100: its parent 149 is damaged or not there",
    ),
    "another parent": (
        change(checkpoint(100), replace(8, (51).to_bytes(8, "little"))),
        "checkpoint 100",
    ),
    "damaged item": (change(checkpoint(100), flip(200)), "field 'history': its bytes do not match"),
    "damaged state sum": (change(checkpoint(100), flip(CHECKPOINT.size - 1)), "do not match the checksum of the state"),
    "snapshot of another commit": (change_first(SNAPSHOTS, flip(3)), "is not the state that the deltas lead to"),
    "snapshot cut short": (change_first(SNAPSHOTS, lambda raw: raw[:5]), "the record is damaged"),
    "snapshot without checkpoint": (
        lambda tx: tx.put(SNAPSHOTS + int_part(900), tx.get(first(tx, SNAPSHOTS)) or b""),
        "the snapshot 900 is of a checkpoint that is damaged or not there",
    ),
    "chunk missing": (lambda tx: tx.delete(first(tx, CHUNKS)), "is missing"),
    "chunk cut short": (change_first(CHUNKS, lambda raw: raw[:-1]), "snapshot"),
    "chunk of nobody": (
        lambda tx: tx.put(CHUNKS + int_part(5) + int_part(7), b"x"),
        "the chunk (5, 7) belongs to no snapshot",
    ),
    "pin of nothing": (
        lambda tx: tx.put(records.pins(T.prefix) + int_part(999), b""),
        "checkpoint 999 is pinned and not there",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_broken_rule_is_said(store: Store, damage: str) -> None:
    write, sentence = DAMAGE[damage]
    store._engine.transact(write)
    found = store.check()
    assert any(sentence in problem for problem in found), found
    # What is not damaged is not blamed.
    assert not any("thread 'other'" in problem for problem in found)
    assert len(found) < 110


@pytest.mark.parametrize("seq", [0, 63, 100, 150, 199, 200])
def test_no_flipped_byte_of_a_checkpoint_gives_a_wrong_state(store: Store, seq: int) -> None:
    """As if the engine's own checksums were not there."""
    thread = store.thread("t")
    right = thread.load(at=seq)
    raw = store._engine.transact(lambda tx: tx.get(checkpoint(seq)) or b"").value
    noticed = 0
    for at in range(0, len(raw), 7):
        store._engine.transact(lambda tx, at=at: tx.put(checkpoint(seq), flip(at)(raw)))  # type: ignore[misc]  # default
        try:
            assert store.thread("t").load(at=seq) == right
        except CorruptionError as error:
            assert "'t'" in str(error)
            noticed += 1
    # Times, reason and metadata are not the state; nor is the op where a snapshot of this checkpoint stands for it.
    assert noticed >= (1 if seq == 63 else 5)
    store._engine.transact(lambda tx: tx.put(checkpoint(seq), raw))
    assert store.check() == []


def test_more_problems_than_anybody_reads_are_cut(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "PROBLEMS_MAX", 5)
    store._engine.transact(remove(checkpoint(0)))
    assert len(store.check()) == 5


def test_what_stands_above_a_damaged_checkpoint_is_still_looked_at(store: Store) -> None:
    other: Thread = store.thread("other")
    other.commit(Set("step", 1))
    store._engine.transact(change(ThreadKeys(2).checkpoints + int_part(1), flip(CHECKPOINT.size - 1)))
    store._engine.transact(change(checkpoint(100), flip(200)))
    found = store.check()
    assert any("'other', checkpoint 1" in problem for problem in found)
    assert any("'t', checkpoint 100" in problem for problem in found)


# --- the same in packs ---------------------------------------------------------------------


def pack_key(last: int) -> bytes:
    return records.packs(T.prefix) + int_part(last)


def reheaded(**changed: Any) -> Callable[[Tx], None]:
    """A pack whose head says something else, with a right checksum."""

    def edit(raw: bytes) -> bytes:
        there = packs.head_of(raw, 127, "t")
        made = there._replace(
            **{name: value + (0 if name == "parent" else getattr(there, name)) for name, value in changed.items()}
        )
        flags, count, dictionary, first_seq, parent, before, after = made
        packed = packs.PACK.pack(1, flags, count, dictionary, first_seq, parent + 1, before, after, 0)
        crc = packs._CRC.pack(packs._head_crc(packed, 127))
        return packed[:-4] + crc + raw[packs.PACK.size :]

    return change(pack_key(127), edit)


def overlap(tx: Tx) -> None:
    """A checkpoint of its own where a pack has one."""
    tx.put(checkpoint(100), tx.get(checkpoint(199)) or b"")


PACK_DAMAGE: dict[str, tuple[Callable[[Tx], None], str]] = {
    "pack missing": (remove(pack_key(127)), "its parent 127 is damaged or not there"),
    "pack cut short": (change(pack_key(127), lambda raw: raw[:-9]), "pack 127: the record is damaged"),
    "pack without content": (change(pack_key(127), lambda raw: raw[:20]), "pack 127: the record is damaged"),
    "pack of a newer format": (change(pack_key(127), flip(0)), "pack 127: the record is damaged or of another format"),
    "content flipped": (change(pack_key(127), flip(200)), "pack 127: the record is damaged"),
    "head flipped": (change(pack_key(127), flip(24)), "pack 127: the record is damaged"),
    "pack of another state": (reheaded(before=1), "the pack 127 is not of the state of its parent 63"),
    "pack that leads elsewhere": (
        reheaded(after=1),
        "checkpoint 127: the fields do not match the checksum of the state",
    ),
    "pack with another parent": (reheaded(parent=50), "the pack 127 is not of the state of its parent 50"),
    "checkpoint in the range of a pack": (overlap, "stands in the range of a pack that ends with 127"),
}


@pytest.mark.parametrize("damage", PACK_DAMAGE)
def test_every_broken_rule_of_packs_is_said(packed: Store, damage: str) -> None:
    write, sentence = PACK_DAMAGE[damage]
    packed._engine.transact(write)
    found = packed.check()
    assert any(sentence in problem for problem in found), found
    assert not any("thread 'other'" in problem for problem in found)
    assert len(found) < 110


@pytest.mark.parametrize("seq", [64, 100, 127, 140, 191])
def test_no_flipped_byte_of_a_pack_gives_a_wrong_state(packed: Store, seq: int) -> None:
    """As if the engine's own checksums were not there."""
    right, history = packed.thread("t").load(at=seq), packed.thread("t").history()
    last = seq | 63
    raw = packed._engine.transact(lambda tx: tx.get(pack_key(last)) or b"").value
    noticed = 0
    for at in [*range(packs.PACK.size + 12), *range(packs.PACK.size + 12, len(raw), 97)]:
        packed._engine.transact(lambda tx, at=at: tx.put(pack_key(last), flip(at)(raw)))  # type: ignore[misc]  # default
        try:
            assert packed.thread("t").load(at=seq) == right
            assert packed.thread("t").history() == history
        except CorruptionError as error:
            assert "'t'" in str(error)
            noticed += 1
    assert noticed >= 40
    packed._engine.transact(lambda tx: tx.put(pack_key(last), raw))
    assert packed.check() == []


def test_one_damaged_piece_of_a_dictionary_costs_nothing_and_two_are_said(packed: Store) -> None:
    made = zstd.train([repr({"n": n, "text": text(n)}).encode() for n in range(200)], 8192)
    assert made is not None
    packed._engine.transact(lambda tx: dictionaries.put(tx, made, [1], tx.lsn))
    with packed._engine.read() as snap:
        pack = lines.find_pack(snap, T.prefix, 100, "t")
        assert pack is not None
        swap = packing.make(snap, T, [pack], "t", dictionary=made, forced=True)
    assert swap is not None and packed._engine.transact(swap.write).value
    right = packed.thread("t").load(at=100)
    key = dictionaries.DICTIONARIES + int_part(made.id)
    for lost in range(dictionaries.PIECES + 1):
        raw = packed._engine.transact(lambda tx, at=lost: tx.get(key + int_part(at)) or b"").value  # type: ignore[misc]  # default
        packed._engine.transact(remove(key + int_part(lost)))
        dictionaries._known.clear()
        assert packed.thread("t").load(at=100) == right
        assert [problem for problem in packed.check() if "missing" in problem] == [
            f"piece {lost} of the dictionary {made.id} is missing"
        ]
        packed._engine.transact(lambda tx, at=lost, raw=raw: tx.put(key + int_part(at), raw))  # type: ignore[misc]  # defaults
    assert packed.check() == []
    packed._engine.transact(remove(key + int_part(2)))
    packed._engine.transact(remove(key + int_part(5)))
    dictionaries._known.clear()
    with pytest.raises(CorruptionError, match="2 records are missing or damaged"):
        packed.thread("t").load(at=100)
    assert any("2 records are missing or damaged" in problem for problem in packed.check())
