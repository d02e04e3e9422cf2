"""What a worker process tells its supervisor: one JSON object a line on its standard output."""

from __future__ import annotations

import json
import os
from typing import Any

EXIT_ALONE = 3
"""Exit status of a worker whose supervisor is gone."""


def emit(event: str, **fields: Any) -> None:
    """Write one line, whole and at once: the process may be gone the moment after; the pipe keeps what was written."""
    line = (json.dumps({"event": event, **fields}) + "\n").encode("ascii")
    try:
        os.write(1, line)
    except BrokenPipeError:
        # The supervisor is gone. Whoever calls here (the loop, a tool) must not take that for a failure of its own.
        os._exit(EXIT_ALONE)


def parse(line: bytes) -> dict[str, Any]:
    """The object of one line; a line that a kill cut short is an event ``cut``."""
    try:
        value = json.loads(line)
    except ValueError:
        return {"event": "cut"}
    return value if isinstance(value, dict) and "event" in value else {"event": "cut"}
