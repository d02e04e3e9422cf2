"""An engine in a process of its own, driven over a pipe: to be killed, stopped, forked, robbed of its rights.

    with Remote() as other:
        other.open(path)
        other.put(b"k", b"v")
        other.kill()

A call raises here what it raised there. `begin` and `finish` split a call that blocks.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import agentstore.errors

SERVER = Path(__file__).with_name("serve.py")
ROOT = Path(__file__).resolve().parents[2]

ANSWER_S = 120.0
"""Longer than any call takes on a slow machine: a call that gets no answer hangs."""


class Died(Exception):
    """The process ended instead of answering: `status` is its exit status, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the process ended with status {status}")
        self.status = status


class Unexpected(Exception):
    """The process answered with an exception that is not one of agentstore's."""


class Remote:
    """The near side. Not safe for threads."""

    def __init__(self, *prefix: str, uid: int | None = None, pass_fds: Sequence[int] = ()) -> None:
        """`prefix`: a command that runs the process, such as ``unshare``. `uid`: the user that it becomes at first."""
        self._prefixed = bool(prefix)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(SERVER), str(-1 if uid is None else uid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            pass_fds=pass_fds,
        )
        self.pid: int = self.call("pid")
        """As this process sees it (in another pid namespace it is one of unshare's children)."""

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.stdout.close()

    # --- calls -----------------------------------------------------------------------

    def begin(self, name: str, *arguments: Any) -> None:
        """Send a call."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([name, *map(_out, arguments)]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Died(self._process.wait()) from None

    def answered(self, seconds: float) -> bool:
        """Whether the answer comes within so many seconds."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def finish(self) -> Any:
        """The answer to the call that was begun."""
        assert self._process.stdout is not None
        if not self.answered(ANSWER_S):
            raise TimeoutError("no answer")
        line = self._process.stdout.readline()
        if not line:
            raise Died(self._process.wait())
        answer = json.loads(line)
        if "error" in answer:
            kind = getattr(agentstore.errors, answer["error"], None)
            if kind is None:
                raise Unexpected(f"{answer['error']}: {answer['message']}")
            raise kind(answer["message"])
        return _in(answer["value"])

    def call(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self.finish()

    def open(self, path: object, **options: Any) -> None:
        self.call("open", str(path), options)

    def put(self, key: bytes, value: bytes) -> int:
        """Commit one value; its LSN."""
        lsn: int = self.call("put", key, value)
        return lsn

    def get(self, key: bytes) -> bytes | None:
        """By a snapshot."""
        value: bytes | None = self.call("get", key)
        return value

    def stats(self) -> dict[str, int]:
        stats: dict[str, int] = self.call("stats")
        return stats

    def verify(self) -> list[str]:
        findings: list[str] = self.call("verify")
        return findings

    def close(self) -> None:
        self.call("close")

    # --- signals -----------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL, and it is dead."""
        pid = self._process.pid
        # A prefix such as unshare waits for its child, and ends after it.
        for each in (_children(pid) if self._prefixed else []) or [pid]:
            os.kill(each, signal.SIGKILL)
        self._process.wait()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit status, once it has one."""
        return self._process.wait(ANSWER_S)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _out(value: Any) -> Any:
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


def _in(value: Any) -> Any:
    return bytes.fromhex(value["bytes"]) if isinstance(value, dict) and value.keys() == {"bytes"} else value
