"""How many syncs processes really did, counted by strace from outside."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

CALLS = ("fsync", "fdatasync", "msync", "sync_file_range")

_LINE = re.compile(r"^(?:\d+\s+)?(\w+)\(")


def available() -> bool:
    """Whether strace is there and may trace (containers often forbid ptrace)."""
    if shutil.which("strace") is None:
        return False
    probe = subprocess.run(["strace", "-o", os.devnull, "-e", "trace=fsync", "true"], capture_output=True, check=False)
    return probe.returncode == 0


def count_syncs(commands: Sequence[Sequence[str]]) -> dict[str, int]:
    """Run `commands` side by side (each must exit 0) and count their sync calls, those of threads and children too."""
    with tempfile.TemporaryDirectory(prefix="agentstore-strace-") as folder:
        logs = [os.path.join(folder, str(number)) for number in range(len(commands))]
        traced = [
            subprocess.Popen(
                ["strace", "-f", "-qq", "-e", "signal=none", "-e", "trace=" + ",".join(CALLS), "-o", log, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            for log, command in zip(logs, commands, strict=True)
        ]
        statuses = [process.wait() for process in traced]
        if any(statuses):
            raise RuntimeError(f"a traced process ended with status {next(filter(None, statuses))}")
        counts = dict.fromkeys(CALLS, 0)
        for log in logs:
            with open(log, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    # An interrupted call is logged as "fdatasync(5 <unfinished ...>", then "<... fdatasync resumed>".
                    found = _LINE.match(line)
                    if found is not None and found[1] in counts:
                        counts[found[1]] += 1
        return counts
