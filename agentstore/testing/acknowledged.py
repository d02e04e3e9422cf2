"""What writers were promised: a log that each keeps outside the store, to hold the store to after a crash.

One file per writer, one line per event, each line one unbuffered ``write``: what was written
survives the death of its process, and of the file system that the store is on. The lines::

    p <pid>            a process goes on with this writer
    a <n>              step n is about to be asked for
    c <n> <lsn>        step n is confirmed
    s <writer> <n>     a reader saw step n of another writer
    e <text>           the process gave up, and why
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field


class Diary:
    """The writing side. For one thread."""

    def __init__(self, directory: str, writer: str) -> None:
        self.writer = writer
        self._fd = os.open(
            os.path.join(directory, writer), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._line(f"p {os.getpid()}")

    def _line(self, text: str) -> None:
        os.write(self._fd, text.encode() + b"\n")

    def asked(self, step: int) -> None:
        self._line(f"a {step}")

    def confirmed(self, step: int, lsn: int) -> None:
        self._line(f"c {step} {lsn}")

    def saw(self, writer: str, step: int) -> None:
        self._line(f"s {writer} {step}")

    def gave_up(self, why: str) -> None:
        self._line("e " + " ".join(why.split()))

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class Promise:
    """What the diary of one writer says."""

    writer: str
    pid: int = 0
    """Of the last process that wrote."""
    asked: int = -1
    """The highest step that was ever asked for."""
    confirmed: int = -1
    """The highest step that was acknowledged."""
    confirmations: int = 0
    lsn: int = 0
    """The highest LSN that was acknowledged."""
    saw: dict[str, int] = field(default_factory=dict)
    """The highest step of each other writer that this one saw in a snapshot."""
    gave_up: list[str] = field(default_factory=list)


def read_diary(directory: str, writer: str) -> Promise:
    """What `writer` was promised. A last line that its death cut short does not count."""
    promise = Promise(writer)
    with open(os.path.join(directory, writer), "rb") as file:
        text = file.read()
    for line in text[: text.rfind(b"\n") + 1].decode().splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "p":
            promise.pid = int(rest)
        elif kind == "a":
            promise.asked = max(promise.asked, int(rest))
        elif kind == "c":
            step, lsn = (int(word) for word in rest.split())
            promise.confirmed = max(promise.confirmed, step)
            promise.lsn = max(promise.lsn, lsn)
            promise.confirmations += 1
        elif kind == "s":
            writer, step_text = rest.split()
            promise.saw[writer] = max(promise.saw.get(writer, -1), int(step_text))
        elif kind == "e":
            promise.gave_up.append(rest)
    return promise


def read_diaries(directory: str) -> dict[str, Promise]:
    """All diaries in `directory`, by writer."""
    return {name: read_diary(directory, name) for name in sorted(os.listdir(directory))}
