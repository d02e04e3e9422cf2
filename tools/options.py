"""Options that several commands share."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from agentstore import Store

STORE_VARIABLE = "AGENTSTORE_DIR"
STORE_DEFAULT = "./agents"

StorePath = Annotated[
    str,
    typer.Option("--store", envvar=STORE_VARIABLE, metavar="DIR", help="The store's directory.", show_default=True),
]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print one JSON document, for scripts.")]
ThreadId = Annotated[str, typer.Argument(metavar="THREAD", help="The thread's id, exactly.")]
JsonId = Annotated[
    bool,
    typer.Option("--json-id", help="THREAD is a JSON string, as `ls --json` prints it: for any id there is."),
]


def thread_id_of(argument: str, json_id: bool) -> str:
    """The thread id that a user gave.

    >>> thread_id_of('"a\\\\u0000b"', json_id=True)
    'a\\x00b'
    """
    if not json_id:
        # Bytes of the command line that are not UTF-8 arrive as lone surrogates.
        return os.fsencode(argument).decode("utf-8", "backslashreplace")
    try:
        value = json.loads(argument)
    except ValueError as error:
        raise typer.BadParameter(f"--json-id wants a JSON string such as '\"user-42\\\\n\"': {error}") from error
    if not isinstance(value, str):
        raise typer.BadParameter("--json-id wants a JSON string, with its quotation marks")
    return value


def existing_store(path: str, *, readonly: bool = True) -> Store:
    """The store at `path`; never makes one. Raises the errors of `Store.open`."""
    return Store.open(path, create=False, readonly=readonly)
