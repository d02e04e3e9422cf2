"""All crash states of short stories: ``python -m fuzz states``.

Every story of one and of two steps, told at each phase of a store's life; then stories of three and more, drawn. The
power is cut after each call that a story makes, and every state that may be left is made and looked at, up to
`STATES_MAX` of one moment; the counts say how many moments had more. The rest is as in `fuzz.disk`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from fuzz.campaign import Case
from fuzz.disk import DiskCampaign
from fuzz.story import Step, draw, fewer_steps

STATES_MAX = 256
"""Made of one moment."""
DEEPER = 0.02

SMALL: Step = ["commit", "a", 40, "round"]
LARGE: Step = ["commit", "a", 9000, "round"]
FILLING: list[Step] = [LARGE, LARGE, LARGE]
"""Fills a segment and begins the next (of the small ones that are used here)."""

PHASES: dict[str, list[Step]] = {
    "create": [],
    "first commit": [["reopen"]],
    "in the middle": [SMALL, ["decide", "a"], ["intend", "a"]],
    "roll": [LARGE, LARGE],
    "fold": [*FILLING, SMALL],
    "reuse": [*FILLING, ["fold"], LARGE],
    "recovery": [*FILLING, SMALL, ["kill"]],
    "close": [SMALL, SMALL, ["commit", "b", 40, "final"], ["keep", 1]],
    "compaction": [*([SMALL] * 10), ["compact"]],
}
"""What was told before."""

STEPS: list[Step] = [
    SMALL,
    ["commit", "b", 700, "final"],
    LARGE,
    ["finish", "a"],
    ["once", "x"],
    ["fork", "a", "c"],
    ["pin", "a"],
    ["delete", "a"],
    ["keep", 1],
    ["prune"],
    ["fold"],
    ["reopen"],
    ["kill"],
    ["compact"],
]


class StatesCampaign(DiskCampaign):
    """Short stories, all of their crash states."""

    name = "states"

    def cases(self, seed: int) -> Iterator[Case]:
        """All stories of one step at every phase, all of two, then longer ones, drawn."""
        rng = random.Random(seed)
        for length in (1, 2):
            for steps in itertools.product(STEPS, repeat=length):
                for phase in PHASES:
                    yield self._case(phase, list(steps), seed)
        while True:
            yield self._case(rng.choice(list(PHASES)), draw(rng, rng.randint(3, 5)), rng.randrange(1 << 32))

    def _case(self, phase: str, steps: list[Step], seed: int) -> Case:
        before = PHASES[phase]
        told = {"phase": phase, "steps": [*before, *steps], "begin": len(before) if before else -1}
        return {**told, "seed": seed, "images": STATES_MAX, "deeper": DEEPER}

    def smaller(self, case: Case) -> Iterator[Case]:
        """With fewer steps; cut everywhere."""
        for steps in fewer_steps(case["steps"]):
            yield {**case, "steps": steps, "begin": -1}


CAMPAIGN = StatesCampaign()
