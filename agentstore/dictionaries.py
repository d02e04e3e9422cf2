"""Dictionaries: what many messages have in common, learnt from the store's own, so that packs need not repeat it.

Every pack that was made with a dictionary is lost without it, so one damaged record must not cost it. Its zstd frame is
cut into `PIECES` pieces of one size (the last one filled with zeros), and their exclusive or is kept as one more:
whichever single one is damaged or missing follows from the others. Records "z" id piece: the CBOR array

    [1, LSN, [number, …], bytes of the frame, piece]

with the numbers of the threads that it was trained on (in the first piece and in the last; empty in the others). It
stays while a pack names its id, and goes when a thread that it was trained on forgot something: what nobody can reach
any more must not be read from here either.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final, NamedTuple, cast

from agentstore import records
from agentstore.codec import zstd
from agentstore.engine import keys
from agentstore.engine.api import Reader, Tx
from agentstore.errors import CorruptionError, LimitExceeded

DICTIONARIES: Final = keys.encode("z")
PIECES: Final = 8
_KEPT_MAX: Final = 16


class Trained(NamedTuple):
    """What is known of a dictionary beside its contents."""

    id: int
    lsn: int
    threads: list[int]


class _Piece(NamedTuple):
    lsn: int
    threads: list[int]
    frame_bytes: int
    data: bytes


_lock = threading.Lock()
_known: dict[tuple[int, int, bytes], zstd.Dictionary] = {}


# --- reading ---------------------------------------------------------------------------


def find(reader: Reader, number: int) -> zstd.Dictionary:
    """The dictionary with this id; CorruptionError if it is not there, or two of its records are damaged.

    Kept in memory once it was read, by what its first whole piece says.
    """
    first = next(_whole_pieces(reader, number), None)
    if first is None:
        raise CorruptionError(f"the dictionary {number} is missing; run 'agentstore verify'")
    key = (number, first[0], first[1].data)
    with _lock:
        found = _known.get(key)
    if found is None:
        found = _assemble(number, dict(_whole_pieces(reader, number)))
        with _lock:
            if len(_known) >= _KEPT_MAX:
                _known.clear()
            _known[key] = found
    return found


def _whole_pieces(reader: Reader, number: int) -> Iterator[tuple[int, _Piece]]:
    """Those of a dictionary's pieces, the exclusive or included, that can be read."""
    for at in range(PIECES + 1):
        try:
            yield at, _piece(reader, number, at)
        except CorruptionError:
            continue


def _piece(reader: Reader, number: int, at: int) -> _Piece:
    where = f"piece {at} of the dictionary {number}"
    raw = reader.get(_key(number, at))
    if raw is None:
        raise CorruptionError(f"{where} is missing")
    parts = records.unpack(raw, where)
    if [type(part) for part in parts] != [int, int, list, int, bytes] or parts[0] != records.VERSION:
        raise CorruptionError(f"{where} is damaged or of another format")
    return _Piece(*parts[1:])


def _assemble(number: int, pieces: dict[int, _Piece]) -> zstd.Dictionary:
    if len(pieces) < PIECES:
        raise CorruptionError(
            f"of the dictionary {number} {PIECES + 1 - len(pieces)} records are missing or damaged;"
            " run 'agentstore verify'"
        )
    data = {at: piece.data for at, piece in pieces.items()}
    missing = set(range(PIECES)) - data.keys()
    for at in missing:
        data[at] = _exclusive_or(list(data.values()))
    size = next(iter(pieces.values())).frame_bytes
    try:
        frame = b"".join([data[at] for at in range(PIECES)])[:size]
        found = zstd.Dictionary(zstd.decompress(frame, zstd.DICTIONARY_BYTES_MAX))
    except (CorruptionError, LimitExceeded) as error:
        raise CorruptionError(f"the dictionary {number} is damaged: {error}") from error
    if found.id != number:
        raise CorruptionError(f"the dictionary {number} is damaged: it says that it is {found.id}")
    return found


def _exclusive_or(pieces: list[bytes]) -> bytes:
    total = 0
    for piece in pieces:
        total ^= int.from_bytes(piece, "little")
    return total.to_bytes(max(len(piece) for piece in pieces), "little")


def _key(number: int, at: int) -> bytes:
    return DICTIONARIES + records.int_part(number) + records.int_part(at)


def ids(reader: Reader) -> list[int]:
    """The ids of all dictionaries. O(their number)."""
    found = [key for key, _ in reader.scan(DICTIONARIES, records.end_of(DICTIONARIES))]
    return sorted({cast(int, keys.decode(key[len(DICTIONARIES) :])[0]) for key in found})


def all_of(reader: Reader) -> list[Trained]:
    """All dictionaries of which it is known what they were trained on."""
    found: list[Trained] = []
    for number in ids(reader):
        for at in (0, PIECES):
            try:
                piece = _piece(reader, number, at)
            except CorruptionError:
                continue  # `check` says so
            found.append(Trained(number, piece.lsn, piece.threads))
            break
    return found


def newest(reader: Reader) -> zstd.Dictionary | None:
    """The dictionary that new packs are made with; None if there is none, or it cannot be read. O(dictionaries)."""
    there = all_of(reader)
    if not there:
        return None
    try:
        return find(reader, max(there, key=lambda each: each.lsn).id)
    except CorruptionError:
        return None


def check(reader: Reader) -> Iterator[str]:
    """A sentence for each piece of a dictionary that is missing or damaged, and each dictionary that cannot be read."""
    for number in ids(reader):
        for at in range(PIECES + 1):
            try:
                _piece(reader, number, at)
            except CorruptionError as error:
                yield str(error)
        try:
            _assemble(number, dict(_whole_pieces(reader, number)))
        except CorruptionError as error:
            yield str(error)


# --- writing ---------------------------------------------------------------------------


def put(tx: Tx, dictionary: zstd.Dictionary, threads: list[int], lsn: int | None = None) -> None:
    """Keep a dictionary that was trained on these threads as they were at `lsn`, or as they are now.

    What a thread forgot after `lsn` and before `tx` is in the dictionary.
    """
    lsn = tx.lsn if lsn is None else lsn
    frame = zstd.compress(dictionary.data, zstd.LEVEL_MAX)
    size = -(-len(frame) // PIECES)
    pieces = [frame[at * size : (at + 1) * size].ljust(size, b"\0") for at in range(PIECES)]
    for at, piece in enumerate([*pieces, _exclusive_or(pieces)]):
        of = threads if at in (0, PIECES) else []
        tx.put(_key(dictionary.id, at), records.pack([records.VERSION, lsn, of, len(frame), piece]))


def remove(tx: Tx, number: int) -> None:
    """Forget a dictionary that no pack names any more."""
    for at in range(PIECES + 1):
        tx.delete(_key(number, at))
