"""What a worker process tells its supervisor: one JSON object a line on its standard output."""

from __future__ import annotations

import json
import os
from typing import Any


def emit(event: str, **fields: Any) -> None:
    """Write one line, whole and at once: the process may be gone the moment after; the pipe keeps what was written."""
    os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode("ascii"))


def parse(line: bytes) -> dict[str, Any]:
    """The object of one line; a line that a kill cut short is an event ``cut``."""
    try:
        value = json.loads(line)
    except ValueError:
        return {"event": "cut"}
    return value if isinstance(value, dict) and "event" in value else {"event": "cut"}
