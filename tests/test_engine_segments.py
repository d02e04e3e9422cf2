"""The files of the log while several threads and processes use them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from crash.remote import Remote

from agentstore.engine import segment
from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.files import Files
from agentstore.engine.segment import FRAMES_AT, SEGMENT_BYTES, Header
from agentstore.engine.segments import Segments

UUID = bytes(range(16))


class Interrupted(Files):
    """Runs `meanwhile` in another thread before the next read, and waits a second for it at most."""

    def __init__(self) -> None:
        self.others: list[threading.Thread] = []
        self.meanwhile: Callable[[], object] | None = None

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self._interrupt()
        return super().pread(fd, size, offset)

    def size(self, fd: int) -> int:
        self._interrupt()
        return super().size(fd)

    def _interrupt(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            other = threading.Thread(target=meanwhile)
            other.start()
            other.join(1.0)
            self.others.append(other)


def header(number: int, *, first_lsn: int) -> Header:
    return Header(
        UUID, SEGMENT_BYTES, number, 1000 + number, first_lsn, number - 1, 999 + number, first_lsn - 1, FRAMES_AT
    )


def filled(files: Files, directory: Path, count: int) -> tuple[Segments, list[int]]:
    """Segments 1 to `count`, each with a frame of its own number as LSN."""
    segments = Segments(files, str(directory), UUID)
    made: list[int] = []
    for number in range(1, count + 1):
        file = segments.take(SEGMENT_BYTES, 0, made[-1] if made else 0)
        segments.write_header(file, header(number, first_lsn=number))
        epoch = 1000 + number
        frame, _ = segment.encode_frame(epoch, segment.epoch_crc(epoch), number, number - 1, 0, b"")
        fd = segments.fd(file)
        assert fd is not None
        files.pwrite(fd, frame, FRAMES_AT)
        made.append(file)
    return segments, made


def test_a_segment_is_not_closed_under_a_thread_that_reads_it(tmp_path: Path) -> None:
    """The roller unlinked a folded segment and closed its descriptor while the background looked at the same segment:
    EBADF in a fold, or, had the number of the descriptor been given out again, the bytes of another file."""
    files = Interrupted()
    segments, made = filled(files, tmp_path, 5)
    for read in (lambda: segments.header(made[0]), lambda: segments.read(made[1])):
        files.meanwhile = lambda: segments.take(SEGMENT_BYTES, 4, made[-1])
        read()  # the bytes of this segment, or none; never another's, never an OSError
        files.others.pop().join()
    segments.close()


def test_who_counts_the_log_does_not_mind_that_a_roller_gives_a_segment_up(tmp_path: Path) -> None:
    """`live_bytes` found a header, and when it read the segment another process had unlinked it: CorruptionError."""
    files = Interrupted()
    segments, made = filled(files, tmp_path, 5)
    segments.close()
    other = Segments(files, str(tmp_path), UUID)
    (found, *_) = other.headers()
    other.close()
    Path(segments.path(made[0])).unlink()
    assert other.last_lsn(found) == 0
    assert other.reusable(found, 4, made[-1])
    other.close()


class RolledMeanwhile(Files):
    """Runs `meanwhile` before the next read of a whole segment."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] | None = None

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        if size >= SEGMENT_BYTES:
            meanwhile, self.meanwhile = self.meanwhile, None
            if meanwhile is not None:
                meanwhile()
        return super().pread(fd, size, offset)


@pytest.mark.parametrize("unlinked", [False, True])
def test_verify_beside_a_roller_finds_no_damage_in_what_it_reuses(tmp_path: Path, unlinked: bool) -> None:
    """A folded segment was zero-filled, or unlinked, by another process after `verify` had read its header: a damaged
    frame was reported where there was none, or CorruptionError."""
    files = RolledMeanwhile()
    engine = EmbeddedEngine.open(tmp_path / "store", background=False, files=files)
    with Remote() as other:
        other.open(tmp_path / "store", background=False)
        other.call("fill", "a", 400_000, 60 if unlinked else 25)
        engine.fold()
        before = {path.name for path in (tmp_path / "store" / "wal").iterdir()}

        def roll() -> int:
            lsn = other.stats()["lsn"]
            other.call("fill", "b", 400_000, 25)
            return other.stats()["lsn"] - lsn

        rolled: list[int] = []
        files.meanwhile = lambda: rolled.append(roll())
        assert engine.verify() == []
        assert rolled == [25]
        after = {path.name for path in (tmp_path / "store" / "wal").iterdir()}
        assert bool(before - after) == unlinked
    engine.close()


def test_a_segment_that_was_rolled_to_meanwhile_is_not_taken_for_retired(tmp_path: Path) -> None:
    """Acknowledged commits were lost: the background looked at the segments just when another one became active, and
    remembered what was in that one as its last LSN; a later roll of this process reused it before it was folded."""
    path, half = tmp_path / "store", SEGMENT_BYTES // 3
    with Remote() as one, Remote() as other:
        one.open(path, background=False)
        other.open(path, background=False)
        one.call("look_while_rolling")
        lsns = [other.put(b"\x30a%d" % number, bytes(half)) for number in range(6)]
        assert lsns == [1, 2, 3, 4, 5, 6]
        one.put(b"\x30b", bytes(half))
        other.kill()
        one.kill()
    engine = EmbeddedEngine.open(path, background=False)
    with engine.read() as snap:
        assert [snap.get(b"\x30a%d" % number) for number in range(6)] == [bytes(half)] * 6
    assert engine.verify() == []
    engine.close()
