"""A state as its encoded bytes per top-level field, and the ops that change it.

A field that is a list is the concatenation of its items' encodings with their number; any other
field is its encoding. So an append is bytes at the end, every other change is bytes in the
middle, a checksum can be extended, and loading applies thousands of deltas without decoding
anything: the one decode comes last. (Ops that edit decoded values were the alternative: a
decode and an encode of the field for every op on every load.)

`records.py` has the ops byte by byte; `deltas.py` makes them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from agentstore import patches
from agentstore.codec import cbor
from agentstore.codec.crc import crc32c, extend
from agentstore.errors import CorruptionError, LimitExceeded
from agentstore.records import NO_COUNT, OP_APPEND, OP_DELETE, OP_ORDER, OP_PATCH, OP_SET, OP_SPLICE

STATE_BYTES_MAX: Final = cbor.ENCODED_BYTES_MAX - 1024 * 1024
"""Size of one encoded state, in bytes: what `load` can decode at once, less room for names and headers."""

Op: TypeAlias = "list[Any]"
_DIGEST = struct.Struct("<qIQI")
_HEADER_SIZES = {24: 2, 25: 3, 26: 5, 27: 9}


class Chunk:
    """A part of a field that a snapshot keeps in a record of its own, not read yet."""

    __slots__ = ("_read", "flag", "index", "seq", "size")

    def __init__(self, ref: list[int], read: Callable[[Chunk], bytes]) -> None:
        self.seq, self.index, self.size, self.flag = ref
        self._read = read

    @property
    def ref(self) -> list[int]:
        """What a snapshot's record keeps of it."""
        return [self.seq, self.index, self.size, self.flag]

    def read(self) -> bytes:
        return self._read(self)


class Field:
    """One top-level field: its checksum, and its bytes where somebody needs them. Not thread-safe.

    `count` is the number of items of a list, else `NO_COUNT`. `parts` joined are the body; None: not in memory.
    """

    __slots__ = ("count", "crc", "known_digest", "name_crc", "parts", "size")

    def __init__(self, name_crc: int, count: int, crc: int, size: int, parts: list[bytes | Chunk] | None) -> None:
        self.name_crc = name_crc
        self.count = count
        self.crc = crc
        self.size = size
        self.parts = parts
        self.known_digest: int | None = None

    def renew(self, count: int, crc: int, size: int) -> None:
        """Take over the checksum after an op."""
        self.count = count
        self.crc = crc
        self.size = size
        self.known_digest = None

    @property
    def digest(self) -> int:
        """What the field adds to the checksum of the state. Computed when asked for: a load applies many ops before."""
        known = self.known_digest
        if known is None:
            packed = _DIGEST.pack(self.count, self.crc, self.size, self.name_crc)
            self.known_digest = known = extend(0, packed)
        return known

    def body(self) -> bytes:
        """All bytes of the field, joined once. Only where `parts` is not None."""
        parts = self.parts
        assert parts is not None
        if len(parts) != 1 or parts[0].__class__ is not bytes:
            parts[:] = [b"".join([part if part.__class__ is bytes else part.read() for part in parts])]  # type: ignore[union-attr]  # an exact class test: isinstance costs more
        joined = parts[0]
        assert isinstance(joined, bytes)
        return joined

    def read(self) -> list[bytes]:
        """The parts with all chunks read. Only where `parts` is not None."""
        parts = self.parts
        assert parts is not None
        for index, part in enumerate(parts):
            if isinstance(part, Chunk):
                parts[index] = part.read()
        return parts  # type: ignore[return-value]  # no chunk is left

    def splice(self, start: int, removed: int, data: bytes) -> None:
        """Replace `removed` bytes from `start` by `data`; chunks that lie before stay unread."""
        kept, before, rest = self._rest(start)
        at = start - before
        assert self.parts is not None
        self.parts[kept:] = [rest[:at] + data + rest[at + removed :]]

    def slice(self, start: int, size: int) -> bytes:
        """`size` bytes from `start`; chunks that lie before stay unread."""
        _, before, rest = self._rest(start)
        return rest[start - before : start - before + size]

    def _rest(self, start: int) -> tuple[int, int, bytes]:
        """(parts that lie before `start`, their bytes, all bytes of the others)."""
        parts = self.parts
        assert parts is not None
        kept, before = 0, 0
        for part in parts:
            size = part.size if isinstance(part, Chunk) else len(part)
            if before + size > start:
                break
            kept += 1
            before += size
        return kept, before, b"".join([part.read() if isinstance(part, Chunk) else part for part in parts[kept:]])


State: TypeAlias = "dict[str, Field]"
"""The fields in the order of the state."""


def name_crc(name: str) -> int:
    return crc32c(name.encode())


def state_sum(state: State) -> int:
    """The checksum of a state: the sum of its fields' digests, so that a change of one costs O(1)."""
    return sum([field.digest for field in state.values()]) & 0xFFFFFFFF


def split(encoded: bytes) -> tuple[int, bytes]:
    """(count, body) of an encoded value.

    >>> split(bytes.fromhex("820102")), split(bytes.fromhex("6161"))
    ((2, b'\\x01\\x02'), (-1, b'aa'))
    """
    first = encoded[0]
    if not 0x80 <= first <= 0x9B:
        return NO_COUNT, encoded
    if first < 0x98:
        return first - 0x80, encoded[1:]
    size = _HEADER_SIZES[first & 0x1F]
    return int.from_bytes(encoded[1:size], "big"), encoded[size:]


def unsplit(count: int, body: bytes) -> bytes:
    """The encoded value of a field; the reverse of `split`."""
    return body if count == NO_COUNT else cbor.array_header(count) + body


def sums_of(state: State) -> list[Any]:
    """What a record keeps of all fields, see `state_from_sums`. O(fields)."""
    return [[name, field.crc, field.count, field.size] for name, field in state.items()]


def state_from_sums(sums: list[Any]) -> State:
    """A state of which only the checksums are known. CorruptionError if `sums` is not what `sums_of` makes."""
    try:
        return {name: Field(name_crc(name), count, crc, size, None) for name, crc, count, size in sums}
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptionError(f"a list of checksums is damaged: {error!r}") from error


def apply(state: State, ops: list[Op]) -> None:
    """Change `state` as `ops` say; bodies that are not in memory stay unknown. O(ops), but a splice joins its field.

    CorruptionError if an op does not fit the state: then it is not the state that the op was made for. One loop for
    all ops: a load spends half of its time here.
    """
    try:
        for op in ops:
            kind = op[0]
            name = op[1]
            if kind == OP_APPEND:
                _, _, body, crc, count = op
                field = state[name]
                if crc is None:
                    # Of a pack: what was compared with its checksum before, and the number of its items.
                    crc = extend(field.crc, body)
                    count += field.count
                if count < field.count or field.count == NO_COUNT:
                    raise CorruptionError(f"an append does not fit the field {name!r}")
                if field.parts is not None:
                    field.parts.append(body)
                field.size += len(body)
                field.crc = crc
                field.count = count
                field.known_digest = None
            elif kind == OP_SET:
                _, _, body, crc, count = op
                if crc is None:
                    crc = extend(0, body)
                if name in state:
                    field = state[name]
                    field.parts = [body]
                    field.renew(count, crc, len(body))
                else:
                    state[name] = Field(name_crc(name), count, crc, len(body), [body])
            elif kind in _SPLICES:
                _splice(state[name], op)
            elif kind == OP_DELETE:
                del state[name]
            elif kind == OP_ORDER:
                _order(state, name)
            else:
                raise CorruptionError(f"unknown op {kind!r}")
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise CorruptionError(f"an op does not fit the state that it is applied to: {error!r}") from error


_SPLICES = frozenset({OP_SPLICE, OP_PATCH})


def _order(state: State, names: list[str]) -> None:
    if sorted(names) != sorted(state):
        raise CorruptionError("an order does not name the fields that there are")
    ordered = [(name, state[name]) for name in names]
    state.clear()
    state.update(ordered)


def _splice(field: Field, op: Op) -> None:
    kind, name, start, removed, data, crc, count = op
    if not 0 <= start <= start + removed <= field.size:
        raise CorruptionError(f"a splice reaches outside of the field {name!r}")
    if kind == OP_PATCH:
        pieces: list[patches.Piece] = [(low, size, frame) for low, size, frame in data]
        if field.parts is None:
            field.renew(count, crc, field.size - removed + patches.size_of(pieces))
            return
        data = patches.apply(field.slice(start, removed), pieces, STATE_BYTES_MAX)
    if field.parts is not None:
        field.splice(start, removed, data)
    field.renew(count, crc, field.size - removed + len(data))


def forget_large(state: State, body_bytes_max: int) -> None:
    """Let go of the bytes of fields that are larger than `body_bytes_max`."""
    for field in state.values():
        if field.size > body_bytes_max:
            field.parts = None


def verify(state: State, name: str) -> bool:
    """Whether the bytes of a field, read for it, have the checksum and the size that the ops said. O(field)."""
    field = state[name]
    crc = size = 0
    for part in field.read():
        crc = crc32c(part, crc)
        size += len(part)
    return size == field.size and crc == field.crc


def verify_parts(field: Field) -> bool:
    """As `verify`, and chunks stay what they are: read again when somebody needs them. O(field)."""
    crc = size = 0
    for part in field.parts or ():
        data = part.read() if isinstance(part, Chunk) else part
        crc = crc32c(data, crc)
        size += len(data)
    return size == field.size and crc == field.crc


def decode(state: State) -> dict[str, Any]:
    """The state as a plain dict: the one decode of a load. O(size)."""
    pieces: list[bytes] = [cbor.map_header(len(state))]
    for name, field in state.items():
        pieces.append(cbor.encode(name))
        if field.count != NO_COUNT:
            pieces.append(cbor.array_header(field.count))
        pieces += field.read()
    try:
        decoded: dict[str, Any] = cbor.decode_joined(pieces)
    except LimitExceeded:
        # Items were encoded alone, and may be as deep as a value may be: two levels less than the whole state is.
        return {name: _decode_alone(field) for name, field in state.items()}
    return decoded


def _decode_alone(field: Field) -> Any:
    if field.count == NO_COUNT:
        return cbor.decode(field.body())
    return [cbor.decode(item) for item in items_of(field.body())]


def items_of(body: bytes) -> Iterator[bytes]:
    """The encodings whose concatenation `body` is. ValueError if it is not one. O(size), in Python: not for every load.

    >>> list(items_of(bytes.fromhex("01820203616100")))
    [b'\\x01', b'\\x82\\x02\\x03', b'aa', b'\\x00']
    """
    at = 0
    while at < len(body):
        begin, open_items = at, 1
        while open_items:
            major, info = body[at] >> 5, body[at] & 0x1F
            at += 1
            open_items -= 1
            if info >= 24:
                if info > 27:
                    raise ValueError(f"no encoding of this store at byte {at - 1}")
                size = 1 << (info - 24)
                info = int.from_bytes(body[at : at + size], "big")
                at += size
            if major in (2, 3):
                at += info
            elif major >= 4:
                open_items += {4: info, 5: 2 * info, 6: 1, 7: 0}[major]
        if at > len(body):
            raise ValueError("the last item is cut short")
        yield body[begin:at]


def check_size(bytes_after: int, where: str) -> None:
    """LimitExceeded if a state would be larger than what one `load` can decode."""
    if bytes_after > STATE_BYTES_MAX:
        raise LimitExceeded(
            f"{where}: the state would have {bytes_after} encoded bytes, the limit is {STATE_BYTES_MAX};"
            " move large contents out of the state, or summarize the conversation"
        )
