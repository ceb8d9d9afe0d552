"""The bytes of a hot log file, and their recovery after a crash (FORMAT, hot log)."""

import fcntl
import logging
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.entry import HotMark, IdempotencyKey
from tidelog.storage.core.errors import Corrupt, StoreUnfit
from tidelog.storage.store.folder import sync_path
from tidelog.storage.write.requests import AppendRequest, TopicRecords

log = logging.getLogger(__name__)

MAGIC = b"TIDEHOT1"
FRAME = struct.Struct("<IIQ")  # payload length, CRC-32C of number and payload, number
KEPT = "-kept-"
_UPPER_HALF = bytes(4)
_ZEROS = 512
_FRAME_BYTES_MIN = 64
_EFFORT_MAX = 4 * 1024**3
"""Maximum number of bytes for which one search for a frame computes checksums. Checksums of 4 GiB
take a few seconds."""


class Head(msgspec.Struct, frozen=True):
    cluster_id: str
    log_id: str


class FramePart(msgspec.Struct, frozen=True, array_like=True):
    topic_id: str
    partition: int
    message: bytes  # an Arrow record batch message of CHUNK_SCHEMA


class Frame(msgspec.Struct, frozen=True, array_like=True):
    commit_id: bytes
    is_json: bool
    topic_id: str | None
    key: IdempotencyKey | None
    parts: list[FramePart]
    principal: str = ""
    """Frames of level 1 have no principal."""


_frames = msgspec.msgpack.Decoder(Frame)


class Recovered(NamedTuple):
    """A file of a crashed process, or a file that HotLog.keep made.

    Its requests have hot marks and are in order. `fd` holds the lock of the file.
    """

    path: Path
    log_id: str
    requests: list[AppendRequest]
    fd: int

    @property
    def is_kept(self) -> bool:
        """Return whether the file has only one request, which the store refused (HotLog.keep)."""
        return KEPT in self.path.name


def recover(directory: Path, cluster_id: str) -> list[Recovered]:
    """Lock and read the directory's logs that no running process holds, each with all its files.

    Raises StoreUnfit if a log belongs to another cluster, because its records must not get into
    this cluster, and must not be dropped.
    """
    files: list[Recovered] = []
    # Another process holds, or has just deleted, a file of these logs.
    other_log_ids: set[str] = set()
    try:
        for path in sorted(directory.glob("*.hot")):
            log_id = _first_log(path)
            # The paths are sorted: if two processes start at once, one gets all files of a log.
            fd = None if log_id in other_log_ids else _lock(path)
            if fd is None:
                other_log_ids.add(log_id)
                continue
            try:
                files.append(read_file(path, fd, cluster_id))
            except BaseException:
                os.close(fd)
                raise
    except BaseException as error:
        release(files)
        if isinstance(error, OSError):
            raise StoreUnfit(f"hot logs in {directory} cannot be read: {error}") from error
        raise
    return _each_once(files)


def _each_once(files: Sequence[Recovered]) -> list[Recovered]:
    """If a request is in a file of its own and also in another file, drop it from the other file.

    The request is in both if a process crashed while it set the request aside.
    """
    commit_ids = {request.commit_id for file in files if file.is_kept for request in file.requests}
    return [
        file
        if file.is_kept
        else file._replace(
            requests=[request for request in file.requests if request.commit_id not in commit_ids]
        )
        for file in files
    ]


def _first_log(path: Path) -> str:
    """Return the id of the log to which the file's requests belonged at first."""
    return path.name.partition("-")[0]


def _lock(path: Path) -> int | None:
    """Lock the file; return its descriptor, or None if another process holds or has deleted it."""
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


def release(files: Sequence[Recovered]) -> None:
    """Release the locks of files, for the next recovery."""
    for recovered in files:
        os.close(recovered.fd)


def discard(files: Sequence[Recovered]) -> set[str]:
    """Durably delete the files whose requests are all committed, and release their locks.

    Returns the logs that have no file left. No recovery will need the marks of these logs again.
    """
    finished = set()
    for recovered in files:
        directory = recovered.path.parent
        recovered.path.unlink(missing_ok=True)
        sync_path(directory)
        os.close(recovered.fd)
        for log_id in {recovered.log_id, _first_log(recovered.path)}:
            if not any(directory.glob(f"{log_id}-*.hot")):
                finished.add(log_id)
    return finished


def read_file(path: Path, fd: int, cluster_id: str) -> Recovered:
    body = path.read_bytes()
    if not body.startswith(MAGIC):
        raise StoreUnfit(f"hot log {path} has a wrong header: move it away to start without it")
    length = int.from_bytes(body[len(MAGIC) : len(MAGIC) + 4], "little")
    position = len(MAGIC) + 4 + length
    try:
        head = msgspec.json.decode(body[len(MAGIC) + 4 : position], type=Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreUnfit(f"hot log {path} has a damaged head: {error}") from error
    if head.cluster_id != cluster_id:
        raise StoreUnfit(
            f"hot log {path} belongs to cluster {head.cluster_id}, not to {cluster_id}: "
            "start a broker of that cluster here first, or give this broker another --hot-dir"
        )
    requests: list[AppendRequest] = []
    last, damaged = 0, 0
    while position < len(body):
        frame_parts = _frame_at(body, position)
        if frame_parts is None:
            # If no whole frame follows, this frame is torn (some file systems leave zeros), and its
            # request was never answered. If whole frames follow, this frame may be damaged. Then
            # its request may have been acknowledged, and the disk has lost data.
            try:
                further = _next_frame(body, position + 1, last)
            except StoreUnfit as error:
                raise StoreUnfit(
                    f"hot log {path} {error}: move it away to start without it"
                ) from error
            if further is None:
                break
            damaged += further - position
            position = further
            continue
        number, payload = frame_parts
        try:
            frame = _frames.decode(payload)
            requests.append(_append_request(frame, HotMark(head.log_id, number), str(path)))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, Corrupt) as error:
            raise StoreUnfit(f"hot log {path} has an invalid frame: {error}") from error
        position += FRAME.size + len(payload)
        last = number
    if damaged:
        copy_path = path.with_suffix(".damaged")
        shutil.copyfile(path, copy_path)
        why = "acknowledged requests (acks=1) in these bytes are lost, later requests are kept"
        log.error(
            "hot log %s: %d bytes are damaged: %s; a copy is in %s", path, damaged, why, copy_path
        )
    if position < len(body):
        log.warning("hot log %s: ignored %d torn bytes at its end", path, len(body) - position)
    return Recovered(path, head.log_id, requests, fd)


def _frame_at(body: bytes, position: int) -> tuple[int, bytes] | None:
    """Return number and payload of the frame at `position`.

    If no whole frame is there, return None.
    """
    if len(body) - position < FRAME.size:
        return None
    size, crc, number = FRAME.unpack_from(body, position)
    if not 0 < size <= len(body) - position - FRAME.size:
        return None
    payload = body[position + FRAME.size : position + FRAME.size + size]
    return (number, payload) if frame_checksum(number, payload) == crc else None


def _next_frame(body: bytes, start: int, last: int) -> int | None:
    """Return the position of the next whole frame.

    If there is none, return None. The frame's number must be higher than `last`. If `last` is not
    0, no more numbers may be missing after `last` than frames fit into the skipped bytes. The
    search looks for the upper half of the number, which is zero, because few other positions match.

    Raises StoreUnfit if too many bytes look like a frame: then an operator has to decide.
    """
    place, effort = start - 1, 0
    while (place := body.find(_UPPER_HALF, place + 1)) >= 0:
        position = place - (FRAME.size - len(_UPPER_HALF))
        if position >= start:
            size, _, number = FRAME.unpack_from(body, position)
            between = (position - start) // _FRAME_BYTES_MIN
            if last < number and (not last or number <= last + 1 + between):
                if _frame_at(body, position) is not None:
                    return position
                effort += min(size, len(body) - position)
                if effort > _EFFORT_MAX:
                    raise StoreUnfit(f"is damaged at byte {start}")
        if not body[place : place + _ZEROS].strip(b"\0"):
            place += _ZEROS - FRAME.size  # a page that was never written
    return None


def prefix(cluster_id: str, log_id: str) -> bytes:
    """Return the bytes of a file before its first frame."""
    head = msgspec.json.encode(Head(cluster_id, log_id))
    return MAGIC + struct.pack("<I", len(head)) + head


def frames(first: int, payloads: Sequence[bytes]) -> bytes:
    """Return the payloads as frames, numbered from `first`."""
    return b"".join(
        FRAME.pack(len(payload), frame_checksum(number, payload), number) + payload
        for number, payload in enumerate(payloads, first)
    )


def frame_checksum(number: int, payload: bytes) -> int:
    return crc32c(payload, crc32c(number.to_bytes(8, "little")))


def _append_request(frame: Frame, mark: HotMark, path: str) -> AppendRequest:
    parts = [
        TopicRecords(part.topic_id, part.partition, chunks.decode_message(part.message, path))
        for part in frame.parts
    ]
    size = sum(len(part.message) for part in frame.parts)
    return AppendRequest(
        parts,
        size,
        is_json=frame.is_json,
        key=frame.key,
        hot=mark,
        topic_id=frame.topic_id,
        commit_id=frame.commit_id,
        principal=frame.principal,
    )


def write_all(fd: int, body: bytes) -> None:
    view = memoryview(body)
    while view:
        view = view[os.write(fd, view) :]
