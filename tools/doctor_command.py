"""`agentstore doctor`: what it prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from .doctor import LOOK, PROBLEM, examine
from .options import JsonOutput
from .output import console, print_json, printable

EXIT_PROBLEM = 1

_STYLES = {PROBLEM: "bold red", LOOK: "yellow"}


def doctor(
    store: Annotated[str, typer.Argument(metavar="DIR", help="The store; it may be in use.")],
    json_output: JsonOutput = False,
) -> None:
    """Look at a store and the machine under it before they go into production. It changes nothing.

    Every line is ok, something to look at, or a problem, with what to do. Exit status 1 if there is a problem.
    `agentstore verify` is the check of what is in the store.
    """
    findings = list(examine(store))
    bad = any(finding.level == PROBLEM for finding in findings)
    if json_output:
        print_json({"ok": not bad, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            line = f"{finding.level:<13} {finding.name:<12} {printable(finding.what)}"
            console().print(line, style=_STYLES.get(finding.level))
            if finding.todo:
                console().print(f"{'':<26} {printable(finding.todo)}")
    raise typer.Exit(EXIT_PROBLEM if bad else 0)


COMMANDS = (doctor,)
