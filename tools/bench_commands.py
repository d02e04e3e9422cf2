"""`agentstore bench commit | load | threads`: where they run, and their tables."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from .bench import commit as commit_scenario
from .bench import load as load_scenario
from .bench import threads as threads_scenario
from .options import JsonOutput
from .output import console, print_json, print_pairs, print_table

Where = Annotated[str, typer.Option("--dir", metavar="DIR", help="Measure on this file system; cleaned up afterwards.")]


def commit(
    where: Where = ".",
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of 25 commits of each contender.")] = 40,
    seconds: Annotated[float, typer.Option(min=0.05, help="How long many writers run at a time.")] = 2.0,
    json_output: JsonOutput = False,
) -> None:
    """One confirmed commit beside a bare durable write, SQLite and LMDB; many processes and threads on one store."""
    with _directory(where) as directory:
        result = commit_scenario.run(directory, rounds=rounds, seconds=seconds)
    _show(result, json_output, _print_commit)


def load(
    where: Where = ".",
    messages: Annotated[int, typer.Option(min=1, help="Length of the thread.")] = 10_000,
    json_output: JsonOutput = False,
) -> None:
    """Load a long thread, newest and older states; open stores whose writers were killed with a full log."""
    with _directory(where) as directory:
        result = load_scenario.run(directory, messages=messages)
    _show(result, json_output, _print_plain)


def threads(
    where: Where = ".",
    count: Annotated[int, typer.Option(min=1, help="How many threads.")] = 100_000,
    json_output: JsonOutput = False,
) -> None:
    """Open, read and list a store with very many threads."""
    with _directory(where) as directory:
        result = threads_scenario.run(directory, threads=count)
    _show(result, json_output, _print_plain)


COMMANDS = (commit, load, threads)


@contextmanager
def _directory(where: str) -> Iterator[str]:
    try:
        with tempfile.TemporaryDirectory(prefix=".agentstore-bench-", dir=where) as directory:
            yield directory
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        if error.filename and str(error.filename).startswith(where):
            raise typer.BadParameter(f"cannot measure in {where}: {error.strerror}", param_hint="--dir") from error
        raise


def _show(result: dict[str, Any], json_output: bool, table: Callable[[dict[str, Any]], None]) -> None:
    if json_output:
        print_json(result)
        return
    console().print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    table(result)


def _print_plain(result: dict[str, Any]) -> None:
    rows = [(name, value) for name, value in result.items() if name not in ("scenario", "machine", "open_after_kill")]
    rows += [
        ("open after a kill with a full log, ms", opened["open_ms"]) for opened in result.get("open_after_kill", [])
    ]
    print_pairs([(name.replace("_", " "), value) for name, value in rows])


def _print_commit(result: dict[str, Any]) -> None:
    syncs = result["syncs"] or {}
    print_table(
        ["contender", "p50 µs", "p99 µs", "x bare", "CPU µs", "beyond bare", "syncs", "settings"],
        [
            (
                row["name"],
                row["p50_us"],
                row["p99_us"],
                f"{row['p50_ratio']:.2f}",
                row["cpu_us"],
                row["cpu_beyond_bare_us"],
                _counted(syncs.get(row["name"])),
                row["settings"],
            )
            for row in result["single"]
        ],
        empty="",
    )
    print_table(
        ["many writers, one store", "commits/s", "bare loop/s", "ratio", "p50 µs", "p99 µs", "CPU µs", "syncs"],
        [
            (
                f"{many['writers']} {kind}",
                many["commits_per_s"],
                many["bare_per_s"],
                f"{many['ratio']:.2f}",
                many["p50_us"],
                many["p99_us"],
                many["cpu_us"],
                _counted(syncs.get(f"agentstore, {many['writers']} {kind}")),
            )
            for kind, many in (("processes", result["processes"]), ("threads", result["threads"]))
        ],
        empty="",
    )
    if result["syncs"] is None:
        console().print("Syncs were not counted: strace is not there or may not trace.")


def _counted(counts: dict[str, float] | None) -> str:
    return "" if counts is None else ", ".join(f"{number:g} {call}" for call, number in counts.items())
