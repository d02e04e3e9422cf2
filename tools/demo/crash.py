"""Where the demo's worker dies, by its own hand or by its supervisor's, always by SIGKILL.

Nothing is cleaned up after SIGKILL: no `finally`, no flush, no exit handler. What the
worker wrote before is in the kernel's hands, what it did not write never happened.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NoReturn, cast, get_args

from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.files import Files
from agentstore.engine.segment import FRAMES_AT
from agentstore.testing import crashpoints

Kind = Literal["never", "tool-before", "tool-after", "commit-before", "commit-after", "wal", "outside"]


@dataclass(frozen=True, slots=True)
class Death:
    """One moment to die.

    `kind` and the `number`-th time that it comes: ``tool-before``: in a call, before its effect; ``tool-after``:
    between effect and receipt; ``commit-before``, ``commit-after``; ``wal``: inside the write of a frame, `part` of it
    written; ``outside``: the supervisor kills when it has heard so many lines. `tool`: only in its calls (``*``: any).

    >>> Death.parse("tool-after:2:0.5:charge_card").label
    'between effect and receipt of charge_card (call 2)'
    >>> Death.parse(str(Death("wal", 3, part=0.25)))
    Death(kind='wal', number=3, part=0.25, tool='')
    """

    kind: Kind
    number: int = 1
    part: float = 0.0
    tool: str = ""

    @classmethod
    def never(cls) -> Death:
        return cls("never")

    @classmethod
    def parse(cls, text: str) -> Death:
        """The inverse of `str`; an empty text is `never`."""
        if not text:
            return cls.never()
        kind, number, part, tool = text.split(":")
        if kind not in get_args(Kind):
            raise ValueError(f"there is no moment {kind!r}; the moments are {', '.join(get_args(Kind))}")
        return cls(cast(Kind, kind), int(number), float(part), tool)

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}:{self.part!r}:{self.tool}"

    @property
    def label(self) -> str:
        """In words."""
        tool = "a tool" if self.tool == "*" else self.tool
        return {
            "never": "no kill",
            "tool-before": f"after the intent, before the effect of {tool} (call {self.number})",
            "tool-after": f"between effect and receipt of {tool} (call {self.number})",
            "commit-before": f"before commit {self.number}",
            "commit-after": f"right after commit {self.number}",
            "wal": f"inside the WAL write of frame {self.number}, {self.part:.0%} of it written",
            "outside": f"from outside, at a random moment after event {self.number}",
        }[self.kind]


class Reaper:
    """Brings one death about in this process. Thread-safe: calls of tools may run side by side."""

    def __init__(self, death: Death) -> None:
        self._death = death
        self._left = death.number
        self._lock = threading.Lock()

    @contextmanager
    def at_store(self, path: str) -> Iterator[None]:
        """Stand by while the store at `path` is opened and used."""
        kind = self._death.kind
        if kind in ("commit-before", "commit-after"):
            crashpoints.install(kind, self._death.number)
        if kind != "wal":
            yield
            return
        # All who open a store in a process share one engine: the Store that is opened next writes through these files.
        engine = EmbeddedEngine.open(path, files=_DyingFiles(self))
        try:
            yield
        finally:
            engine.close()

    def in_tool(self, moment: Literal["before", "after"], tool: str) -> None:
        """A call of `tool` is before or after its effect."""
        if self._death.kind == f"tool-{moment}" and self._death.tool in ("*", tool):
            self.count_down()

    def count_down(self) -> None:
        """Die if this is the time."""
        if self.is_due():
            die()

    def is_due(self) -> bool:
        """Count one time; whether it is the one."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def written(self, size: int) -> int:
        """How much of a frame of `size` bytes is written before the end: from none to all of it."""
        return round(size * self._death.part)


class _DyingFiles(Files):
    """The engine's system calls, of which the write of one frame does not return."""

    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        # A frame begins with its marker; the zeros of a fresh segment and headers in front of the frames do not count.
        if offset >= FRAMES_AT and any(data[:8]) and self._reaper.is_due():
            super().pwrite(fd, data[: self._reaper.written(len(data))], offset)
            die()
        super().pwrite(fd, data, offset)


def die() -> NoReturn:
    """SIGKILL this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # the signal is delivered to some thread of the process, at once but not to this instruction
        signal.pause()
