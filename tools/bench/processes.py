"""Writer processes of the benchmarks: started together, sampled while they run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

SAMPLE_S = 0.01
"""Time between two looks at a process's memory, in seconds."""

WRITER = (sys.executable, "-P", "-m", "agentstore.tools.bench.writer")


class Writer:
    """One writer process, standing ready. `go` lets it work, `result` waits for what it did."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen([*WRITER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        said = self._out.readline()
        if said != b"ready\n":
            self._process.kill()
            status = self._process.wait()
            raise RuntimeError(f"the writer {' '.join(arguments)} did not come up: status {status}, it said {said!r}")

    def go(self) -> None:
        self._in.write(b"\n")
        self._in.close()

    def result(self) -> dict[str, Any]:
        """What it printed; RuntimeError if it failed."""
        text = self._out.read()
        self._out.close()
        status = self._process.wait()
        if status != 0:
            raise RuntimeError(f"a writer ended with status {status}")
        result: dict[str, Any] = json.loads(text)
        return result

    def died(self) -> int:
        """Wait for its end; its status."""
        self._out.close()
        return self._process.wait()

    def sample_memory(self) -> MemorySampler:
        """Look at its anonymous memory until it ends."""
        return MemorySampler(self._process.pid)


class MemorySampler:
    """The largest RssAnon of a process, looked at every `SAMPLE_S` while the block runs. Linux."""

    def __init__(self, pid: int) -> None:
        self._path = f"/proc/{pid}/status"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.max_bytes = 0

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.max_bytes = max(self.max_bytes, rss_anon_bytes(self._path))


def rss_anon_bytes(status_path: str = "/proc/self/status") -> int:
    """RssAnon of a process in bytes; 0 where it cannot be read (it ended, or there is no /proc)."""
    try:
        with open(status_path, encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def run_together(writers: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Start writers, let them all go when every one is ready, and return what each did."""
    ready: list[Writer] = []
    try:
        for arguments in writers:
            ready.append(Writer(*arguments))
    finally:
        if len(ready) < len(writers):
            for writer in ready:
                writer.go()
    for writer in ready:
        writer.go()
    return [writer.result() for writer in ready]
