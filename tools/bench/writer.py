"""A writer process of the benchmarks, so that others can run beside it, trace it, sample it or kill it.

    python -m agentstore.tools.bench.writer loop CONTENDER DIR [--count N | --seconds S] [--threads T] [--frame-bytes B]
    python -m agentstore.tools.bench.writer grow DIR --count N          one thread of N messages
    python -m agentstore.tools.bench.writer threads DIR --count N       N threads of one checkpoint
    python -m agentstore.tools.bench.writer full-log DIR [--blob-bytes B]   fill the WAL, then die by SIGKILL

It prints ``ready``, waits for a line on its standard input, works, and prints what it did as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from agentstore import Append, Set, Store
from agentstore.engine.roll import WAL_HARD_BYTES
from agentstore.engine.segment import SEGMENT_BYTES

from .frame import message, percentile
from .peers import agentstore_commit, apsw_full, bare_loop, lmdb_sync, prepared_messages, sqlite_full

MESSAGE_BYTES = 600
GROW_THREAD = "bench:long"
GROW_WORKERS = 32
"""Threads that make many small threads: their commits share syncs."""


def loop(
    name: str, directory: str, *, count: int | None, seconds: float, threads: int, frame_bytes: int
) -> dict[str, object]:
    """Run one contender `count` times or for `seconds` in each of `threads` threads; what each operation took."""
    makers = {
        "bare": lambda _: bare_loop(frame_bytes),
        "sqlite": lambda _: sqlite_full(),
        "lmdb": lambda _: lmdb_sync(),
        "apsw": lambda _: apsw_full(),
    }
    makers["agentstore"] = lambda thread: agentstore_commit(f"bench:{os.getpid()}:{thread}")
    wall: list[int] = []
    lock = threading.Lock()
    ready = threading.Barrier(threads + 1)
    go = threading.Event()

    def work(thread: int) -> None:
        mine: list[int] = []
        with makers[name](thread).open(directory) as operation:
            ready.wait()
            go.wait()
            clock = time.perf_counter_ns
            end = clock() + int(seconds * 1e9)
            while len(mine) < count if count is not None else clock() < end:
                begin = clock()
                operation()
                mine.append(clock() - begin)
            with lock:
                wall.extend(mine)
            done.wait()  # nobody closes while others measure

    done = threading.Barrier(threads + 1)
    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    _ready()
    process, begin = time.process_time(), time.perf_counter()
    go.set()
    done.wait()
    elapsed, cpu = time.perf_counter() - begin, time.process_time() - process
    for worker in workers:
        worker.join()
    return {
        "operations": len(wall),
        "seconds": elapsed,
        "cpu_us": cpu * 1e6 / max(1, len(wall)),
        "p50_us": percentile(wall, 50) / 1000,
        "p99_us": percentile(wall, 99) / 1000,
    }


def grow(directory: str, count: int) -> dict[str, object]:
    """One thread of `count` appends, as a live agent writes it."""
    _ready()
    began = time.perf_counter()
    with Store.open(directory) as store:
        thread = store.thread(GROW_THREAD)
        thread.commit(Set("conversation_history", []), Set("step", 0), reason="input")
        for step in range(1, count + 1):
            thread.commit(
                Append("conversation_history", message(step, MESSAGE_BYTES)),
                Set("step", step),
                reason="round",
                step=step,
            )
    return {"seconds": time.perf_counter() - began}


def many_threads(directory: str, count: int) -> dict[str, object]:
    """`count` threads of one checkpoint, made by `GROW_WORKERS` threads of this process."""
    _ready()
    began = time.perf_counter()
    with Store.open(directory) as store:

        def work(first: int) -> None:
            for number in range(first, count, GROW_WORKERS):
                store.thread(thread_name(number)).commit(
                    Set("conversation_history", [message(number % 97, 100)]), Set("step", 0), reason="input"
                )

        workers = [threading.Thread(target=work, args=(first,)) for first in range(GROW_WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return {"seconds": time.perf_counter() - began}


def thread_name(number: int) -> str:
    return f"user-{number % 1000}:task-{number}"


def full_log(directory: str, blob_bytes: int | None) -> None:
    """Fill the log as far as committers let it grow, and die with all of it unfolded.

    With chat messages as of a live agent, or (fewer and larger frames, sooner full) random blobs of `blob_bytes`.
    """
    messages = prepared_messages()
    _ready()
    # Without the background nothing folds before the hard limit: the largest log that a kill can leave.
    with Store.open(directory, background=False) as store:
        step = 0
        while store.stats()["wal_bytes"] < WAL_HARD_BYTES - SEGMENT_BYTES:
            thread = store.thread(f"bench:full-log:{step}")
            thread.commit(Set("conversation_history", []), reason="input")
            for _ in range(100):
                step += 1
                said = messages[step % len(messages)] if blob_bytes is None else os.urandom(blob_bytes)
                thread.commit(Append("conversation_history", said), step=step)
        os.kill(os.getpid(), signal.SIGKILL)


def _ready() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="agentstore.tools.bench.writer")
    parser.add_argument("job", choices=["loop", "grow", "threads", "full-log"])
    parser.add_argument("names", nargs="+", metavar="[CONTENDER] DIR")
    parser.add_argument("--count", type=int)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--frame-bytes", type=int, default=600)
    parser.add_argument("--blob-bytes", type=int)
    given = parser.parse_args(arguments)
    directory = given.names[-1]
    if given.job == "full-log":
        full_log(directory, given.blob_bytes)
    elif given.job == "grow":
        print(json.dumps(grow(directory, given.count)))
    elif given.job == "threads":
        print(json.dumps(many_threads(directory, given.count)))
    else:
        result = loop(
            given.names[0],
            directory,
            count=given.count,
            seconds=given.seconds,
            threads=given.threads,
            frame_bytes=given.frame_bytes,
        )
        print(json.dumps(result))


if __name__ == "__main__":
    main()
