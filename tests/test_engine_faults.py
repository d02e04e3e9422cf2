"""Every system call of the engine fails in turn: the right error, nothing lost, usable again where it should be.

For n = 1, 2, 3 ... the n-th call of a scenario fails, until a run completes in which none did.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentstore.engine import embedded, process
from agentstore.engine.api import Confirmed, Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.files import Files
from agentstore.engine.keys import encode
from agentstore.errors import (
    AgentStoreError,
    CommitUnknown,
    DiskFull,
    OutOfResources,
    StoreFailed,
    StoreFull,
    StorePermissionError,
)
from agentstore.testing.faults import CALLS, WRITING_CALLS, Call, Error, Fault, FaultyFiles, Kill, abandon, is_frame
from agentstore.testing.limits import SMALL_SEGMENT_BYTES, small_limits

LAST = encode("last")


def write(tx: Tx, number: int, value: bytes) -> None:
    tx.put(encode("n", number), value)
    tx.put(LAST, b"%d" % number)


@dataclass
class Ledger:
    """What was asked for, and what the engine said to it."""

    confirmed: dict[int, bytes] = field(default_factory=dict)
    unknown: dict[int, bytes] = field(default_factory=dict)
    refused: dict[int, bytes] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)

    def commit(self, engine: EmbeddedEngine, size: int = 100) -> None:
        """Commit the next number; file the answer."""
        number = len(self.confirmed) + len(self.unknown) + len(self.refused)
        value = f"{number} ".encode() * (size // len(f"{number} ") + 1)

        try:
            engine.transact(lambda tx: write(tx, number, value))
        except (CommitUnknown, StoreFailed) as error:
            self.unknown[number] = value
            self.errors.append(error)
        except AgentStoreError as error:
            self.refused[number] = value
            self.errors.append(error)
        else:
            self.confirmed[number] = value

    def check(self, engine: EmbeddedEngine) -> None:
        """All that was confirmed is there, nothing that was refused, no half of anything, in its order."""
        with engine.read() as view:
            found = {int(value.split()[0]): value for _, value in view.scan(encode("n"), encode("n") + b"\xff")}
            last = view.get(LAST)
        for number, value in self.confirmed.items():
            assert found.pop(number, None) == value, f"commit {number} was confirmed and is not there"
        for number, value in found.items():
            assert self.unknown.get(number) == value, f"commit {number} is there and was refused, or is another"
        there = [*self.confirmed, *found]
        assert last == (b"%d" % max(there) if there else None)
        # What is there now stays: only the first look may decide about an unknown outcome.
        self.confirmed.update(found)
        for number in found:
            del self.unknown[number]
        self.refused.update(self.unknown)
        self.unknown.clear()


@dataclass(frozen=True)
class Scenario:
    """`prepare` makes the store, without faults; `act` is done under one, and returns the engine if it is open."""

    name: str
    prepare: Callable[[str, FaultyFiles, Ledger], EmbeddedEngine | None]
    act: Callable[[str, FaultyFiles, Ledger, EmbeddedEngine | None], EmbeddedEngine | None]
    calls_min: int
    """Fewer calls than this, and the loop did nothing."""


def opened(path: str, files: Files) -> EmbeddedEngine:
    return EmbeddedEngine.open(path, files=files, background=False)


def nothing(path: str, files: FaultyFiles, ledger: Ledger) -> None:
    return None


def fresh(path: str, files: FaultyFiles, ledger: Ledger) -> EmbeddedEngine:
    """Open, three commits in its first segment."""
    engine = opened(path, files)
    for _ in range(3):
        ledger.commit(engine)
    return engine


def killed(path: str, files: FaultyFiles, ledger: Ledger) -> None:
    """Three commits, then it was killed; and once more, so that there are two segments."""
    abandon(fresh(path, files, ledger))
    abandon(fresh(path, files, ledger))


def recovered(path: str, files: FaultyFiles, ledger: Ledger) -> EmbeddedEngine:
    """Open after two kills: the next commit rolls, into an old segment."""
    killed(path, files, ledger)
    return opened(path, files)


def closed(path: str, files: FaultyFiles, ledger: Ledger) -> EmbeddedEngine:
    """Open after a close: the next commit rolls, into a new file."""
    fresh(path, files, ledger).close()
    return opened(path, files)


def with_spare(path: str, files: FaultyFiles, ledger: Ledger) -> EmbeddedEngine:
    """Open after a close, and a segment was prepared: the next commit rolls into it."""
    engine = closed(path, files, ledger)
    assert engine._parts.segments.prepare_spare()
    return engine


def open_it(path: str, files: FaultyFiles, ledger: Ledger, engine: EmbeddedEngine | None) -> EmbeddedEngine | None:
    try:
        return opened(path, files)
    except AgentStoreError as error:
        ledger.errors.append(error)
        return None


def create(path: str, files: FaultyFiles, ledger: Ledger, engine: EmbeddedEngine | None) -> EmbeddedEngine | None:
    engine = open_it(path, files, ledger, None)
    if engine is not None:
        ledger.commit(engine)
    return engine


def commit(path: str, files: FaultyFiles, ledger: Ledger, engine: EmbeddedEngine | None) -> EmbeddedEngine | None:
    assert engine is not None
    ledger.commit(engine)
    ledger.commit(engine)
    return engine


def commit_oversize(
    path: str, files: FaultyFiles, ledger: Ledger, engine: EmbeddedEngine | None
) -> EmbeddedEngine | None:
    assert engine is not None
    ledger.commit(engine, 2 * SMALL_SEGMENT_BYTES)
    ledger.commit(engine)
    return engine


def fold(path: str, files: FaultyFiles, ledger: Ledger, engine: EmbeddedEngine | None) -> EmbeddedEngine | None:
    assert engine is not None
    try:
        engine.fold()
    except AgentStoreError as error:
        ledger.errors.append(error)
    return engine


def closed_again(path: str, files: FaultyFiles, ledger: Ledger) -> None:
    closed(path, files, ledger).close()


def close(path: str, files: FaultyFiles, ledger: Ledger, engine: EmbeddedEngine | None) -> None:
    """Everything confirmed is in the log already: close has nothing to complain about."""
    assert engine is not None
    engine.close()


def prepare(path: str, files: FaultyFiles, ledger: Ledger, engine: EmbeddedEngine | None) -> EmbeddedEngine | None:
    assert engine is not None
    try:
        engine._guarded(engine._parts.segments.prepare_spare)  # as the background does
    except AgentStoreError as error:
        ledger.errors.append(error)
    ledger.commit(engine)
    return engine


SCENARIOS = [
    Scenario("create", nothing, create, 60),
    Scenario("commit", fresh, commit, 6),
    Scenario("roll into a new file", closed, commit, 15),
    Scenario("roll into an old file", recovered, commit, 20),
    Scenario("roll into a prepared file", with_spare, commit, 15),
    Scenario("oversize frame", fresh, commit_oversize, 20),
    Scenario("fold", fresh, fold, 5),
    Scenario("close", fresh, close, 15),
    Scenario("close with two segments", recovered, close, 10),
    Scenario("reopen", closed_again, open_it, 35),
    Scenario("recovery", killed, open_it, 45),
    Scenario("prepare", closed, prepare, 20),
]


@dataclass(frozen=True)
class Weather:
    """An error, the calls that it can happen to, and what may be raised."""

    errno: int
    calls: frozenset[str]
    raises: tuple[type[Exception], ...]
    part: float = 0.0


WEATHER = {
    "EIO": Weather(errno.EIO, CALLS, (StoreFailed,)),
    "EIO in the middle": Weather(errno.EIO, frozenset({"pwrite"}), (StoreFailed,), 0.5),
    "ENOSPC": Weather(errno.ENOSPC, WRITING_CALLS, (DiskFull, StoreFailed)),
    "ENOSPC in the middle": Weather(errno.ENOSPC, frozenset({"pwrite"}), (DiskFull,), 0.5),
    "EMFILE": Weather(errno.EMFILE, frozenset({"open", "map"}), (OutOfResources, CommitUnknown)),
    "EACCES": Weather(errno.EACCES, frozenset({"open", "make_directory"}), (StorePermissionError, CommitUnknown)),
}


TWICE = ("EIO", "ENOSPC")
"""Those that also go on for ever; for the others once is as bad."""


def poisons(weather: Weather, call: Call | None) -> bool:
    """Whether this error at this call may put the store out of use."""
    assert call is not None
    if weather.errno == errno.ENOSPC:
        return call.name in ("fdatasync", "sync_map")
    return weather.errno == errno.EIO


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run(scenario: Scenario, weather: Weather, nth: int, for_ever: bool, path: str) -> FaultyFiles:
    """One run with one fault; the files tell whether it struck."""
    before = descriptors()
    files, ledger = FaultyFiles(), Ledger()
    engine = scenario.prepare(path, files, ledger)
    assert not ledger.errors
    files.arm(Fault(nth, Error(weather.errno, weather.part), weather.calls, for_ever))
    engine = scenario.act(path, files, ledger, engine)
    struck, count = files.struck, files.count
    files.arm(None)
    for error in ledger.errors:
        assert isinstance(error, weather.raises), (struck, error)
        if isinstance(error, StoreFailed):
            assert poisons(weather, struck), (struck, error)
    if struck is None:
        assert not ledger.errors
    if engine is not None and not any(isinstance(error, StoreFailed) for error in ledger.errors):
        # Not poisoned: works at once.
        errors = len(ledger.errors)
        ledger.check(engine)
        ledger.commit(engine)
        ledger.check(engine)
        assert len(ledger.errors) == errors
    if engine is not None:
        abandon(engine)
    for _ in range(2):
        assert path not in {each.path for each in process.engines.values() if isinstance(each, EmbeddedEngine)}
        engine = opened(path, Files())
        ledger.check(engine)
        ledger.commit(engine)
        assert engine.verify() == []
        engine.close()
    if descriptors() != before:
        gc.collect()  # an error that is still referred to keeps nothing open but what it refers to
        assert descriptors() == before, f"a descriptor leaked after {struck}"
    files.arm(None)
    files.struck, files.count = struck, count
    return files


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: these tests count calls, they do not pull plugs."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="agentstore-") as path:
        yield Path(path)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize(
    ("weather", "for_ever"),
    [(weather, for_ever) for weather in WEATHER for for_ever in (False, True) if weather in TWICE or not for_ever],
    ids=lambda value: value if isinstance(value, str) else "for ever" if value else "once",
)
def test_every_call_fails_in_turn(scenario: Scenario, weather: str, for_ever: bool, directory: Path) -> None:
    struck = 0
    with small_limits():
        for nth in range(1, 1000):
            path = directory / str(nth)
            files = run(scenario, WEATHER[weather], nth, for_ever, str(path))
            shutil.rmtree(path)
            if files.struck is None:
                break
            struck += 1
    assert files.struck is None
    assert struck == files.count == nth - 1
    if weather == "EIO" and not for_ever:
        assert struck >= scenario.calls_min


def in_one_group(engine: EmbeddedEngine, *functions: Callable[[Tx], object]) -> list[object]:
    """Commit side by side so that one thread writes all of them, in this order; what each got or raised."""
    holding, release = threading.Event(), threading.Event()
    outcomes: dict[int, object] = {}

    def hold(tx: Tx) -> None:
        holding.set()
        assert release.wait(60)

    def commit(place: int, fn: Callable[[Tx], object]) -> None:
        try:
            outcomes[place] = engine.transact(fn)
        except Exception as error:
            outcomes[place] = error

    threads = [threading.Thread(target=commit, args=(-1, hold))]
    threads[0].start()
    assert holding.wait(60)
    for place, fn in enumerate(functions):
        threads.append(threading.Thread(target=commit, args=(place, fn)))
        threads[-1].start()
        deadline = time.monotonic() + 60
        while len(engine._writer._queue) <= place:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    release.set()
    for thread in threads:
        thread.join()
    return [outcomes[place] for place in range(len(functions))]


def put(key: str, value: bytes) -> Callable[[Tx], None]:
    return lambda tx: tx.put(encode(key), value)


def get(engine: EmbeddedEngine, key: str) -> bytes | None:
    with engine.read() as view:
        return view.get(encode(key))


def test_a_roll_that_fails_for_one_member_of_a_group_does_not_refuse_those_before(directory: Path) -> None:
    """Found by reading: `_lead` told DiskFull to the whole group, though the frames before were in the committed
    tail. Whoever believed it and tried again had his change twice.
    """
    files = FaultyFiles()
    with small_limits():
        engine = opened(str(directory / "store"), files)
        engine.transact(put("first", b"1"))
        files.arm(Fault(1, Error(errno.ENOSPC), frozenset({"pwrite"}), True, lambda call: not is_frame(call)))
        fits, rolls, after = in_one_group(
            engine, put("fits", b"2"), put("rolls", bytes(SMALL_SEGMENT_BYTES)), put("after", b"3")
        )
        files.arm(None)
        assert isinstance(fits, Confirmed)
        assert isinstance(rolls, DiskFull)
        assert isinstance(after, DiskFull)
        assert (get(engine, "fits"), get(engine, "rolls"), get(engine, "after")) == (b"2", None, None)
        engine.transact(put("rolls", bytes(SMALL_SEGMENT_BYTES)))
        abandon(engine)
        engine = opened(str(directory / "store"), files)
        assert (get(engine, "fits"), get(engine, "rolls")) == (b"2", bytes(SMALL_SEGMENT_BYTES))
        engine.close()


def test_a_function_that_raises_for_what_it_read_is_not_heard_if_that_could_not_be_synced(directory: Path) -> None:
    """Found by reading: the error of the function won over the failed sync, so its caller acted on a write that a
    power cut took back.
    """
    files = FaultyFiles()
    engine = opened(str(directory / "store"), files)
    engine.transact(put("first", b"1"))

    def guard(tx: Tx) -> None:
        if tx.get(encode("taken")):
            raise ValueError("taken")

    files.arm(Fault(1, Error(errno.EIO), frozenset({"fdatasync"})))
    outcomes = in_one_group(engine, put("taken", b"2"), guard)
    assert [type(outcome) for outcome in outcomes] == [StoreFailed, StoreFailed]
    assert outcomes[0] is not outcomes[1]


def test_a_frame_whose_unwritten_rest_is_zeros_is_not_refused(directory: Path) -> None:
    """Found by reading: ENOSPC in the middle of a frame that ends with zeros leaves a complete frame in a zero-filled
    file. It was refused with DiskFull ("nothing was written"), and then the next writer took it for one of the dead.
    """
    files = FaultyFiles()
    engine = opened(str(directory / "store"), files)
    engine.transact(put("first", b"1"))
    files.arm(Fault(1, Error(errno.ENOSPC, part=0.5), frozenset({"pwrite"})))
    confirmed = engine.transact(put("zeros", bytes(1000)))
    assert files.struck is not None
    assert is_frame(files.struck)
    engine.transact(put("next", b"3"))
    assert (get(engine, "zeros"), confirmed.lsn) == (bytes(1000), 2)
    abandon(engine)
    engine = opened(str(directory / "store"), files)
    assert (get(engine, "zeros"), get(engine, "next")) == (bytes(1000), b"3")
    engine.close()


def test_a_refused_frame_is_overwritten(directory: Path) -> None:
    """The garbage of a frame that found no room is under the next one, never in front of it."""
    files = FaultyFiles()
    engine = opened(str(directory / "store"), files)
    for part in (0.0, 0.1, 0.5, 0.9):
        files.arm(Fault(1, Error(errno.ENOSPC, part), frozenset({"pwrite"})))
        with pytest.raises(DiskFull, match="nothing was lost"):
            engine.transact(put("a", b"x" * 1000))
        files.arm(None)
        assert get(engine, "a") is None
    engine.transact(put("b", b"2"))
    abandon(engine)
    engine = opened(str(directory / "store"), files)
    assert (get(engine, "a"), get(engine, "b")) == (None, b"2")
    assert engine.verify() == []
    engine.close()


# --- processes that die in a call -----------------------------------------------------


VALUES = [b"%d " % number * (3000 if number == 3 else 100) for number in range(5)]
"""The fourth does not fit where the third ends."""


def dies(path: str, kill: Kill, nth: int, ledger: Ledger) -> bool:
    """Open, commit, roll, fold and close in a child that dies at its `nth` call; False if it came to its end.

    What the child was told is in `ledger`: it says so through a pipe, right after it was.
    """
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hear)
        try:
            files = FaultyFiles(Fault(nth, kill, where=is_frame if kill.when == "inside" else None))
            engine = opened(path, files)
            for number, value in enumerate(VALUES):
                engine.transact(lambda tx, n=number, value=value: write(tx, n, value))  # type: ignore[misc]
                os.write(tell, b"%d\n" % number)
                if number == 2:
                    engine.fold()
            engine.close()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(tell)
    with os.fdopen(hear, "rb") as pipe:
        told = {int(line) for line in pipe.read().split()}
    _, status = os.waitpid(child, 0)
    for number, value in enumerate(VALUES):
        (ledger.confirmed if number in told else ledger.unknown)[number] = value
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


@pytest.mark.parametrize(
    ("kill", "calls_min"),
    # After a call is before the next one.
    [(Kill("before"), 100), (Kill("inside", 0.5), 5), (Kill("inside", 1.0), 5)],
    ids=["before", "inside", "whole"],
)
def test_a_process_dies_at_every_call(kill: Kill, calls_min: int, directory: Path) -> None:
    died = 0
    with small_limits():
        for nth in range(1, 1000):
            path, ledger = str(directory / str(nth)), Ledger()
            if not dies(path, kill, nth, ledger):
                break
            died += 1
            for _ in range(2):
                engine = opened(path, Files())
                ledger.check(engine)
                ledger.commit(engine)
                engine.close()
            shutil.rmtree(path)
    assert len(ledger.confirmed) == 5
    assert died >= calls_min, died


# --- the seam itself --------------------------------------------------------------------


def test_a_short_write_goes_on_where_it_stopped(directory: Path) -> None:
    """A real one: RLIMIT_FSIZE cuts the first write short; only the second, of the rest, is refused."""
    path = directory / "file"
    script = """
        import errno, os, resource, signal, sys
        from agentstore.engine.files import Files
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        fd = Files().open(sys.argv[1], os.O_RDWR | os.O_CREAT)
        try:
            Files().pwrite(fd, b"a" * 4000 + b"b" * 4000, 0)
        except OSError as error:
            sys.exit(error.errno)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(path)], check=False)
    assert done.returncode == errno.EFBIG
    assert path.read_bytes() == b"a" * 4000 + b"b" * 1000


def test_only_the_seam_makes_system_calls() -> None:
    """A call past `Files` would be one that no fault and no power cut of these tests reaches."""
    forbidden = re.compile(
        r"\bos\.(open|close|pread|pwrite|write|read|fsync|fdatasync|ftruncate|truncate|rename|replace|unlink|remove|mkdir|"
        r"makedirs|rmdir|listdir|scandir|stat|lstat|fstat|access|link|symlink)\(|\bfcntl\.|\bmmap\.mmap\(|(?<![\w.])open\(|\bshutil\."
    )
    engine = Path(embedded.__file__).parent
    found = {
        f"{path.name}: {line.strip()}"
        for path in sorted(engine.glob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if path.name != "files.py" and forbidden.search(line) and not line.strip().startswith("def ")
    }
    assert found == set()
    assert forbidden.search((engine / "files.py").read_text(encoding="utf-8"))


# --- LMDB's own errors ------------------------------------------------------------------


def test_tail_reaches_its_map(directory: Path) -> None:
    """StoreFull for what does not fit; what was confirmed stays. (Tail is made anew by every recovery.)"""
    path = str(directory / "store")
    engine = EmbeddedEngine.open(path, background=False, map_bytes=256 * 1024)
    ledger = Ledger()
    while not ledger.errors:
        ledger.commit(engine, 20_000)
    assert len(ledger.confirmed) > 5
    ledger.commit(engine, 20_000)
    assert [type(error) for error in ledger.errors] == [CommitUnknown, StoreFull]
    abandon(engine)
    engine = EmbeddedEngine.open(path, background=False, map_bytes=256 * 1024)
    ledger.check(engine)
    ledger.commit(engine, 20_000)
    ledger.check(engine)
    engine.close()


def test_base_reaches_its_map(directory: Path) -> None:
    """The fold is refused and changes nothing; the log keeps everything."""
    path = str(directory / "store")
    engine = EmbeddedEngine.open(path, background=False, map_bytes=256 * 1024)
    ledger = Ledger()
    with pytest.raises(StoreFull, match="MAP_BYTES"):
        for _ in range(100):
            ledger.commit(engine, 20_000)
            engine.fold()
    assert not ledger.errors
    assert len(ledger.confirmed) > 5
    ledger.check(engine)
    engine.close()
    engine = opened(path, Files())
    ledger.check(engine)
    ledger.commit(engine)
    engine.close()


STRACE = shutil.which("strace")

WORKLOAD = """
import sys
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.keys import encode
from agentstore.errors import AgentStoreError
engine = EmbeddedEngine.open(sys.argv[1], background=False)
for number in range(4):
    try:
        engine.transact(lambda tx: tx.put(encode("n", number), b"%d " % number * 1000))
        print(number, flush=True)
        engine.fold()
        print("folded", flush=True)
    except AgentStoreError as error:
        print(type(error).__name__, flush=True)
engine.close()
"""


def injected(path: str, calls: str, error: str) -> list[str]:
    """What the workload prints while strace makes the calls of LMDB on base.mdb fail; skips where it may not trace."""
    assert STRACE is not None
    strace = [STRACE, "-f", "-qq", "-o", "/dev/null", "-P", f"{path}/base.mdb", "-e", f"trace={calls}"]
    done = subprocess.run(
        [*strace, "-e", f"inject={calls}:error={error}", sys.executable, "-c", WORKLOAD, path],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if "ptrace" in done.stderr.lower():
        pytest.skip(f"strace may not trace here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("folded\n", "").split()


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
@pytest.mark.parametrize(
    ("calls", "error", "said", "commits"),
    [
        # A failed commit of base, whatever failed in it, poisons: what is on the disk is not known.
        ("fdatasync", "EIO", ["StoreFailed"], 1),
        ("writev,pwritev", "EIO", ["StoreFailed"], 1),
        ("pwrite64", "EIO", ["StoreFailed"], 1),
        # No space for a page aborts the transaction alone: the fold is refused as long as there is none.
        ("writev,pwritev", "ENOSPC", ["DiskFull"] * 4, 4),
        # No space for the meta page, which is where it always was: LMDB gives up the environment.
        ("pwrite64", "ENOSPC", ["DiskFull", "StoreFailed"], 2),
    ],
)
def test_errors_of_lmdb_writing_base(calls: str, error: str, said: list[str], commits: int, directory: Path) -> None:
    path = str(directory / "store")
    opened(path, Files()).close()
    lines = injected(path, calls, error)
    told = [int(line) for line in lines if line.isdigit()]
    assert told == list(range(commits))
    failures = [line for line in lines if not line.isdigit()]
    # What was poisoned stays so: every later call says the same.
    assert failures == said + ["StoreFailed"] * (len(failures) - len(said))
    assert len(failures) == (4 if commits == 4 else 4 - commits + len(said))
    for _ in range(2):
        engine = opened(path, Files())
        with engine.read() as view:
            there = [number for number in range(4) if view.get(encode("n", number)) == b"%d " % number * 1000]
        assert there == told
        assert engine.verify() == []
        engine.close()
