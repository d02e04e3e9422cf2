"""The command line, `agentstore`: what its commands are and how they end.

Exit status: 0 done; 1 done, and the answer is no (a check failed, no such thread); 2 the command could not be
carried out (wrong usage, not a store, a store that is newer or damaged); 130 interrupted; 143 terminated.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, ParamSpec

import typer

from agentstore.errors import (
    AgentStoreError,
    CheckpointNotFound,
    RuntimeStateError,
    ThreadGone,
    ThreadNotFound,
)

from . import (
    backup_command,
    bench_commands,
    compact_command,
    demo_command,
    doctor_command,
    export_commands,
    operate,
    replay_command,
    salvage_command,
)
from .output import visible

EXIT_NO = 1
EXIT_FAILED = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

_NO = (ThreadNotFound, ThreadGone, CheckpointNotFound, RuntimeStateError)
"""Errors that answer a question about a store that is fine."""

OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""Of a raw OSError without a path: the store's own have types, so this is of what was printed."""

P = ParamSpec("P")

app = typer.Typer(
    name="agentstore",
    help="A checkpoint store on a write-ahead log for long-running agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agentstore {metadata.version('agentstore-wal')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _drop_output() -> None:
    """Without this Python complains once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def ending_well(command: Callable[P, None]) -> Callable[P, None]:
    """`command` with the library's errors as one sentence on stderr and an exit status, never a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except AgentStoreError as error:
            sentence = visible(" ".join(str(error).split())) or type(error).__name__
            print(f"agentstore: {sentence}", file=sys.stderr)
            for line in getattr(error, "details", "").splitlines():
                print(f"    {visible(line)}", file=sys.stderr)
            raise typer.Exit(EXIT_NO if isinstance(error, _NO) else EXIT_FAILED) from error
        except BrokenPipeError:
            _drop_output()  # `agentstore ls | head`: nobody reads on
            raise typer.Exit(0) from None
        except OSError as error:
            if error.filename is not None or error.errno not in OUTPUT_ERRORS:
                raise
            _drop_output()
            print(f"agentstore: the output could not be written: {error.strerror}", file=sys.stderr)
            raise typer.Exit(EXIT_FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return run


def _add(to: typer.Typer, *commands: Callable[..., None]) -> None:
    for command in commands:
        # `import` is a word of Python: the function that does it is called import_command.
        to.command(command.__name__.removesuffix("_command"))(ending_well(command))


_add(app, demo_command.demo, replay_command.replay, *operate.COMMANDS, *compact_command.COMMANDS)
_add(app, *backup_command.COMMANDS, *export_commands.COMMANDS, *doctor_command.COMMANDS, *salvage_command.COMMANDS)
_bench = typer.Typer(help="Measure the store against its peers, side by side.", no_args_is_help=True)
_add(_bench, *bench_commands.COMMANDS)
app.add_typer(_bench, name="bench")


def _terminate(_signal: int, _frame: object) -> None:
    raise SystemExit(EXIT_TERMINATED)


def main() -> None:
    """The console script."""
    # Without this the workers of a demo or a replay, and temporary directories, would outlive a SIGTERM.
    signal.signal(signal.SIGTERM, _terminate)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as in `agentstore ls >&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its escape, not a traceback.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # both are text files in a console script
    app(prog_name="agentstore")


if __name__ == "__main__":
    main()
