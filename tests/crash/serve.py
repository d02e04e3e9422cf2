"""The far side of `crash.remote`: calls come in on standard input, one JSON list a line, answers go out likewise."""

from __future__ import annotations

import codecs
import json
import mmap
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

from agentstore.engine import keys
from agentstore.engine.api import Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.files import Files
from agentstore.engine.segment import SEGMENT_BYTES
from agentstore.testing.faults import Fault, FaultyFiles, Kill

LAST_TXNID_AT = 48
"""Where LMDB 0.9's lock file has the number of the last transaction: behind two words and a mutex."""

COUNTER = keys.encode("counter")


class NetworkFiles(Files):
    """The directory is on NFS."""

    def file_system(self, path: str) -> str:
        return "nfs4"


class HeldFiles(Files):
    """A sync that takes until the file `gate` is there; `gate`.in tells that one has begun."""

    def __init__(self, gate: str) -> None:
        self._gate = gate
        self.armed = False

    def fdatasync(self, fd: int) -> None:
        if self.armed:
            with open(self._gate + ".in", "w"):
                pass
            while not os.path.exists(self._gate):
                threading.Event().wait(0.002)
        super().fdatasync(fd)


def files_of(kind: str, *arguments: Any) -> Files:
    if kind == "network":
        return NetworkFiles()
    if kind == "held":
        return HeldFiles(*arguments)
    if kind == "kill":  # at the n-th call: before it, after it, or half way through
        return FaultyFiles(Fault(arguments[0], Kill(arguments[1])))
    assert kind == "kill at sync"
    return FaultyFiles(Fault(arguments[0], Kill("before"), frozenset({"fdatasync"})))


class Server:
    """One engine, perhaps."""

    def __init__(self) -> None:
        self.engines: list[EmbeddedEngine] = []
        self.files: Files | None = None

    @property
    def engine(self) -> EmbeddedEngine:
        return self.engines[-1]

    def pid(self) -> int:
        return os.getpid()

    def use(self, kind: str, *arguments: Any) -> None:
        """The system calls of the engines that are opened from here on."""
        self.files = files_of(kind, *arguments)

    def struck(self) -> bool:
        """Whether the call that was to go wrong was made."""
        assert isinstance(self.files, FaultyFiles)
        return self.files.struck is not None

    def arm(self, value: bool) -> None:
        assert isinstance(self.files, HeldFiles)
        self.files.armed = value

    def open(self, path: str, options: dict[str, bool]) -> None:
        self.engines.append(EmbeddedEngine.open(path, files=self.files, **options))

    def put(self, key: bytes, value: bytes) -> int:
        return self.engine.transact(lambda tx: tx.put(key, value)).lsn

    def delete(self, key: bytes) -> int:
        return self.engine.transact(lambda tx: tx.delete(key)).lsn

    def get(self, key: bytes) -> bytes | None:
        with self.engine.read() as view:
            return view.get(key)

    def get_by_transaction(self, key: bytes) -> bytes | None:
        return self.engine.transact(lambda tx: tx.get(key)).value

    def fill(self, name: str, size: int, count: int) -> int:
        """Commit values of `size` bytes under (name, 0), (name, 1) … up to `count`, each in its own transaction."""
        for number in range(count):
            self.put(keys.encode(name, number), b"%d " % number * (size // 4))
        return count

    def add(self, times: int, threads: int = 1) -> None:
        """Count up `times` times in each of so many threads."""
        errors: list[BaseException] = []

        def life() -> None:
            try:
                for _ in range(times):
                    self.engine.transact(add_one)
            except BaseException as error:
                errors.append(error)

        crew = [threading.Thread(target=life) for _ in range(threads)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        if errors:
            raise errors[0]

    def look_while_rolling(self) -> None:
        """What `_fold_when_due` does, with a roll between its two looks."""
        parts = self.engine._parts
        applied, position = parts.base.position().applied_lsn, parts.tail.position()
        self.engine._writer._roller.roll(SEGMENT_BYTES)
        parts.segments.live_bytes(applied, position)

    def stats(self) -> dict[str, int]:
        return self.engine.stats()

    def verify(self) -> list[str]:
        return self.engine.verify()

    def fold(self) -> None:
        self.engine.fold()

    def close(self) -> None:
        self.engines.pop().close()

    def die_before_a_commit_is_published(self) -> None:
        """As a folder does that is killed when LMDB has written its new meta page to base.mdb, and has not yet put the
        number of the transaction into the table that readers look at: the writers' mutex is left to the next one."""
        base = self.engine._parts.base
        writing = base.env.begin(write=True)
        with open(base.path + "-lock", "r+b") as file, mmap.mmap(file.fileno(), 4096) as page:
            (published,) = struct.unpack_from("<Q", page, LAST_TXNID_AT)
            assert published == base.env.info()["last_txnid"]
            struct.pack_into("<Q", page, LAST_TXNID_AT, published - 1)
            os.kill(os.getpid(), signal.SIGKILL)
        del writing  # until here: to be collected would end it

    def close_all(self) -> None:
        while self.engines:
            self.close()

    def fork_and_sleep(self) -> int:
        """A child that does nothing but live; its pid."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.read(reading, 1)  # its after-fork hooks have run
            return pid
        os.write(writing, b".")
        os.close(0)
        os.close(1)
        signal.pause()
        os._exit(0)

    def fork_and(self, *calls: list[Any]) -> list[Any]:
        """Make these calls in a forked child, which then ends as a program does; its answers and its exit status."""
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            os.write(writing, json.dumps([answer(self, call) for call in calls]).encode())
            sys.exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            answers = json.loads(pipe.read() or b"[]")
        return [*answers, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]


def add_one(tx: Tx) -> None:
    tx.put(COUNTER, b"%d" % (int(tx.get(COUNTER) or b"0") + 1))


def answer(server: Server, call: list[Any]) -> dict[str, Any]:
    name, *arguments = call
    method: Callable[..., Any] = getattr(server, name)
    try:
        value = method(*map(_in, arguments))
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"value": {"bytes": value.hex()} if isinstance(value, bytes) else value}


def _in(value: Any) -> Any:
    return bytes.fromhex(value["bytes"]) if isinstance(value, dict) and "bytes" in value else value


def main() -> None:
    uid = int(sys.argv[1])
    if uid >= 0:
        # Only now: the interpreter and the library may lie where this user cannot read.
        for encoding in ("ascii", "utf-8", "latin-1"):
            codecs.lookup(encoding)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    server = Server()
    for line in sys.stdin.buffer:
        reply = json.dumps(answer(server, json.loads(line))).encode() + b"\n"
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
