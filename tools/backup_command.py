"""`agentstore backup` and `agentstore restore`: what they print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from agentstore.backup import Copied
from agentstore.backup import restore as restore_copy

from .options import JsonOutput, existing_store
from .output import console, print_json, printable


def backup(
    store: Annotated[str, typer.Argument(metavar="DIR", help="The store; it may be in use.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A new directory, on a local file system.")],
    json_output: JsonOutput = False,
) -> None:
    """Copy a store, also while others write to it. The copy is checked before it gets its name.

    Everything that was confirmed when the command began is in the copy, which is a store that opens. DEST must not
    exist, or be an empty directory. A copy that is killed leaves only DEST's hidden .partial directory, which the next
    one removes.
    """
    with existing_store(store) as opened, _steps() as tell:
        copied = opened.backup(dest, on_step=tell)
    _report(copied, "backup", json_output)


def restore(
    backup: Annotated[str, typer.Argument(metavar="BACKUP", help="A copy that `agentstore backup` made.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The store's new directory.")],
    json_output: JsonOutput = False,
) -> None:
    """Make a store out of a backup, which is checked before, as the store is after. DEST must not exist, or be empty.

    The restored store is the same store at an earlier time: what happened since the backup is not in it.
    """
    with _steps() as tell:
        copied = restore_copy(backup, dest, on_step=tell)
    _report(copied, "restore", json_output)


@contextmanager
def _steps() -> Iterator[Callable[[str], None]]:
    """What is being done, as a spinner on stderr if that is a terminal."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda step: None
        return
    with out.status("opening") as status:
        yield status.update


def _report(copied: Copied, what: str, json_output: bool) -> None:
    if json_output:
        print_json(
            {
                "ok": True,
                "path": copied.path,
                "bytes": copied.bytes,
                "threads": copied.threads,
                "lsn": copied.lsn,
            }
        )
        return
    done = "Backed up to" if what == "backup" else "Restored to"
    console().print(
        f"{done} {printable(copied.path)}: {copied.threads:,} threads, {copied.bytes:,} bytes, "
        f"up to LSN {copied.lsn:,}; every invariant holds."
    )


COMMANDS = (backup, restore)
