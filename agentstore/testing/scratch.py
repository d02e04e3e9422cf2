"""A store for an example or a test, gone when the process ends."""

from __future__ import annotations

import tempfile
import weakref

from agentstore.store import Store


def scratch_store() -> Store:
    """A new, empty store in a temporary directory, without background work; removed once it is unused.

    >>> list(scratch_store().threads())
    []
    """
    directory = tempfile.TemporaryDirectory(prefix="agentstore-scratch-")
    store = Store.open(directory.name, background=False)
    # The directory's own finalizer would run while the store still holds it open.
    weakref.finalize(store, _clean, store._engine.close, directory)
    return store


def _clean(close: object, directory: tempfile.TemporaryDirectory[str]) -> None:
    assert callable(close)
    close()
    directory.cleanup()
