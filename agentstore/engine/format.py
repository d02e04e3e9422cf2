"""The file FORMAT: what makes a directory a store. Written last at creation, by rename."""

from __future__ import annotations

import os
import struct

from agentstore.codec.crc import crc32c
from agentstore.engine.files import Files
from agentstore.engine.segment import FORMAT_VERSION
from agentstore.errors import CorruptionError, FormatTooNew, NotAStore

_MAGIC = b"agentstore store"
_FORMAT = struct.Struct("<16sI16s")
_CRC = struct.Struct("<I")
FORMAT_BYTES = _FORMAT.size + _CRC.size
assert FORMAT_BYTES == 40


def encode_format(uuid: bytes) -> bytes:
    raw = _FORMAT.pack(_MAGIC, FORMAT_VERSION, uuid)
    return raw + _CRC.pack(crc32c(raw))


def read_format(files: Files, path: str) -> bytes:
    """The uuid of the store whose FORMAT is at `path`; a typed error for what this version does not read."""
    fd = files.open(path, os.O_RDONLY)
    try:
        raw = files.pread(fd, FORMAT_BYTES, 0)
    finally:
        files.close(fd)
    if not raw.startswith(_MAGIC):
        raise NotAStore(f"{path} is not the FORMAT file of an agentstore store; choose another directory")
    if len(raw) < FORMAT_BYTES or _CRC.unpack_from(raw, _FORMAT.size)[0] != crc32c(raw[: _FORMAT.size]):
        raise CorruptionError(f"{path} is damaged; keep a copy of the directory, then run 'agentstore verify'")
    _, version, uuid = _FORMAT.unpack_from(raw)
    if version > FORMAT_VERSION:
        raise FormatTooNew(
            f"the store {os.path.dirname(path)} has format version {version}, this agentstore reads up to "
            f"{FORMAT_VERSION}; "
            "install a newer agentstore"
        )
    if version < FORMAT_VERSION:
        raise NotAStore(
            f"the store {os.path.dirname(path)} has format version {version} of before the first release, which "
            "is not read"
        )
    return bytes(uuid)
