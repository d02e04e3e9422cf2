"""`readonly=True`: beside a writer, alone, with recovery due, and on a file system that nobody can write to."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash.remote import Died, Remote

from agentstore.engine import keys
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.errors import ReadOnlyStore, RecoveryNeeded, StoreNotFound, StorePermissionError
from agentstore.testing.loopdisk import LoopDisk, why_not

KEY = keys.encode("k")


def get(engine: EmbeddedEngine, key: bytes = KEY) -> bytes | None:
    with engine.read() as view:
        return view.get(key)


def refuses_to_write(engine: EmbeddedEngine) -> None:
    for fn in (lambda tx: tx.put(KEY, b"never"), lambda tx: tx.delete(KEY), lambda tx: tx.get(KEY)):
        with pytest.raises(ReadOnlyStore, match="readonly=True"):
            engine.transact(fn)


def test_a_reader_beside_a_writer_sees_what_is_confirmed_and_cannot_commit(tmp_path: Path) -> None:
    with Remote() as writer:
        writer.open(tmp_path / "store")
        writer.put(KEY, b"0")
        reader = EmbeddedEngine.open(tmp_path / "store", readonly=True)
        for number in range(1, 50):
            writer.put(KEY, b"%d" % number)
            assert get(reader) == b"%d" % number
        refuses_to_write(reader)
        with reader.read() as view:
            writer.put(KEY, b"later")
            writer.call("fold")
            assert view.get(KEY) == b"49"  # one moment of the store
            assert [value for _, value in view.scan(KEY, keys.end_of(KEY))] == [b"49"]
        assert get(reader) == b"later"
        assert reader.verify() == []
        reader.close()
        writer.put(KEY, b"after the reader has gone")
        writer.close()
    with Remote() as other:
        other.open(tmp_path / "store")
        assert other.get(KEY) == b"after the reader has gone"


def test_a_reader_waits_for_a_write_that_is_not_confirmed_yet(tmp_path: Path) -> None:
    """The frame is written and in tail, its sync is under way: nobody may act on it before it is on stable storage."""
    gate = tmp_path / "gate"
    with Remote() as writer, Remote() as reader:
        writer.call("use", "held", str(gate))
        writer.open(tmp_path / "store", background=False)
        writer.put(KEY, b"old")
        reader.open(tmp_path / "store", readonly=True, background=False)
        writer.call("arm", True)
        writer.begin("put", {"bytes": KEY.hex()}, {"bytes": b"new".hex()})
        while not (tmp_path / "gate.in").exists():
            assert not writer.answered(0.01)
        reader.begin("get", {"bytes": KEY.hex()})
        assert not reader.answered(0.5)
        gate.write_bytes(b"")
        assert reader.finish() == b"new"
        lsn = writer.finish()
        assert reader.stats()["durable_lsn"] >= lsn


def test_a_reader_makes_durable_what_a_dead_writer_had_not(tmp_path: Path) -> None:
    """The writer died between its frame and its sync. Who shows that frame to anybody has synced it before."""
    with Remote() as writer, Remote() as reader:
        writer.open(tmp_path / "store", background=False)
        writer.put(KEY, b"old")
        reader.open(tmp_path / "store", readonly=True, background=False)
        writer.close()
        writer.call("use", "kill at sync", 1)
        writer.open(tmp_path / "store", background=False)
        with pytest.raises(Died):
            writer.put(KEY, b"new")
        before = reader.stats()
        assert before["lsn"] == 2
        assert before["durable_lsn"] == 1
        assert reader.get(KEY) == b"new"
        assert reader.stats()["durable_lsn"] == 2
        reader.kill()
        engine = EmbeddedEngine.open(tmp_path / "store")
        assert get(engine) == b"new"
        engine.close()


def test_a_reader_alone(tmp_path: Path) -> None:
    writer = EmbeddedEngine.open(tmp_path / "store")
    writer.transact(lambda tx: tx.put(KEY, b"value"))
    writer.close()
    for _ in range(2):
        reader = EmbeddedEngine.open(tmp_path / "store", readonly=True)
        assert get(reader) == b"value"
        refuses_to_write(reader)
        assert reader.verify() == []
        reader.close()
    writer = EmbeddedEngine.open(tmp_path / "store")
    assert get(writer) == b"value"
    writer.close()


def test_a_reader_does_the_recovery_that_is_due(tmp_path: Path) -> None:
    with Remote() as writer:
        writer.open(tmp_path / "store", background=False)
        writer.call("fill", "n", 2000, 50)
        writer.put(KEY, b"value")
        writer.kill()
    reader = EmbeddedEngine.open(tmp_path / "store", readonly=True)
    assert get(reader) == b"value"
    refuses_to_write(reader)
    assert reader.stats()["applied_lsn"] == 51
    with Remote() as writer:  # joins what the reader recovered
        writer.open(tmp_path / "store")
        writer.put(KEY, b"newer")
        assert get(reader) == b"newer"
        writer.kill()
    assert get(reader) == b"newer"
    reader.close()


def test_there_is_nothing_to_read_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound):
        EmbeddedEngine.open(tmp_path / "store", readonly=True)
    assert list(tmp_path.iterdir()) == []


# --- a file system that nobody can write to ---------------------------------------------------

on_a_disk = pytest.mark.skipif(bool(why_not()), reason=f"no loop disk: {why_not()}")


@on_a_disk
def test_a_closed_store_on_a_read_only_file_system() -> None:
    with LoopDisk(size_mib=64) as disk:
        path = Path(disk.directory, "store")
        with Remote() as writer:
            writer.open(path)
            writer.call("fill", "n", 2000, 50)
            writer.put(KEY, b"value")
            writer.close()
        disk.replug("ro")
        with Remote() as reader:
            with pytest.raises(StorePermissionError, match=r"[Rr]ead-only file system"):
                reader.open(path)
            with pytest.raises(StoreNotFound):
                reader.open(path.with_name("other"), readonly=True)
            reader.open(path, readonly=True)
            assert reader.get(KEY) == b"value"
            assert reader.get(keys.encode("n", 49)) is not None
            assert reader.verify() == []
            assert reader.stats()["lsn"] == 51
            with pytest.raises(ReadOnlyStore):
                reader.put(KEY, b"never")
            with Remote() as second:
                second.open(path, readonly=True)
                assert second.get(KEY) == b"value"
            reader.close()
        disk.replug()
        with Remote() as writer:
            writer.open(path)
            writer.put(KEY, b"newer")


@on_a_disk
def test_a_killed_store_on_a_read_only_file_system_needs_recovery() -> None:
    with LoopDisk(size_mib=64) as disk:
        path = Path(disk.directory, "store")
        with Remote() as writer:
            writer.open(path)
            writer.put(KEY, b"value")
            writer.kill()
        disk.replug("ro")
        with Remote() as reader:
            with pytest.raises(RecoveryNeeded, match="mount it writable"):
                reader.open(path, readonly=True)
            with pytest.raises(StorePermissionError):
                reader.open(path)
        disk.replug()
        with Remote() as reader:
            reader.open(path, readonly=True)
            assert reader.get(KEY) == b"value"
            reader.close()
        disk.replug("ro")
        with Remote() as reader:
            reader.open(path, readonly=True)
            assert reader.get(KEY) == b"value"
