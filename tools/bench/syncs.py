"""How many syncs a process really did, counted by strace from outside.

`CALLS` are counted in a subprocess that sets a contender up and runs it n times, once
for n = 0 and once for the real n; the difference belongs to the operations.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

CALLS = ("fsync", "fdatasync", "msync", "sync_file_range")

_LINE = re.compile(r"^(?:\d+\s+)?(?:\S+\s+)?(\w+)\(")


def available() -> bool:
    """Whether strace is there and may trace (containers often forbid ptrace)."""
    if shutil.which("strace") is None:
        return False
    probe = subprocess.run(["strace", "-o", os.devnull, "-e", "trace=fsync", "true"], capture_output=True, check=False)
    return probe.returncode == 0


def count_syncs(command: Sequence[str]) -> dict[str, int]:
    """Run `command` (it must exit 0) and count its sync calls, those of its threads and children too."""
    with tempfile.NamedTemporaryFile(prefix="agentstore-strace-") as log:
        trace = ["strace", "-f", "-qq", "-e", "signal=none", "-e", "trace=" + ",".join(CALLS), "-o", log.name]
        subprocess.run([*trace, *command], check=True, stdout=subprocess.DEVNULL)
        counts = dict.fromkeys(CALLS, 0)
        for line in log.read().decode("utf-8", "replace").splitlines():
            # An interrupted call is logged twice: "fdatasync(5 <unfinished ...>", then "<... fdatasync resumed>".
            found = _LINE.match(line)
            if found is not None and found[1] in counts:
                counts[found[1]] += 1
    return counts
