"""`agentstore bench commit | load | threads | size | growth | compact`: where they run, and their tables."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from .bench import commit as commit_scenario
from .bench import compacting as compact_scenario
from .bench import growth as growth_scenario
from .bench import load as load_scenario
from .bench import size as size_scenario
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


def size(
    files: Annotated[list[str], typer.Argument(metavar="FILE.jsonl…", help="Transcripts, a chat message a line.")],
    where: Where = ".",
    peer_bytes_max: Annotated[
        int, typer.Option(min=0, help="LangGraph's SqliteSaver, if installed, stops at a file of this size.")
    ] = size_scenario.PEER_BYTES_MAX,
    json_output: JsonOutput = False,
) -> None:
    """What transcripts take on disk, one commit a message, before and after the offline job."""
    _readable(files)
    with _directory(where) as directory:
        result = size_scenario.run(directory, files, peer_bytes_max=peer_bytes_max)
    _show(result, json_output, _print_size)


def growth(
    where: Where = ".",
    messages: Annotated[str, typer.Option(help="Lengths of the threads.")] = "1000,10000,100000",
    json_output: JsonOutput = False,
) -> None:
    """What a message costs as its conversation grows; commits to a state of 10 MB beside one of 10 KB."""
    with _directory(where) as directory:
        result = growth_scenario.run(directory, counts=_numbers(messages))
    _show(result, json_output, _print_growth)


def compact(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE.jsonl…]", help="Transcripts to make the stores of.")
    ] = None,
    where: Where = ".",
    megabytes: Annotated[str, typer.Option(help="Sizes of the stores, as JSON.")] = "10,100",
    jobs: Annotated[str, typer.Option(help="Threads that compress.")] = "1,2",
    json_output: JsonOutput = False,
) -> None:
    """What the offline job costs as the store grows."""
    _readable(files or [])
    with _directory(where) as directory:
        result = compact_scenario.run(directory, files or [], megabytes=_numbers(megabytes), jobs=_numbers(jobs))
    _show(result, json_output, lambda found: _print_rows(found["rows"]))


COMMANDS = (commit, load, threads, size, growth, compact)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"numbers of 1 or more with commas between them, not {text!r}")
    return numbers


def _readable(files: list[str]) -> None:
    for file in files:
        if not os.path.isfile(file):
            raise typer.BadParameter(f"there is no file {file}")


def _print_rows(rows: list[dict[str, Any]]) -> None:
    """Ratios would be rounded to one digit as numbers: they are texts here."""
    print_table(
        [name.replace("_", " ") for name in rows[0]],
        [[f"{value:.2f}" if isinstance(value, float) else value for value in row.values()] for row in rows],
        empty="",
    )


def _print_size(result: dict[str, Any]) -> None:
    print_pairs([(name.replace("_", " "), result[name]) for name in ("transcripts", "messages", "json_bytes")])
    compacted = _sized(f"compacted in {result['compact_s']} s", result["compacted"])
    _print_rows([_sized("closed", result["closed"]), compacted])
    peer = result["langgraph"]
    if peer is None:
        console().print("LangGraph's SqliteSaver is not installed: pip install langgraph-checkpoint-sqlite")
    else:
        console().print(
            f"LangGraph's SqliteSaver, synchronous=FULL: {peer['puts']:,} puts of the {peer['transcripts']} smallest"
            f" transcripts, {peer['disk_bytes']:,} bytes, {peer['ratio']} x their JSON"
        )


def _sized(name: str, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "store": name,
        "disk bytes": found["disk_bytes"],
        "x JSON": f"{found['ratio']:.3f}",
        "load p50 ms": found["load_p50_ms"],
        "load max ms": found["load_max_ms"],
    }


def _print_growth(result: dict[str, Any]) -> None:
    _print_rows(result["rows"])
    print_pairs([(name.replace("_", " "), value) for name, value in result["state_size"].items()])


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
