"""The engine's sizes scaled down, so that a few small commits fill segments and reach every limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentstore.engine import embedded, log, roll, segments
from agentstore.engine.segment import SEGMENT_BYTES

SMALL_SEGMENT_BYTES = 32 * 1024


@contextmanager
def small_limits(segment_bytes: int = SMALL_SEGMENT_BYTES) -> Iterator[None]:
    """Segments of `segment_bytes` and limits in proportion, for stores that are opened and closed inside.

    The sizes are constants, not options, since all processes of a store must agree on them; segments of
    any size are read. For one thread of a test process.

    >>> from agentstore.engine import roll
    >>> with small_limits():
    ...     roll.SEGMENT_BYTES
    32768
    """
    names = ("SEGMENT_BYTES", "WAL_HARD_BYTES", "WAL_SOFT_BYTES", "REPLAY_BYTES_MAX")
    scale = SEGMENT_BYTES // segment_bytes
    places = [(module, name) for module in (embedded, log, roll, segments) for name in names if hasattr(module, name)]
    before = [(module, name, getattr(module, name)) for module, name in places]
    for module, name, value in before:
        setattr(module, name, value // scale)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
