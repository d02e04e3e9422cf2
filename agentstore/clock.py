"""Time and the identity of processes: the one seam for both.

Whatever expires (leases, the deadlines of effects) is measured on CLOCK_BOOTTIME together with the
boot id, never on wall time: wall time jumps back, CLOCK_MONOTONIC stands still while the machine
sleeps, and either would let two workers believe that the same lease is theirs. Wall time only
labels what people read.

A process is named by four numbers that nothing reuses together: boot id, inode of its pid namespace,
pid, start time of the pid. That is enough to *prove* that it is dead, which is all that recovery may act on;
"I cannot see it" is never a proof.

Code asks `current()` for the clock at each use. Tests put another one there with `using`;
`agentstore.testing.manual_clock` has one whose time moves only when it is told to.

>>> clock = current()
>>> clock.provably_dead(clock.owner())
False
>>> clock.provably_dead(clock.owner()._replace(boot_id=bytes(16)))   # of a boot before this one
True
"""

from __future__ import annotations

import os
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from agentstore.errors import CorruptionError, UnsupportedPlatform

NS_PER_S = 1_000_000_000

_OWNER = struct.Struct(">16sQIQ")
assert _OWNER.size == 36


class Owner(NamedTuple):
    """One process, for as long as its machine is up.

    `pid_namespace` 0 and `start_ticks` 0 mean *not known*; what is not known never proves anything.
    """

    boot_id: bytes
    """16 bytes: the kernel's random uuid of this boot."""
    pid_namespace: int
    """Inode of the pid namespace that `pid` is a number of."""
    pid: int
    start_ticks: int
    """Start time of the process in clock ticks since boot, as /proc/PID/stat has it."""

    def pack(self) -> bytes:
        """36 bytes, big-endian: boot id, namespace, pid, start."""
        return _OWNER.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Owner:
        """The owner that `pack` wrote; CorruptionError if the bytes are not one.

        >>> owner = current().owner()
        >>> Owner.unpack(owner.pack()) == owner
        True
        """
        if len(data) != _OWNER.size:
            raise CorruptionError(f"an owner has {_OWNER.size} bytes, not {len(data)}; run `agentstore verify`")
        return cls(*_OWNER.unpack(data))

    def __str__(self) -> str:
        return f"pid {self.pid}"


class Clock(Protocol):
    """What the store asks about time and processes."""

    def boottime_ns(self) -> int:
        """CLOCK_BOOTTIME in nanoseconds: goes on while the machine sleeps, starts anew at each boot."""

    def wall_ns(self) -> int:
        """Unix time in nanoseconds. A label for people: nothing is ever decided by it."""

    def owner(self) -> Owner:
        """This process."""

    def provably_dead(self, owner: Owner) -> bool:
        """Whether `owner` can never run again: of another boot, or of our pid namespace and gone.

        False whenever that cannot be known.
        """


def is_past(boot_id: bytes, deadline_ns: int) -> bool:
    """Whether a deadline on the boot clock of `boot_id` has passed. O(1).

    A deadline of another boot has passed: whoever waited for it went down with that boot.

    >>> owner, now = current().owner(), current().boottime_ns()
    >>> later = now + 60 * NS_PER_S
    >>> is_past(owner.boot_id, now), is_past(owner.boot_id, later), is_past(bytes(16), later)
    (True, False, True)
    """
    clock = current()
    return boot_id != clock.owner().boot_id or clock.boottime_ns() >= deadline_ns


class SystemClock:
    """The clock of the machine. Thread-safe; notices a fork."""

    def __init__(self) -> None:
        self._owner: Owner | None = None

    def boottime_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def wall_ns(self) -> int:
        return time.time_ns()

    def owner(self) -> Owner:
        owner = self._owner
        # The pid is compared each time: a forked child is another process than the one that was asked first.
        if owner is None or owner.pid != os.getpid():
            self._owner = owner = _this_process()
        return owner

    def provably_dead(self, owner: Owner) -> bool:
        mine = self.owner()
        if owner.boot_id != mine.boot_id:
            return True
        if owner.pid_namespace != mine.pid_namespace or owner.pid_namespace == 0:
            return False  # its pid is a number of another space, where we see nothing
        if not _pid_exists(owner.pid):
            return True
        if owner.start_ticks == 0 or mine.start_ticks == 0:
            return False
        stat = _read_stat(str(owner.pid))
        if stat is None:
            return False  # hidden from us (hidepid), or it ended just now: the next look knows
        return stat.start_ticks != owner.start_ticks or stat.is_zombie


class _Stat(NamedTuple):
    pid: int
    start_ticks: int
    is_zombie: bool


def _pid_exists(pid: int) -> bool:
    """Asked of the kernel, not of /proc: with hidepid, /proc does not show the processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read_stat(name: str) -> _Stat | None:
    """What /proc/`name`/stat says, or None where it cannot be read."""
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            data = file.read()
    except OSError:
        return None
    # The second field is the program's name in parentheses and may itself hold spaces and parentheses.
    pid, rest = data[: data.index(b" ")], data[data.rindex(b")") + 2 :].split()
    # A zombie with one thread left (itself) executes nothing any more and only waits for its parent, which under an
    # init that reaps nobody means for ever. With other threads left, the leader alone has ended.
    is_zombie = rest[0] in (b"Z", b"X") and int(rest[17]) <= 1
    return _Stat(int(pid), int(rest[19]), is_zombie)


def _this_process() -> Owner:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = uuid.UUID(file.read().strip()).bytes
    except (OSError, ValueError) as error:
        raise UnsupportedPlatform(
            f"the boot id cannot be read ({error}); leases and effects need Linux with /proc mounted"
        ) from error
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    pid = os.getpid()
    stat = _read_stat("self")
    # Where /proc belongs to another pid namespace than we do (`unshare --pid` without a mount of its own), its numbers
    # are of other processes: then no start time is known, ours included.
    start = stat.start_ticks if stat is not None and stat.pid == pid else 0
    return Owner(boot_id, namespace, pid, start)


_current: Clock = SystemClock()


def current() -> Clock:
    """The clock in use; the machine's own unless a test put another one there."""
    return _current


@contextmanager
def using(clock: Clock) -> Iterator[Clock]:
    """Use `clock` in this whole process (all of its threads) inside the block. For tests.

    A global rather than an argument of every function: what expires is judged in the background thread as well,
    and a process that believed two clocks at once would be a worse thing than the tests could find.
    """
    global _current  # noqa: PLW0603  the seam itself: one variable, set here only
    before = _current
    _current = clock
    try:
        yield clock
    finally:
        _current = before
