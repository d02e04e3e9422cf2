"""A run of a command in a process of its own, as one case of a campaign.

Such a run adopts orphans, takes signals and waits for any child: nothing for a process
that drives campaigns.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from fuzz.campaign import Case, Violation
from fuzz.crew import PR_SET_PDEATHSIG, Wrong


def apart(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` returns (JSON), run in a fork that does not outlive this process. Raises Violation."""
    hear, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.close(hear)
            try:
                answer = {"result": run()}
            except Wrong as wrong:
                answer = {"wrong": {"message": str(wrong)}}
            except BaseException:
                answer = {"wrong": {"message": traceback.format_exc()}}
            with os.fdopen(tell, "w", encoding="utf-8") as pipe:
                json.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(hear, encoding="utf-8") as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not text:
        raise Violation(f"the run died with status {status}")
    answer = json.loads(text)
    if "wrong" in answer:
        raise Violation(answer["wrong"]["message"])
    return answer["result"]  # type: ignore[no-any-return]  # it is JSON of a dict


def nothing_smaller(case: Case) -> Iterator[Case]:
    """Where the moment of a crash is not decided by the case, a smaller one says nothing."""
    yield from ()
