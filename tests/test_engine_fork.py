"""A fork with an open engine: the parent goes on, the child is refused what it inherited and may open its own."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import threading
from pathlib import Path

import pytest
from crash.remote import Remote
from one_value import KEY, get, put

from agentstore.engine import keys
from agentstore.engine.api import Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.errors import ForkedStore


def test_a_forked_child_is_refused_what_it_inherited_and_opens_its_own(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    key = {"bytes": KEY.hex()}
    with Remote() as parent:
        parent.open(path)
        parent.put(KEY, b"1")
        refused = parent.call("fork_and", ["get", key], ["put", key, key], ["stats"], ["verify"], ["fold"])
        assert [each.get("error") for each in refused[:-1]] == ["ForkedStore"] * 5
        assert "open it again in the child" in refused[0]["message"]
        assert refused[-1] == 0
        mine = parent.call(
            "fork_and",
            ["close"],
            ["open", path, {}],
            ["get", key],
            ["put", key, {"bytes": b"2".hex()}],
            ["verify"],
            ["close"],
        )
        assert all("error" not in each for each in mine[:-1]), mine
        assert mine[2]["value"] == {"bytes": b"1".hex()}
        assert mine[4]["value"] == []
        assert mine[-1] == 0
        assert parent.get(KEY) == b"2"
        parent.put(KEY, b"3")
        assert parent.verify() == []
        parent.close()


def test_the_child_of_a_killed_parent_holds_none_of_its_locks(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Remote() as parent:
        parent.open(store)
        parent.put(KEY, b"1")
        child = parent.call("fork_and_sleep")
        try:
            parent.kill()
            for name in ("lock", "lock.sync", "lock.fold"):
                with open(store / name) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            engine = EmbeddedEngine.open(store)
            assert get(engine, KEY) == b"1"
            put(engine, KEY, b"2")
            engine.close()
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_the_middle_of_a_fork_leaves_no_engine_half_held(tmp_path: Path) -> None:
    """A handler's exception ended what is done before a fork: the child could use what it had inherited."""
    engines = [EmbeddedEngine.open(tmp_path / name) for name in ("first", "second")]
    reading, done = threading.Event(), threading.Event()

    def read() -> None:
        with engines[0].read():
            reading.set()
            done.wait()

    def interrupt() -> None:
        while not engines[0]._gate._closed:  # the fork waits for the reader
            pass
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR1)
            signal.sigtimedwait([], 0.02)
        done.set()

    def handle(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handle)
    threads = [threading.Thread(target=read), threading.Thread(target=interrupt)]
    try:
        threads[0].start()
        reading.wait()
        threads[1].start()
        pid = os.fork()
        if not pid:
            refused = 0
            try:
                for engine in engines:
                    try:
                        engine.transact(lambda tx: tx.put(KEY, b"child"))
                    except ForkedStore:
                        refused += 1
            finally:
                os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)
        done.set()
        for thread in threads:
            thread.join()
    for engine in engines:
        assert put(engine, KEY, b"parent") == 1
        assert engine._background is not None and engine._background._thread is not None
        engine.close()


def test_a_child_forked_inside_a_snapshot_leaves_it_without_harm(tmp_path: Path) -> None:
    """Leaving the `with` in the child ended the read transactions of its parent, in the shared table of readers: the
    pages under the parent's snapshot were given out again."""
    engine = EmbeddedEngine.open(tmp_path / "store", background=False)
    many = [keys.encode("n", number) for number in range(300)]

    def write(value: bytes) -> None:
        def fn(tx: Tx) -> None:
            for key in many:
                tx.put(key, value * 500)

        engine.transact(fn)
        engine.fold()

    write(b"old ")
    child, left = -1, False
    try:
        with engine.read() as view:
            child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                for number in range(20):
                    write(b"%03d " % number)
                assert [view.get(key) for key in many] == [b"old " * 500] * len(many)
        left = True
    finally:
        if child == 0:
            gc.collect()
            os._exit(0 if left else 1)
    engine.close()
