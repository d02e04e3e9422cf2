"""What all classes of fuzzing have in common: cases, counts, shrinking, and a file that plays a failure again.

A campaign makes cases from a seed and runs them. A case is plain JSON and decides all that happens in it, so a case
that failed fails again; `drive` makes it as small as its campaign can and hands it back, and ``python -m fuzz
repro FILE`` runs it from a file. (Where real processes are killed or a real power is cut the moment of it is not
decided by the case: such a campaign says so by `repeats`.)
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

Case = dict[str, Any]
"""JSON: what decides a case, with names that its campaign gives it."""

FILE_VERSION = 1

SHRINK_RUNS_MAX = 2_000
"""So many smaller cases are tried before the smallest that failed is kept."""


class Violation(AssertionError):
    """The store broke its promise."""


@dataclass
class Counts:
    """What was done to the store, and what came of it."""

    cases: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """By class of fault: how many were injected."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """By outcome: how many cases, states or schedules ended in it."""
    moments: Counter[str] = field(default_factory=Counter)
    """Of crashes, where all states of a moment can be made: how many had all of theirs made, how many some."""

    def __str__(self) -> str:
        return "; ".join(f"{name}: {listed(each)}" for name, each in self.named() if each) or "nothing"

    def named(self) -> list[tuple[str, Counter[str]]]:
        """All counters by name."""
        return [("faults", self.faults), ("moments", self.moments), ("outcomes", self.outcomes)]

    def as_json(self) -> dict[str, Any]:
        return {"cases": self.cases, **{name: dict(sorted(each.items())) for name, each in self.named()}}


def listed(kinds: Counter[str]) -> str:
    """The counts of one kind as text: "3 torn, 1 whole"."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


class Campaign(Protocol):
    """One class of fuzzing."""

    name: str
    """As in ``python -m fuzz NAME``."""
    repeats: bool
    """Whether the same case always does the same."""

    def missing(self) -> str | None:
        """What this machine lacks to run it, or None."""

    def cases(self, seed: int) -> Iterator[Case]:
        """Cases, the same for the same seed; endless, or all that there are."""

    def run(self, case: Case, counts: Counts) -> None:
        """Run one case and count what it did. Raises `Violation`; any other exception is one too."""

    def smaller(self, case: Case) -> Iterator[Case]:
        """Cases to try in place of a failed one, those that take most away first."""


@dataclass(frozen=True)
class Failure:
    """The smallest case that failed, and how."""

    campaign: str
    seed: int
    case: Case
    message: str
    first: Case
    """As it failed at first."""

    def write(self, directory: str) -> str:
        """Write the file that ``repro`` reads; its path."""
        path = os.path.join(directory, f"fuzz-{self.campaign}-{self.seed}.json")
        record = {"version": FILE_VERSION, "campaign": self.campaign, "seed": self.seed, "case": self.case}
        with open(path, "w", encoding="utf-8") as out:
            json.dump({**record, "message": self.message, "first": self.first}, out, indent=1)
            out.write("\n")
        return path


def read_failure(path: str) -> Failure:
    """What `Failure.write` wrote. Raises OSError, or ValueError where the file is not one of ours."""
    with open(path, encoding="utf-8") as file:
        record = json.load(file)
    if not isinstance(record, dict) or record.get("version") != FILE_VERSION:
        raise ValueError(f"{path}: not a failing case of version {FILE_VERSION}")
    return Failure(record["campaign"], record["seed"], record["case"], record["message"], record["first"])


def failing(campaign: Campaign, case: Case, counts: Counts) -> str | None:
    """Run a case: None, or what went wrong."""
    try:
        campaign.run(case, counts)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def shrink(campaign: Campaign, case: Case, message: str) -> tuple[Case, str]:
    """The smallest case found that still fails, and what it says."""
    runs = 0
    progress = campaign.repeats
    while progress:
        progress = False
        for smaller in campaign.smaller(case):
            runs += 1
            if runs > SHRINK_RUNS_MAX:
                break
            again = failing(campaign, smaller, Counts())
            if again is not None:
                case, message, progress = smaller, again, True
                break
    return case, message


def drive(
    campaign: Campaign,
    seed: int,
    *,
    seconds: float | None = None,
    cases: int | None = None,
    report: Callable[[Counts, float], object] | None = None,
) -> tuple[Counts, Failure | None]:
    """Run cases until so many seconds have passed, so many cases have run, there are no more, or one fails."""
    counts = Counts()
    begun = time.monotonic()
    for case in campaign.cases(seed):
        message = failing(campaign, case, counts)
        counts.cases += 1
        if message is not None:
            smallest, message = shrink(campaign, case, message)
            return counts, Failure(campaign.name, seed, smallest, message, case)
        passed = time.monotonic() - begun
        if report is not None:
            report(counts, passed)
        if (cases is not None and counts.cases >= cases) or (seconds is not None and passed >= seconds):
            break
    return counts, None
