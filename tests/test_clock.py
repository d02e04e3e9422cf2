"""agentstore.clock: the boot clock, and what proves that a process is dead. Real processes throughout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from agentstore import clock
from agentstore.clock import NS_PER_S, Owner, SystemClock
from agentstore.errors import CorruptionError
from agentstore.testing.manual_clock import ManualClock

PRINT_OWNER = """
import sys
from agentstore.clock import current
print(current().owner().pack().hex(), flush=True)
sys.stdin.read()
"""


class Child:
    """A Python process that says who it is and then waits for its stdin to end."""

    def __init__(self, *prefix: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", PRINT_OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.owner = Owner.unpack(bytes.fromhex(line)) if line else None

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    process = Child()
    yield process
    process.end()


def test_owner_is_this_process() -> None:
    owner = clock.current().owner()
    assert owner.pid == os.getpid()
    assert owner.pid_namespace == os.stat("/proc/self/ns/pid").st_ino
    with open("/proc/sys/kernel/random/boot_id") as file:
        assert owner.boot_id.hex() == file.read().strip().replace("-", "")
    assert owner.start_ticks > 0
    assert len(owner.boot_id) == 16
    assert not clock.current().provably_dead(owner)


def test_start_time_is_that_of_the_process() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    started_s = clock.current().owner().start_ticks / ticks
    assert started_s <= clock.current().boottime_ns() / NS_PER_S


def test_pack_round_trip_and_refusal() -> None:
    owner = Owner(bytes(range(16)), 2**63, 2**32 - 1, 2**64 - 1)
    assert Owner.unpack(owner.pack()) == owner
    for wrong in (b"", owner.pack()[:-1], owner.pack() + b"\0"):
        with pytest.raises(CorruptionError):
            Owner.unpack(wrong)


def test_a_living_process_is_not_dead_and_a_killed_one_is(child: Child) -> None:
    assert child.owner is not None
    assert child.owner.pid == child.process.pid
    assert not clock.current().provably_dead(child.owner)
    os.kill(child.process.pid, signal.SIGSTOP)  # a stopped process can go on at any time
    assert not clock.current().provably_dead(child.owner)
    child.process.kill()
    child.process.wait()
    assert clock.current().provably_dead(child.owner)


def test_a_zombie_is_dead(child: Child) -> None:
    """A killed worker whose parent never waits for it must not hold its lease until it expires."""
    assert child.owner is not None
    child.process.kill()
    os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)  # it ended, and stays unreaped
    os.kill(child.process.pid, 0)  # its pid is still taken
    assert clock.current().provably_dead(child.owner)


def test_a_leader_whose_threads_go_on_is_not_dead() -> None:
    """pthread_exit in the main thread shows the process as a zombie, while its other threads still run."""
    program = textwrap.dedent("""
        import ctypes, sys, threading
        from agentstore.clock import current
        owner = current().owner()
        def other():
            main.join_native()
            print(owner.pack().hex(), flush=True)
            sys.stdin.read()
        class Main:
            def join_native(self):
                import time
                while open("/proc/self/stat").read().rsplit(")", 1)[1].split()[0] != "Z":
                    time.sleep(0.001)
        main = Main()
        threading.Thread(target=other).start()
        libc = ctypes.CDLL(None)
        libc.syscall(60 if sys.maxsize > 2**32 and __import__("platform").machine() == "x86_64" else 93, 0)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        owner = Owner.unpack(bytes.fromhex(process.stdout.readline()))
        with open(f"/proc/{process.pid}/stat") as file:
            assert file.read().rsplit(")", 1)[1].split()[0] == "Z"
        assert not clock.current().provably_dead(owner)
    finally:
        process.kill()
        process.communicate()
    assert clock.current().provably_dead(owner)


def test_a_pid_taken_by_another_process_is_dead(child: Child) -> None:
    assert child.owner is not None
    before = child.owner._replace(start_ticks=child.owner.start_ticks - 1)
    assert clock.current().provably_dead(before)


def test_what_is_not_known_proves_nothing(child: Child) -> None:
    assert child.owner is not None
    system = clock.current()
    child.end()
    assert system.provably_dead(child.owner)
    assert not system.provably_dead(child.owner._replace(pid_namespace=0))
    assert not system.provably_dead(child.owner._replace(pid_namespace=child.owner.pid_namespace + 1))
    me = system.owner()
    assert not system.provably_dead(me._replace(start_ticks=0))


def test_another_boot_is_dead_whatever_else_is_equal() -> None:
    system = clock.current()
    assert system.provably_dead(system.owner()._replace(boot_id=bytes(16)))
    assert system.provably_dead(system.owner()._replace(boot_id=bytes(16), pid_namespace=0, start_ticks=0))


def test_a_forked_child_is_somebody_else() -> None:
    system = SystemClock()
    mine = system.owner()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, system.owner().pack())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        theirs = Owner.unpack(file.read())
    os.waitpid(pid, 0)
    assert theirs.pid == pid
    assert theirs != mine
    assert system.provably_dead(theirs)


@pytest.mark.parametrize("mount_proc", [True, False])
def test_another_pid_namespace(mount_proc: bool) -> None:
    """A worker in a container: its pid says nothing to us, and ours nothing to it."""
    options = ["--pid", "--fork", "--kill-child", *(["--mount-proc"] if mount_proc else [])]
    process = Child("unshare", *options)
    try:
        if process.owner is None:
            pytest.skip("no permission to make a pid namespace (unshare)")
        assert process.owner.pid == 1
        mine = clock.current().owner()
        if mount_proc:
            assert process.owner.pid_namespace != mine.pid_namespace
            assert process.owner.start_ticks > 0
        else:
            assert process.owner.start_ticks == 0  # its /proc shows the numbers of another namespace
    finally:
        process.end()
    assert process.owner.boot_id == mine.boot_id
    assert not clock.current().provably_dead(process.owner)


def test_boottime_goes_forward() -> None:
    system = clock.current()
    first = system.boottime_ns()
    assert system.boottime_ns() >= first
    assert abs(system.wall_ns() - time.time_ns()) < 60 * NS_PER_S


def test_is_past_does_not_ask_the_wall_clock() -> None:
    machine = ManualClock()
    with clock.using(machine):
        boot_id = machine.owner().boot_id
        deadline_ns = machine.boottime_ns() + 30 * NS_PER_S
        machine.set_wall(machine.wall_ns() + 10**6 * NS_PER_S)
        assert not clock.is_past(boot_id, deadline_ns)
        machine.set_wall(0)
        machine.advance(29.999)
        assert not clock.is_past(boot_id, deadline_ns)
        machine.advance(0.001)
        assert clock.is_past(boot_id, deadline_ns)
        machine.reboot()
        assert clock.is_past(boot_id, 2**63)


def test_using_puts_the_clock_back_after_an_error() -> None:
    before = clock.current()
    with pytest.raises(ValueError, match="boom"), clock.using(ManualClock()):
        assert clock.current() is not before
        raise ValueError("boom")
    assert clock.current() is before


def test_the_manual_clock_knows_its_processes() -> None:
    machine = ManualClock()
    first = machine.owner()
    second = machine.start_process()
    assert machine.owner() == second
    assert not machine.provably_dead(first)
    machine.kill(first)
    assert machine.provably_dead(first)
    with pytest.raises(ValueError, match="not alive"):
        machine.be(first)
    container = machine.start_process(pid_namespace=7)
    machine.kill(second)
    assert not machine.provably_dead(second)  # seen from another namespace
    assert machine.reboot() != container
    assert machine.provably_dead(container)
