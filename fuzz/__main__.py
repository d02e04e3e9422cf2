"""``python -m fuzz kill``, ``powercut`` and ``copy``: exit status 0 only if every promise was kept."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from typing import Annotated

import typer

from fuzz.crew import Wrong

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)

SeedOption = Annotated[int, typer.Option(help="What is drawn (not when it hits) is the same for the same seed.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the summary.")]


def spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    return f"{len(seconds)}, median {statistics.median(seconds) * 1e3:.0f} ms, longest {max(seconds) * 1e3:.0f} ms"


def listed(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


@app.command()
def kill(
    kills: Annotated[int, typer.Option(help="How many kills.")] = 200,
    procs: Annotated[int, typer.Option(help="Processes that write.")] = 4,
    seed: SeedOption = 1,
    reopen_s: Annotated[float, typer.Option(help="The longest that a reopen after a kill may take, in seconds.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Kill writers at random moments; after each kill everything acknowledged must be there, and nothing else."""
    from fuzz.kill import run

    begun = time.monotonic()
    try:
        tally = run(kills, procs, seed)
    except Wrong as wrong:
        typer.echo(f"FAILED (seed {seed}): {wrong}", err=True)
        raise typer.Exit(1) from wrong
    slow = [seconds for seconds in tally.open_s if seconds > reopen_s]
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "kills": tally.kills,
                    "kinds": dict(tally.kinds),
                    "processes_killed": tally.killed,
                    "stores": tally.stores,
                    "commits_acknowledged": tally.confirmed,
                    "lost": 0,
                    "reopens_s": [round(each, 4) for each in tally.open_s],
                    "joins_s": [round(each, 4) for each in tally.join_s],
                    "second_reopens": tally.second_opens,
                    "seconds": round(time.monotonic() - begun, 1),
                }
            )
        )
    else:
        typer.echo(
            f"{tally.kills} kills ({listed(tally.kinds)}), "
            f"{tally.killed} processes killed, {tally.stores} stores\n"
            f"{tally.confirmed} commits acknowledged: all there, byte for byte, nothing else\n"
            f"reopens with recovery: {spread(tally.open_s)}; joins beside writers: {spread(tally.join_s)}; "
            f"{tally.second_opens} second reopens after a write; {time.monotonic() - begun:.0f} s"
        )
    if slow:
        typer.echo(f"FAILED: {len(slow)} reopens took longer than {reopen_s} s", err=True)
        raise typer.Exit(1)


@app.command()
def powercut(
    cycles: Annotated[int, typer.Option(help="How many power cuts (cuts during recovery not counted).")] = 100,
    seed: SeedOption = 1,
    fs: Annotated[str, typer.Option(help="ext4 or xfs.")] = "ext4",
    as_json: JsonOption = False,
) -> None:
    """Cut the power of a real file system at random; everything acknowledged must be there, and nothing else."""
    from agentstore.testing.loopdisk import MKFS, why_not
    from fuzz.powercut import run

    if fs not in MKFS:
        typer.echo(f"--fs is one of {', '.join(MKFS)}", err=True)
        raise typer.Exit(2)
    missing = why_not(fs)
    if missing:
        typer.echo(f"skipped: {missing}", err=True)
        raise typer.Exit(77)
    begun = time.monotonic()
    try:
        tally = run(cycles, fs, seed)
    except Wrong as wrong:
        typer.echo(f"FAILED (seed {seed}): {wrong}", err=True)
        raise typer.Exit(1) from wrong
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "cycles": tally.cycles,
                    "kinds": dict(tally.kinds),
                    "cuts": tally.cuts,
                    "fs": fs,
                    "stores": tally.stores,
                    "commits_acknowledged": tally.confirmed,
                    "lost": 0,
                    "torn": tally.unconfirmed,
                    "reopens_s": [round(each, 4) for each in tally.open_s],
                    "seconds": round(time.monotonic() - begun, 1),
                }
            )
        )
    else:
        typer.echo(
            f"{tally.cycles} power cuts of {fs} ({listed(tally.kinds)}), "
            f"{tally.cuts - tally.cycles} more during recovery and after a write, {tally.stores} stores\n"
            f"{tally.confirmed} commits acknowledged: all there, byte for byte, nothing else; "
            f"{tally.unconfirmed} steps asked for and not confirmed were lost\n"
            f"reopens: {spread(tally.open_s)}; {time.monotonic() - begun:.0f} s"
        )


@app.command()
def copy(
    copies: Annotated[int, typer.Option(help="How many copies.")] = 100,
    seed: SeedOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Copy a store while it is written; a copy must open as what the store was, or be refused as damaged."""
    from fuzz.copying import run

    begun = time.monotonic()
    try:
        tally = run(copies, seed)
    except Wrong as wrong:
        typer.echo(f"FAILED (seed {seed}): {wrong}", err=True)
        raise typer.Exit(1) from wrong
    seconds = time.monotonic() - begun
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "copies": tally.copies,
                    "right": tally.right,
                    "refused": tally.refused,
                    "wrong": 0,
                    "stores": tally.stores,
                    "seconds": round(seconds, 1),
                }
            )
        )
    else:
        typer.echo(
            f"{tally.copies} copies of {tally.stores} stores that were written meanwhile: {tally.right} opened as "
            f"the store was, {tally.refused} were refused as damaged, none opened as anything else; {seconds:.0f} s"
        )


if __name__ == "__main__":
    app()
