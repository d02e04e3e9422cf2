"""`agentstore salvage`: out of a damaged store, everything that still proves itself."""

from __future__ import annotations

from typing import Annotated

import typer

from agentstore.salvage import Salvaged, as_json
from agentstore.salvage import salvage as run

from .options import JsonOutput
from .output import console, print_json, print_table, printable

EXIT_MISSING = 1
"""Exit status when something is missing."""


def salvage(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The damaged store; it is only read.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A directory that is not there yet, or empty.")],
    json_output: JsonOutput = False,
) -> None:
    """Make a new store of everything in a damaged one that still proves itself, and say what is missing.

    Exit status 0: nothing is; 1: something is; 2: it could not be done.
    """
    done = run(directory, dest)
    if json_output:
        print_json(as_json(done))
    else:
        _print(done)
    raise typer.Exit(0 if done.whole else EXIT_MISSING)


def _print(done: Salvaged) -> None:
    out = console()
    for problem in done.problems:
        out.print(printable(f"Damaged: {problem}"), style="red")
    print_table(
        ["thread", "checkpoints", "lost", "not found", "notes"],
        [
            (each.id, each.checkpoints, len(each.lost), len(each.missing), "; ".join(each.notes))
            for each in done.threads
        ],
        empty="No threads.",
    )
    out.print("Nothing is missing." if done.whole else "What is not listed here as lost proved itself.")


COMMANDS = (salvage,)
