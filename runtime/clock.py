"""The runtime's seam to time: wall clock for what people read, boot time for deadlines."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now() -> datetime:
    """The wall clock, in UTC. Never compared with anything: it may jump."""
    return datetime.now(UTC)


def boottime() -> float:
    """Seconds since boot, suspended time included; the clock of deadlines."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
