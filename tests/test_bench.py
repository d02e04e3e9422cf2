"""The frame of the benchmarks, and a small run of every scenario with everything that it checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentstore.tools.bench import commit, compacting, growth, load, size, syncs, threads
from agentstore.tools.bench.frame import interleave, message, percentile
from agentstore.tools.bench.processes import rss_anon_bytes

needs_strace = pytest.mark.skipif(not syncs.available(), reason="strace is not there or may not trace")


def test_percentiles_are_nearest_rank() -> None:
    values = list(range(1, 1001))
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (500, 990, 1000)
    assert percentile([3], 1) == 3


def test_contenders_take_turns_and_nobody_is_always_last() -> None:
    ran: list[str] = []
    timings = interleave({name: lambda name=name: ran.append(name) for name in "ABC"}, rounds=3, block=2)  # type: ignore[misc]
    assert "".join(ran) == "AABBCC" + "BBCCAA" + "CCAABB"
    assert {name: len(timing.wall_ns) for name, timing in timings.items()} == {"A": 6, "B": 6, "C": 6}


@needs_strace
def test_syncs_are_counted_in_all_threads_of_all_processes(tmp_path: Path) -> None:
    program = """
import os, sys, threading
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
def work():
    for _ in range(5):
        os.fdatasync(fd)
workers = [threading.Thread(target=work) for _ in range(3)]
[w.start() for w in workers]; [w.join() for w in workers]
os.fsync(fd)
"""
    commands = [[sys.executable, "-c", program, str(tmp_path / name)] for name in ("a", "b")]
    counted = syncs.count_syncs(commands)
    assert (counted["fdatasync"], counted["fsync"], counted["msync"]) == (30, 2, 0)


def test_anonymous_memory_is_seen() -> None:
    before = rss_anon_bytes()
    held = bytearray(os.urandom(1)) * 40_000_000
    assert before > 0
    assert rss_anon_bytes() - before > 30_000_000, len(held)


def test_commit_scenario_measures_every_contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in {"PROCESSES": 2, "THREADS": 8, "REPETITIONS": 1, "SYNC_OPERATIONS": 40}.items():
        monkeypatch.setattr(commit, name, small)
    result = commit.run(str(tmp_path), rounds=2, seconds=0.1)
    assert [row["name"] for row in result["single"]][:4] == ["bare", "agentstore", "sqlite", "lmdb"]
    assert all(row["operations"] == 50 and row["p99_us"] >= row["p50_us"] > 0 for row in result["single"])
    assert 300 < result["frame_bytes"] < 1500
    assert result["processes"]["commits_per_s"] > 0
    assert result["threads"]["commits_per_s"] > 0
    json.dumps(result)
    if result["syncs"] is not None:
        assert result["syncs"]["bare"]["fdatasync"] == 1
        # The background's own work (a snapshot, a fold) comes on top of one sync a commit.
        assert 0 < result["syncs"]["agentstore"]["fdatasync"] <= 1.2
        assert 0 < result["syncs"]["agentstore, 8 threads"]["fdatasync"] <= 1.2
        assert 0 < result["syncs"]["agentstore, 2 processes"]["fdatasync"] <= 1.2


def test_load_scenario_compares_whole_states(tmp_path: Path) -> None:
    result = load.run(str(tmp_path), messages=60, loads=5, opens=1, blob_bytes=30_000)
    assert result["newest_p50_ms"] > 0
    assert result["older_p50_ms"] > 0
    assert result["open_after_kill"][0]["wal_bytes"] > 20_000_000, "the log was not full"
    assert result["writer_rss_anon_bytes"] > 1_000_000


def test_threads_scenario_looks_at_each_way_in(tmp_path: Path) -> None:
    result = threads.run(str(tmp_path), threads=300, turns=5)
    for name in ("open_one", "list_newest", "list_by_name", "list_by_prefix"):
        assert result[f"{name}_p50_ms"] > 0


def test_bench_command_prints_tables_and_json(tmp_path: Path) -> None:
    def bench(*arguments: str) -> str:
        command = [sys.executable, "-m", "agentstore.tools.cli", "bench", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    shown = bench("threads", "--count", "50")
    assert "list newest p50" in shown
    parsed: dict[str, Any] = json.loads(bench("threads", "--count", "50", "--json"))
    assert parsed["threads"] == 50
    assert os.listdir(tmp_path) == [], "the benchmark left something behind"


def test_size_scenario_compares_every_state_with_its_file(tmp_path: Path) -> None:
    files = []
    for number in range(3):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("".join(json.dumps(message(n + 100 * number)) + "\n" for n in range(90)))
        files.append(str(file))
    result = size.run(str(tmp_path), files, peer_bytes_max=100_000)
    assert result["messages"] == 270 and result["json_bytes"] > 270 * 600
    assert 0 < result["compacted"]["disk_bytes"] <= result["closed"]["disk_bytes"] < result["json_bytes"]
    assert result["closed"]["kinds"]["packs"] > 0
    assert result["langgraph"] is None or result["langgraph"]["puts"] >= 90


def test_growth_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "ROUNDS", 2)
    monkeypatch.setattr(growth, "LARGE", 200_000)
    result = growth.run(str(tmp_path), counts=(100, 200))
    assert [row["messages"] for row in result["rows"]] == [100, 200]
    assert all(row["bytes_per_message"] > 0 and row["writer_rss_anon_mb"] > 1 for row in result["rows"])
    assert result["rows"][0]["bytes_per_message, x first"] == 1.0
    assert result["state_size"]["ratio"] > 0


def test_compact_scenario(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(message(n)) + "\n" for n in range(50)))
    for files in ([], [str(file)]):
        result = compacting.run(str(tmp_path / f"run {len(files)}"), files, megabytes=(1,), jobs=(1, 2))
        assert [row["jobs"] for row in result["rows"]] == [1, 2]
        assert all(0 < row["after_ratio"] < row["before_ratio"] < 1 for row in result["rows"])
