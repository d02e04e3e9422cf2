"""A reader of a store's bytes, from docs/format.md alone, in at most 150 lines. It imports nothing of agentstore."""

from __future__ import annotations

import struct
from itertools import accumulate
from pathlib import Path
from typing import Any

import cbor2
import zstandard
from crcmod.predefined import mkPredefinedCrcFun

MASK = 0x9E3779B97F4A7C15
_crc = mkPredefinedCrcFun("crc-32c")


def crc32c(*parts: bytes) -> int:
    return int(_crc(b"".join(parts)))


def read_format(data: bytes) -> bytes:
    """The store's uuid."""
    assert len(data) == 40 and data[:16] == b"agentstore store"
    assert struct.unpack_from("<I", data, 36)[0] == crc32c(data[:36])
    assert struct.unpack_from("<I", data, 16)[0] == 2
    return data[20:36]


def read_header(data: bytes, uuid: bytes) -> dict[str, int] | None:
    for at in (0, 4096):
        raw = data[at : at + 100]
        if raw[:8] == b"AGSTWAL\n" and raw[16:32] == uuid and struct.unpack_from("<I", raw, 96)[0] == crc32c(raw[:96]):
            names = "size number epoch first_lsn previous_number previous_epoch previous_lsn previous_end".split()
            return dict(zip(names, struct.unpack_from("<8Q", raw, 32), strict=True))
    return None


def read_frames(data: bytes, epoch: int) -> list[dict[str, Any]]:
    frames, at = [], 8192
    while at + 36 <= len(data):
        marker, length, crc, lsn, durable, previous = struct.unpack_from("<QIIQQI", data, at)
        end = at + 36 + length
        covered = struct.pack("<Q", epoch) + data[at + 8 : at + 12] + data[at + 16 : end]
        if marker != epoch ^ MASK or crc != crc32c(covered):
            break
        items = read_items(data[at + 36 : end])
        frames.append({"lsn": lsn, "durable_lsn": durable, "previous": previous, "crc": crc, "items": items})
        at = end
    return frames


def read_items(payload: bytes) -> list[tuple[bytes, bytes | None]]:
    items: list[tuple[bytes, bytes | None]] = []
    at = 0
    while at < len(payload):
        key_size, size = struct.unpack_from("<HI", payload, at)
        value_at = at + 6 + key_size
        at = value_at + (0 if size == 0xFFFFFFFF else size)
        items.append((payload[value_at - key_size : value_at], None if size == 0xFFFFFFFF else payload[value_at:at]))
    assert at == len(payload)
    return items


def read_log(directory: Path) -> list[dict[str, Any]]:
    uuid = read_format((directory / "FORMAT").read_bytes())
    by_name = {}
    for path in (directory / "wal").glob("*.seg"):
        data = path.read_bytes()
        header = read_header(data, uuid)
        if header is not None:
            by_name[header["number"], header["epoch"]] = header, read_frames(data, header["epoch"])
    chain: list[list[dict[str, Any]]] = []
    name = max(by_name)
    while name in by_name:
        header, frames = by_name[name]
        chain.insert(0, frames)
        name = header["previous_number"], header["previous_epoch"]
    return [frame for frames in chain for frame in frames]


def read_key(key: bytes) -> tuple[int | str | bytes, ...]:
    parts: list[int | str | bytes] = []
    at = 0
    while at < len(key):
        tag = key[at]
        at += 1
        if tag < 0x30:
            parts.append(int.from_bytes(key[at : at + tag - 0x10], "big"))
            at += tag - 0x10
            continue
        end = at
        while key[end] or key[end + 1 : end + 2] == b"\xff":
            end += 1 if key[end] else 2
        raw = key[at:end].replace(b"\0\xff", b"\0")
        parts.append(raw if tag == 0x30 else raw.decode("utf-8", "surrogatepass"))
        at = end + 1
    return tuple(parts)


def read_checkpoint(value: bytes) -> dict[str, Any]:
    version, flags, _, _, meta, parent, _, lsn, _, _ = struct.unpack_from("<BBBBIQQQ8sI", value)
    assert version == 1
    payload = value[44 + meta :]
    if flags & 1:
        payload = zstandard.ZstdDecompressor().decompress(payload)
    read = cbor2.loads(value[44 : 44 + meta]) if meta else [None, None, None]
    return {"parent": parent - 1 if parent else None, "lsn": lsn, "meta": read, "ops": cbor2.loads(payload)[0]}


def read_pack(value: bytes, last: int, dictionary: bytes = b"") -> dict[str, Any]:
    _, _, members, number, first, parent, _, _, crc = struct.unpack_from("<BBHIQQIII", value)
    assert value[0] == 1 and crc == crc32c(value[:32], struct.pack("<Q", last)) and bool(number) == bool(dictionary)
    zstd = zstandard.ZstdDecompressor(zstandard.ZstdCompressionDict(dictionary) if dictionary else None)
    data = zstd.decompress(value[36:])
    heads = 8 + struct.unpack_from("<I", data)[0]
    at = heads + struct.unpack_from("<I", data, 4)[0]
    seqs, reasons, times, lsns, ids, metas, _ = cbor2.loads(data[8:heads])
    fields, ops = cbor2.loads(data[heads:at])
    made: list[list[Any]] = ops or [[] for _ in range(members)]
    for name, of, kinds, sizes, counts in fields:
        for place, size in enumerate(sizes):
            op = [kinds[place], name, data[at : at + size], None, counts[place]]
            made[place if of is None else of[place]].append(op)
            at += size
    assert at == len(data) and {len(reasons), len(times), len(ids), len(metas)} == {members}
    seqs = [first + sum(seqs[: at + 1]) if seqs else first + at for at in range(members)]
    return {"seqs": seqs, "parent": parent - 1 if parent else None, "lsns": list(accumulate(lsns)), "ops": made}


def apply(bodies: dict[str, tuple[bytes, int]], ops: list[list[Any]]) -> None:
    """Change the bodies and counts of a state's fields; every field must then have its checksum."""
    for kind, name, *rest in ops:
        if kind == 2:
            del bodies[name]
            continue
        crc, count = rest[-2:]
        old, before = bodies.get(name, (b"", 0))
        if kind == 1:
            body = rest[0]
        elif kind == 3:
            body = old + rest[0]
        else:
            assert kind == 4, kind
            start, removed, new = rest[:3]
            body = old[:start] + new + old[start + removed :]
        assert crc is None or crc == crc32c(body)
        bodies[name] = body, count + before if crc is None and kind == 3 else count
