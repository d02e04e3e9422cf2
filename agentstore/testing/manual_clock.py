"""A clock for tests: its time moves only when it is told to, and processes live and die by a call.

>>> from agentstore import clock
>>> machine = ManualClock()
>>> with clock.using(machine):
...     worker = machine.start_process()          # "this process" from now on
...     machine.advance(30)
...     machine.kill(worker)
...     clock.current().provably_dead(worker)
True
"""

from __future__ import annotations

import os
import time

from agentstore.clock import NS_PER_S, Owner


class ManualClock:
    """A machine whose time, boots and processes a test decides. Satisfies `agentstore.clock.Clock`."""

    def __init__(self, *, boottime_s: float = 1000.0) -> None:
        self._boottime_ns = int(boottime_s * NS_PER_S)
        self._wall_ns = time.time_ns()
        self._boot_id = os.urandom(16)
        self._namespace = 4026531836
        self._alive: set[Owner] = set()
        self._pid = 1000
        self._me = self.start_process()

    def boottime_ns(self) -> int:
        return self._boottime_ns

    def wall_ns(self) -> int:
        return self._wall_ns

    def owner(self) -> Owner:
        return self._me

    def provably_dead(self, owner: Owner) -> bool:
        if owner.boot_id != self._boot_id:
            return True
        return owner.pid_namespace == self._me.pid_namespace and owner not in self._alive

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self._boottime_ns += int(seconds * NS_PER_S)
        self._wall_ns += int(seconds * NS_PER_S)

    def set_wall(self, wall_ns: int) -> None:
        """Set the wall clock, as an administrator or NTP does; the boot clock does not notice."""
        self._wall_ns = wall_ns

    def start_process(self, *, pid_namespace: int | None = None) -> Owner:
        """Start a process and be it from now on; the others stay alive."""
        self._pid += 1
        namespace = self._namespace if pid_namespace is None else pid_namespace
        self._me = Owner(self._boot_id, namespace, self._pid, self._boottime_ns // 10_000_000)
        self._alive.add(self._me)
        return self._me

    def be(self, owner: Owner) -> None:
        """Be the process `owner` (which must be alive) from now on."""
        if owner not in self._alive:
            raise ValueError(f"{owner} is not alive")
        self._me = owner

    def kill(self, owner: Owner) -> None:
        """End the process `owner`, from outside."""
        self._alive.discard(owner)

    def reboot(self) -> Owner:
        """Everything dies, the boot clock starts anew under a new boot id; be a new process."""
        self._alive.clear()
        self._boot_id = os.urandom(16)
        self._boottime_ns = NS_PER_S
        return self.start_process()
