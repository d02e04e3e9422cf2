"""CRC-32C is the same number whichever library computes it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentstore.codec import crc

# Computed bit by bit, and known from RFC 3720, appendix B.4.
VECTORS = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (b"\x00" * 32, 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


def bit_by_bit(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def google(data: bytes, start: int = 0) -> int:
    google_crc32c = pytest.importorskip("google_crc32c", reason="google-crc32c is not installed")
    return int(google_crc32c.extend(start, data))


def by_crcmod(data: bytes, start: int = 0) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return crc._crcmod()(data, start)


IMPLEMENTATIONS = [crc.crc32c, google, by_crcmod, bit_by_bit]


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
def test_known_values(function: Callable[..., int]) -> None:
    for data, expected in VECTORS:
        assert function(data) == expected


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_all_give_the_same_and_extend(first: bytes, second: bytes, start: int) -> None:
    expected = bit_by_bit(first + second, start)
    for function in IMPLEMENTATIONS:
        assert function(first + second, start) == expected
        assert function(second, function(first, start)) == expected


def run(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environ},
    )


SHOW = "from agentstore.codec import crc; print(crc.HAVE_FAST, hex(crc.crc32c(b'6789', crc.crc32c(b'12345'))))"
NO_GOOGLE = "import sys; sys.modules['google_crc32c'] = None; "
NO_EXTENSION = "import sys; sys.modules['crcmod._crcfunext'] = None; "
NO_GOOGLE_EXTENSION = "import sys; sys.modules['google_crc32c.cext'] = None; "


def test_google_crc32c_is_used_when_it_is_installed() -> None:
    pytest.importorskip("google_crc32c", reason="google-crc32c is not installed")
    done = run(SHOW)
    assert done.stdout.split() == ["True", "0xe3069283"]
    assert done.stderr == ""
    assert crc.HAVE_FAST


@pytest.mark.parametrize("missing", [NO_GOOGLE, NO_GOOGLE_EXTENSION])
def test_crcmod_is_used_otherwise(missing: str) -> None:
    done = run(missing + SHOW)
    assert done.stdout.split() == ["False", "0xe3069283"]


def test_crcmod_without_its_extension_warns_once() -> None:
    done = run(NO_GOOGLE + NO_EXTENSION + SHOW + "; import agentstore.codec.crc; crc.crc32c(b'again')")
    assert done.stdout.split() == ["False", "0xe3069283"]
    assert done.stderr.count("RuntimeWarning: crcmod was installed without its C extension") == 1


def test_no_warning_where_crcmod_is_not_needed() -> None:
    pytest.importorskip("google_crc32c", reason="google-crc32c is not installed")
    done = run(NO_EXTENSION + SHOW)
    assert done.stdout.split() == ["True", "0xe3069283"]
    assert done.stderr == ""


def test_a_library_with_another_polynomial_is_refused() -> None:
    """A wrong checksum would be written into the store, and fail everywhere else."""
    fake = "import sys, types, zlib; m = types.ModuleType('google_crc32c'); m.implementation = 'c'; "
    fake += "m.extend = lambda crc, data: zlib.crc32(data, crc); sys.modules['google_crc32c'] = m; "
    script = fake + "\ntry:\n    import agentstore.codec.crc\nexcept ImportError as error:\n    print(error)"
    assert "does not compute CRC-32C" in run(script).stdout
