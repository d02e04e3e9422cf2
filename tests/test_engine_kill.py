"""Writers killed at random moments: a short run of the command, and that its check notices what is wrong.

The long run is ``python -m fuzz kill --kills 200 --procs 4``.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from crash.remote import Died, Remote

from agentstore.engine import keys
from agentstore.engine.api import Tx
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.testing.acknowledged import Diary, Promise, read_diaries
from agentstore.testing.workload import COUNTER, SMALL, Models, faults, head_key, take_step

ROOT = Path(__file__).resolve().parent.parent
SEED = 7


@pytest.mark.parametrize("seed", [1])
def test_writers_are_killed_and_nothing_acknowledged_is_lost(seed: int) -> None:
    command = [sys.executable, "-m", "fuzz", "kill", "--kills", "6", "--procs", "3", "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--reopen-s", "3600", "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["kills"] == 6
    assert result["processes_killed"] >= 6
    assert result["commits_acknowledged"] > 0


def test_a_folder_killed_before_its_commit_was_published(tmp_path: Path) -> None:
    """A folder was killed inside LMDB's commit: the new state of base was on disk, readers still saw the one before.
    The next folder took its start from a read, and the write transaction then found base further on: AssertionError."""
    key = keys.encode("k")
    with Remote() as dying, Remote() as other:
        other.open(tmp_path / "store", background=False)
        other.put(key, b"1")
        dying.open(tmp_path / "store", background=False)
        other.call("fold")
        other.put(key, b"2")
        with pytest.raises(Died):
            dying.call("die_before_a_commit_is_published")
        assert other.get(key) == b"2"
        other.call("fold")
        assert other.stats()["applied_lsn"] == 2
        assert other.get(key) == b"2"
        assert other.verify() == []
        other.kill()
    engine = EmbeddedEngine.open(tmp_path / "store")
    with engine.read() as view:
        assert view.get(key) == b"2"
    engine.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_command(number: int) -> None:
    """Writers whose supervisor was ended went on for ever."""
    command = [sys.executable, "-m", "fuzz", "kill", "--kills", "1000", "--procs", "2"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, process_group=0) as process:
        while len(children(process.pid)) < 2:
            assert process.poll() is None
        begun = children(process.pid)
        process.send_signal(number)
        process.wait()
        while any(Path(f"/proc/{pid}").exists() for pid in begun):
            signal.sigtimedwait([], 0.02)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


# --- the check can fail -------------------------------------------------------------------------

STEPS = 12


def spoil_nothing(tx: Tx) -> None:
    """The control: as it should be."""


def lose_the_last_step(tx: Tx) -> None:
    tx.put(head_key("a"), b"%d" % (STEPS - 2))


def lose_a_record(tx: Tx) -> None:
    tx.delete(keys.encode("w", "a", "record", 3))


def flip_a_byte(tx: Tx) -> None:
    key = keys.encode("w", "a", "record", 3)
    value = tx.get(key)
    assert value is not None
    tx.put(key, bytes([value[0] ^ 1]) + value[1:])


def bring_back_what_was_deleted(tx: Tx) -> None:
    there = {key for key, _ in tx.scan(keys.encode("w", "a", "slot"), keys.end_of(keys.encode("w", "a", "slot")))}
    gone = next(key for key in (keys.encode("w", "a", "slot", slot) for slot in range(60)) if key not in there)
    tx.put(gone, b"deleted long ago")


def put_what_nobody_asked_for(tx: Tx) -> None:
    take_step(tx, SEED, "a", STEPS, SMALL)


def put_for_a_stranger(tx: Tx) -> None:
    take_step(tx, SEED, "stranger", 0, SMALL)


def lose_an_update_of_the_counter(tx: Tx) -> None:
    tx.put(COUNTER, b"%d" % (STEPS - 1))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_nothing, ""),
        (lose_the_last_step, f"step {STEPS - 1} was acknowledged, its head is {STEPS - 2}"),
        (lose_a_record, "holds nothing"),
        (flip_a_byte, "it should hold"),
        (bring_back_what_was_deleted, "it should hold nothing"),
        (put_what_nobody_asked_for, f"its head is {STEPS}, asked for was {STEPS - 1}"),
        (put_for_a_stranger, "asked for was nothing"),
        (lose_an_update_of_the_counter, "the counter is"),
    ],
)
def test_the_check_notices_what_is_wrong(tmp_path: Path, spoil: Callable[[Tx], None], says: str) -> None:
    diaries = tmp_path / "diaries"
    diaries.mkdir()
    diary = Diary(str(diaries), "a")
    engine = EmbeddedEngine.open(tmp_path / "store")
    for step in range(STEPS):
        diary.asked(step)
        done = engine.transact(lambda tx, step=step: take_step(tx, SEED, "a", step, SMALL))  # type: ignore[misc]
        diary.confirmed(step, done.lsn)
    diary.close()
    engine.transact(spoil)
    promises = read_diaries(str(diaries))
    assert promises["a"].confirmed == promises["a"].asked == STEPS - 1
    with engine.read() as view:
        found = faults(view, Models(SEED, SMALL), promises, lambda: promises)
    engine.close()
    if says:
        assert any(says in each for each in found), found
    else:
        assert found == []


def test_the_check_notices_that_something_seen_is_gone(tmp_path: Path) -> None:
    engine = EmbeddedEngine.open(tmp_path / "store")
    promise = Promise("b", saw={"a": 0})
    with engine.read() as view:
        found = faults(view, Models(SEED), {"b": promise}, lambda: {"b": promise})
    engine.close()
    assert found == ["writer b saw step 0 of writer a, whose head is -1"]


def test_a_line_that_a_death_cut_short_is_no_promise(tmp_path: Path) -> None:
    diary = Diary(str(tmp_path), "a")
    diary.asked(0)
    diary.confirmed(0, 1)
    diary.asked(1)
    diary.close()
    with (tmp_path / "a").open("ab") as file:
        file.write(b"c 1 2")
    promise = read_diaries(str(tmp_path))["a"]
    assert (promise.asked, promise.confirmed, promise.confirmations, promise.lsn) == (1, 0, 1, 1)
