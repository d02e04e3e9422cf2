"""Which checkpoints stay: the rule that a user gives, and what it says of a thread. Nothing here removes anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from agentstore import records
from agentstore.codec import cbor
from agentstore.errors import CorruptionError, LimitExceeded
from agentstore.packs import NO_PARENT, Entry
from agentstore.records import REASON_CODES

KEEP_DEFAULT: Final = frozenset({"plan", "approval", "final"})
FINISHED: Final = frozenset({"COMPLETED", "FAILED"})
"""Statuses of threads that `finished_after` deletes."""

_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints of a thread stay: the last N and key nodes.

    A checkpoint stays if it is the head, is held (the newest decision on the head's line, the decision of a call
    that has no receipt), is pinned, is one of the last `keep_last`, has a reason in `keep`, or has a step that
    `keep_every` divides. `max_age` takes away older ones that stay by `keep` or `keep_every` alone. `finished_after`
    deletes whole threads whose head has the status COMPLETED or FAILED and is older, unless a call of theirs is open or
    a checkpoint is pinned.

    `keep_last`: 1 or more, or None for all. `keep`: reasons (`agentstore.REASONS`). `keep_every`: steps, 1 or more, or
    None. `max_age`, `finished_after`: durations, or None for never. `ValueError`, `TypeError` for anything else.

    >>> Retention(keep_last=20, keep={"final"}, max_age=timedelta(days=30))
    Retention(keep_last=20, keep={'final'}, max_age=30 days, 0:00:00)
    """

    keep_last: int | None = 20
    keep: frozenset[str] = field(default=KEEP_DEFAULT)
    keep_every: int | None = None
    max_age: timedelta | None = None
    finished_after: timedelta | None = None

    def __init__(
        self,
        keep_last: int | None = 20,
        keep: Iterable[str] = KEEP_DEFAULT,
        keep_every: int | None = None,
        max_age: timedelta | None = None,
        finished_after: timedelta | None = None,
    ) -> None:
        if isinstance(keep, str):
            raise TypeError(f"keep is a set of reasons, not the text {keep!r}")
        reasons = frozenset(keep)
        for reason in reasons:
            if reason not in REASON_CODES:
                raise ValueError(f"there is no reason {reason!r}; the reasons are {', '.join(REASON_CODES)}")
        for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
            if number is not None and (number.__class__ is not int or not 1 <= number < 1 << 62):
                raise ValueError(f"{name} is an int of 1 or more, or None, not {number!r}")
        for name, age in (("max_age", max_age), ("finished_after", finished_after)):
            if age is not None and (not isinstance(age, timedelta) or age < timedelta(0)):
                raise ValueError(f"{name} is a timedelta of 0 or more, or None, not {age!r}")
        object.__setattr__(self, "keep_last", keep_last)
        object.__setattr__(self, "keep", reasons)
        object.__setattr__(self, "keep_every", keep_every)
        object.__setattr__(self, "max_age", max_age)
        object.__setattr__(self, "finished_after", finished_after)

    def __repr__(self) -> str:
        parts = [f"keep_last={self.keep_last}", f"keep={{{', '.join(repr(one) for one in sorted(self.keep))}}}"]
        if self.keep_every is not None:
            parts.append(f"keep_every={self.keep_every}")
        for name, age in (("max_age", self.max_age), ("finished_after", self.finished_after)):
            if age is not None:
                parts.append(f"{name}={age}")
        return f"Retention({', '.join(parts)})"

    # --- as a record -------------------------------------------------------------------

    def encode(self) -> bytes:
        """The record of a rule: CBOR of ``[1, keep_last, [reason code, …], keep_every, max_age, finished_after]``,
        ages in microseconds."""
        return records.pack(
            [
                records.VERSION,
                self.keep_last,
                sorted(REASON_CODES[reason] for reason in self.keep),
                self.keep_every,
                None if self.max_age is None else self.max_age // _MICROSECOND,
                None if self.finished_after is None else self.finished_after // _MICROSECOND,
            ]
        )

    @classmethod
    def decode(cls, raw: bytes, where: str) -> Retention:
        """The rule of a record; CorruptionError if it is damaged."""
        parts = records.unpack(raw, where)
        try:
            version, last, codes, every, age, finished = parts
            if version != records.VERSION:
                raise ValueError(f"version {version}")
            if any(code.__class__ is not int or code < 0 for code in codes):
                raise ValueError("a reason is not a number")
            return cls(
                last,
                [records.REASONS[code] for code in codes],
                every,
                None if age is None else timedelta(microseconds=age),
                None if finished is None else timedelta(microseconds=finished),
            )
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            raise CorruptionError(f"{where}: the retention rule is damaged: {error}") from error

    # --- what it says ------------------------------------------------------------------

    def why_kept(self, entries: Iterable[Entry], *, head: int, held: Mapping[int, str], now_us: int) -> dict[int, str]:
        """Why each checkpoint that stays does, by seq. `entries` ascending; `held`: those that stay whatever the rule.

        O(checkpoints).
        """
        ordered = list(entries)
        newest = {entry.seq for entry in (ordered if self.keep_last is None else ordered[-self.keep_last :])}
        oldest_us = None if self.max_age is None else now_us - self.max_age // _MICROSECOND
        kept: dict[int, str] = {}
        for entry in ordered:
            why = "head" if entry.seq == head else held.get(entry.seq)
            if why is None and entry.seq in newest:
                why = "every one stays" if self.keep_last is None else f"one of the last {self.keep_last}"
            if why is None and (oldest_us is None or entry.created_us >= oldest_us):
                why = self._key_node(entry)
            if why is not None:
                kept[entry.seq] = why
        return kept

    def _key_node(self, entry: Entry) -> str | None:
        if entry.reason in self.keep:
            return f"reason {entry.reason}"
        if self.keep_every is not None:
            step = step_and_status(entry)[0]
            if step is not None and step % self.keep_every == 0:
                return f"step {step}"
        return None

    def is_over(self, head: Entry, now_us: int) -> bool:
        """Whether the whole thread goes, whose head this is."""
        if self.finished_after is None or step_and_status(head)[1] not in FINISHED:
            return False
        return head.created_us < now_us - self.finished_after // _MICROSECOND


def step_and_status(entry: Entry) -> tuple[int | None, str | None]:
    """What the meta part of a checkpoint says. CorruptionError."""
    if not entry.meta:
        return None, None
    try:
        step, status, _ = cbor.decode(entry.meta)
    except (CorruptionError, LimitExceeded, ValueError, TypeError) as error:
        raise CorruptionError(f"checkpoint {entry.seq}: its step and status are damaged: {error}") from error
    return step, status


def kept_parents(entries: Iterable[Entry], kept: Mapping[int, str]) -> dict[int, int]:
    """The nearest kept ancestor of each kept checkpoint, or `NO_PARENT`. `entries` ascending. O(checkpoints)."""
    nearest: dict[int, int] = {}
    parents: dict[int, int] = {}
    for entry in entries:
        above = NO_PARENT if entry.parent == NO_PARENT else nearest.get(entry.parent, NO_PARENT)
        if entry.seq in kept:
            parents[entry.seq] = above
            nearest[entry.seq] = entry.seq
        else:
            nearest[entry.seq] = above
    return parents


_AGE = re.compile(r"(\d+)([smhdw])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def age_of(text: str) -> timedelta:
    """A duration as commands take it: a number and one of s, m, h, d, w. ValueError.

    >>> age_of("30d")
    datetime.timedelta(days=30)
    """
    found = _AGE.fullmatch(text)
    if found is None:
        raise ValueError(f"an age is a number and one of s, m, h, d, w, as in 30d, not {text!r}")
    try:
        return timedelta(**{_UNITS[found[2]]: int(found[1])})
    except OverflowError:
        raise ValueError(f"an age of {text} is longer than there are days to count") from None
