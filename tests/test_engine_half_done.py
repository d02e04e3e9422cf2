"""Calls that end in the middle: what an engine is like after an exception that nobody plans for."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from one_value import KEY, get, put

from agentstore import Store, deleting
from agentstore.engine import writer
from agentstore.engine.api import KEY_BYTES_MAX
from agentstore.engine.control import FAILED
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.files import Files
from agentstore.engine.tail import put_batch
from agentstore.errors import CommitUnknown, LimitExceeded, OutOfResources, StoreFailed


def test_an_exception_behind_a_complete_frame_is_not_the_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for the function's own: tail kept a half of the writes, and the next of the group took the LSN."""
    engine = EmbeddedEngine.open(tmp_path / "store", background=False)
    put(engine, KEY, b"1")
    real = put_batch

    def half(txn: Any, batch: dict[bytes, bytes | None], lsn: int) -> None:
        real(txn, dict(list(batch.items())[:1]), lsn)
        raise MemoryError

    def both(tx: Any) -> None:
        tx.put(b"\x30a", b"x")
        tx.put(b"\x30b", b"y")

    monkeypatch.setattr(writer, "put_batch", half)
    with pytest.raises(CommitUnknown):
        engine.transact(both)
    monkeypatch.undo()
    assert get(engine, b"\x30a") is None
    # The next writer finds the whole frame, as after a death.
    assert put(engine, KEY, b"2") == 3
    assert [get(engine, key) for key in (b"\x30a", b"\x30b")] == [b"x", b"y"]
    engine.close()
    engine = EmbeddedEngine.open(tmp_path / "store", background=False)
    assert [get(engine, key) for key in (b"\x30a", b"\x30b", KEY)] == [b"x", b"y", b"2"]
    assert engine.verify() == []
    engine.close()


def test_a_hint_that_is_refused_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, size: int, advice: int) -> None:
        raise OSError(errno.EPERM, "not here")

    monkeypatch.setattr("agentstore.engine.files._advise", refuse)
    engine = EmbeddedEngine.open(tmp_path / "store", background=False)
    assert put(engine, KEY, b"1") == 1
    engine.close()


def test_an_error_before_tail_is_committed_ends_the_commit(tmp_path: Path) -> None:
    """The sync of an LSN that is in no tail went on for ever."""

    class Refusing(Files):
        armed = False

        def start_writing(self, fd: int, size: int, offset: int) -> None:
            if self.armed:
                raise OSError(errno.EPERM, "not here")

    files = Refusing()
    engine = EmbeddedEngine.open(tmp_path / "store", background=False, files=files)
    put(engine, KEY, b"1")
    files.armed = True
    with pytest.raises(CommitUnknown):
        put(engine, KEY, b"2")
    files.armed = False
    assert put(engine, KEY, b"3") == 3
    engine.close()


@pytest.mark.parametrize("key", [b"", b"x" * (KEY_BYTES_MAX + 1)])
def test_a_key_that_lmdb_does_not_take_never_gets_into_a_frame(tmp_path: Path, key: bytes) -> None:
    """Its frame was complete, and every later commit and open failed at it."""
    engine = EmbeddedEngine.open(tmp_path / "store", background=False)
    with pytest.raises(LimitExceeded, match="a key has 1 to"):
        put(engine, key, b"1")
    with pytest.raises(LimitExceeded, match="a key has 1 to"):
        engine.transact(lambda tx: tx.delete(key))
    assert put(engine, KEY, b"1") == 1
    engine.close()
    EmbeddedEngine.open(tmp_path / "store", background=False).close()


def test_an_open_without_a_thread_for_the_background_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    with pytest.raises(OutOfResources, match="can't start new thread"):
        EmbeddedEngine.open(tmp_path / "store")
    monkeypatch.undo()
    engine = EmbeddedEngine.open(tmp_path / "store")
    assert put(engine, KEY, b"1") == 1
    engine.close()


def test_an_open_that_is_interrupted_while_it_finishes_deletions_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(engine: EmbeddedEngine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(deleting, "finish_all", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Store.open(tmp_path / "store", background=False)
    monkeypatch.undo()
    Store.open(tmp_path / "store").close()


def test_a_close_that_was_interrupted_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmbeddedEngine.open(tmp_path / "store")
    put(engine, KEY, b"1")

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_stop_background", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    monkeypatch.undo()
    engine.close()
    engine = EmbeddedEngine.open(tmp_path / "store", background=False)  # other options: the first is gone
    assert get(engine, KEY) == b"1"
    engine.close()


@pytest.mark.parametrize("call", ["read", "fold", "stats", "verify"])
def test_whoever_notices_that_a_store_failed_lets_go_of_it(tmp_path: Path, call: str) -> None:
    """Without a background thread only commits did: the store could not be opened again."""
    engine = EmbeddedEngine.open(tmp_path / "store", background=False)
    put(engine, KEY, b"1")
    engine._parts.control.words[FAILED] = 1
    with pytest.raises(StoreFailed):
        if call == "read":
            get(engine, KEY)
        elif call == "fold":
            put(engine, KEY, b"2")
        else:
            getattr(engine, call)()
            engine.read().__enter__()
    engine = EmbeddedEngine.open(tmp_path / "store", background=False)
    assert get(engine, KEY) == b"1"
    engine.close()


def test_an_interrupted_leader_hands_the_lead_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later commit of the process waited for ever."""
    engine = EmbeddedEngine.open(tmp_path / "store", background=False)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for name in ("_lead", "_begin"):
        monkeypatch.setattr(engine._writer, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(engine, KEY, b"1")
        monkeypatch.undo()
        put(engine, KEY, b"2")
    engine.close()


def test_an_interruption_at_the_sync_lock_leaves_it_free(tmp_path: Path) -> None:
    """Every other process waited for one that had been interrupted just as it had the lock, or was about to free it."""

    class Interrupting(Files):
        at = ""

        def lock(self, fd: int, *, shared: bool = False, wait: bool = True) -> bool:
            held = super().lock(fd, shared=shared, wait=wait)
            self._strike("lock")
            return held

        def unlock(self, fd: int) -> None:
            self._strike("unlock")
            super().unlock(fd)

        def _strike(self, at: str) -> None:
            if self.at == at:
                self.at = ""
                raise KeyboardInterrupt

    files = Interrupting()
    engine = EmbeddedEngine.open(tmp_path / "store", background=False, files=files)
    put(engine, KEY, b"1")
    other = os.open(tmp_path / "store" / "lock.sync", os.O_RDWR)
    for at in ("lock", "unlock"):
        files.at = at
        with pytest.raises(KeyboardInterrupt):
            put(engine, KEY, b"2")
        assert not files.at
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_UN)
    os.close(other)
    engine.close()
