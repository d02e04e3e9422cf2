"""Salvage: what comes out of a damaged store is true, and what does not is named. The store itself is never touched.

Every page of base, not every sixth: ``AGENTSTORE_SALVAGE_EVERY=1 pytest tests/test_salvage.py``.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentstore import (
    AgentStoreError,
    Append,
    CheckpointNotFound,
    EffectCall,
    NotAStore,
    Retention,
    Set,
    Splice,
    Store,
    StoreInUse,
    compaction,
    loading,
    packing,
    snapshots,
)
from agentstore.engine.parts import BASE, CONTROL, FORMAT, WAL
from agentstore.records import ThreadKeys, int_part
from agentstore.salvage import Salvaged, salvage
from agentstore.testing.faults import abandon
from agentstore.testing.limits import small_limits

PAGE = 4096
EVERY = int(os.environ.get("AGENTSTORE_SALVAGE_EVERY", "6"))
States = dict[str, dict[int, Any]]


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with small_limits(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(compaction, "CONTENT_BYTES_MIN", 1000)
        patched.setattr(snapshots, "LOAD_US_MIN", 100)
        yield


def text(n: int) -> str:
    return f"{n}: {random.Random(n % 40).randbytes(200).hex()}"


def grow(store: Store, name: str, count: int, states: States) -> None:
    thread = store.thread(name)
    state = thread.load() if thread.head is not None else {"history": [], "step": -1}
    for n in range(count):
        at = 0 if thread.head is None else thread.head.seq + 1
        if n % 30 == 29:
            thread.commit(Splice("history", 0, 10, ["summary"]), reason="summary")
            state = state | {"history": ["summary", *state["history"][10:]]}
        else:
            thread.commit(Append("history", text(at)), Set("step", at), step=at)
            state = state | {"history": [*state["history"], text(at)], "step": at}
        states.setdefault(name, {})[at] = state


def filled(path: Path) -> States:
    """A store whose writer was killed: packs, cold packs with a dictionary, roots, snapshots, effects, a full log."""
    states: States = {}
    with Store.open(path, background=False) as store:
        for name in ("cold", "pruned", "deleted"):
            grow(store, name, 150, states)
        store.thread("pruned").set_retention(Retention(keep_last=40))
        store.thread("deleted").delete()
    del states["deleted"]
    assert compaction.compact(path, level=3).dictionary is not None
    states["pruned"] = {seq: state for seq, state in states["pruned"].items() if seq >= 110}
    store = Store.open(path, background=False)
    grow(store, "packed", 140, states)
    grow(store, "cold", 20, states)
    thread = store.thread("packed")
    thread.pin(7, "note")
    call = EffectCall(index=0, tool="pay", arguments={"amount": 5}, rule="ask")
    decision = thread.commit(Append("history", "pay"), reason="decision", intents=[call])
    states["packed"][decision.seq] = thread.load()
    store._engine.fold()
    grow(store, "late", 30, states)
    thread.effect(decision=decision, index=0, tool="pay", arguments={"amount": 5}, rule="ask").receipt("paid")
    states["packed"][decision.seq + 1] = thread.load()
    store._upkeep.close()
    abandon(store._engine)
    return states


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, States]:
    path = tmp_path_factory.mktemp("salvage") / "store"
    return path, filled(path)


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def check(path: Path, dest: Path, states: States) -> Salvaged:
    """Salvage, and compare everything that comes out."""
    before = content(path)
    done = salvage(path, dest)
    assert content(path) == before
    found = 0
    with Store.open(dest, background=False) as store:
        assert store.check() == []
        threads = list(store.threads())
        assert sorted(each.id for each in done.threads if each.checkpoints) == sorted(threads)
        for name in threads:
            assert name in states or name.startswith("salvaged-"), name
            thread = store.thread(name)
            for cp in thread.history():
                state = thread.load(at=cp.seq)
                found += 1
                if name in states:
                    assert state == states[name][cp.seq], (name, cp.seq)
                else:
                    assert state in [known.get(cp.seq) for known in states.values()]
            thread.load()
            thread.commit(Set("after", True))  # it can be worked with
    total = sum(len(known) for known in states.values())
    assert found == sum(each.checkpoints for each in done.threads) <= total
    if found < total:
        assert not done.whole, "something is missing and nothing says so"
    return done


def copied(source: Path, path: Path, damage: Callable[[Path], object]) -> Path:
    shutil.copytree(source, path)
    damage(path)
    return path


def test_all_of_a_store_that_is_not_damaged(damaged: tuple[Path, States], tmp_path: Path) -> None:
    source, states = damaged
    done = check(source, tmp_path / "new", states)
    assert done.whole, done
    with Store.open(tmp_path / "new") as store:
        thread = store.thread("packed")
        assert thread.pins() == {7: "note"} and [effect.result for effect in thread.effects()] == ["paid"]
        with pytest.raises(CheckpointNotFound):
            store.thread("pruned").load(at=5)
        assert store.thread("pruned").retention == Retention(keep_last=40)


def test_each_page_of_base_zeroed(damaged: tuple[Path, States], tmp_path: Path) -> None:
    source, states = damaged
    pages = os.path.getsize(source / BASE) // PAGE
    lost = 0
    for page in range(EVERY - 1, pages, EVERY):

        def zero(path: Path, page: int = page) -> None:
            with open(path / BASE, "r+b") as file:
                file.seek(page * PAGE)
                file.write(bytes(PAGE))

        path = copied(source, tmp_path / str(page), zero)
        done = check(path, tmp_path / f"new {page}", states)
        lost += not done.whole
        shutil.rmtree(path)
        shutil.rmtree(tmp_path / f"new {page}")
    assert lost > pages / EVERY / 4


def test_flipped_bits_of_base(damaged: tuple[Path, States], tmp_path: Path) -> None:
    source, states = damaged
    rng = random.Random(1)
    size = os.path.getsize(source / BASE)
    for number in range(60 // EVERY):

        def flip(path: Path) -> None:
            with open(path / BASE, "r+b") as file:
                for _ in range(5):
                    at = rng.randrange(size)
                    file.seek(at)
                    byte = file.read(1)[0] ^ 1 << rng.randrange(8)
                    file.seek(at)
                    file.write(bytes([byte]))

        path = copied(source, tmp_path / str(number), flip)
        check(path, tmp_path / f"new {number}", states)


def cut(name: str, part: float) -> Callable[[Path], object]:
    return lambda path: os.truncate(path / name, int(os.path.getsize(path / name) * part))


def garbage(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(random.Random(2).randbytes(os.path.getsize(path / name)))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no base": lambda path: (path / BASE).unlink(),
    "base cut to a half": cut(BASE, 0.5),
    "base cut to a tenth": cut(BASE, 0.1),
    "base empty": cut(BASE, 0),
    "base is garbage": garbage(BASE),
    "no FORMAT": lambda path: (path / FORMAT).unlink(),
    "FORMAT is garbage": garbage(FORMAT),
    "no control": lambda path: (path / CONTROL).unlink(),
    "no tail": lambda path: (path / "tail.mdb").unlink(),
    "no lock files": lambda path: [file.unlink() for file in path.glob("*lock*")],
    "no wal": lambda path: shutil.rmtree(path / WAL),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_file_damaged_or_missing(damage: str, damaged: tuple[Path, States], tmp_path: Path) -> None:
    source, states = damaged
    path = copied(source, tmp_path / "s", DAMAGE[damage])
    done = check(path, tmp_path / "new", states)
    assert done.whole == (damage in ("FORMAT is garbage", "no control", "no tail", "no lock files"))


def test_each_segment_damaged_or_missing(damaged: tuple[Path, States], tmp_path: Path) -> None:
    source, states = damaged
    segments = sorted(file.name for file in (source / WAL).glob("*.seg"))
    assert len(segments) >= 2

    def write(name: str, at: int, data: bytes) -> Callable[[Path], object]:
        def damage(path: Path) -> None:
            with open(path / WAL / name, "r+b") as file:
                file.seek(at)
                file.write(data)

        return damage

    lost = 0
    for name in segments:
        for number, damage in enumerate(
            (
                lambda path, name=name: (path / WAL / name).unlink(),
                cut(f"{WAL}/{name}", 0.5),
                lambda path, name=name: [write(name, at, b"\xff" * 100)(path) for at in (0, PAGE)],
                write(name, 8192 + 9000, b"\xff\xff"),
            )
        ):
            path = copied(source, tmp_path / f"{name} {number}", damage)
            done = check(path, tmp_path / f"new {name} {number}", states)
            lost += not done.whole
    assert lost >= 4


def test_a_snapshot_saves_what_stands_on_a_lost_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first checkpoint stands alone and is lost, the others are a pack: they stay from the snapshot on."""
    monkeypatch.setattr(snapshots, "LOAD_US_MIN", 1_000_000)
    states: States = {}
    path, keys = tmp_path / "s", ThreadKeys(1)
    with Store.open(path, background=False) as store:
        grow(store, "t", 50, states)
        with store._engine.read() as snap:
            run = [*packing.singles(snap, keys, "t")]
            prepared = snapshots.prepare(keys, loading.load(snap, keys.prefix, 20, "t"))
            swap = packing.make(snap, keys, [*run[1:]], "t")
        assert swap is not None and store._engine.transact(swap.write).value
        assert store._engine.transact(prepared.write).value
        store._engine.transact(lambda tx: tx.delete(keys.checkpoints + int_part(0)))
        store._upkeep._written.clear()
    done = check(path, tmp_path / "new", states)
    [report] = done.threads
    assert (report.lost, report.missing, report.checkpoints) == ([*range(1, 20)], [0], 30)


def test_what_cannot_be_is_refused(damaged: tuple[Path, States], tmp_path: Path) -> None:
    source, _ = damaged
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotAStore):
        salvage(tmp_path / "empty", tmp_path / "new")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(AgentStoreError, match="not empty"):
        salvage(source, tmp_path / "taken")
    with Store.open(tmp_path / "open"), pytest.raises(StoreInUse):
        salvage(tmp_path / "open", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_killed_at_random_moments_it_leaves_no_half_store(damaged: tuple[Path, States], tmp_path: Path) -> None:
    source, states = damaged
    for number in range(6):
        dest = tmp_path / f"new {number}"
        pid = os.fork()
        if pid == 0:
            try:
                salvage(source, dest)
            finally:
                os._exit(0)
        time.sleep(random.Random(number).uniform(0, 0.5))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if dest.exists():
            shutil.rmtree(dest)
        assert check(source, dest, states).whole
        assert sorted(os.listdir(tmp_path)) == sorted(f"new {n}" for n in range(number + 1))


def test_the_command(damaged: tuple[Path, States], tmp_path: Path) -> None:
    source, _ = damaged
    run = [sys.executable, "-m", "agentstore.tools.cli", "salvage"]
    done = subprocess.run([*run, source, tmp_path / "a", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["whole"] is True
    path = copied(source, tmp_path / "s", DAMAGE["no wal"])
    done = subprocess.run([*run, path, tmp_path / "b"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "wal is missing" in done.stdout
    done = subprocess.run([*run, tmp_path / "nothing", tmp_path / "c"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
