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
SETTLE: Final[Step] = ["settle"]
OPEN: Final[Step] = ["open"]
CLOSE: Final[Step] = ["close"]
MEET: Final[Step] = ["meet"]
LOOK: Final[Step] = ["look"]
KILL: Final[Step] = ["kill"]

OPEN_STORE: Final[Step] = ["open_store"]
APPEND: Final[Step] = ["append"]
LOAD: Final[Step] = ["load"]

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
    kind: str = "engine"
    """Or "store": which actors there are."""

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "before": self.before, "begin": self.begin, "parts": self.parts}


def store(
    parts: list[list[Step]], *, appended: int = 1, begin: list[Step] | None = None, deaths: bool = False
) -> Program:
    """A program on a thread that has so many checkpoints."""
    before = [OPEN_STORE, *[APPEND] * appended]
    return Program(parts, before, [OPEN_STORE, LOAD] if begin is None else begin, deaths, "store")


PROGRAMS: Final = {
    "two writers": Program([[SMALL, SMALL], [SMALL, ["commit", 40, 700]]], deaths=True),
    "rolls": Program([[LARGE, LARGE], [LARGE, SMALL]], before=KILLED, deaths=True),
    "fold": Program([[SMALL, LARGE, SMALL], [SMALL, FOLD]], deaths=True),
    "two folds": Program([[SMALL, FOLD, SMALL], [SMALL, FOLD]]),
    "reader": Program([[SMALL, LARGE], [READ], [FOLD]], begin=[OPEN, SMALL]),
    "reuse": Program([[LARGE, FOLD, LARGE, LARGE], [LARGE, LARGE, READ]], before=[OPEN, LARGE, LARGE, LARGE]),
    "stale list": Program([[LOOK, MEET, MEET, LARGE], [LARGE, MEET, FOLD, LARGE, LARGE, LARGE, MEET]], before=KILLED),
    "spare": Program([[["prepare"], SMALL], [LARGE, LARGE, LARGE]]),
    "verify": Program([[LARGE, FOLD, LARGE], [["verify"], ["verify"]]], before=[OPEN, LARGE, LARGE, LARGE]),
    "create": Program([[OPEN, SMALL], [OPEN, SMALL, CLOSE]], before=[], begin=[], deaths=True),
    "openers": Program([[OPEN, SMALL], [OPEN, SMALL, READ], [OPEN, READ]], before=KILLED, begin=[]),
    "recovery": Program([[OPEN, SMALL], [OPEN, SMALL]], before=KILLED, begin=[], deaths=True),
    "close": Program([[SMALL, CLOSE], [SMALL, CLOSE]], deaths=True),
    "close and die": Program([[SMALL, CLOSE], [SMALL, KILL]]),
    "close and open": Program([[OPEN, SMALL, CLOSE, OPEN, READ, SMALL], [OPEN, SMALL, CLOSE]], begin=[]),
    "swap of base": Program(
        [[OPEN, ["close", True], OPEN, READ], [OPEN, SMALL, ["close", True]]], before=KILLED, begin=[], deaths=True
    ),
    "thread": store([[APPEND, APPEND], [APPEND, LOAD]], deaths=True),
    "leases": store([[["lease"], APPEND, APPEND], [["take_lease"], APPEND]]),
    "packs": store([[APPEND, APPEND], [["pack"], LOAD]], appended=6, deaths=True),
    "two packers": store([[["pack"], APPEND], [["pack"], LOAD]], appended=6),
    "retention": store([[APPEND, APPEND], [["prune"], LOAD]], appended=5, deaths=True),
    "retention and packs": store([[["pack"], APPEND], [["prune"], LOAD]], appended=6),
    "offline job": store(
        [[OPEN_STORE, APPEND, ["close_store"], ["compact"]], [["compact"], OPEN_STORE, APPEND]],
        appended=6,
        begin=[],
        deaths=True,
    ),
    "the dead": Program([[SMALL, ["commit", 40, 700]], [SETTLE]], deaths=True),
    "writers and a folder": Program([[SMALL, LARGE], [LARGE, SMALL], [FOLD, READ]], before=KILLED),
}
