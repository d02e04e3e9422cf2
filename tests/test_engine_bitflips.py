"""Bit rot in a killed store is noticed: a sample here, every byte with ``python -m agentstore.testing.bitflips``."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentstore.engine import opening
from agentstore.engine.base import seal
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.keys import encode
from agentstore.testing.bitflips import (
    COMMITS,
    Flip,
    Variant,
    flipped,
    killed_store,
    outcome,
    run,
    value,
    without_power,
)
from agentstore.testing.crashsim import in_memory
from agentstore.testing.faults import abandon
from agentstore.testing.limits import small_limits


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=in_memory(), prefix="agentstore-") as path:
        yield Path(path)


@pytest.mark.parametrize("power_cut", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize("variant", ["log", "half folded"])
def test_no_flipped_bit_gives_a_wrong_answer_or_loses_a_commit_in_silence(
    variant: Variant, power_cut: bool, directory: Path
) -> None:
    result = run(directory, variant, every=331, power_cut=power_cut)
    assert result.broken == []
    assert sum(result.outcomes.values()) >= 60
    assert result.outcomes["refused"] >= 3


def test_every_flip_in_a_frame_of_the_log_is_refused_after_a_kill(directory: Path) -> None:
    """The control page knows what was durable: even the last frame cannot be taken for a torn tail."""
    with small_limits():
        image = killed_store(str(directory / "store"), "log")
        (path,) = [path for path in image.files if path.endswith(".seg")]
        end = len(image.files[path].rstrip(b"\0"))
        for offset in [*range(8192, 8292), *range(end - 100, end)]:
            flip = Flip(path, offset, offset % 8)
            assert outcome(image, flip, str(directory / "flipped"), power_cut=False) == "refused", flip
            _remove(directory / "flipped")


def test_after_a_power_cut_only_the_last_groups_can_be_lost(directory: Path) -> None:
    """Each frame knows what was durable before it: the last one alone has nobody behind it who tells."""
    with small_limits():
        image = without_power(killed_store(str(directory / "store"), "log"))
        (path,) = [path for path in image.files if path.endswith(".seg")]
        marker = image.files[path][8192:8200]
        starts = [at for at in range(8192, len(image.files[path])) if image.files[path].startswith(marker, at)]
        assert len(starts) == COMMITS
        came = []
        for start in starts:
            came.append(outcome(image, Flip(path, start + 60, 3), str(directory / "flipped"), power_cut=True))
            _remove(directory / "flipped")
        assert came == ["refused"] * (COMMITS - 1) + ["torn tail"]


def test_one_copy_of_a_header_is_enough(directory: Path) -> None:
    with small_limits():
        image = killed_store(str(directory / "store"), "log")
        (path,) = [path for path in image.files if path.endswith(".seg")]
        for copy in (0, 4096):
            for offset in range(copy, copy + 100, 9):
                assert outcome(image, Flip(path, offset, 1), str(directory / "flipped"), power_cut=False) == "nothing"
                _remove(directory / "flipped")


def test_the_check_notices_a_wrong_answer(directory: Path) -> None:
    """A record that was changed together with its checksum is the one thing that nothing can notice."""
    with small_limits():
        image = killed_store(str(directory / "store"), "half folded")
        key, wrong = encode("key", 3), value(4)
        right = seal(key, value(3))
        assert image.files["base.mdb"].count(right) == 1
        base = image.files["base.mdb"].replace(right, seal(key, wrong))
        forged = type(image)(image.directories, image.files | {"base.mdb": base})
        flip = Flip("control", 4000, 0)
        with pytest.raises(AssertionError, match="commit 3 reads as"):
            outcome(forged, flip, str(directory / "flipped"), power_cut=False)
        assert flipped(forged, flip).files["control"] != forged.files["control"]


def test_verify_reports_a_structure_that_lmdb_cannot_walk(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by flips in a base that was not walked when it was opened, as a large one is not: `verify` raised LMDB's
    own error, or LMDB ended the process, where it should have been reported.
    """
    monkeypatch.setattr(opening, "VERIFY_AT_RECOVERY_BYTES", 0)
    root = directory / "store"
    with small_limits():
        engine = EmbeddedEngine.open(root, background=False)
        for number in range(40):
            engine.transact(lambda tx, n=number: tx.put(encode("key", n), value(n) * 3))  # type: ignore[misc]
        engine.fold()
        abandon(engine)
        # In place: a file of another inode would be walked. The type of every page but the two meta pages.
        with (root / "base.mdb").open("r+b") as file:
            for page in range(2, (root / "base.mdb").stat().st_size // 4096):
                file.seek(page * 4096 + 10)
                kind = file.read(1)[0]
                if kind == 2:  # a leaf: not one that holds the position
                    file.seek(page * 4096 + 16)
                    found = file.read(4080)
                    if b"\x01base" not in found:
                        file.seek(page * 4096 + 10)
                        file.write(b"\x08")
        engine = EmbeddedEngine.open(root, background=False)
        findings = engine.verify()
        abandon(engine)
    assert len(findings) > 1
    assert findings[-1].endswith("its records were not read")


def _remove(path: Path) -> None:
    shutil.rmtree(path)
