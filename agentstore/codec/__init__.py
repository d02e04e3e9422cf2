"""Bytes in, bytes out, with limits on both: CBOR, CRC-32C and zstd."""
