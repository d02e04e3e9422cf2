"""Steps 2 to 5 of a commit: the writers' lock, the dead, the transaction, the frame.

Threads of one process that commit at the same moment form a group: one of them takes the
writers' lock, runs the functions of all, writes a frame for each, commits tail once and
syncs once. Each is a transaction of its own. See docs/engine.md for why each sentence is as it is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import lmdb

from agentstore.engine.control import DURABLE_LSN, FAILED, LAST_SEGMENT, WRITING_LSN
from agentstore.engine.files import FULL_DISK
from agentstore.engine.lmdbfile import translate_lmdb
from agentstore.engine.parts import Parts
from agentstore.engine.roll import Roller
from agentstore.engine.segment import (
    FRAME,
    FRAME_BYTES,
    FRAME_PAYLOAD_BYTES_MAX,
    MARKER_MASK,
    decode_batch,
    encode_frame,
    epoch_crc,
    frame_at,
)
from agentstore.engine.sync import Syncer
from agentstore.engine.tail import (
    POSITION_KEY,
    TailPosition,
    new_tuple,
    pack_position,
    put_batch,
    unpack_position,
)
from agentstore.engine.transaction import Transaction
from agentstore.errors import AgentStoreError, CommitUnknown, DiskFull, LimitExceeded, StoreFailed

T = TypeVar("T")

RELOAD = "it may become part of the log; reload before you try again"
INTERRUPTED = f"the thread that wrote this for others was interrupted: {RELOAD}"

GROUP_MAX = 64
"""Transactions that one holder of the writers' lock writes before it lets others have it."""


class Request(Generic[T]):
    """One transaction on its way: its function, then its result."""

    __slots__ = ("error", "fn", "leads", "lsn", "value", "woken")

    def __init__(self, fn: Callable[[Any], T]) -> None:
        self.fn = fn
        self.value: Any = None
        self.error: BaseException | None = None
        self.lsn = 0
        """What must be durable before anybody hears of the result: its own LSN, or the newest that it read."""
        self.leads = False
        self.woken: Any = None
        """A lock that is free once the request is done, or leads."""


AnyRequest = Request[Any]


class Writer:
    """Runs transactions one at a time, across processes. Safe for threads."""

    def __init__(self, parts: Parts, syncer: Syncer, *, fold: Callable[[], object], rolled: Callable[[], None]) -> None:
        self._parts = parts
        self._syncer = syncer
        self._roller = Roller(parts, syncer, self._begin, fold)
        self._rolled = rolled
        self._words = parts.control.words
        self._env = parts.tail.env
        self._pwrite = parts.files.pwrite
        self._start_writing = parts.files.start_writing
        self._fd = parts.segments.fd
        self._seed = (0, epoch_crc(0))
        self._mutex = threading.Lock()
        self._busy = False
        self._room = 0
        self._queue: deque[AnyRequest] = deque()
        self.finished_dead = 0

    @property
    def rolls(self) -> int:
        return self._roller.count

    # --- the group -------------------------------------------------------------------

    def run(self, fn: Callable[[Any], T]) -> Request[T]:
        """Run `fn` in a transaction; back once its writes, or else its reads, are durable. Raises what it raised."""
        request = Request(fn)
        try:
            with self._mutex:
                if self._busy:
                    request.woken = threading.Lock()
                    request.woken.acquire()
                    self._queue.append(request)
                else:
                    self._busy = request.leads = True
            if not request.leads:
                self._wait(request)
            if request.leads:
                self._lead(request)
        finally:
            if request.leads:
                self._hand_over(request)  # interrupted before it came to that
        if request.error is not None:
            raise request.error
        return request

    def _wait(self, request: AnyRequest) -> None:
        try:
            request.woken.acquire()
        except BaseException:
            # Interrupted: leave the queue.
            with self._mutex:
                if request in self._queue:
                    self._queue.remove(request)
            raise

    def _lead(self, request: AnyRequest) -> None:
        """Write everybody's frames, hand the lead to the next group, sync, wake everybody."""
        group = [request]
        written = 0
        try:
            try:
                if self._queue:
                    self._gather(group)
                written = self._write_some(group, 0)
                while written < len(group):
                    written = self._write_rest(group, written)
            except Exception as error:
                # Those before have their frames in the committed tail: for them it goes on.
                self._fail(group[written:], error)
            finally:
                self._hand_over(request)
            highest = request.lsn if len(group) == 1 else max([each.lsn for each in group])
            if highest > self._words[DURABLE_LSN]:
                self._syncer.sync(highest)
        except Exception as error:
            self._unsynced(group, error)
        except BaseException as error:
            self._unsynced(group[1:], error)
            self._fail(group[1:], CommitUnknown(INTERRUPTED))
            raise
        finally:
            for each in group[1:]:
                each.woken.release()

    def _gather(self, group: list[AnyRequest]) -> None:
        with self._mutex:
            while self._queue and len(group) < GROUP_MAX:
                group.append(self._queue.popleft())

    def _hand_over(self, request: AnyRequest) -> None:
        with self._mutex:
            request.leads = False
            if self._queue:
                following = self._queue.popleft()
                following.leads = True
                following.woken.release()
            else:
                self._busy = False

    def _unsynced(self, group: list[AnyRequest], error: BaseException) -> None:
        """Nobody may act on what is not durable: neither on his own frame, nor on what made his function raise."""
        durable = self._words[DURABLE_LSN]
        late = [each for each in group if each.lsn > durable]
        for each in late:
            each.error = None
        if isinstance(error, StoreFailed):
            self._fail(late, error)
        else:
            unknown = CommitUnknown(f"LSN {durable + 1} and above could not be synced ({error}): {RELOAD}")
            unknown.__cause__ = error
            self._fail(late, unknown)

    def _fail(self, group: list[AnyRequest], error: Exception) -> None:
        """An error for everybody in the group who has no result of his own."""
        typed: Exception = error
        if isinstance(error, lmdb.Error):
            typed = translate_lmdb(error, self._parts.tail.path)
        elif isinstance(error, OSError):
            typed = self._parts.fault(error, "a commit")
        if typed is not error:
            typed.__cause__ = error
            error = typed
        for place, each in enumerate(group):
            if each.error is None:
                # Everybody raises an exception object of its own: a traceback belongs to one thread.
                each.error = error if place == 0 else _copy(error)

    # --- one holder of the writers' lock -----------------------------------------------

    def _write_rest(self, group: list[AnyRequest], written: int) -> int:
        """Somebody's frame does not fit into the active segment: roll, then go on."""
        self._roller.roll(self._room)
        self._rolled()
        return self._write_some(group, written)

    def _begin(self) -> tuple[Any, TailPosition]:
        """The writers' lock, with the dead finished."""
        words = self._words
        while True:
            txn: Any = self._env.begin(write=True)
            try:
                if words[FAILED]:
                    raise self._parts.failure()
                position = new_tuple(TailPosition, unpack_position(txn.get(POSITION_KEY)))
                if words[WRITING_LSN] <= position.lsn or position.must_roll or not self._finish_dead(txn, position):
                    return txn, position
                # Committed at once, so that it stays even if what comes next writes nothing or raises.
                txn.commit()
            except BaseException:
                txn.abort()
                raise

    def _write_some(self, group: list[AnyRequest], at: int) -> int:
        """Run and write from `at` on what fits into the active segment; how far it came (`_room`: what is missing)."""
        txn, start = self._begin()
        first = at
        try:
            if start.must_roll or self._words[LAST_SEGMENT] > start.segment:
                self._room = 0
                return at
            position = start
            base = self._parts.base
            while at < len(group):
                request = group[at]
                tx = Transaction(txn, base, position.lsn + 1)
                try:
                    request.value = request.fn(tx)
                    request.lsn = tx.newest
                    if tx.writes:
                        after = self._write(txn, position, request, tx)
                        if after is None:
                            break
                        position = after
                except (StoreFailed, lmdb.Error):
                    raise
                except Exception as error:
                    if request.lsn == tx.lsn:
                        raise  # not of the function: its frame is complete, and tail has perhaps a part of it
                    # What made it give up must be as durable as what it would have returned.
                    request.error, request.lsn = error, tx.newest
                finally:
                    if tx.base_txn is not None:
                        tx.base_txn.abort()
                at += 1
            if position is not start:
                # The disk works on the frames while LMDB works on tail.
                fd = self._fd(position.file)
                if fd is not None:
                    self._start_writing(fd, position.offset - start.offset, start.offset)
                txn.put(POSITION_KEY, pack_position(*position))
                txn.commit()
                self._syncer.written = position
            return at
        except Exception as error:
            self._void(group[first:], start.lsn, error)
            raise
        finally:
            txn.abort()

    def _void(self, group: list[AnyRequest], lsn: int, error: Exception) -> None:
        """Tail did not take what was written above `lsn`. The frames are complete: the next writer has them."""
        for request in group:
            if request.lsn > lsn:
                request.error = None
                if not isinstance(error, StoreFailed):
                    request.error = CommitUnknown(
                        f"the frame with LSN {request.lsn} is complete, but {self._parts.tail.path} could not take it "
                        f"({error}): {RELOAD}"
                    )
                request.lsn = 0

    def _write(self, txn: Any, position: TailPosition, request: AnyRequest, tx: Transaction) -> TailPosition | None:
        """The frame, then tail's entries; the position behind it, or None if the segment has no room."""
        _, segment, epoch, file, size, offset, previous_crc, _ = position
        payload = tx.payload()
        end = offset + FRAME_BYTES + len(payload)
        if end > size:
            self._room = self._checked(FRAME_BYTES + len(payload))
            return None
        lsn, words = tx.lsn, self._words
        if self._seed[0] != epoch:
            self._seed = (epoch, epoch_crc(epoch))
        frame, crc = encode_frame(epoch, self._seed[1], lsn, words[DURABLE_LSN], previous_crc, payload)
        try:
            fd = self._fd(file)
        except OSError as error:
            raise self._parts.fault(error, f"segment {segment}") from error
        assert fd is not None
        words[WRITING_LSN] = lsn
        try:
            self._pwrite(fd, frame, offset)
        except OSError as error:
            self._not_written(error, fd, frame, position)
        request.lsn = lsn
        put_batch(txn, tx.writes, lsn)
        return new_tuple(TailPosition, (lsn, segment, epoch, file, size, end, crc, False))

    def _not_written(self, error: OSError, fd: int, frame: bytes, position: TailPosition) -> None:
        """Raise what a failed write of a frame means; back if the frame is complete all the same."""
        segment, offset = position.segment, position.offset
        if error.errno not in FULL_DISK:
            raise self._parts.poison(error, f"write to segment {segment} at offset {offset}") from error
        try:
            # What is missing may be zeros, as the file has there: then the next writer would take the frame for whole.
            if self._parts.files.pread(fd, len(frame), offset) == frame:
                return
        except OSError as unreadable:
            raise self._parts.poison(unreadable, f"read of segment {segment} at offset {offset}") from unreadable
        raise DiskFull(
            f"no space left for a frame of {len(frame)} bytes in segment {segment}; nothing was lost"
        ) from error

    def _checked(self, size: int) -> int:
        if size > FRAME_BYTES + FRAME_PAYLOAD_BYTES_MAX:
            raise LimitExceeded(
                f"a transaction of {size} bytes is over FRAME_PAYLOAD_BYTES_MAX ({FRAME_PAYLOAD_BYTES_MAX})"
            )
        return size

    def _finish_dead(self, txn: Any, position: TailPosition) -> bool:
        """Put the frame of a writer that died or failed after writing it into tail; overwrite anything else there."""
        fd = self._fd(position.file)
        if fd is None:
            path = self._parts.segments.path(position.file)
            raise self._parts.poison(FileNotFoundError(2, "no such file"), path)
        pread = self._parts.files.pread
        head = pread(fd, FRAME_BYTES, position.offset)
        if len(head) < FRAME_BYTES:
            return False
        marker, length, _, lsn, _, previous = FRAME.unpack(head)
        if marker != position.epoch ^ MARKER_MASK or lsn != position.lsn + 1 or previous != position.crc:
            return False
        if length > min(FRAME_PAYLOAD_BYTES_MAX, position.size - position.offset - FRAME_BYTES):
            return False
        data = pread(fd, FRAME_BYTES + length, position.offset)
        frame = frame_at(data, 0, position.epoch)
        if frame is None:
            return False
        put_batch(txn, decode_batch(data, FRAME_BYTES, len(data)), lsn)
        after = position._replace(lsn=lsn, offset=position.offset + frame.end, crc=frame.crc)
        txn.put(POSITION_KEY, pack_position(*after))
        self.finished_dead += 1
        return True


def _copy(error: Exception) -> Exception:
    """The same error for another thread."""
    if isinstance(error, AgentStoreError):
        return type(error)(*error.args)
    return error
