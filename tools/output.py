"""What commands print: one JSON document for scripts, or lines and tables for people.

Text that came out of a store is never trusted to be printable: thread ids may hold control
characters, escape sequences and markup. People see them escaped, scripts get them exactly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .plain import to_json


def printable(text: str) -> str:
    """`text` with all that is not printable escaped, and backslashes doubled: one text, one printed form.

    >>> printable("red \\x1b[31m alert\\n")
    'red \\\\x1b[31m alert\\\\n'
    """
    return visible(text.replace("\\", "\\\\"))


def visible(text: str) -> str:
    """`text` with all that is not printable escaped, for sentences that may quote anything.

    >>> visible("thread 'a\\\\n': \\x07")
    "thread 'a\\\\n': \\\\x07"
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def console(*, stderr: bool = False) -> Console:
    """A console that never reads markup or emoji codes out of data, and keeps whole lines when its output is piped."""
    made = Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = 200
    return made


def print_json(value: object) -> None:
    """`value` as one JSON document. ASCII only: whatever the terminal's encoding is, ids come out exact."""
    sys.stdout.write(json.dumps(to_json(value), indent=2, allow_nan=False) + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """A table of `rows`, or the sentence `empty`. Numbers stand on the right."""
    made = [list(row) for row in rows]
    if not made:
        console().print(empty)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        numeric = all(row[number] is None or isinstance(row[number], int | float) for row in made)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in made:
        table.add_row(*(Text(cell(value)) for value in row))
    console().print(table, soft_wrap=False)


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Names with their values, one a line."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in pairs:
        table.add_row(Text(printable(name), style="bold"), Text(cell(value)))
    console().print(table, soft_wrap=False)


def cell(value: object) -> str:
    """One value of a table: nothing for None, thousands separated, text escaped.

    >>> cell(1234567), cell(None), cell(True), cell("a\\tb")
    ('1,234,567', '', 'yes', 'a\\\\tb')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return printable(str(value))


def timestamp(value: datetime | None) -> str:
    """A moment for people: UTC, to the second."""
    return "" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def shortened(text: str, limit: int = 100) -> str:
    """`text` on one printable line of at most `limit` characters.

    >>> shortened("x" * 200, 10)
    'xxxxxxxxx…'
    """
    line = printable(text[: limit + 1])
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
