"""Order-preserving encoding of tuples of int, str and bytes to keys.

Sorting the encodings as bytes sorts the tuples (ints before bytes before strs, in each place), and
``encode(a, b)`` begins with ``encode(a)``, so a prefix of parts is a prefix of bytes.
After the tuple layer of FoundationDB: an int is its length and its big-endian bytes; a
str (UTF-8, surrogates included) or bytes has its zero bytes escaped and ends with one.

>>> encode(1, "a") < encode(1, "b") < encode(2, "a") < encode(256)
True
>>> decode(encode(7, "a\\x00b", b"\\x00"))
(7, 'a\\x00b', b'\\x00')
"""

from __future__ import annotations

_INT = 0x10  # 0x10 + number of bytes, 0 to 8
_BYTES = 0x30
_STR = 0x31
# Keys never begin with a byte below 0x10: the engine keeps its own records there.

INT_MAX = 2**64 - 1


def encode(*parts: int | str | bytes) -> bytes:
    """The key of `parts`. Ints from 0 to 2**64 - 1. O(size)."""
    out = bytearray()
    for part in parts:
        if part.__class__ is int:
            if not 0 <= part <= INT_MAX:
                raise ValueError(f"a key holds ints from 0 to 2**64 - 1, not {part!r}")
            size = (part.bit_length() + 7) >> 3
            out.append(_INT + size)
            out += part.to_bytes(size, "big")
        elif part.__class__ is str:
            out.append(_STR)
            out += part.encode("utf-8", "surrogatepass").replace(b"\0", b"\0\xff")
            out.append(0)
        elif part.__class__ is bytes:
            out.append(_BYTES)
            out += part.replace(b"\0", b"\0\xff")
            out.append(0)
        else:
            raise TypeError(f"a key holds int, str and bytes, not {type(part).__name__}")
    return bytes(out)


def end_of(prefix: bytes) -> bytes:
    """The smallest key above all keys that begin with `prefix`: the `hi` of a prefix scan."""
    return prefix + b"\xff"


def _terminated(key: bytes, at: int) -> tuple[bytes, int]:
    end = at
    while True:
        end = key.index(b"\0", end)
        if key[end + 1 : end + 2] != b"\xff":
            return key[at:end].replace(b"\0\xff", b"\0"), end + 1
        end += 2


def decode(key: bytes) -> tuple[int | str | bytes, ...]:
    """The parts of `key`; ValueError if it is not one."""
    parts: list[int | str | bytes] = []
    at = 0
    while at < len(key):
        tag = key[at]
        at += 1
        if _INT <= tag <= _INT + 8:
            size = tag - _INT
            if at + size > len(key):
                raise ValueError(f"key is cut short: {key.hex()}")
            parts.append(int.from_bytes(key[at : at + size], "big"))
            at += size
        elif tag in (_BYTES, _STR):
            raw, at = _terminated(key, at)
            parts.append(raw if tag == _BYTES else raw.decode("utf-8", "surrogatepass"))
        else:
            raise ValueError(f"key has an unknown tag {tag:#x}: {key.hex()}")
    return tuple(parts)
