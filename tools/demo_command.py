"""`agentstore demo`: what it prints while workers die, and its verdict."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from typing import Annotated

import typer

from .demo.supervisor import Report, Start, run_demo
from .options import JsonOutput
from .output import console, print_json, print_pairs, print_table


def demo(
    kills: Annotated[int, typer.Option(min=0, help="How often the worker is killed with SIGKILL.")] = 8,
    seed: Annotated[int, typer.Option(help="Chooses the moments of the kills.")] = 0,
    json_output: JsonOutput = False,
    keep: Annotated[
        str | None, typer.Option(metavar="DIR", help="Leave the store and the outside world in this new directory.")
    ] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger/--no-ledger", help="--no-ledger: checkpoints only, to see what intents are for.")
    ] = True,
) -> None:
    """Book a team's trip with an agent that is killed again and again, and count what really happened.

    A travel desk agent (its model is a script) reserves seats, charges cards and sends mails in a small outside world.
    Its process is killed at the worst moments, and started again with the same call. Exit status 0: nothing was done
    twice, nothing was lost, and the conversation is the one that an undisturbed run has.
    """
    with ExitStack() as cleanup:
        if keep is None:
            directory = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="agentstore-demo-"))
        else:
            directory = os.path.abspath(keep)
            _make_new(directory)
        shown = _Nothing() if json_output else _Story(kills)
        report = run_demo(directory, kills=kills, seed=seed, ledger=ledger, on_start=shown.start)
        if json_output:
            print_json(report.to_json())
        else:
            _print_report(report)
            if keep is not None:
                console().print(f"The store is {directory}/store: agentstore ls --store {directory}/store")
    raise typer.Exit(0 if report.ok else 1)


def _make_new(directory: str) -> None:
    try:
        os.makedirs(directory)
    except FileExistsError:
        if os.listdir(directory):
            raise typer.BadParameter(f"{directory} exists and is not empty", param_hint="--keep") from None
    except OSError as error:
        raise typer.BadParameter(f"{directory} cannot be made: {error.strerror}", param_hint="--keep") from error


class _Nothing:
    def start(self, start: Start) -> None:
        pass


class _Story:
    """Tells every start of the worker as it ends."""

    def __init__(self, kills: int) -> None:
        self._console = console()
        self._kills = kills
        self._dealt = 0
        self._console.print(f"A travel desk agent books a trip for five. Its worker will be killed {kills} times.\n")

    def start(self, start: Start) -> None:
        for note in start.notes:
            self._console.print(f"      {note}")
        if start.killed is not None:
            self._dealt += 1
            self._console.print(f"kill {self._dealt:>2}  {start.killed}", style="bold red")
        elif self._dealt < self._kills:
            self._console.print("      the trip is booked; the team wants another one", style="green")
        else:
            self._console.print("      everything is booked", style="green")


def _print_report(report: Report) -> None:
    recoveries = ", ".join(f"{kind} {number}" for kind, number in report.recoveries.items())
    times = sorted(report.recovering_ms)
    console().print()
    print_table(
        ["tool", "wanted", "executed", "duplicated", "lost", "requests"],
        [
            (tool, count.wanted, count.executed, count.duplicated, count.lost, count.requests)
            for tool, count in report.effects.items()
        ],
        empty="",
    )
    spent = (
        f"{sum(times):.0f} ms in all, {times[len(times) // 2]:.0f} ms median, {times[-1]:.0f} ms worst"
        if times
        else "none"
    )
    print_pairs(
        [
            ("kills", f"{report.kills} of {report.kills_wanted} (seed {report.seed})"),
            ("trips booked", str(report.trips)),
            ("recoveries", recoveries),
            ("time recovering", spent),
            ("conversation", "as undisturbed" if report.same_conversation else "DIFFERENT from an undisturbed run"),
            ("store", "every invariant holds" if not report.store_problems else "; ".join(report.store_problems)),
        ]
    )
    if report.ok:
        console().print("Nothing was done twice, nothing was lost.", style="bold green")
    else:
        console().print(_verdict(report), style="bold red")


def _verdict(report: Report) -> str:
    duplicated = sum(count.duplicated for count in report.effects.values())
    lost = sum(count.lost for count in report.effects.values())
    why = "" if report.ledger else " That is what --no-ledger is there to show: checkpoints alone do not prevent it."
    return f"FAILED: {duplicated} effects were done twice, {lost} were lost.{why}"
