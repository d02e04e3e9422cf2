"""`agentstore export` and `agentstore import`: their progress and what they print."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from agentstore import Store

from .export import Exported, export
from .export_sqlite import export_sqlite
from .importing import Imported, import_lines, import_transcript, size_of
from .options import JsonOutput, existing_store
from .output import console, print_json, visible
from .replacement import OutputFailed, failed, is_special, replacing
from .transcript import read_transcripts

STDOUT = "-"


def export_command(
    store: Annotated[str, typer.Argument(metavar="DIR", help="The store; it may be in use.")],
    out: Annotated[str, typer.Argument(metavar="[OUT]", help="The file of --jsonl; - is standard output.")] = STDOUT,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="One JSON line for each record; the default.")] = False,
    sqlite: Annotated[
        str | None, typer.Option(metavar="FILE", help="An SQLite file with tables of all, for queries.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="--jsonl: the state of every checkpoint, not only of the head.")
    ] = False,
) -> None:
    """Write a store as JSON lines, which `agentstore import` reads, or as an SQLite file.

    A file is there whole or as it was before. Not written: leases, fencing tokens, what `Store.once` recorded, the
    texts of duplicate receipts; --jsonl also leaves out events.
    """
    if sqlite is not None and (jsonl or everything or out != STDOUT):
        raise typer.BadParameter("--sqlite FILE goes without --jsonl, --all and OUT")
    with existing_store(store) as opened:
        if sqlite is not None:
            done = _to_sqlite(opened, sqlite)
        else:
            with _progress(opened.stats()["threads"], "threads", out == STDOUT) as advance:
                done = _to_lines(opened, out, everything, lambda: advance(1))
    said = console(stderr=True)
    said.print(
        f"{done.threads:,} threads, {done.checkpoints:,} checkpoints, {done.effects:,} effects, {done.pins:,} pins."
    )
    if done.once:
        said.print(f"Not written: {done.once:,} records of Store.once, which belong to no thread.")
    if done.duplicates:
        said.print(f"Not written: {done.duplicates:,} duplicate receipts, but for their number.")


def _to_sqlite(store: Store, path: str) -> Exported:
    try:
        with (
            replacing(path, store.path) as partial,
            _progress(store.stats()["threads"], "threads", False) as advance,
        ):
            return export_sqlite(store, partial, lambda: advance(1))
    except sqlite3.Error as error:
        raise OutputFailed(f"{path} could not be written: {error}; look at the disk") from error


def _to_lines(store: Store, out: str, everything: bool, advance: Callable[[], object]) -> Exported:
    if out == STDOUT:
        buffer = sys.stdout
        return export(store, lambda line: buffer.write(line + "\n"), everything=everything, on_thread=advance)
    if is_special(out):  # a pipe or a device has no name to be replaced
        try:
            with open(out, "w", encoding="utf-8", newline="\n") as file:
                return export(store, lambda line: file.write(line + "\n"), everything=everything, on_thread=advance)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise failed(out, error) from error
    with replacing(out, store.path) as partial, open(partial, "w", encoding="utf-8", newline="\n") as file:
        return export(store, lambda line: file.write(line + "\n"), everything=everything, on_thread=advance)


def import_command(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="What `agentstore export --jsonl` wrote.")],
    store: Annotated[str, typer.Argument(metavar="DIR", help="The store; it is made if it is not there.")],
    transcripts: Annotated[
        bool, typer.Option("--transcripts", help="FILEs are transcripts: one OpenAI chat message a line.")
    ] = False,
    json_output: JsonOutput = False,
) -> None:
    """Read exported lines into a store: the same threads, seqs, states, times, effects and receipts.

    A thread is there once all of its lines were read, or not at all. Threads that are there already are left alone, so
    an import that was killed is made again. With --transcripts each file becomes a thread with one commit a message.
    """
    done = Imported()
    if transcripts:
        read = read_transcripts(files)
        with (
            Store.open(store, background=False) as opened,
            _progress(sum(len(one.messages) for one in read), "messages", json_output) as advance,
        ):
            for transcript in read:
                import_transcript(opened, transcript, done, lambda: advance(1))
    else:
        with (
            Store.open(store, background=False) as opened,
            _progress(sum(map(size_of, files)), "bytes", json_output) as advance,
        ):
            for file in files:
                import_lines(opened, file, done, advance)
    if json_output:
        print_json({"ok": True, **asdict(done)})
        return
    console().print(
        f"{done.threads:,} threads, {done.checkpoints:,} checkpoints, {done.effects:,} effects, {done.pins:,} pins; "
        f"{done.there:,} threads were there already."
    )
    if done.bare:
        console().print(f"{done.bare:,} checkpoints have no state in the file (exported without --all): left out.")
    if done.opened:
        console().print(f"{done.opened:,} calls have no receipt: a person decides, see `agentstore resolve`.")


@contextmanager
def _progress(total: int, what: str, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal; the function moves it."""
    out = console(stderr=True)
    counted = TaskProgressColumn() if what == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), counted, TimeElapsedColumn())
    with Progress(*columns, console=out, disable=quiet or not out.is_terminal, transient=True) as progress:
        task = progress.add_task(visible(what), total=total)
        yield lambda count: progress.update(task, advance=count)


COMMANDS = (export_command, import_command)
