"""Where the log ends, what is a torn tail and what is damage: segments made byte by byte, and read back."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentstore.engine.base import START, Position
from agentstore.engine.files import Files
from agentstore.engine.log import REPLAY_BYTES_MAX, LogReader, batches, chain
from agentstore.engine.segment import (
    FRAME_BYTES,
    FRAME_PAYLOAD_BYTES_MAX,
    FRAMES_AT,
    HEADER_BYTES,
    HEADER_COPY_AT,
    ITEM,
    Header,
    decode_batch,
    decode_header,
    encode_frame,
    encode_header,
    epoch_crc,
    frame_at,
    frames_behind,
)
from agentstore.engine.segments import Segments
from agentstore.engine.transaction import Transaction
from agentstore.errors import CorruptionError

UUID = bytes(range(16))
SIZE = 32 * 1024


def payload(lsn: int, size: int = 20) -> bytes:
    key = b"\x11" + lsn.to_bytes(4, "big")
    return ITEM.pack(len(key), size) + key + bytes([lsn % 256]) * size


@dataclass
class Log:
    """A log under construction. `durable` of a frame is what its writer knew."""

    directory: Path
    lsn: int = 0
    crc: int = 0
    at: int = 0
    files: list[int] = field(default_factory=list)
    headers: list[Header] = field(default_factory=list)
    starts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """LSN -> (place of its segment, offset)."""

    def roll(self, epoch: int, *, number: int | None = None, onto: int | None = None) -> None:
        """A new segment; `onto`: in the file of that segment, over its old bytes."""
        before = self.headers[-1] if self.headers else Header(UUID, 0, 0, 0, 0, 0, 0, 0, 0)
        header = Header(
            UUID, SIZE, number or before.number + 1, epoch, self.lsn + 1, before.number, before.epoch, self.lsn, self.at
        )
        file = len(self.files) + 1 if onto is None else self.files[onto]
        old = bytearray(self.path(file).read_bytes() if onto is not None else bytes(SIZE))
        raw = encode_header(header)
        old[0:HEADER_BYTES] = old[HEADER_COPY_AT : HEADER_COPY_AT + HEADER_BYTES] = raw
        self.path(file).write_bytes(old)
        self.files.append(file)
        self.headers.append(header)
        self.at = FRAMES_AT

    def path(self, file: int) -> Path:
        return self.directory / f"{file:016x}.seg"

    def frame(self, durable: int, body: bytes | None = None) -> None:
        self.lsn += 1
        body = payload(self.lsn) if body is None else body
        epoch = self.headers[-1].epoch
        raw, self.crc = encode_frame(epoch, epoch_crc(epoch), self.lsn, durable, self.crc, body)
        self.starts[self.lsn] = (len(self.files) - 1, self.at)
        self.write(len(self.files) - 1, self.at, raw)
        self.at += len(raw)

    def write(self, place: int, offset: int, data: bytes) -> None:
        with self.path(self.files[place]).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def damage(self, lsn: int, data: bytes = b"\xff\xff") -> None:
        """Overwrite the middle of a frame."""
        place, offset = self.starts[lsn]
        self.write(place, offset + FRAME_BYTES + 8, data)

    def read(self, base: Position = START, *, durable: int = 0, to: int | None = None) -> list[int]:
        """The LSNs that a reader finds above `base`."""
        segments = Segments(Files(), str(self.directory), UUID)
        try:
            reader = LogReader(segments, chain(segments.headers(), base), base, durable_lsn=durable, to=to)
            found = [frame.frame.lsn for frame in reader]
            assert reader.lsn == (found[-1] if found else base.applied_lsn)
            return found
        finally:
            segments.close()

    def position(self, lsn: int) -> Position:
        """Base's position once everything up to `lsn` is applied."""
        place, offset = self.starts[lsn]
        header = self.headers[place]
        data = self.path(self.files[place]).read_bytes()
        frame = frame_at(data, offset, header.epoch)
        assert frame is not None
        return Position(lsn, header.number, header.epoch, frame.end, frame.crc)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Two segments: LSNs 1 to 3 and 4 to 6, each frame synced before the next one was written."""
    made = Log(tmp_path)
    for epoch in (77, 99):
        made.roll(epoch)
        for _ in range(3):
            made.frame(made.lsn)
    return made


def test_all_of_it(log: Log) -> None:
    assert log.read() == [1, 2, 3, 4, 5, 6]
    assert log.read(durable=6) == [1, 2, 3, 4, 5, 6]
    assert log.read(to=5) == [1, 2, 3, 4, 5]
    assert log.read(log.position(2)) == [3, 4, 5, 6]
    assert log.read(log.position(3)) == [4, 5, 6]
    assert log.read(log.position(6)) == []


def test_an_empty_log(tmp_path: Path) -> None:
    assert Log(tmp_path).read() == []
    with pytest.raises(CorruptionError, match="has no segment, ends at LSN 0, but everything up to LSN 3"):
        Log(tmp_path).read(durable=3)


def test_a_torn_tail_is_dropped(log: Log) -> None:
    log.damage(6)
    assert log.read() == [1, 2, 3, 4, 5]
    assert log.read(durable=5) == [1, 2, 3, 4, 5]


def test_a_hole_before_frames_of_the_same_unsynced_group_is_a_torn_tail(
    log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        log.frame(6)  # 7, 8, 9: nobody of them knew more than 6
    log.damage(7)
    with caplog.at_level(logging.WARNING, logger="agentstore"):
        assert log.read(durable=6) == [1, 2, 3, 4, 5, 6]
    assert "torn tail in segment 2" in caplog.text
    assert "LSN 7 and 2 later frames were never confirmed" in caplog.text


def test_a_hole_before_a_frame_that_knew_it_durable_is_damage(log: Log) -> None:
    log.frame(6)
    log.frame(6)
    log.frame(8)
    log.damage(7)
    with pytest.raises(CorruptionError) as raised:
        log.read()
    place, offset = log.starts[7]
    message = str(raised.value)
    assert "segment 2 " in message
    assert str(log.path(log.files[place])) in message
    assert f"offset {offset}" in message
    assert "LSN 7 is damaged, everything up to LSN 8 was durable" in message
    assert "agentstore verify" in message


@pytest.mark.parametrize("lsn", [1, 2, 3, 4, 5, 6])
def test_damage_at_or_below_the_durable_lsn(log: Log, lsn: int) -> None:
    log.damage(lsn)
    with pytest.raises(CorruptionError, match=f"LSN {lsn} is damaged"):
        log.read(durable=6)


@pytest.mark.parametrize("lsn", [1, 2, 3])
def test_a_predecessor_record_proves_what_was_durable(log: Log, lsn: int) -> None:
    log.damage(lsn)
    with pytest.raises(CorruptionError, match=f"LSN {lsn} is damaged"):
        log.read()


@pytest.mark.parametrize("lsn", [1, 2, 3, 4])
def test_damage_below_what_base_has_is_not_looked_at(log: Log, lsn: int) -> None:
    base = log.position(4)
    log.damage(lsn)
    assert log.read(base, durable=6) == [5, 6]


def test_a_segment_cut_exactly_at_a_frame_is_noticed(log: Log) -> None:
    """rocksdb#7701: without its last frame the segment looks whole; the next header knows better."""
    place, offset = log.starts[3]
    log.write(place, offset, bytes(SIZE - offset))
    with pytest.raises(CorruptionError, match=r"segment 1 .* LSN 3 is damaged, everything up to LSN 3"):
        log.read()


def test_the_last_segment_cut_exactly_at_a_frame_is_noticed_by_the_durable_lsn(log: Log) -> None:
    place, offset = log.starts[6]
    log.write(place, offset, bytes(SIZE - offset))
    assert log.read(durable=5) == [1, 2, 3, 4, 5]
    with pytest.raises(CorruptionError, match="LSN 6 is damaged"):
        log.read(durable=6)


def test_a_missing_middle_segment(log: Log) -> None:
    log.roll(123)
    log.frame(6)
    middle = log.path(log.files[1])
    kept = middle.read_bytes()
    middle.unlink()
    with pytest.raises(CorruptionError, match="segment 2 of the log is missing: LSNs 1 to 6"):
        log.read()
    assert log.read(log_position(log, 6, kept)) == [7]  # base has all of it: nobody needs the segment


def log_position(log: Log, lsn: int, data: bytes) -> Position:
    place, offset = log.starts[lsn]
    header = log.headers[place]
    frame = frame_at(data, offset, header.epoch)
    assert frame is not None
    return Position(lsn, header.number, header.epoch, frame.end, frame.crc)


def test_a_predecessor_of_another_epoch_is_not_it(log: Log) -> None:
    """The number alone does not make a predecessor: it may be that of a life that was never part of this log."""
    other = log.headers[0]._replace(epoch=4711)
    raw = encode_header(other)
    log.write(0, 0, raw)
    log.write(0, HEADER_COPY_AT, raw)
    with pytest.raises(CorruptionError, match="segment 1 of the log is missing"):
        log.read()


def test_names_of_files_mean_nothing(log: Log) -> None:
    one, two = log.path(log.files[0]), log.path(log.files[1])
    aside = log.directory / "aside"
    one.rename(aside)
    two.rename(one)
    aside.rename(log.directory / f"{0xABCDEF:016x}.seg")
    assert log.read() == [1, 2, 3, 4, 5, 6]


def test_a_reused_segment_with_old_frames_behind(log: Log) -> None:
    """pebble#567, rocksdb#7252: what an earlier life left is not parsed, wherever it stands."""
    base = log.position(6)
    log.roll(1234, onto=0)
    assert log.read(base) == []
    log.frame(6)
    assert log.read(base) == [7]
    data = log.path(log.files[0]).read_bytes()
    assert [frame.lsn for frame in frames_behind(data, FRAMES_AT, 1234)] == [7]
    assert [frame.lsn for frame in frames_behind(data, FRAMES_AT, 77)] == [2, 3]  # they are there, of another epoch
    # And base's own segment may be the one that was reused.
    assert log.read(base, durable=7) == [7]


def test_frames_that_follow_a_dropped_torn_tail(log: Log) -> None:
    """The number of the dropped frame is used again in a new segment; what survived of it stays where it was."""
    log.frame(6)
    log.frame(6)  # 7 and 8, of which 7 is torn
    log.damage(7)
    lsn, crc, at = log.position(6).applied_lsn, log.position(6).crc, log.starts[7][1]
    log.lsn, log.crc, log.at = lsn, crc, at
    log.roll(555)
    log.frame(6, payload(70))
    assert log.read() == [1, 2, 3, 4, 5, 6, 7]
    log.frame(7)
    assert log.read(durable=8) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_highest_header_leads_even_if_nothing_follows_it(log: Log) -> None:
    log.roll(321, number=9)
    assert log.read() == [1, 2, 3, 4, 5, 6]
    log.frame(6)
    assert log.read() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("copy", [0, HEADER_COPY_AT])
def test_either_copy_of_a_header_will_do(log: Log, copy: int) -> None:
    log.write(1, copy + 20, b"\xff\xff\xff")
    assert log.read() == [1, 2, 3, 4, 5, 6]


def test_without_both_copies_a_needed_segment_is_missed(log: Log) -> None:
    for copy in (0, HEADER_COPY_AT):
        log.write(1, copy + 20, b"\xff\xff\xff")
    with pytest.raises(CorruptionError, match=r"LSN 4 is damaged|LSNs 4 to 6 are damaged"):
        log.read(durable=6)


def test_a_segment_of_another_store_is_none(log: Log) -> None:
    raw = encode_header(log.headers[1]._replace(uuid=bytes(16)))
    assert decode_header(raw, UUID) is None
    for copy in (0, HEADER_COPY_AT):
        log.write(1, copy, raw)
    assert log.read(durable=3) == [1, 2, 3]


def test_batches_end_on_frames_and_hold_the_newest_write(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.roll(5)
    key = b"\x11k"
    for number in range(3):
        log.frame(log.lsn, ITEM.pack(len(key), 1) + key + b"%d" % number)
    segments = Segments(Files(), str(tmp_path), UUID)
    reader = LogReader(segments, chain(segments.headers(), START), START, durable_lsn=0)
    (replay,) = batches(reader)
    segments.close()
    assert (replay.writes, replay.first_lsn, replay.reached) == ({key: b"2"}, 1, log.position(3))
    assert REPLAY_BYTES_MAX >= 1


def test_a_frame_with_a_right_checksum_and_no_batch_is_damage(log: Log) -> None:
    log.frame(6, b"\x05")
    segments = Segments(Files(), str(log.directory), UUID)
    reader = LogReader(segments, chain(segments.headers(), START), START, durable_lsn=0)
    with pytest.raises(CorruptionError, match="LSN 7 in segment 2 has a right CRC and no batch in it"):
        list(batches(reader))
    segments.close()


# --- the bytes ------------------------------------------------------------------------------

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)


@given(epoch=U64, lsn=U64, durable=U64, previous=U32, body=st.binary(max_size=200), bit=st.integers(0, 10_000))
def test_frames_of_any_epoch_prove_themselves_and_every_bit_counts(
    epoch: int, lsn: int, durable: int, previous: int, body: bytes, bit: int
) -> None:
    raw, crc = encode_frame(epoch, epoch_crc(epoch), lsn, durable, previous, body)
    frame = frame_at(raw, 0, epoch)
    assert frame == (lsn, durable, previous, crc, 0, len(raw))
    assert frame_at(raw, 0, epoch ^ 1) is None
    assert frame_at(raw[:-1], 0, epoch) is None
    bit %= len(raw) * 8
    damaged = bytearray(raw)
    damaged[bit // 8] ^= 1 << bit % 8
    assert frame_at(bytes(damaged), 0, epoch) is None


@given(epoch=U64, gaps=st.lists(st.binary(max_size=30), min_size=1, max_size=5))
def test_frames_are_found_behind_whatever_stands_between_them(epoch: int, gaps: list[bytes]) -> None:
    data, wanted = b"", []
    for lsn, gap in enumerate(gaps):
        data += gap
        wanted.append((lsn, len(data)))
        data += encode_frame(epoch, epoch_crc(epoch), lsn, 0, 0, b"x" * lsn)[0]
    found = [(frame.lsn, frame.start) for frame in frames_behind(data, 0, epoch)]
    assert found == wanted


def test_zeros_are_no_frame_in_any_epoch() -> None:
    for epoch in (0, 1, 2**64 - 1):
        assert frame_at(bytes(100), 0, epoch) is None
    # The one epoch whose marker is zeros: its checksum is not.
    assert frame_at(bytes(100), 0, 0x9E3779B97F4A7C15) is None


def test_a_length_over_the_limit_is_no_frame() -> None:
    raw, _ = encode_frame(1, epoch_crc(1), 1, 0, 0, b"")
    assert frame_at(raw[:8] + (FRAME_PAYLOAD_BYTES_MAX + 1).to_bytes(4, "little") + raw[12:], 0, 1) is None


@given(numbers=st.lists(U64, min_size=8, max_size=8), bit=st.integers(0, HEADER_BYTES * 8 - 1))
def test_headers(numbers: list[int], bit: int) -> None:
    header = Header(UUID, *numbers)
    raw = encode_header(header)
    assert len(raw) == HEADER_BYTES
    assert decode_header(raw, UUID) == header
    assert decode_header(raw, bytes(16)) is None
    assert decode_header(raw[:-1], UUID) is None
    damaged = bytearray(raw)
    damaged[bit // 8] ^= 1 << bit % 8
    assert decode_header(bytes(damaged), UUID) is None


@given(st.dictionaries(st.binary(min_size=1, max_size=20), st.none() | st.binary(max_size=40), max_size=8))
def test_batches(writes: dict[bytes, bytes | None]) -> None:
    transaction = Transaction(None, None, 1)  # type: ignore[arg-type]  # reads nothing
    transaction.writes = writes
    raw = transaction.payload()
    assert decode_batch(b"ab" + raw + b"cd", 2, 2 + len(raw)) == writes
    for cut in range(1, len(raw)):
        try:
            shorter = decode_batch(raw, 0, cut)
        except ValueError:
            continue
        assert shorter.items() <= writes.items()  # cut between two items
