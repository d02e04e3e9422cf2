"""A process that writes one thread beside others, with limits so small that packs and snapshots come and go at once.

python tests/store_worker.py DIRECTORY SEED COMMITS
"""

from __future__ import annotations

import random
import sys

from agentstore import Append, Set, Splice, StaleThread, Store, Thread, packing, position, snapshots

THREAD_ID = "shared"


def small_limits() -> None:
    for module, name, value in (
        (position, "ASK_EVERY", 2),
        (position, "PACK_MEMBERS", 6),
        (packing, "PACK_MEMBERS", 6),
        (snapshots, "PACK_MEMBERS", 6),
        (snapshots, "LOAD_US_MIN", 40),
        (snapshots, "GAP_MIN", 16),
        (snapshots, "CHUNK_BYTES_MIN", 64),
        (snapshots, "CHUNK_BYTES_MAX", 160),
        (snapshots, "THIN_EVERY", 2),
        (snapshots, "DENSE_SNAPSHOTS", 2),
    ):
        assert hasattr(module, name)
        setattr(module, name, value)


def act(thread: Thread, rng: random.Random, seed: int, n: int) -> None:
    """One random commit or load. StaleThread when another process was faster."""
    dice = rng.random()
    head = thread.head
    if dice < 0.8 or head is None:
        thread.commit(Append("history", {"by": seed, "n": n, "text": "y" * rng.randrange(60)}), Set(f"of {seed}", n))
    elif dice < 0.9:
        items = len(thread.load()["history"])
        if items > 30:
            thread.commit(Splice("history", rng.randrange(items - 10), rng.randrange(3), ["summary"]))
    elif dice < 0.95:
        thread.commit(Append("history", "branch"), parent=max(0, head.seq - rng.randrange(20)))
    else:
        thread.load(at=rng.randrange(head.seq + 1))


def main(directory: str, seed: int, commits: int) -> None:
    small_limits()
    rng = random.Random(seed)
    with Store.open(directory) as store:
        thread = store.thread(THREAD_ID)
        for n in range(commits):
            try:
                act(thread, rng, seed, n)
            except StaleThread:
                thread.load()
            print(n, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
