"""A process that commits to a thread of its own and says so after each: python tests/backup_writer.py DIRECTORY NAME"""

from __future__ import annotations

import sys

from agentstore import Append, Store

with Store.open(sys.argv[1]) as store:
    thread = store.thread(sys.argv[2])
    for n in range(1_000_000):
        thread.commit(Append("numbers", n))
        print(n, flush=True)
