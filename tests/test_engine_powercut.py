"""The power of a real file system is cut: a short run of the command, where it can run.

The long run is ``python -m fuzz powercut --cycles 100``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentstore.testing.loopdisk import LoopDisk, why_not

ROOT = Path(__file__).resolve().parent.parent


def needs(kind: str) -> None:
    missing = why_not(kind)
    if missing:
        pytest.skip(f"no power cuts of {kind} here: {missing}")


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_power_cut_takes_what_was_not_synced_and_nothing_else(kind: str) -> None:
    """The instrument itself: without this the run below could pass by cutting nothing."""
    needs(kind)
    with LoopDisk(kind) as disk:
        paths = {name: Path(disk.directory, name) for name in ("synced", "unsynced")}
        for path in paths.values():
            path.write_bytes(bytes(8192))
        os.sync()
        for name, path in paths.items():
            with path.open("r+b") as file:
                file.write(b"new" * 100)
                file.flush()
                if name == "synced":
                    os.fdatasync(file.fileno())
        disk.cut_power()
        with pytest.raises(OSError, match="Input/output error"):
            Path(disk.directory, "later").write_bytes(b"")
        disk.replug()
        assert paths["synced"].read_bytes() == (b"new" * 100).ljust(8192, b"\0")
        assert paths["unsynced"].read_bytes() == bytes(8192)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_the_power_is_cut_and_nothing_acknowledged_is_lost(kind: str) -> None:
    needs(kind)
    command = [sys.executable, "-m", "fuzz", "powercut", "--cycles", "2", "--seed", "1", "--fs", kind, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["cycles"] == 2
    assert result["cuts"] >= 4
    assert result["commits_acknowledged"] > 0
