"""`agentstore compact`: the offline job, for cron."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from agentstore import Retention
from agentstore.compaction import COLD_LEVEL, Compacted, as_json
from agentstore.compaction import compact as run
from agentstore.retention import age_of

from .options import JsonOutput
from .output import console, print_json, print_table, printable, shortened


def _retention(
    keep_last: int | None, keep: str | None, keep_every: int | None, max_age: str | None, finished_after: str | None
) -> Retention | None:
    """The rule that the options make; None if there are none."""
    if all(each is None for each in (keep_last, keep, keep_every, max_age, finished_after)):
        return None
    if keep_last is None and any(each is not None for each in (keep, keep_every, max_age)):
        raise typer.BadParameter(
            "--keep, --keep-every and --max-age need --keep-last: without it every checkpoint stays"
        )
    more: dict[str, Any] = {}
    if keep is not None:
        more["keep"] = [reason for reason in keep.split(",") if reason]
    try:
        return Retention(
            keep_last=keep_last,
            keep_every=keep_every,
            max_age=None if max_age is None else age_of(max_age),
            finished_after=None if finished_after is None else age_of(finished_after),
            **more,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def compact(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The store.")],
    keep_last: Annotated[int | None, typer.Option(min=1, help="Only so many checkpoints stay of a thread …")] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="REASONS", help="… and those of these reasons (plan,approval,final).")
    ] = None,
    keep_every: Annotated[int | None, typer.Option(min=1, help="… and those whose step it divides.")] = None,
    max_age: Annotated[
        str | None, typer.Option(metavar="AGE", help="What stays by reason or step goes when it is older (30d).")
    ] = None,
    finished_after: Annotated[
        str | None, typer.Option(metavar="AGE", help="Threads COMPLETED or FAILED for longer are deleted (7d).")
    ] = None,
    summarize_over: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="TOKENS", help="First summarize conversations that have more tokens, to half as many."
        ),
    ] = None,
    level: Annotated[int, typer.Option(min=1, max=19, help="Of zstd.")] = COLD_LEVEL,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="So many threads compress.")] = 1,
    online: Annotated[bool, typer.Option("--online", help="Beside programs that have the store open.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what retention would remove.")] = False,
    json_output: JsonOutput = False,
) -> None:
    """Apply retention, pack what is cold, and give disk space back. May be killed and run again.

    Without options for it, the rules that are kept in the store apply. Exit status 2 while another job runs, or
    somebody has the store open (without --online).
    """
    if summarize_over is not None and online:
        raise typer.BadParameter("--summarize-over moves heads: it needs the store closed, so not with --online")
    rule = _retention(keep_last, keep, keep_every, max_age, finished_after)
    progress = _Progress()
    try:
        done = run(
            directory,
            retention=rule,
            level=level,
            jobs=jobs,
            online=online,
            dry_run=dry_run,
            summarize_over=summarize_over,
            progress=progress.show,
        )
    finally:
        progress.end()
    if json_output:
        print_json(as_json(done))
    elif dry_run:
        _print_expired(done)
    else:
        _print_done(done)
    if not json_output:
        for each in done.damaged:
            console().print(printable(f"Left as it is: {each}"), style="red")
    if done.damaged:
        raise typer.Exit(1)


class _Progress:
    """One line on a terminal, rewritten; nothing elsewhere."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, what: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            self._shown = True
            print(f"\r{what}: {done:,}{f' of {total:,}' if total else ''} threads", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown:
            print(file=sys.stderr)


def _print_expired(done: Compacted) -> None:
    print_table(
        ["thread", "would go", "stay", "bytes", "rule"],
        [
            (
                each.thread,
                "all of it" if each.whole else len(each.removed),
                len(each.kept),
                each.bytes,
                shortened(next(iter(each.removed.values()), ""), 80),
            )
            for each in done.expired
        ],
        empty="Nothing would go.",
    )


def _print_done(done: Compacted) -> None:
    out = console()
    removed = sum(len(each.removed) for each in done.expired)
    out.print(f"Removed {removed:,} checkpoints of {len(done.expired):,} threads; wrote {done.packs:,} packs.")
    if done.summarized:
        out.print(f"Summarized {sum(done.summarized.values()):,} messages of {len(done.summarized):,} threads.")
    names = sorted(done.kinds_before.keys() | done.kinds_after.keys())
    print_table(
        ["kind", "bytes before", "bytes after"],
        [
            *((name, done.kinds_before.get(name, 0), done.kinds_after.get(name, 0)) for name in names),
            ("on disk", done.bytes_before, done.bytes_after),
        ],
        empty="",
    )
    if not done.shrunk:
        out.print("Somebody has the store open: its files give their free pages back once it is closed by all.")


COMMANDS = (compact,)
