"""Campaigns as commands: found by name, driven for a time, their counts printed and their failures written to files."""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Final

import typer

from fuzz.campaign import Campaign, Counts, Failure, drive, failing, listed, read_failure

CAMPAIGNS: Final = {
    "disk": "fuzz.disk:CAMPAIGN",
    "states": "fuzz.states:CAMPAIGN",
    "strace": "fuzz.strace:CAMPAIGN",
    "powercut": "fuzz.powercut:CAMPAIGN",
    "powercut-xfs": "fuzz.powercut:XFS",
    "fulldisk": "fuzz.fulldisk:CAMPAIGN",
    "kill": "fuzz.kill:CAMPAIGN",
    "copy": "fuzz.copying:CAMPAIGN",
    "interleave": "fuzz.interleave:CAMPAIGN",
}
"""By name where it is. One is imported when it is run: they need different things of the machine."""

MISSING: Final = 77
"""Exit status where the machine cannot run a campaign, as test drivers have it."""

REPORT_S = 10.0
"""Between two lines of progress, in seconds."""


def campaign(name: str) -> Campaign:
    """The campaign of this name. Raises KeyError."""
    module, _, attribute = CAMPAIGNS[name].partition(":")
    found: Campaign = getattr(importlib.import_module(module), attribute)
    return found


class Progress:
    """Lines of progress on standard error."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._said = 0.0

    def __call__(self, counts: Counts, passed: float) -> None:
        if passed - self._said >= REPORT_S:
            self._said = passed
            typer.echo(f"{self._name}: {passed:.0f} s, {counts.cases:,} cases, {listed(counts.outcomes)}", err=True)


def drive_named(name: str, seed: int, seconds: float, cases: int | None, *, out: str, as_json: bool) -> int:
    """Drive one campaign and print what came of it. The exit status."""
    running = campaign(name)
    missing = running.missing()
    if missing is not None:
        typer.echo(f"{name}: skipped: {missing}", err=True)
        return MISSING
    begun = time.monotonic()
    counts, failure = drive(running, seed, seconds=seconds, cases=cases, report=Progress(name))
    passed = time.monotonic() - begun
    if as_json:
        record = {"campaign": name, "seed": seed, "seconds": round(passed, 1), **counts.as_json()}
        print(json.dumps(record | {"failure": None if failure is None else failure.message}))
    else:
        print(summary(name, seed, counts, passed))
    if failure is None:
        return 0
    tell_failure(failure, out)
    return 1


def summary(name: str, seed: int, counts: Counts, passed: float) -> str:
    """What a campaign did, as lines of text."""
    lines = [f"{name}, seed {seed}: {counts.cases:,} cases, {passed:.0f} s"]
    for title, each in counts.named():
        lines += [f"  {title}"] * bool(each) + [f"    {count:>10,}  {kind}" for kind, count in each.most_common()]
    return "\n".join(lines)


def tell_failure(failure: Failure, out: str) -> None:
    """Say how a campaign failed, and where the case is that failed."""
    path = failure.write(out)
    print(f"FAILED: {failure.message}\nAgain: python -m fuzz repro {path}", file=sys.stderr)


def play_again(path: str) -> int:
    """Run the case of a file that `Failure.write` wrote. The exit status: 1 if it fails again."""
    failure = read_failure(path)
    running = campaign(failure.campaign)
    missing = running.missing()
    if missing is not None:
        typer.echo(f"{failure.campaign}: skipped: {missing}", err=True)
        return MISSING
    counts = Counts()
    message = failing(running, failure.case, counts)
    if message is None:
        often = "" if running.repeats else ", which does not do the same each time"
        print(f"The case of {path} does not fail{often}: {counts}")
        return 0
    print(f"FAILED: {message}", file=sys.stderr)
    return 1
