"""A process under strace that tells a story to a store, and counts what goes through the seam of the engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from typing import Any

from agentstore.engine.files import Files, set_default_files
from agentstore.engine.parts import CONTROL
from agentstore.errors import AgentStoreError
from agentstore.testing.limits import small_limits
from agentstore.testing.simdisk import SECTOR
from fuzz.story import Step, Teller, certain
from fuzz.strace_log import TRACED, Seen, Watcher

TOLD, SEAM = "told", "seam"
"""Files beside the store: what the story said, and what went through the seam."""

INJECTED_FAILURE = 3
"""Exit status of a process that met an error of the disk."""


class Seam(Files):
    """Real calls, and a count of those that write: what the engine's seam knows of."""

    def __init__(self, root: str) -> None:
        self.seen: Counter[Seen] = Counter()
        self._root = root
        self._paths: dict[int, str] = {}

    def _saw(self, name: str, path: str, offset: int = 0, size: int = 0) -> None:
        inside = os.path.relpath(path, self._root)
        if not inside.startswith("../"):
            self.seen[name, "" if inside == "." else inside, offset, size] += 1

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        self._paths[fd] = path
        if flags & os.O_CREAT:
            self._saw("open", path)
        return fd

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        super().pwrite(fd, data, offset)
        self._saw("pwrite", self._paths[fd], offset, len(data))

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self._saw("sync", self._paths[fd])

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self._saw("truncate", self._paths[fd], size)

    def make_directory(self, path: str) -> None:
        super().make_directory(path)
        self._saw("mkdir", path)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self._saw("rename", target)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self._saw("unlink", path)

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        self._saw("sync_directory", path)

    def sync_map(self, page: Any) -> None:
        super().sync_map(page)
        self._saw("sync_map", os.path.join(self._root, CONTROL))


def _tell(home: str, steps: list[Step], seed: int) -> int:
    """The life of the process under strace: its exit status."""
    root = os.path.join(home, "store")
    told_fd = os.open(os.path.join(home, TOLD), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(told_fd, 1)
    control = os.path.join(root, CONTROL)

    def say(line: str) -> None:
        # The page before the line: what is said was known to the page by then.
        if os.path.exists(control):
            with open(control, "rb", buffering=0) as file:
                os.write(1, f"k {file.read(SECTOR).hex()}\n".encode())
        os.write(1, f"{line}\n".encode())

    seam = Seam(root)
    set_default_files(seam)
    try:
        with small_limits(), certain(seed):
            teller = Teller(root, say)
            teller.tell(steps)
            teller.close()
    except AgentStoreError as error:
        say(f"e {type(error).__name__}: {error}")
        return INJECTED_FAILURE
    say("end")
    with open(os.path.join(home, SEAM), "w", encoding="utf-8") as file:
        json.dump(list(seam.seen.items()), file)
    return 0


def record(home: str, steps: list[Step], seed: int, inject: str | None) -> tuple[Watcher, int]:
    """Tell a story under strace, at `home`; what strace saw, and the exit status (negative: a signal)."""
    hear, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(go)
            os.read(hear, 1)
            status = _tell(home, steps, seed)
        finally:
            os._exit(status)
    os.close(hear)
    log = os.path.join(home, "log")
    command = ["strace", "-f", "-y", "-xx", "-s", "999999", "-e", "signal=none", "-o", log, "-p", str(pid)]
    command += ["-e", "trace=" + ",".join(TRACED)] + (["-e", f"inject={inject}"] if inject else [])
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as strace:
        assert strace.stderr is not None
        said = strace.stderr.readline()
        if b"attached" not in said:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise Untraceable(said.decode().strip())
        os.close(go)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        strace.stderr.read()
    watcher = Watcher(os.path.join(home, "store"), os.path.join(home, TOLD))
    with open(log, encoding="ascii") as file:
        watcher.watch(file.read())
    return watcher, status


class Untraceable(Exception):
    """strace could not attach to a process."""
