"""The short programs whose orders are run: what the store is at the beginning, and the steps of each actor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from fuzz.actors import Step

SMALL: Final[Step] = ["commit", 40]
LARGE: Final[Step] = ["commit", 9000]
"""Two of these fill a segment (see `agentstore.testing.limits`), and a third one rolls."""
FOLD: Final[Step] = ["fold"]
READ: Final[Step] = ["read"]
OPEN: Final[Step] = ["open"]
CLOSE: Final[Step] = ["close"]
MEET: Final[Step] = ["meet"]
LOOK: Final[Step] = ["look"]

KILLED: Final = [OPEN, LARGE, LARGE, SMALL]
"""A store whose log is to be replayed."""
CLOSED: Final = [OPEN, SMALL, CLOSE]


@dataclass(frozen=True)
class Program:
    """`before`: how the store was made, whose process is killed then. `begin`: what each actor does before the others
    can come between; `parts`: the steps of each. `deaths`: whether actors are also killed at every point."""

    parts: list[list[Step]]
    before: list[Step] = field(default_factory=lambda: [*CLOSED])
    begin: list[Step] = field(default_factory=lambda: [OPEN])
    deaths: bool = False

    def as_json(self) -> dict[str, Any]:
        return {"before": self.before, "begin": self.begin, "parts": self.parts}


PROGRAMS: Final = {
    "two writers": Program([[SMALL, SMALL], [SMALL, ["commit", 40, 700]]], deaths=True),
    "rolls": Program([[LARGE, LARGE], [LARGE, SMALL]], before=KILLED, deaths=True),
    "fold": Program([[SMALL, LARGE, SMALL], [SMALL, FOLD]], deaths=True),
    "two folds": Program([[SMALL, FOLD, SMALL], [SMALL, FOLD]]),
    "reader": Program([[SMALL, LARGE], [READ, READ], [FOLD, FOLD]]),
    "reuse": Program([[LARGE, FOLD, LARGE, LARGE], [LARGE, LARGE, READ]], before=[OPEN, LARGE, LARGE, LARGE]),
    "stale list": Program(
        [[LOOK, MEET, MEET, LARGE], [LARGE, LARGE, LARGE, MEET, FOLD, LARGE, LARGE, LARGE, MEET]], before=KILLED
    ),
    "spare": Program([[["prepare"], SMALL], [LARGE, LARGE, LARGE]]),
    "verify": Program([[LARGE, FOLD, LARGE], [["verify"], ["verify"]]], before=[OPEN, LARGE, LARGE, LARGE]),
    "create": Program([[OPEN, SMALL], [OPEN, SMALL, CLOSE]], before=[], begin=[], deaths=True),
    "openers": Program([[OPEN, SMALL], [OPEN, SMALL, READ], [OPEN, READ]], before=KILLED, begin=[]),
    "recovery": Program([[OPEN, SMALL], [OPEN, SMALL]], before=KILLED, begin=[], deaths=True),
    "close": Program([[SMALL, CLOSE], [SMALL, CLOSE]], deaths=True),
    "close and open": Program([[OPEN, SMALL, CLOSE, OPEN, READ, SMALL], [OPEN, SMALL, CLOSE]], begin=[]),
    "swap of base": Program(
        [[OPEN, ["close", True], OPEN, READ], [OPEN, SMALL, ["close", True]]], before=KILLED, begin=[], deaths=True
    ),
    "writers and a folder": Program([[SMALL, LARGE], [LARGE, SMALL], [FOLD, READ]], before=KILLED),
}
