"""CRC-32C (Castagnoli): the checksum of every frame, record and state.

`google_crc32c` does it when its C extension is installed (extra ``fast``: 1 KiB in about
0.15 µs); otherwise crcmod, the base dependency (about 2.5 µs with its C extension, about
130 µs without: then a warning says so, once). All three give the same values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Final

CHECK_INPUT: Final = b"123456789"
CHECK_VALUE: Final = 0xE3069283
"""CRC-32C of ``CHECK_INPUT``, as every description of the polynomial prints it."""


def _google() -> Callable[[int, bytes], int] | None:
    """`extend(crc, data)` of google_crc32c, or None where its C extension is missing."""
    try:
        with warnings.catch_warnings():
            # Without its extension the package warns at import and is slower than crcmod;
            # the warning would blame the user for a package that is not used then.
            warnings.simplefilter("ignore", RuntimeWarning)
            import google_crc32c
    except ImportError:
        return None
    if google_crc32c.implementation != "c":
        return None
    extend: Callable[[int, bytes], int] = google_crc32c.extend
    return extend


def _crcmod() -> Callable[[bytes, int], int]:
    """`crc32c(data, crc)` of crcmod; warns where it was built without its C extension."""
    from crcmod.predefined import mkPredefinedCrcFun

    try:
        import crcmod._crcfunext  # noqa: F401  # what crcmod itself tries before its Python code
    except ImportError:
        warnings.warn(
            "crcmod was installed without its C extension: checksums are about 50 times slower. Install google-crc32c"
            " (pip install 'agentstore-wal[fast]'), or reinstall crcmod where a C compiler is.",
            RuntimeWarning,
            stacklevel=2,
        )
    function: Callable[[bytes, int], int] = mkPredefinedCrcFun("crc-32c")
    return function


_extend = _google()

HAVE_FAST: Final = _extend is not None
"""True when google_crc32c's C extension does the work."""

if _extend is not None:
    extend: Final = _extend
    """`crc32c` with its arguments the other way round, ``extend(crc, data)``: without a call in between, for the path
    of every commit."""

    def crc32c(data: bytes, crc: int = 0) -> int:
        """CRC-32C of `data`; with `crc`, of what `crc` was computed over followed by `data`. O(n).

        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
        >>> crc32c(b"6789", crc32c(b"12345")) == crc32c(b"123456789")
        True
        """
        return extend(crc, data)

else:
    _slow = _crcmod()

    def extend(crc: int, data: bytes) -> int:
        """`crc32c` with its arguments the other way round."""
        return _slow(data, crc)

    def crc32c(data: bytes, crc: int = 0) -> int:
        """CRC-32C of `data`; with `crc`, of what `crc` was computed over followed by `data`. O(n)."""
        return _slow(data, crc)


# A library that computes another polynomial would make every store unreadable by the next one.
if crc32c(CHECK_INPUT) != CHECK_VALUE:
    raise ImportError("the installed CRC library does not compute CRC-32C; reinstall google-crc32c or crcmod")
