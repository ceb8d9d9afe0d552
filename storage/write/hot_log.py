"""The local hot log: makes records with acks=1 durable before their commit.

Each process appends framed, numbered requests to files `<directory>/<log id>-<generation>.hot`. The
commit of a request carries the request's number as hot mark, and `apply` accepts each number once.
So a restart may commit all of a file again (DESIGN 3): `apply` skips the requests that were
committed before the crash. A process locks its files. The next process that starts in the directory
adopts the logs that are not locked. One process adopts all files of a log. If two processes adopted
files of one log, one of them could commit higher numbers first, and `apply` would skip the requests
with lower numbers as already committed.

**On a crash**: a recovery ignores a torn (incomplete) last frame, because its request was never
answered, and commits the requests of whole frames again. A file is deleted only after all its
requests are committed. The mark of a log is retired only after the deletion of its last file is
durable. So the cluster state has the mark as long as the log has a file.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
import pyarrow as pa

from tidelog.storage.codec import record_columns
from tidelog.storage.codec.entry import HotMark
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core import format_levels
from tidelog.storage.core.errors import CommitUnknown, LogError, Unavailable
from tidelog.storage.runtime.tasks import TASK_ENDS
from tidelog.storage.store.folder import sync_path
from tidelog.storage.write.hot_log_file import (
    KEPT,
    Frame,
    FramePart,
    Recovered,
    discard,
    frames,
    prefix,
    read_file,
    write_all,
)
from tidelog.storage.write.requests import AppendRequest

log = logging.getLogger("tidelog.hotlog")

ROTATE_BYTES = 64 * 1024 * 1024
_encoder = msgspec.msgpack.Encoder()


@dataclass
class _LogFile:
    """A hot log file of this process. Its first `size` bytes, up to number `last`, are durable."""

    path: Path
    fd: int
    size: int
    last: int = -1
    is_spoilt: bool = False  # bytes after `size` are undefined, so nothing may be appended


class _WaitingFrame(NamedTuple):
    request: AppendRequest
    payload: bytes
    done: asyncio.Future[None]


class HotLog:
    """The hot log of one process: one fdatasync for all waiting requests. Owned by one event loop.

    `on_durable` is called with each durable request, in the order of marks and before its `append`
    returns. It is also called if the caller of `append` was cancelled. The request is durable then,
    and `apply` would skip it if a request with a higher mark were committed before it. `on_failed`
    is called with each other request, also if its caller was cancelled.
    """

    def __init__(
        self,
        directory: Path,
        cluster_id: str,
        new_log_id: str,
        on_durable: Callable[[AppendRequest], object],
        on_failed: Callable[[AppendRequest, LogError], None],
        level: Callable[[], int] = lambda: format_levels.NEWEST,
    ) -> None:
        """`level` returns the level of the cluster: frames of level 1 have no principal."""
        self._level = level
        self._on_durable = on_durable
        self._on_failed = on_failed
        self.directory = directory
        self.cluster_id = cluster_id
        self.log_id = new_log_id
        self.is_marked = False
        """Whether the cluster state has a mark of this log."""
        self._next = 0
        self._generation = 0
        self._file: _LogFile | None = None  # receives appends
        # Earlier files, locked until all their requests are committed.
        self._full: list[_LogFile] = []
        self.kept: deque[Recovered] = deque()
        """Locked files of requests that the store refuses, one request in each file."""
        self._leaving: Recovered | None = None  # from `keep` until `set_aside`
        self._waiting: list[_WaitingFrame] = []
        self._sync: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "tidelog-hotlog")

    def has_copy(self, marks: Mapping[str, int], *, is_reset: bool) -> bool:
        """Return whether a copy of this process has used numbers of this log.

        `marks` are marks in the WAL. If `is_reset`, they are all marks of a newly loaded state, and
        this process has not applied all entries before that state. Then a missing mark also shows a
        copy, if an earlier state had a mark of this log, because a recovery of the copy's disk has
        retired the log.
        """
        newest = marks.get(self.log_id)
        return is_reset and self.is_marked if newest is None else newest >= self._next

    async def append(self, request: AppendRequest) -> None:
        """Make the request durable, set its hot mark and pass it to `on_durable`.

        Raises Unavailable if the request is definitely not in the file. Raises CommitUnknown if an
        error leaves this unknown.
        """
        try:
            payload = _payload(request, self._level())
        except TASK_ENDS:
            raise
        except BaseException as error:
            why = Unavailable(f"not written, the request cannot be encoded: {error!r}")
            self._on_failed(request, why)
            raise why from error
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(_WaitingFrame(request, payload, future))
        if self._sync is None or self._sync.done():
            self._sync = asyncio.create_task(self._write_waiting())
        await future

    async def _write_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting, []
            first = self._next
            # Numbers are used up even if the write fails, so that no two requests get the same
            # number.
            self._next += len(batch)
            payloads = [waiting.payload for waiting in batch]
            try:
                # **On a crash** here: frames are in the file or torn; no request was answered.
                await loop.run_in_executor(self._thread, self._write, first, payloads)
            except (Unavailable, CommitUnknown) as error:
                self._fail(batch, error)
                continue
            except TASK_ENDS:
                raise
            except BaseException as error:  # whole frames may be in the file
                log.critical("bug in the hot log", exc_info=error)
                if self._file is not None:
                    self._file.is_spoilt = True
                self._fail(batch, CommitUnknown(f"the hot log failed: {error!r}"))
                continue
            for number, waiting in enumerate(batch, first):
                waiting.request.hot = HotMark(self.log_id, number)
                self._on_durable(waiting.request)
                if not waiting.done.done():
                    waiting.done.set_result(None)

    def _fail(self, batch: Sequence[_WaitingFrame], error: LogError) -> None:
        for waiting in batch:
            self._on_failed(waiting.request, error)
            if not waiting.done.done():
                waiting.done.set_exception(error)

    def _write(self, first: int, payloads: Sequence[bytes]) -> None:
        try:
            if self._file is None or self._file.size >= ROTATE_BYTES or self._file.is_spoilt:
                self._open_file()
        except OSError as error:
            raise Unavailable(f"cannot create a hot log in {self.directory}: {error}") from error
        file = self._file
        assert file is not None
        body = frames(first, payloads)
        try:
            write_all(file.fd, body)
            os.fdatasync(file.fd)
        except BaseException as error:  # noqa: BLE001 - always raises again
            _take_back(file, error)
        file.size += len(body)
        file.last = first + len(payloads) - 1

    def _open_file(self) -> None:
        path = self.directory / f"{self.log_id}-{self._generation:06d}.hot"
        start = prefix(self.cluster_id, self.log_id)
        fd = self._make(path, start)
        if self._file is not None:
            self._full.append(self._file)
        self._generation += 1
        self._file = _LogFile(path, fd, len(start))

    def _make(self, path: Path, body: bytes) -> int:
        """Make a locked file with this content, durably; return its descriptor."""
        self.directory.mkdir(0o700, parents=True, exist_ok=True)
        making = path.with_suffix(".new")
        fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Lock the file and write it before it gets the name that a recovery searches for.
            fcntl.flock(fd, fcntl.LOCK_EX)
            write_all(fd, body)
            os.fdatasync(fd)
            making.rename(path)
            sync_path(self.directory)
        except BaseException:
            os.close(fd)
            for half in (making, path):
                half.unlink(missing_ok=True)
            raise
        return fd

    # -- requests that the store refuses

    async def keep(self, request: AppendRequest, log_id: str) -> Recovered:
        """Copy the request durably to a new file.

        The file is a hot log with the id `log_id`, which has only this request, as number 0. The
        name of the file begins with the id of the request's first log, so that the same process
        recovers both logs. A second call with the same id makes no second file. Raises OSError.
        """
        assert request.hot is not None, "only acknowledged requests are kept"
        if self._leaving is not None and self._leaving.log_id == log_id:
            return self._leaving
        path = self.directory / f"{request.hot.log_id}{KEPT}{log_id}.hot"
        body = prefix(self.cluster_id, log_id) + frames(0, [_payload(request, self._level())])
        loop = asyncio.get_running_loop()
        fd = await loop.run_in_executor(self._thread, self._make, path, body)
        self._leaving = Recovered(path, log_id, [], fd)
        return self._leaving

    def set_aside(self, file: Recovered) -> None:
        """Add a file to `kept`, so that its request is tried again.

        `keep` made the file, or a recovery found it.
        """
        self._leaving = None
        self.kept.append(file._replace(requests=[]))  # the request stays on the disk

    async def load(self, kept_file: Recovered) -> AppendRequest:
        """Read the request of a kept file. Raises StoreUnfit, OSError."""
        loop = asyncio.get_running_loop()
        read = partial(read_file, kept_file.path, kept_file.fd, self.cluster_id)
        (request,) = (await loop.run_in_executor(self._thread, read)).requests
        return request

    async def discard(self, kept_file: Recovered) -> set[str]:
        """Delete a kept file whose request is committed; return the logs without a file."""
        self.kept.remove(kept_file)
        return await asyncio.get_running_loop().run_in_executor(self._thread, discard, [kept_file])

    def committed(self, marks: Sequence[HotMark]) -> None:
        """Delete the full files that have no mark above the newest of `marks`.

        All their requests are committed.
        """
        newest = max((mark.seq for mark in marks if mark.log_id == self.log_id), default=-1)
        self.is_marked = self.is_marked or newest >= 0
        while self._full and self._full[0].last <= newest:
            file = self._full.pop(0)
            # If the file stays, or returns after a crash, `apply` still knows its marks.
            with contextlib.suppress(OSError):
                file.path.unlink()
            os.close(file.fd)

    async def drain(self) -> None:
        """Wait until no write is active; then `on_durable` was called with all durable requests."""
        if self._sync is not None:
            await self._sync

    async def close(self, *, is_drained: bool) -> None:
        """Close the files. If `is_drained`, all their requests are committed: delete them."""
        await self.drain()
        self._thread.shutdown()
        files = [*self._full, *([] if self._file is None else [self._file])]
        self._full, self._file = [], None
        for kept_file in (*self.kept, *([] if self._leaving is None else [self._leaving])):
            os.close(kept_file.fd)
        self.kept.clear()
        try:
            if files and is_drained:
                for file in files:
                    file.path.unlink(missing_ok=True)
                sync_path(self.directory)
        except OSError as error:
            log.warning("committed hot logs in %s were not deleted: %s", self.directory, error)
        finally:
            for file in files:
                os.close(file.fd)


def _payload(request: AppendRequest, level: int) -> bytes:
    parts = [
        FramePart(part.topic_id, partition, _message(rows))
        for part in request.parts
        for partition, rows in part.parted()
    ]
    elements = (request.commit_id, request.is_json, request.topic_id, request.key, parts)
    return _encoder.encode(
        elements if level == format_levels.FIRST else Frame(*elements, request.principal)
    )


def _message(rows: Rows | pa.RecordBatch) -> bytes:
    batch = record_columns.batch_of_rows([rows]) if isinstance(rows, Rows) else rows
    return batch.serialize().to_pybytes()


def _take_back(file: _LogFile, error: BaseException) -> NoReturn:
    """Cut off the frames whose write failed.

    Their callers got an error, so a recovery must not commit them.
    """
    try:
        os.ftruncate(file.fd, file.size)
        os.lseek(file.fd, file.size, os.SEEK_SET)
        os.fsync(file.fd)
    except OSError as second:
        file.is_spoilt = True
        raise CommitUnknown(f"hot log {file.path}: {error}, then {second}") from error
    raise Unavailable(f"hot log {file.path} cannot be written: {error}") from error
