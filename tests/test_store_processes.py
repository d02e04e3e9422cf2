"""Processes on one store, some killed: the store layer's own invariants hold, snapshots and their chunks included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import store_worker

from agentstore import Store, records


def start(directory: Path, seed: int, commits: int) -> subprocess.Popen[str]:
    command = [sys.executable, store_worker.__file__, str(directory), str(seed), str(commits)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_snapshots_of_many_processes_on_one_thread_survive_kills(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    newest = -1
    for round_ in range(3):
        workers = [start(directory, 10 * round_ + n, 120) for n in range(3)]
        # The first is killed in the middle of what it does, wherever that is; the others go on.
        assert workers[0].stdout is not None
        for line in workers[0].stdout:
            if int(line) == 60:
                workers[0].kill()
                break
        for worker in workers:
            worker.communicate()
        assert [worker.returncode for worker in workers] == [-9, 0, 0]
        with Store.open(directory, background=False) as store:
            assert store.check() == []
            thread = store.thread(store_worker.THREAD_ID)
            head = thread.head
            assert head is not None and head.seq >= newest + 100
            newest = head.seq
            assert thread.load()["history"]
            low = records.snapshots(records.ThreadKeys(1).prefix)
            with store._engine.read() as snap:
                snapshots = len([key for key, _ in snap.scan(low, records.end_of(low))])
            assert snapshots >= 5
