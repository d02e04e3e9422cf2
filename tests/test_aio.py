"""AsyncStore: the same names awaited, the loop never blocked, nothing half done when a task is cancelled."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest

from agentstore import (
    Append,
    AsyncEffect,
    AsyncLease,
    AsyncStore,
    AsyncThread,
    Effect,
    EffectInDoubt,
    InvalidChange,
    Lease,
    Set,
    StaleThread,
    Store,
    StoreClosed,
    Thread,
)

CHARGE: dict[str, Any] = {"index": 0, "tool": "charge", "arguments": {"amount": 5}, "rule": "query"}


class CancelledAt:
    """Awaits a coroutine, and cancels the task when it suspends for the n-th time."""

    def __init__(self, inner: Coroutine[Any, Any, Any], nth: int) -> None:
        self.inner = inner
        self.nth = nth
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.inner.__await__()
        thrown: BaseException | None = None
        while True:
            try:
                waits_for = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration as end:
                return end.value
            self.suspensions += 1
            if self.suspensions == self.nth:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            thrown = None
            try:
                yield waits_for
            except BaseException as error:
                thrown = error


Body = Callable[[AsyncStore], Coroutine[Any, Any, Any]]


def cancel_everywhere(directory: Path, scenario: Body, check: Body) -> int:
    """Run `scenario` cancelled at its first, second, third … await, each on a new store, then `check`; how many."""

    async def run(nth: int) -> bool:
        async with await AsyncStore.open(directory / str(nth)) as store:
            cancelling = CancelledAt(scenario(store), nth)

            async def body() -> None:
                await cancelling

            task = asyncio.create_task(body())
            await asyncio.wait((task,))
            assert task.cancelled() == (cancelling.suspensions >= nth), task
            await check(store)
            assert await store.check() == []
            return task.cancelled()

    nth = 1
    while asyncio.run(run(nth)):
        nth += 1
    return nth - 1


def test_a_commit_cancelled_at_every_await_is_there_or_not_and_the_handle_knows(tmp_path: Path) -> None:
    async def scenario(store: AsyncStore) -> None:
        store.shared = thread = store.thread("t")  # type: ignore[attr-defined]  # a place to find the handle again
        for n in range(4):
            await thread.commit(Append("notes", n), Set("step", n), step=n)

    async def check(store: AsyncStore) -> None:
        thread: AsyncThread = store.shared  # type: ignore[attr-defined]  # see above
        head = await thread.head
        there = await store.thread("t").head
        assert head == there
        written = 0 if there is None else there.seq + 1
        # The handle is not stale: it goes on where the thread is.
        checkpoint = await thread.commit(Append("notes", "after"))
        assert checkpoint.seq == written
        assert (await thread.load())["notes"] == [*range(written), "after"]

    assert cancel_everywhere(tmp_path, scenario, check) >= 4


def test_load_fork_and_delete_cancelled_at_every_await(tmp_path: Path) -> None:
    async def scenario(store: AsyncStore) -> None:
        thread = store.thread("t")
        await thread.commit(Set("step", 0))
        await thread.load()
        other = await thread.fork(into="u")
        await other.commit(Set("step", 1))
        await other.delete()
        [_ async for _ in store.threads()]

    async def check(store: AsyncStore) -> None:
        for name in [name async for name in store.threads()]:
            assert (await store.thread(name).load())["step"] in (0, 1)

    assert cancel_everywhere(tmp_path, scenario, check) >= 6


def test_a_lease_whose_taking_is_cancelled_is_free(tmp_path: Path) -> None:
    async def scenario(store: AsyncStore) -> None:
        thread = store.thread("t")
        await thread.commit(Set("step", 0))
        async with await thread.lease("worker-1", ttl_s=1000) as lease:
            await lease.renew(2000)
            await thread.commit(Set("step", 1))

    async def check(store: AsyncStore) -> None:
        lease = await store.thread("t").lease("worker-2")  # LeaseHeld if the first were not given back
        await lease.release()

    assert cancel_everywhere(tmp_path, scenario, check) >= 4


def test_an_effect_cancelled_at_every_await_is_never_in_flight(tmp_path: Path) -> None:
    called: list[str] = []

    async def scenario(store: AsyncStore) -> None:
        called.clear()
        thread = store.thread("t")
        decision = await thread.commit(Set("step", 0), reason="decision")
        async with await thread.effect(decision=decision, **CHARGE) as effect:
            called.append(effect.key)
            await effect.receipt({"id": 1}, Set("step", 1))

    async def check(store: AsyncStore) -> None:
        thread = store.thread("t")
        head = await thread.head
        if head is None:
            return
        try:
            effect = await thread.effect(decision=(head.thread_uuid, 0), **CHARGE)
        except EffectInDoubt:
            pytest.fail("the call was made or not, and this process knows which")
        # Its tool was called exactly when it has a receipt: `receipt` was begun, and so it was finished.
        assert effect.done == (head.seq == 1) == bool(called)

    assert cancel_everywhere(tmp_path, scenario, check) >= 3


def test_opening_cancelled_leaves_nothing_open(tmp_path: Path) -> None:
    async def main() -> None:
        task = asyncio.create_task(AsyncStore.open(tmp_path / "s"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    # Were it still open here, other options would be refused.
    Store.open(tmp_path / "s", background=False).close()
    Store.open(tmp_path / "s", background=True).close()


def test_the_loop_runs_while_calls_wait(tmp_path: Path) -> None:
    async def main() -> None:
        async with await AsyncStore.open(tmp_path / "s") as store:
            held = threading.Event()
            transact = store._store._engine.transact

            def slow(fn: Any) -> Any:
                held.wait()
                return transact(fn)

            store._store._engine.transact = slow  # type: ignore[method-assign]  # a disk that hangs until we say so
            commit = asyncio.create_task(store.thread("t").commit(Set("step", 1)))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not commit.done()
            held.set()
            assert (await commit).seq == 0

    asyncio.run(main())


def test_tasks_on_one_handle_take_turns_and_on_many_run_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with await AsyncStore.open(tmp_path / "s") as store:
            shared = store.thread("shared")
            checkpoints = await asyncio.gather(*[shared.commit(Append("notes", n)) for n in range(20)])
            assert [checkpoint.seq for checkpoint in checkpoints] == list(range(20))
            assert (await shared.load())["notes"] == list(range(20))
            await asyncio.gather(*[store.thread(f"t{n}").commit(Set("n", n)) for n in range(100)])
            assert (await store.stats())["threads"] == 101
            assert len([name async for name in store.threads(prefix="t")]) == 100

    asyncio.run(main())


def test_listing_more_than_a_page(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        names = [f"{n:04}" for n in range(600)]
        for name in names:
            store.thread(name).commit()

    async def main() -> None:
        async with await AsyncStore.open(tmp_path / "s") as store:
            assert [name async for name in store.threads()] == names
            assert [name async for name in store.threads(order="created", limit=300)] == names[::-1][:300]

    asyncio.run(main())


def test_once_takes_functions_of_both_kinds_and_a_cancelled_one_is_in_doubt(tmp_path: Path) -> None:
    async def main() -> None:
        async with await AsyncStore.open(tmp_path / "s") as store:

            async def charge(amount: int, key: str) -> str:
                await asyncio.sleep(0)
                return f"{amount} {len(key)}"

            assert await store.once("a", charge, arguments={"amount": 5}) == "5 64"
            assert await store.once("a", charge, arguments={"amount": 5}) == "5 64"
            assert await store.once("b", lambda: 7) == 7

            started = asyncio.Event()
            ended: list[str] = []

            async def hang() -> None:
                started.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    ended.append("cancelled")
                    raise

            task = asyncio.create_task(store.once("c", hang))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended == ["cancelled"]
            with pytest.raises(EffectInDoubt):
                await store.once("c", hang)

            async def query(key: str) -> str:
                return "found"

            assert await store.once("c", hang, rule="query", query=query) == "found"

    asyncio.run(main())


def test_errors_come_through_and_a_closed_store_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        store = await AsyncStore.open(tmp_path / "s")
        thread = store.thread("t")
        await thread.commit(Set("step", 1))
        with pytest.raises(InvalidChange):
            await thread.commit(Append("step", 1))
        await store.thread("t").commit(Set("step", 2))
        with pytest.raises(StaleThread):
            await thread.commit(Set("step", 3))
        assert await thread.load() == {"step": 2}
        await store.close()
        await store.close()
        with pytest.raises(StoreClosed):
            await thread.commit(Set("step", 3))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("plain", "awaited"), [(Store, AsyncStore), (Thread, AsyncThread), (Effect, AsyncEffect), (Lease, AsyncLease)]
)
def test_every_public_name_is_there_with_the_same_parameters(plain: type, awaited: type) -> None:
    for name, member in inspect.getmembers(plain):
        if name.startswith("_"):
            continue
        there = inspect.getattr_static(awaited, name)
        if inspect.isfunction(member) and name != "thread":
            assert inspect.iscoroutinefunction(there) or inspect.isasyncgenfunction(there), name
            mine = inspect.signature(there).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in mine.values()):
                assert list(mine) == list(inspect.signature(member).parameters), name
