"""The durable ordered key-value engine as the layers above see it.

Keys are bytes made by `agentstore.engine.keys.encode` (order-preserving, at most
`KEY_BYTES_MAX` bytes); values are bytes. The embedded engine is the only
implementation today; a server-backed one has to pass the same tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

KEY_BYTES_MAX = 511
"""LMDB's limit of a key, in bytes."""

_SEAL = object()


class Confirmed(Generic[T_co]):
    """The result of a transaction whose bytes are on stable storage.

    Only an engine makes one, after its sync returned; the runtime takes it as the
    permission for the next step. `lsn` is the number of the frame that was confirmed
    (for a transaction that wrote nothing: the newest one that it read).
    """

    __slots__ = ("lsn", "value")

    def __init__(self, value: T_co, lsn: int, seal: object) -> None:
        if seal is not _SEAL:
            raise TypeError("a Confirmed is made by an engine only, after its sync returned")
        self.value = value
        self.lsn = lsn

    def __repr__(self) -> str:
        return f"Confirmed({self.value!r}, lsn={self.lsn})"


class Reader(Protocol):
    """What both a transaction and a snapshot can do."""

    def get(self, key: bytes) -> bytes | None:
        """The value of `key`, or None. O(log n)."""

    def scan(self, lo: bytes, hi: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with ``lo <= key < hi`` in key order (or reverse). Lazy; do not put or delete while iterating."""


class Snapshot(Reader, Protocol):
    """A consistent view of all confirmed data; what it returns is on stable storage."""

    @property
    def lsn(self) -> int:
        """LSN of the newest frame in this view."""


class Tx(Reader, Protocol):
    """A serializable transaction; sees its own writes. Its function may run more than once: no side effects in it."""

    @property
    def lsn(self) -> int:
        """LSN that this transaction gets if it writes anything."""

    def put(self, key: bytes, value: bytes) -> None: ...

    def delete(self, key: bytes) -> None: ...


class Engine(Protocol):
    """Atomic, serializable, confirmed transactions over ordered keys."""

    def transact(self, fn: Callable[[Tx], T]) -> Confirmed[T]:
        """Run `fn` in a transaction and return when its writes are on stable storage.

        If `fn` raises, nothing was written. `fn` may run more than once.
        """

    def read(self) -> AbstractContextManager[Snapshot]:
        """A snapshot as a context manager. Nothing may be awaited and no user code called inside."""

    def close(self) -> None: ...
