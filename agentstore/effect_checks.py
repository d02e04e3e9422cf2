"""The invariants of a thread's effects, lease and events, for `Store.check`.

1.  Every record can be read, down to the arguments and results in it.
2.  The key of a call is the hash of its identity, tool and arguments.
3.  A call is open or finished, never both; a duplicate stands beside a first receipt.
4.  Every finished call is in the index by tool and arguments, and nothing else is.
5.  Nothing was written under a fencing token above the thread's; its lease has exactly that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from agentstore import events, leases
from agentstore.codec.cbor import canonical
from agentstore.effect_records import (
    Identity,
    Intent,
    decode_intent,
    decode_pair,
    decode_receipt,
    hash_call,
    identity_of,
    index_space,
    intent_space,
    receipt_space,
    unpack,
)
from agentstore.engine import keys
from agentstore.engine.api import Reader
from agentstore.errors import CorruptionError, LimitExceeded
from agentstore.records import shown

T = TypeVar("T")


def check(reader: Reader, prefix: bytes, token: int, name: str) -> list[str]:
    """Every invariant under a thread's prefix that does not hold, as sentences. O(effects and events).

    `token` is the fencing token of the thread's head. Damaged records are reported, not raised.
    """
    found = _Check(reader, prefix, token, f"thread {shown(name)}")
    found.effects()
    found.read(lambda: len([*events.recoveries(reader, prefix)]), "its events")
    return leases.check(reader, prefix, token, name) + found.problems


class _Check:
    def __init__(self, reader: Reader, prefix: bytes, token: int, where: str) -> None:
        self._reader = reader
        self._prefix = prefix
        self._token = token
        self._where = where
        self.problems: list[str] = []

    def read(self, decode: Callable[[], T], what: object) -> T | None:
        """What `decode` reads; None, and a problem, if it is damaged."""
        try:
            return decode()
        except (CorruptionError, LimitExceeded) as error:
            self.problems.append(f"{self._where}: {what} cannot be read: {error}")
            return None

    def effects(self) -> None:
        indexed = set(self._indexed())
        finished: set[Identity] = set()
        space = receipt_space(self._prefix)
        for key, data in self._scan(space):
            named = self.read(lambda key=key: identity_of(key, space), "an effect")  # type: ignore[misc]  # defaults of a lambda have no types
            if named is None:
                continue
            identity, duplicate = named
            if duplicate is not None:
                if identity not in finished:
                    self.problems.append(f"{self._where}: {identity} has a duplicate and no first receipt")
                self.read(lambda data=data: unpack(decode_receipt(data).result), f"a duplicate of {identity}")  # type: ignore[misc]  # as above
                continue
            finished.add(identity)
            pair = self.read(lambda data=data: decode_pair(data), f"the receipt of {identity}")  # type: ignore[misc]  # as above
            if pair is None:
                continue
            intent, receipt = pair
            self.read(lambda result=receipt.result: unpack(result), f"the result of {identity}")  # type: ignore[misc]  # as above
            self._call(identity, intent, max(intent.token, receipt.token))
            if (intent.call_hash, identity) not in indexed:
                self.problems.append(f"{self._where}: {identity} ({intent.tool}) is missing in the index of receipts")
            indexed.discard((intent.call_hash, identity))
        for _, identity in sorted(indexed):
            self.problems.append(f"{self._where}: the index of receipts names {identity}, which has none like that")
        self._open(finished)

    def _open(self, finished: set[Identity]) -> None:
        space = intent_space(self._prefix)
        for key, data in self._scan(space):
            identity = identity_of(key, space)[0]
            intent = self.read(lambda data=data: decode_intent(data), f"the intent of {identity}")  # type: ignore[misc]  # as above
            if intent is not None:
                self._call(identity, intent, intent.token)
            if identity in finished:
                self.problems.append(f"{self._where}: {identity} has a receipt and an open intent")

    def _call(self, identity: Identity, intent: Intent, token: int) -> None:
        arguments = self.read(lambda: canonical(unpack(intent.arguments)), f"the arguments of {identity}")
        if arguments is not None and hash_call(identity, intent.tool, arguments) != (intent.key, intent.call_hash):
            self.problems.append(f"{self._where}: the key of {identity} ({intent.tool}) is not that of its arguments")
        if token > self._token:
            self.problems.append(
                f"{self._where}: {identity} was written under fencing token {token}, above the thread's {self._token}"
            )

    def _indexed(self) -> Iterator[tuple[bytes, Identity]]:
        space = index_space(self._prefix)
        for key, _ in self._scan(space):
            call_hash, *parts = keys.decode(key[len(space) :])
            yield call_hash, Identity(*parts)  # type: ignore[arg-type, misc]  # the types it was written with

    def _scan(self, space: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._reader.scan(space, keys.end_of(space))
