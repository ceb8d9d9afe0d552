"""The local hot log: where acks=1 records are made durable before they are committed.

One append-only file per process and generation, `<directory>/<log id>.hot`, of framed requests,
each with a number. The number travels with the commit as its hot mark, and `apply` takes each
number once: so a restart may re-commit whatever the file holds, and what was committed before the
crash is recognised (DESIGN 3.5). Files are locked while their process lives; whoever starts next in
the directory adopts the logs whose locks are free, each log by one process alone: a part of it that
is committed by another would overtake the rest, and what is overtaken counts as committed.

What a crash leaves: a torn last frame, which was never answered and is cut off; whole frames,
which are re-committed. The file is deleted only when all of it is committed, and its mark is
retired only after the deletion is durable: a mark outlives its file, never the reverse.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
import pyarrow as pa

from storage import chunk as chunks
from storage.chunk import Rows, crc32c
from storage.entry import HotMark, IdempotencyKey
from storage.errors import CommitUnknown, Corrupt, LogError, StoreUnfit, Unavailable
from storage.hot import PartRows, Request

log = logging.getLogger("tidelog.hotlog")

MAGIC = b"TIDEHOT1"
_FRAME = struct.Struct("<IIQ")  # payload length, CRC-32C of number and payload, number
_UPPER_HALF = bytes(4)
_ZEROS = 512
_FRAME_BYTES_MIN = 64
_EFFORT_MAX = 4 * 1024**3
"""Bytes that are checksummed in looking for a frame: seconds."""
ROTATE_BYTES = 64 * 1024 * 1024


class _Head(msgspec.Struct, frozen=True):
    cluster_id: str
    log_id: str


class _Part(msgspec.Struct, frozen=True, array_like=True):
    topic_id: str
    partition: int
    message: bytes  # an Arrow record batch message of CHUNK_SCHEMA


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    commit_id: bytes
    is_json: bool
    topic_id: str | None
    key: IdempotencyKey | None
    parts: list[_Part]


_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(_Frame)


class Recovered(NamedTuple):
    """A file that a dead process left: its requests, marked, in order. The lock is held by `fd`."""

    path: Path
    log_id: str
    requests: list[Request]
    fd: int


@dataclass
class _File:
    """A file of ours: `size` bytes of it are durable, up to number `last`."""

    path: Path
    fd: int
    size: int
    last: int = -1
    is_spoilt: bool = False  # what lies after `size` nobody knows: nothing may follow it


class _Waiting(NamedTuple):
    request: Request
    frame: _Frame
    done: asyncio.Future[None]


class HotLog:
    """Appends requests durably, many at once with one fdatasync. Owned by one event loop.

    `on_durable` is called with each request, marked, in the order of marks and before its caller
    goes on: commits must carry marks in that order, whichever callers have gone away meanwhile.
    `on_failed` is called with each of the others, whether its caller is still there or not.
    """

    def __init__(
        self,
        directory: Path,
        cluster_id: str,
        new_log_id: str,
        on_durable: Callable[[Request], None],
        on_failed: Callable[[Request, LogError], None],
    ) -> None:
        self._on_durable = on_durable
        self._on_failed = on_failed
        self.directory = directory
        self.cluster_id = cluster_id
        self.log_id = new_log_id
        self._next = 0
        self._generation = 0
        self._file: _File | None = None  # the one that is written
        self._full: list[_File] = []  # those before it, locked until all they hold is committed
        self._waiting: list[_Waiting] = []
        self._sync: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "tidelog-hotlog")

    async def append(self, request: Request) -> None:
        """Make the request durable here, mark it and hand it on.

        Raises Unavailable when it is definitely not in the file, CommitUnknown when a failing disk
        does not say.
        """
        parts = [
            _Part(part.topic_id, partition, _message(rows))
            for part in request.parts
            for partition, rows in part.parted()
        ]
        frame = _Frame(request.commit_id, request.is_json, request.topic_id, request.key, parts)
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(request, frame, done))
        if self._sync is None or self._sync.done():
            self._sync = asyncio.create_task(self._write_waiting())
        await done

    async def _write_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting, []
            first = self._next
            # Numbers are spent even if the write fails: one is never given to two requests.
            self._next += len(batch)
            payloads = [_encoder.encode(waiting.frame) for waiting in batch]
            try:
                # Dying in here: frames are in the file or torn; nobody has been answered.
                await loop.run_in_executor(self._thread, self._write, first, payloads)
            except (Unavailable, CommitUnknown) as error:
                for waiting in batch:
                    self._on_failed(waiting.request, error)
                    if not waiting.done.done():
                        waiting.done.set_exception(error)
                continue
            for number, waiting in enumerate(batch, first):
                waiting.request.hot = HotMark(self.log_id, number)
                self._on_durable(waiting.request)
                if not waiting.done.done():
                    waiting.done.set_result(None)

    def _write(self, first: int, payloads: Sequence[bytes]) -> None:
        try:
            if self._file is None or self._file.size >= ROTATE_BYTES or self._file.is_spoilt:
                self._open_file()
        except OSError as error:
            raise Unavailable(f"cannot create a hot log in {self.directory}: {error}") from error
        file = self._file
        assert file is not None
        body = b"".join(
            _FRAME.pack(len(payload), _checksum(number, payload), number) + payload
            for number, payload in enumerate(payloads, first)
        )
        try:
            write_all(file.fd, body)
            os.fdatasync(file.fd)
        except OSError as error:
            _take_back(file, error)
        file.size += len(body)
        file.last = first + len(payloads) - 1

    def _open_file(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{self.log_id}-{self._generation:06d}.hot"
        making = path.with_suffix(".new")
        fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Locked and headed before it gets the name that a recovery looks for.
            fcntl.flock(fd, fcntl.LOCK_EX)
            head = msgspec.json.encode(_Head(self.cluster_id, self.log_id))
            prefix = MAGIC + struct.pack("<I", len(head)) + head
            write_all(fd, prefix)
            os.fdatasync(fd)
            making.rename(path)
            sync_directory(self.directory)
        except BaseException:
            os.close(fd)
            for half in (making, path):
                half.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._full.append(self._file)
        self._generation += 1
        self._file = _File(path, fd, len(prefix))

    def committed(self, marks: Sequence[HotMark]) -> None:
        """These are in the WAL, and all before them: files that hold nothing else are deleted."""
        newest = max((mark.seq for mark in marks if mark.log_id == self.log_id), default=-1)
        while self._full and self._full[0].last <= newest:
            file = self._full.pop(0)
            with contextlib.suppress(OSError):  # it may come back: its marks are remembered
                file.path.unlink()
            os.close(file.fd)

    async def drain(self) -> None:
        """Wait until nothing is being written; everything durable has been handed on."""
        if self._sync is not None:
            await self._sync

    async def close(self, *, is_drained: bool) -> None:
        """Release the files; delete them when nothing in them is left to commit."""
        await self.drain()
        self._thread.shutdown()
        files = [*self._full, *([] if self._file is None else [self._file])]
        self._full, self._file = [], None
        try:
            if files and is_drained:
                for file in files:
                    file.path.unlink(missing_ok=True)
                sync_directory(self.directory)
        except OSError as error:
            log.warning("hot logs in %s stay, though all is committed: %s", self.directory, error)
        finally:
            for file in files:
                os.close(file.fd)


def recover(directory: Path, cluster_id: str) -> list[Recovered]:
    """The logs in the directory that no living process holds, each with all of its files.

    Raises StoreUnfit for one that belongs to another cluster: its records must not end up in this
    one, nor be dropped.
    """
    found: list[Recovered] = []
    taken: set[str] = set()  # logs of which another process holds, or just removed, a file
    try:
        for path in sorted(directory.glob("*.hot")):
            log_id = path.name.rpartition("-")[0]
            # In order, so that of two processes that start here at once one gets all of a log.
            fd = None if log_id in taken else _lock(path)
            if fd is None:
                taken.add(log_id)
                continue
            try:
                found.append(_read_file(path, fd, cluster_id))
            except BaseException:
                os.close(fd)
                raise
    except BaseException as error:
        for recovered in found:
            os.close(recovered.fd)
        if isinstance(error, OSError):
            raise StoreUnfit(f"hot logs in {directory} cannot be read: {error}") from error
        raise
    return found


def _lock(path: Path) -> int | None:
    """The file's descriptor, None when another process has it or has removed it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    if os.fstat(fd).st_nlink == 0:
        os.close(fd)
        return None
    return fd


def discard(files: Sequence[Recovered]) -> set[str]:
    """Delete files whose requests are all committed, durably, and let go of their locks.

    Returns the logs of which no file is left: no recovery will ever look for their marks again.
    """
    finished = set()
    for recovered in files:
        directory = recovered.path.parent
        recovered.path.unlink(missing_ok=True)
        sync_directory(directory)
        os.close(recovered.fd)
        if not any(directory.glob(f"{recovered.log_id}-*.hot")):
            finished.add(recovered.log_id)
    return finished


def _read_file(path: Path, fd: int, cluster_id: str) -> Recovered:
    body = path.read_bytes()
    if not body.startswith(MAGIC):
        raise StoreUnfit(f"hot log {path} does not begin as one: move it away to start without it")
    length = int.from_bytes(body[len(MAGIC) : len(MAGIC) + 4], "little")
    at = len(MAGIC) + 4 + length
    try:
        head = msgspec.json.decode(body[len(MAGIC) + 4 : at], type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreUnfit(f"hot log {path} has a damaged head: {error}") from error
    if head.cluster_id != cluster_id:
        raise StoreUnfit(
            f"hot log {path} belongs to cluster {head.cluster_id}, not to {cluster_id}: "
            "start a broker of that cluster here first, or give this one another --hot-dir"
        )
    requests: list[Request] = []
    last, damaged = 0, 0
    while at < len(body):
        found = _frame_at(body, at)
        if found is None:
            # Torn, so never answered; zeros are what some file systems leave of it. Unless there
            # are whole frames behind it: those were promised, and the disk has lost some before.
            try:
                further = _next_frame(body, at + 1, last)
            except StoreUnfit as error:
                raise StoreUnfit(
                    f"hot log {path} {error}: move it away to start without it"
                ) from error
            if further is None:
                break
            damaged += further - at
            at = further
            continue
        number, payload = found
        try:
            frame = _frames.decode(payload)
            requests.append(_request(frame, HotMark(head.log_id, number), str(path)))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, Corrupt) as error:
            raise StoreUnfit(f"hot log {path} has a frame that is none: {error}") from error
        at += _FRAME.size + len(payload)
        last = number
    if damaged:
        kept = path.with_suffix(".damaged")
        shutil.copyfile(path, kept)
        why = "requests that were answered with acks=1 are lost, those behind them are not"
        log.error(
            "hot log %s: %d bytes are damaged: %s; it is kept as %s", path, damaged, why, kept
        )
    if at < len(body):
        log.warning("hot log %s: cut off %d torn bytes", path, len(body) - at)
    return Recovered(path, head.log_id, requests, fd)


def _frame_at(body: bytes, at: int) -> tuple[int, bytes] | None:
    """Number and payload of the frame that is there; None when none is, or not a whole one."""
    if len(body) - at < _FRAME.size:
        return None
    size, crc, number = _FRAME.unpack_from(body, at)
    if not 0 < size <= len(body) - at - _FRAME.size:
        return None
    payload = body[at + _FRAME.size : at + _FRAME.size + size]
    return (number, payload) if _checksum(number, payload) == crc else None


def _next_frame(body: bytes, start: int, last: int) -> int | None:
    """Where the next whole frame begins, of a number above `last` by no more than could be between
    (0: nobody knows where the numbers begin). Looked for by the upper half of its number, which is
    zero, so that little else is looked at.

    Raises StoreUnfit when too much looks like one: it may be there, and a person has to say.
    """
    place, effort = start - 1, 0
    while (place := body.find(_UPPER_HALF, place + 1)) >= 0:
        at = place - (_FRAME.size - len(_UPPER_HALF))
        if at >= start:
            size, _, number = _FRAME.unpack_from(body, at)
            between = (at - start) // _FRAME_BYTES_MIN
            if last < number and (not last or number <= last + 1 + between):
                if _frame_at(body, at) is not None:
                    return at
                effort += min(size, len(body) - at)
                if effort > _EFFORT_MAX:
                    raise StoreUnfit(f"is damaged at byte {start}")
        if not body[place : place + _ZEROS].strip(b"\0"):
            place += _ZEROS - _FRAME.size  # a page that was never written
    return None


def _checksum(number: int, payload: bytes) -> int:
    return crc32c(payload, crc32c(number.to_bytes(8, "little")))


def _request(frame: _Frame, mark: HotMark, path: str) -> Request:
    parts = [
        PartRows(part.topic_id, part.partition, chunks.decode_message(part.message, path))
        for part in frame.parts
    ]
    size = sum(len(part.message) for part in frame.parts)
    return Request(
        frame.commit_id,
        parts,
        size,
        is_json=frame.is_json,
        key=frame.key,
        hot=mark,
        topic_id=frame.topic_id,
    )


def _message(rows: Rows | pa.RecordBatch) -> bytes:
    batch = chunks.batch_of_rows([rows]) if isinstance(rows, Rows) else rows
    return batch.serialize().to_pybytes()


def _take_back(file: _File, error: OSError) -> NoReturn:
    """Frames that were not synced must not be found by a recovery: a no has to stay a no (I6)."""
    try:
        os.ftruncate(file.fd, file.size)
        os.lseek(file.fd, file.size, os.SEEK_SET)
        os.fsync(file.fd)
    except OSError as second:
        file.is_spoilt = True
        raise CommitUnknown(f"hot log {file.path}: {error}, then {second}") from error
    raise Unavailable(f"hot log {file.path} cannot be written: {error.strerror}") from error


def write_all(fd: int, body: bytes) -> None:
    """write(2) until all of it is written."""
    view = memoryview(body)
    while view:
        view = view[os.write(fd, view) :]


def sync_directory(directory: Path) -> None:
    """Make names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
