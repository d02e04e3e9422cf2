"""Every invariant of the engine, checked on an open store: what ``agentstore verify`` runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import lmdb

from agentstore.engine.control import DURABLE_LSN
from agentstore.engine.lmdbfile import damage_of
from agentstore.engine.log import LogReader, chain
from agentstore.engine.parts import Parts
from agentstore.engine.segment import FRAMES_AT, frames_behind
from agentstore.errors import CorruptionError


def problems(parts: Parts) -> list[str]:
    """A sentence for each invariant that does not hold. The fold lock keeps base and log together meanwhile."""
    with parts.fold_lock:
        structure = _structure(parts)
        # Not the records of a damaged tree: LMDB follows every pointer, and ends the process where one leads nowhere.
        records = [f"{parts.base.path}: its records were not read"] if structure else _records(parts)
        return [*_log(parts), *structure, *records]


def _log(parts: Parts) -> list[str]:
    """The log from base to its durable end is whole; frames that are not needed any more are read too."""
    found = []
    durable = parts.control.words[DURABLE_LSN]
    active = parts.tail.position()
    base = parts.base.position()
    headers = parts.segments.headers()
    if not base.applied_lsn <= durable <= active.lsn:
        found.append(f"LSNs are out of order: applied {base.applied_lsn}, durable {durable}, tail {active.lsn}")
    if durable > base.applied_lsn:
        top = [each for each in headers if (each.header.number, each.header.epoch) == (active.segment, active.epoch)]
        try:
            for frame in LogReader(
                parts.segments, chain(headers, base, top[0] if top else None), base, durable_lsn=durable, to=durable
            ):
                frame.batch()
        except CorruptionError as error:
            found.append(str(error))
    for each in headers:
        # A retired segment up to its last frame: damage there is not needed by anybody, but it is a sign.
        if each.file == active.file:
            continue
        after = [other.header for other in headers if other.header.previous_epoch == each.header.epoch]
        if not after:
            continue
        try:
            data = parts.segments.read(each.file)
        except CorruptionError:
            continue  # a roller has given it up since its header was read
        lsns = [frame.lsn for frame in frames_behind(data, FRAMES_AT, each.header.epoch)]
        wanted = after[0].previous_lsn - each.header.previous_lsn
        if (
            len([lsn for lsn in lsns if lsn <= after[0].previous_lsn]) < wanted
            and after[0].previous_lsn <= base.applied_lsn
            # A roller that has begun another life of it has overwritten its header first.
            and parts.segments.header(each.file) == each.header
        ):
            found.append(
                f"segment {each.header.number} ({parts.segments.path(each.file)}) has a damaged frame that base "
                "holds already: nothing is lost, look at the disk"
            )
    return found


def _records(parts: Parts) -> Iterator[str]:
    try:
        yield from parts.base.damaged_records()
    except lmdb.Error as error:
        yield f"{parts.base.path}: its records cannot all be read: {error}"


def _structure(parts: Parts) -> list[str]:
    """Walk a consistent copy of base: opening the file itself a second time would drop LMDB's locks."""
    with tempfile.TemporaryDirectory(prefix="agentstore-verify-") as directory:
        copy = os.path.join(directory, "base.mdb")
        fd = parts.files.open(copy, os.O_RDWR | os.O_CREAT)
        try:
            parts.base.env.copyfd(fd)
        finally:
            parts.files.close(fd)
        return [finding.replace(copy, parts.base.path) for finding in damage_of(copy)]
