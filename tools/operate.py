"""The operator's commands: look at a store, answer a waiting thread, check every invariant."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonOutput, StorePath

EXIT_PROBLEMS = 1
"""Exit status of `verify` when an invariant does not hold."""


def ls(
    store: StorePath,
    prefix: Annotated[str, typer.Option(help="Only thread ids that begin so.")] = "",
    order: Annotated[str, typer.Option(help="name, or created (newest first).")] = "name",
    limit: Annotated[int, typer.Option(min=1, help="At most so many threads.")] = 50,
    json_output: JsonOutput = False,
) -> None:
    """List threads."""
