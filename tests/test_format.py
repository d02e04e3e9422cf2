"""docs/format.md against stores: a decoder written from the document alone reads every frame, header and record."""

from __future__ import annotations

import os
import random
import re
import signal
import struct
from pathlib import Path
from typing import Any, NamedTuple

import cbor2
import format_decoder as decoder
import pytest
import zstandard

from agentstore import Append, Delete, EffectCall, Set, Splice, Store, Thread, compaction
from agentstore.engine.base import CRC_BYTES
from agentstore.engine.embedded import EmbeddedEngine

DOCUMENT = Path(__file__).parent.parent / "docs" / "format.md"


def in_killed_child(directory: Path, work: Any) -> None:
    """Run ``work(store)`` in a process that is killed without closing, so that the log stays."""
    pid = os.fork()
    if pid == 0:
        try:
            work(Store.open(directory, background=False))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the child failed instead of being killed"


PACKED = 130


def write(store: Store) -> None:
    thread = store.thread("a\0b")
    thread.commit(Set("step", 0), Set("notes", []), Set("big", "x" * 5000), reason="input", step=0)
    for number in range(40):
        thread.commit(Append("notes", {"n": number, "text": "é" * number}), Set("step", number), reason="round")
    thread.commit(Splice("notes", 3, 2, ["spliced"]), Delete("big"), metadata={"k": "v"}, step=7, status="RUNNING")
    decision = thread.commit(Append("notes", "call"), reason="decision")
    thread.effect(decision=decision, index=0, tool="charge", arguments={"amount": 5}, rule="query").receipt("paid")
    thread.commit(
        Append("notes", "again"),
        reason="decision",
        intents=[EffectCall(index=0, tool="mail", arguments={}, rule="ask")],
    )
    thread.pin(3, "before the refund")
    thread.fork(at=3, into="fork")
    thread.fork(at=43, into="fork of a decision")
    store.thread("large").commit(Set("blob", os.urandom(5 * 1024 * 1024)))  # a segment of its own
    packed = store.thread("packed")
    for number in range(PACKED):
        more = [Set("late", number)] if number > 70 else []
        packed.commit(Append("notes", {"n": number}, number), Set("step", number), *more, step=number)
    packed.commit(Splice("notes", 3, 2, ["spliced"]), parent=70)
    store.thread("last").commit(Set("step", 1))
    store.thread("last").delete()


class Killed(NamedTuple):
    """A store as its killed writer left it, read once: the decoder computes its checksums byte by byte."""

    directory: Path
    frames: list[dict[str, Any]]
    headers: list[dict[str, int] | None]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    directory = tmp_path_factory.mktemp("format") / "store"
    in_killed_child(directory, write)
    uuid = decoder.read_format((directory / "FORMAT").read_bytes())
    headers = [decoder.read_header(path.read_bytes(), uuid) for path in (directory / "wal").glob("*.seg")]
    return Killed(directory, decoder.read_log(directory), headers)


def test_the_decoder_is_short_and_independent() -> None:
    lines = Path(decoder.__file__).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert not any(re.match(r"\s*(import|from) agentstore", line) for line in lines)


def test_every_frame_and_header_is_read(killed: Killed) -> None:
    frames = killed.frames
    assert [frame["lsn"] for frame in frames] == list(range(1, len(frames) + 1))
    assert len(frames) > 45
    for before, frame in zip([{"crc": 0, "lsn": 0}, *frames], frames, strict=False):
        assert frame["previous"] == before["crc"]
        assert frame["durable_lsn"] <= before["lsn"]
    headers = [header for header in killed.headers if header is not None]
    assert len(headers) >= 3
    assert any(header["size"] > 4 * 1024 * 1024 for header in headers)


def test_the_log_holds_what_base_holds_after_recovery(killed: Killed) -> None:
    """Replaying the decoded items into a dict gives base, record for record, its checksums by the document too."""
    expected: dict[bytes, bytes] = {}
    for frame in killed.frames:
        for key, value in frame["items"]:
            if value is None:
                expected.pop(key, None)
            else:
                expected[key] = value
    engine = EmbeddedEngine.open(killed.directory, create=False, background=False)
    with engine._parts.base.begin() as txn:
        raw = {bytes(key): bytes(value) for key, value in txn.cursor()}
    engine.close()
    meta = raw.pop(b"\x01base")
    assert struct.unpack_from("<I", meta)[0] == decoder.crc32c(b"\x01base", meta[4:])
    assert raw.keys() == expected.keys()
    small = {key: value for key, value in raw.items() if len(value) < 100_000}
    for key, value in small.items():
        assert struct.unpack_from("<I", value)[0] == decoder.crc32c(key, value[CRC_BYTES:])
    assert {key: value[CRC_BYTES:] for key, value in raw.items()} == expected


def test_every_record_is_read_and_the_states_are_those_that_load_returns(killed: Killed) -> None:
    kinds: set[Any] = set()
    checkpoints: dict[int, dict[int, dict[str, Any]]] = {}
    for frame in killed.frames:
        for key, value in frame["items"]:
            parts = decoder.read_key(key)
            kind = parts[1] if isinstance(parts[0], int) else parts[0]
            kinds.add(kind)
            if value is not None and kind == "c":
                record = decoder.read_checkpoint(value)
                assert record["lsn"] == frame["lsn"]
                checkpoints.setdefault(parts[0], {})[parts[2]] = record  # type: ignore[index, arg-type]  # N and seq
            elif value is not None and kind == "h":
                assert len(value) == 50 and value[0] == 1
            elif value is not None and kind in ("i", "e", "l", "v"):
                decoded = cbor2.loads(value)
                for part in decoded if kind == "e" and isinstance(decoded[0], list) else [decoded]:
                    assert part[0] == 1
    assert kinds >= {"h", "c", "p", "i", "e", "r", "n", "t", "m", "d"}
    with Store.open(killed.directory) as store:
        thread = store.thread("a\0b")
        bodies: dict[str, tuple[bytes, int]] = {}
        for seq, record in sorted(checkpoints[1].items()):
            assert record["parent"] == (seq - 1 if seq else None)
            decoder.apply(bodies, record["ops"])
            loaded = thread.load(at=seq)
            for name, (body, count) in bodies.items():
                assert cbor2.dumps(loaded[name]) == (
                    body if count == -1 else cbor2.dumps([None] * count)[: -count or None] + body
                )
        assert list(bodies) == list(thread.load())
        assert checkpoints[1][41]["meta"] == [7, "RUNNING", {"k": "v"}]


def states_of(packs: list[dict[str, Any]]) -> dict[int, dict[str, tuple[bytes, int]]]:
    """The bodies and counts of all fields after each member of packs that follow each other, by seq."""
    bodies: dict[str, tuple[bytes, int]] = {}
    found = {}
    for pack in packs:
        for seq, ops in zip(pack["seqs"], pack["ops"], strict=True):
            decoder.apply(bodies, ops)
            found[seq] = dict(bodies)
    return found


def check_states(thread: Thread, found: dict[int, dict[str, tuple[bytes, int]]]) -> None:
    for seq, bodies in found.items():
        loaded = thread.load(at=seq)
        assert list(loaded) == list(bodies)
        for name, (body, count) in bodies.items():
            whole = body if count == -1 else cbor2.dumps([None] * count)[: -count or None] + body
            assert cbor2.dumps(loaded[name]) == whole


def test_packs_are_read_and_the_states_are_those_that_load_returns(killed: Killed) -> None:
    packs: dict[int, bytes] = {}
    items = [(decoder.read_key(key), value) for frame in killed.frames for key, value in frame["items"]]
    (number,) = [key[1] for key, value in items if key[0] == "t" and value == b"packed"]
    for key, value in items:
        if key[:2] == (number, "q") and value is not None:
            assert isinstance(key[2], int)
            packs[key[2]] = value
    assert sorted(packs) == [63, 127]
    read = [decoder.read_pack(packs[last], last) for last in sorted(packs)]
    assert [pack["parent"] for pack in read] == [None, 63]
    with Store.open(killed.directory) as store:
        thread = store.thread("packed")
        assert [cp.lsn for cp in reversed(thread.history())][:128] == read[0]["lsns"] + read[1]["lsns"]
        check_states(thread, states_of(read))


def test_cold_packs_and_dictionaries_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "CONTENT_BYTES_MIN", 1000)
    common = [random.Random(n).randbytes(200).hex() for n in range(20)]
    with Store.open(tmp_path / "store", background=False) as store:
        for name in ("a", "b"):
            thread = store.thread(name)
            for n in range(150):
                thread.commit(Append("notes", {"n": n, "text": random.Random(f"{name} {n}").choice(common)}))
    assert compaction.compact(tmp_path / "store").dictionary is not None
    with Store.open(tmp_path / "store") as store:
        with store._engine.read() as snap:
            pairs = [(decoder.read_key(key), value) for key, value in snap.scan(b"\x10", b"\xff")]
        pieces = {key[2]: cbor2.loads(value) for key, value in pairs if key[0] == "z"}
        assert sorted(pieces) == list(range(9))
        joined = b"".join(pieces[at][4] for at in range(8))
        sevens = b"".join(bytes([a ^ b]) for a, b in zip(pieces[7][4], pieces[8][4], strict=True))
        rest = 0
        for at in range(7):
            rest ^= int.from_bytes(pieces[at][4], "little")
        assert sevens == rest.to_bytes(len(sevens), "little")
        dictionary = zstandard.ZstdDecompressor().decompress(joined[: pieces[0][3]])
        for number, name in ((1, "a"), (2, "b")):
            parts = [value for key, value in pairs if key[:2] == (number, "q")]
            assert parts[0][1] & 1 and all(len(part) == 1320 for part in parts[:-1])
            check_states(store.thread(name), states_of([decoder.read_pack(b"".join(parts), 149, dictionary)]))


def test_the_hex_dump_in_the_document_is_a_segment() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    data = bytearray(16384)
    for line in re.findall(r"^    ([0-9a-f]{6})  ((?:[0-9a-f]{2} ?)+)", text, re.MULTILINE):
        raw = bytes.fromhex(line[1])
        data[int(line[0], 16) : int(line[0], 16) + len(raw)] = raw
    header = decoder.read_header(bytes(data), bytes(data[16:32]))
    assert header is not None and header["number"] == 1
    (frame,) = decoder.read_frames(bytes(data), header["epoch"])
    assert frame["lsn"] == 1
    keys = [decoder.read_key(key) for key, _ in frame["items"]]
    assert keys == [("m", "threads"), ("n", b"t"), ("t", 1), (1, "c", 0), (1, "h")]
    record = decoder.read_checkpoint(frame["items"][3][1])
    assert record["ops"] == [[1, "step", b"\x01", decoder.crc32c(b"\x01"), -1]]
