"""base.mdb gives free pages back at close: whatever goes wrong on the way, the store opens and holds what it held."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentstore.engine import shrink
from agentstore.engine.api import Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.files import Files
from agentstore.engine.keys import encode
from agentstore.engine.parts import BASE, BASE_NEW
from agentstore.testing.faults import CALLS, WRITING_CALLS, Error, Fault, FaultyFiles, Kill
from agentstore.testing.limits import small_limits

KEPT = 100


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shrink, "WASTE_BYTES_MIN", 64 * 1024)
    with small_limits():
        yield


def value(n: int) -> bytes:
    return random.Random(n).randbytes(1000)


def opened(path: Path, files: Files | None = None) -> EmbeddedEngine:
    return EmbeddedEngine.open(path, files=files or Files(), background=False)


def wasteful(path: Path, files: Files | None = None) -> EmbeddedEngine:
    """An open store whose base has far more free pages than others."""
    engine = opened(path, files)
    for start in range(0, 600, 50):
        engine.transact(lambda tx, start=start: [tx.put(encode("n", n), value(n)) for n in range(start, start + 50)])  # type: ignore[misc]  # default
        engine.fold()

    def forget(tx: Tx) -> None:
        for n in range(KEPT, 600):
            tx.delete(encode("n", n))

    engine.transact(forget)
    engine.fold()
    return engine


def check(path: Path) -> None:
    """The store opens, holds what it held, and can be used."""
    engine = opened(path)
    assert not [name for name in os.listdir(path) if name.startswith(BASE_NEW)]
    with engine.read() as view:
        assert dict(view.scan(encode("n"), encode("n") + b"\xff")) == {encode("n", n): value(n) for n in range(KEPT)}
    assert engine.verify() == []
    engine.transact(lambda tx: tx.put(encode("more"), b"1"))
    engine.close()


def test_base_gives_pages_back_at_close(tmp_path: Path) -> None:
    engine = wasteful(tmp_path / "s")
    before = os.path.getsize(tmp_path / "s" / BASE)
    engine.close()
    after = os.path.getsize(tmp_path / "s" / BASE)
    assert after < before / 3
    assert not [name for name in os.listdir(tmp_path / "s") if name.startswith((BASE_NEW, BASE + "-lock"))]
    check(tmp_path / "s")
    assert os.path.getsize(tmp_path / "s" / BASE) <= after + 64 * 1024


def test_few_free_pages_are_left_for_later(tmp_path: Path) -> None:
    engine = opened(tmp_path / "s")
    for start in range(0, KEPT, 50):
        engine.transact(lambda tx, start=start: [tx.put(encode("n", n), value(n)) for n in range(start, start + 50)])  # type: ignore[misc]  # default
    inode = os.stat(tmp_path / "s" / BASE).st_ino
    engine.close()
    assert os.stat(tmp_path / "s" / BASE).st_ino == inode
    check(tmp_path / "s")


OTHER = """
import sys
from agentstore.engine.embedded import EmbeddedEngine
engine = EmbeddedEngine.open(sys.argv[1], background=False)
print("open", flush=True)
sys.stdin.readline()
engine.close()
"""


def test_not_while_another_process_has_the_store_open(tmp_path: Path) -> None:
    engine = wasteful(tmp_path / "s")
    size, inode = os.path.getsize(tmp_path / "s" / BASE), os.stat(tmp_path / "s" / BASE).st_ino
    command = [sys.executable, "-c", OTHER, str(tmp_path / "s")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        engine.close()
        assert (os.path.getsize(tmp_path / "s" / BASE), os.stat(tmp_path / "s" / BASE).st_ino) == (size, inode)
        other.communicate("\n")
    assert other.returncode == 0
    # That one was the last: with the limit of the product, and less waste than that is left.
    check(tmp_path / "s")
    assert os.path.getsize(tmp_path / "s" / BASE) < size / 3


@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize(
    ("number", "calls"), [(errno.ENOSPC, WRITING_CALLS), (errno.EIO, CALLS)], ids=["ENOSPC", "EIO"]
)
def test_every_call_of_it_fails_in_turn(number: int, calls: frozenset[str], for_ever: bool, tmp_path: Path) -> None:
    shrunk = swapped = 0
    for nth in range(1, 200):
        path = tmp_path / str(nth)
        files = FaultyFiles()
        engine = wasteful(path, files)
        inode = os.stat(path / BASE).st_ino
        files.arm(Fault(nth, Error(number), calls, for_ever))
        engine.close()
        struck = files.struck
        files.arm(None)
        swapped += os.stat(path / BASE).st_ino != inode
        shrunk += struck is not None and BASE in struck.path
        check(path)
        if struck is None:
            break
    assert struck is None and nth > 8
    assert shrunk >= 3 and swapped >= 1


def test_no_space_for_the_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full(Files):
        def free_bytes(self, path: str) -> int:
            return 0

    engine = wasteful(tmp_path / "s")
    inode = os.stat(tmp_path / "s" / BASE).st_ino
    engine._files = Full()
    engine.close()
    assert os.stat(tmp_path / "s" / BASE).st_ino == inode
    assert "no space left for a copy" in caplog.text
    check(tmp_path / "s")


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_call_of_it(when: str, tmp_path: Path) -> None:
    killed = strays = 0
    for nth in range(1, 200):
        path = tmp_path / str(nth)
        pid = os.fork()
        if pid == 0:
            try:
                files = FaultyFiles()
                engine = wasteful(path, files)
                files.arm(Fault(nth, Kill("before" if when == "before" else "after")))
                engine.close()
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        strays += (path / BASE_NEW).exists()
        check(path)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            break
        killed += 1
    assert killed == nth - 1 > 15
    assert strays >= 2
