"""``python -m fuzz NAME --seconds S --seed N``: exit status 0 only if every promise was kept.

It ends with 1 where one was not: the smallest case found is then in a file that ``python -m fuzz repro FILE`` plays
again. It ends with 77 where the machine cannot do it.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated

import typer

from fuzz.campaign import listed
from fuzz.crew import Wrong
from fuzz.driving import CAMPAIGNS, MISSING, drive_named, play_again

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)

SeedOption = Annotated[int, typer.Option(help="What is drawn (not when it hits) is the same for the same seed.")]
SecondsOption = Annotated[float, typer.Option(help="How long.")]
InsteadOption = Annotated[float | None, typer.Option("--seconds", help="How long, in place of how many.")]
CasesOption = Annotated[int | None, typer.Option(help="At most so many cases.")]
OutOption = Annotated[str, typer.Option(help="The directory for the file of a case that failed.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the summary.")]


def spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    return f"{len(seconds)}, median {statistics.median(seconds) * 1e3:.0f} ms, longest {max(seconds) * 1e3:.0f} ms"


@app.command()
def kill(
    kills: Annotated[int, typer.Option(help="How many kills.")] = 200,
    procs: Annotated[int, typer.Option(help="Processes that write.")] = 4,
    seed: SeedOption = 1,
    reopen_s: Annotated[float, typer.Option(help="The longest that a reopen after a kill may take, in seconds.")] = 1.0,
    seconds: InsteadOption = None,
    as_json: JsonOption = False,
) -> None:
    """Kill writers at random moments; after each kill everything acknowledged must be there, and nothing else."""
    if seconds is not None:
        raise typer.Exit(drive_named("kill", seed, seconds, None, out=".", as_json=as_json))
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
    seconds: InsteadOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cut the power of a real file system at random; everything acknowledged must be there, and nothing else."""
    from agentstore.testing.loopdisk import MKFS, why_not
    from fuzz.powercut import run

    if fs not in MKFS:
        typer.echo(f"--fs is one of {', '.join(MKFS)}", err=True)
        raise typer.Exit(2)
    if seconds is not None:
        raise typer.Exit(
            drive_named("powercut" if fs == "ext4" else f"powercut-{fs}", seed, seconds, None, out=".", as_json=as_json)
        )
    missing = why_not(fs)
    if missing:
        typer.echo(f"skipped: {missing}", err=True)
        raise typer.Exit(MISSING)
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
    seconds: InsteadOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a store while it is written; a copy must open as what the store was, or be refused as damaged."""
    if seconds is not None:
        raise typer.Exit(drive_named("copy", seed, seconds, None, out=".", as_json=as_json))
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


def _register(name: str, about: str) -> None:
    @app.command(name, help=about)
    def command(
        seconds: SecondsOption = 60.0,
        cases: CasesOption = None,
        seed: SeedOption = 1,
        out: OutOption = ".",
        as_json: JsonOption = False,
    ) -> None:
        raise typer.Exit(drive_named(name, seed, seconds, cases, out=out, as_json=as_json))


_register("disk", "Stories on a simulated disk: power cuts, torn and lost writes, failing calls, lying syncs.")
_register("states", "Every crash state of every story of one and two steps at each phase of a store's life.")
_register("strace", "Crash states made from what strace saw of a real process; calls that fail, lie and kill.")
_register("fulldisk", "Stories on a file system that is really full.")
_register("interleave", "Orders of short programs of several processes, and kills at every point of them.")


@app.command("all")
def everything(
    seconds: Annotated[float, typer.Option(help="How long, each.")] = 60.0,
    seed: SeedOption = 1,
    out: OutOption = ".",
    as_json: JsonOption = False,
) -> None:
    """Each of them in turn; those that the machine cannot do are skipped."""
    ends = [drive_named(name, seed, seconds, None, out=out, as_json=as_json) for name in CAMPAIGNS]
    raise typer.Exit(max((end for end in ends if end != MISSING), default=MISSING))


@app.command()
def repro(file: Annotated[str, typer.Argument(help="What a campaign that failed wrote.")]) -> None:
    """Run the case again that failed: exit status 1 if it fails again."""
    try:
        raise typer.Exit(play_again(file))
    except (OSError, ValueError, KeyError) as error:
        typer.echo(f"{file}: {error}", err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
