"""`agentstore replay`: its progress bar and its summary."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .options import STORE_DEFAULT, JsonOutput, StorePath
from .output import console, print_json, print_pairs, visible
from .replay import Summary
from .replay import replay as run_replay
from .transcript import read_transcripts

WORKERS_MAX = 64


def replay(
    files: Annotated[list[str], typer.Argument(metavar="FILE.jsonl…", help="One OpenAI chat message a line.")],
    store: StorePath = STORE_DEFAULT,
    kills: Annotated[int, typer.Option(min=0, help="How often a worker is killed with SIGKILL, at random.")] = 0,
    workers: Annotated[int, typer.Option(min=1, max=WORKERS_MAX, help="Worker processes side by side.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Chooses the kills' places in the work; default: random.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Play recorded transcripts through the loop, the log, intents and receipts of a live agent, then compare.

    Each file becomes a thread of the store (which is made if it is not there): the recorded assistant messages are what
    the model says, the recorded tool messages what the tools return. Exit status 0: every thread equals its file,
    message for message and key for key, and every recorded call has exactly one intent and one receipt.
    """
    transcripts = read_transcripts(files)
    total = sum(len(transcript.messages) for transcript in transcripts)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), disable=json_output) as progress:
        task = progress.add_task("messages", total=total)

        def on_progress(messages: int, dealt: int, alive: int) -> None:
            progress.update(
                task,
                completed=messages,
                description=f"{alive} workers, {dealt} kills",
            )

        summary = run_replay(transcripts, store, workers=workers, kills=kills, seed=seed, on_progress=on_progress)
    if json_output:
        print_json(asdict(summary) | {"equal": summary.equal, "ok": summary.ok})
    else:
        _print_summary(summary)
    raise typer.Exit(0 if summary.ok else 1)


def _kills(summary: Summary) -> str:
    missed = summary.kills_wanted - summary.kills
    return f"{summary.kills}" + (f" (the work was finished before {missed} more)" if missed else "")


def _print_summary(summary: Summary) -> None:
    print_pairs(
        [
            ("transcripts equal to their thread", f"{summary.equal} of {summary.transcripts}"),
            ("messages", f"{summary.messages:,}"),
            ("decisions", f"{summary.decisions:,}"),
            ("calls recorded", f"{summary.calls:,} ({summary.interrupted:,} of them interrupted)"),
            ("intents / receipts", f"{summary.intents:,} / {summary.receipts:,}"),
            ("kills of workers", _kills(summary)),
            ("starts of workers", f"{summary.starts}"),
            ("recoveries", ", ".join(f"{kind} {number}" for kind, number in summary.recoveries.items())),
            (
                "requests / executions / duplicated",
                f"{summary.requests:,} / {summary.executions:,} / {summary.duplicated}",
            ),
            ("seconds", f"{summary.seconds:.1f}"),
        ]
    )
    for thread, different in summary.differences.items():
        console().print(f"DIFFERENT  {visible(thread)}: {visible(different)}", style="bold red")
    for problem in summary.store_problems:
        console().print(f"DAMAGED  {visible(problem)}", style="bold red")
    if summary.ok:
        console().print(
            "Every thread equals its file; every recorded call has one intent and one receipt.", style="green"
        )
    elif not summary.differences and not summary.store_problems:
        console().print("FAILED: intents, receipts and recorded calls are not the same number.", style="bold red")
