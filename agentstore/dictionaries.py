"""Dictionaries: what many messages have in common, learnt from the store's own, so that packs need not repeat it.

Record "z" id: the CBOR array ``[1, LSN, [number, …], bytes, frame]``: the numbers of the threads it was trained on, and
the dictionary as a zstd frame. It stays while a pack names its id, and goes when a thread that it was trained on forgot
something: what nobody can reach any more must not be read from here either.
"""

from __future__ import annotations

import threading
from typing import Final, NamedTuple

from agentstore import records
from agentstore.codec import zstd
from agentstore.engine import keys
from agentstore.engine.api import Reader, Tx
from agentstore.errors import CorruptionError, LimitExceeded

DICTIONARIES: Final = keys.encode("z")
_KEPT_MAX: Final = 16


class Trained(NamedTuple):
    """A dictionary's record."""

    id: int
    lsn: int
    threads: list[int]
    size: int
    """Of the dictionary, in bytes."""
    frame: bytes


_lock = threading.Lock()
_known: dict[bytes, zstd.Dictionary] = {}


def find(reader: Reader, number: int) -> zstd.Dictionary:
    """The dictionary with this id; CorruptionError if there is none. Kept in memory once it was read."""
    raw = reader.get(DICTIONARIES + records.int_part(number))
    if raw is None:
        raise CorruptionError(f"the dictionary {number} is missing; run 'agentstore verify'")
    with _lock:
        found = _known.get(raw)
    if found is None:
        trained = decode(number, raw)
        try:
            found = zstd.Dictionary(zstd.decompress(trained.frame, zstd.DICTIONARY_BYTES_MAX))
        except (CorruptionError, LimitExceeded) as error:
            raise CorruptionError(f"the dictionary {number} is damaged: {error}") from error
        if found.id != number:
            raise CorruptionError(f"the dictionary {number} is damaged: it says that it is {found.id}")
        with _lock:
            if len(_known) >= _KEPT_MAX:
                _known.clear()
            _known[raw] = found
    return found


def decode(number: int, raw: bytes) -> Trained:
    """The record of a dictionary. CorruptionError if it is damaged."""
    where = f"the dictionary {number}"
    parts = records.unpack(raw, where)
    if len(parts) != 5 or [type(part) for part in parts] != [int, int, list, int, bytes] or parts[0] != records.VERSION:
        raise CorruptionError(f"{where}: the record is damaged or of another format")
    return Trained(number, *parts[1:])


def all_of(reader: Reader) -> list[Trained]:
    """The records of all dictionaries."""
    return [
        decode(records.seq_of(key, DICTIONARIES), raw)
        for key, raw in reader.scan(DICTIONARIES, records.end_of(DICTIONARIES))
    ]


def put(tx: Tx, dictionary: zstd.Dictionary, threads: list[int]) -> None:
    """Keep a dictionary that was trained on these threads."""
    frame = zstd.compress(dictionary.data, zstd.LEVEL_MAX)
    record = records.pack([records.VERSION, tx.lsn, threads, len(dictionary.data), frame])
    tx.put(DICTIONARIES + records.int_part(dictionary.id), record)


def remove(tx: Tx, number: int) -> None:
    """Forget a dictionary that no pack names any more."""
    tx.delete(DICTIONARIES + records.int_part(number))
