"""Where the demo's worker dies, by its own hand or by its supervisor's, always by SIGKILL.

Nothing is cleaned up after SIGKILL: no `finally`, no flush, no exit handler. What the
worker wrote before is in the kernel's hands, what it did not write never happened.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, cast, get_args

from agentstore.engine.files import set_default_files
from agentstore.testing import crashpoints
from agentstore.testing.faults import die, killing_files

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

    def install(self) -> None:
        """Stand by for the store that this process opens next."""
        death = self._death
        if death.kind == "wal":
            set_default_files(killing_files(death.number, "inside", death.part))
        elif death.kind in ("commit-before", "commit-after"):
            crashpoints.install(death.kind, death.number)

    def in_tool(self, moment: Literal["before", "after"], tool: str) -> None:
        """A call of `tool` is before or after its effect."""
        if self._death.kind != f"tool-{moment}" or self._death.tool not in ("*", tool):
            return
        with self._lock:
            self._left -= 1
            due = self._left == 0
        if due:
            die()
