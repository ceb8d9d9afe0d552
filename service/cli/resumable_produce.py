"""`tidelog produce --state FILE`: each line of an input once, also if this command is killed.

The file has the number of lines that are in the topic. Before a request, the command also writes
the end of the request's batch into the file (`pending`). So a later run sends the same batch with
the same Idempotency-Key. If the broker has an outcome for this key, it answers with that outcome.
The command sends one request at a time.

**On a crash** before a request: the next run sends the batch. After the request: the next run sends
the batch again, and the broker writes nothing. Brokers keep an Idempotency-Key for an hour. After
that, the outcome of the pending batch is unknown, and the next run ends with an error.
"""

import asyncio
import contextlib
import hashlib
import os
from typing import NamedTuple

import msgspec

from tidelog.service.cli.broker_requests import command_error
from tidelog.service.cli.errors import BadUsage, CommandError
from tidelog.service.cli.input_lines import (
    IDLE_S,
    INPUT_READ_BYTES,
    BadLine,
    LineInput,
    ProduceSummary,
)
from tidelog.service.cli.output import SlowProgress, plural, warn
from tidelog.service.client.connection import Connection
from tidelog.service.client.errors import ClientError, Refused
from tidelog.service.client.producer import send_batch
from tidelog.storage.runtime.clock import SystemClock

PENDING_MS_MAX = 50 * 60 * 1000
"""Brokers keep an Idempotency-Key for an hour. Ten minutes less, because clocks differ and this run
may retry."""
CHECKED_BYTES = 4096
"""A later run compares so much of the input before its first line with what an earlier run sent."""
CONTENT_REFUSED = {400, 413, 422}
"""Statuses of responses that refuse a batch for what it contains, each time."""


class _Pending(msgspec.Struct):
    """The batch under way: lines and bytes of input up to its end, digest, and time.

    The digest is that of its bytes; the time is before its first request.
    """

    lines: int
    bytes: int
    digest: str
    since_ms: int


class _State(msgspec.Struct):
    """The contents of the file. `lines` and `bytes` of the input are in the topic."""

    topic: str
    options: str
    run: str
    lines: int = 0
    bytes: int = 0
    checked: str = ""
    checked_bytes: int = 0
    """The digest of the last CHECKED_BYTES of the first `checked_bytes` bytes. Files of old
    versions have none, and a user may change `bytes`."""
    pending: _Pending | None = None


class _Batch(NamedTuple):
    """Lines of input: their records, and the bytes and lines that they take."""

    texts: list[bytes]
    octets: bytes
    lines: int


class ResumableProducer:
    """One run of the command, on one state file."""

    def __init__(self, connection: Connection, lines: LineInput) -> None:
        assert lines.options.state is not None
        self._connection = connection
        self._source = lines.source
        self._options = lines.options
        self._parser = lines.parser
        self._file = lines.options.state
        self._clock = SystemClock()
        self._summary = ProduceSummary(lines.topic)
        self._rest = b""
        self._checked = b""
        """The last CHECKED_BYTES of the input that are in the topic."""
        self._is_at_end = False
        self._state = self._load(lines.topic)

    async def run(self) -> ProduceSummary:
        """Produce the lines that are not in the topic. Raises CommandError."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            with SlowProgress("producing", self._source.size) as progress:
                await self._skip(self._state.bytes)
                if self._state.pending is not None:
                    await self._send(await self._pending_batch(self._state.pending))
                while True:
                    batch, bad = await self._next_batch()
                    if batch.lines:
                        await self._send(batch)
                    if bad is not None:
                        raise BadLine(f"{bad} (lines 1 to {self._state.lines} are in the topic)")
                    if not batch.lines:
                        break
                    progress.show(self._state.bytes)
        except asyncio.CancelledError:
            warn(f"interrupted: lines 1 to {self._state.lines} are in the topic")
            raise
        finally:
            self._summary.retries = self._connection.retries
            self._summary.seconds = loop.time() - started_s
        return self._summary

    # -- the file

    def _load(self, topic: str) -> _State:
        options = self._options
        form = f"{self._parser.media_type} {options.partition} {options.acks} {self._parser.form}"
        try:
            content = self._file.read_bytes()
        except FileNotFoundError:
            return _State(topic, form, self._clock.new_id().hex())
        except OSError as error:
            raise BadUsage(f"--state: cannot read {self._file}: {error.strerror}") from None
        try:
            state = msgspec.json.decode(content, type=_State)
        except msgspec.MsgspecError as error:
            raise BadUsage(f"--state: {self._file} is no state of produce: {error}") from None
        if state.topic != topic:
            raise BadUsage(f"--state: {self._file} belongs to topic {state.topic!r}, not {topic!r}")
        if state.options != form:
            raise BadUsage(
                f"--state: {self._file} was begun with other options of the format, the partition "
                "or acks: give the same ones"
            )
        pending = state.pending
        if pending is not None and self._clock.now_ms() - pending.since_ms > PENDING_MS_MAX:
            why = "and brokers may have dropped their Idempotency-Key"
            raise CommandError(self._advice(state, pending, why))
        return state

    def _advice(self, state: _State, pending: _Pending, why: str) -> str:
        """Return what the user can do about a batch whose outcome no request can tell."""
        return (
            f"it is unknown whether lines {state.lines + 1} to {pending.lines} are in "
            f"{state.topic}, {why}: read the topic. If they are in it, set `lines` and `bytes` in "
            f"{self._file} to the values in `pending`. In both cases set `pending` to null"
        )

    def _save(self) -> None:
        """Replace the file. After a crash, it has the old or the new contents."""
        new = self._file.with_name(f"{self._file.name}.new")
        try:
            with open(new, "wb") as out:
                out.write(msgspec.json.format(msgspec.json.encode(self._state)) + b"\n")
                out.flush()
                os.fsync(out.fileno())
            os.replace(new, self._file)
            folder = os.open(self._file.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise CommandError(f"--state: cannot write {self._file}: {error.strerror}") from None

    # -- the input

    async def _more(self) -> bool:
        """Read more input; return False if none arrives in IDLE_S, or at the end."""
        chunk = await asyncio.to_thread(self._source.read, IDLE_S)
        if chunk:
            self._rest += chunk
        self._is_at_end = chunk == b""
        return bool(chunk)

    async def _skip(self, count: int) -> None:
        """Skip the input that is in the topic. Raises CommandError if this is another input."""
        start = max(count - CHECKED_BYTES, 0)
        if not self._has_sought(start, count):
            await self._drop(start)
        size = count - start
        self._checked = (await self._read_exactly(size))[:size]
        self._rest = self._rest[size:]
        state = self._state
        if count and state.checked_bytes == count and state.checked != _digest(self._checked):
            raise CommandError(
                f"line {state.lines} of the input is not the line that is in the topic: "
                f"{self._file} belongs to another input"
            )

    def _has_sought(self, start: int, count: int) -> bool:
        """Go to `start` and return True; False in a pipe, which has no positions."""
        descriptor = self._source.descriptor
        with contextlib.suppress(OSError):
            if os.lseek(descriptor, 0, os.SEEK_CUR) == 0:
                if os.fstat(descriptor).st_size < count:
                    raise self._shorter()
                os.lseek(descriptor, start, os.SEEK_SET)
                return True
        return False

    async def _drop(self, count: int) -> None:
        """Read `count` bytes, and keep none of them. Raises CommandError."""
        while count:
            size = min(count, INPUT_READ_BYTES)
            await self._read_exactly(size)
            self._rest = self._rest[size:]
            count -= size

    async def _read_exactly(self, count: int) -> bytes:
        """Return the input that was read, `count` bytes or more. Raises CommandError."""
        while len(self._rest) < count:
            if not await self._more() and self._is_at_end:
                raise self._shorter()
        return self._rest

    def _shorter(self) -> CommandError:
        return CommandError(f"the input is shorter than {self._file} says: it is another one")

    async def _pending_batch(self, pending: _Pending) -> _Batch:
        """Cut the batch that an earlier run has begun to send. Raises CommandError."""
        size = pending.bytes - self._state.bytes
        octets = (await self._read_exactly(size))[:size]
        if _digest(octets) != pending.digest:
            raise CommandError(
                f"lines {self._state.lines + 1} to {pending.lines} of the input have changed since "
                f"the run that began to send them: {self._file} belongs to another input"
            )
        lines = octets.removesuffix(b"\n").split(b"\n")
        texts = [text for line in lines if (text := self._record(line)) is not None]
        self._rest = self._rest[size:]
        return _Batch(texts, octets, len(lines))

    async def _next_batch(self) -> tuple[_Batch, BadLine | None]:
        """Cut the next batch: a full one, or what has arrived.

        Also return the error of the line after it.
        """
        texts: list[bytes] = []
        size = used = lines = 0
        while len(texts) < self._options.batch_records and size < self._options.batch_bytes:
            end = self._rest.find(b"\n", used) + 1
            if not end:
                has_more = not self._is_at_end and await self._more()
                if has_more or (not lines and not self._is_at_end):
                    continue  # without a line, wait for one
                if not self._is_at_end or used == len(self._rest):
                    break
                end = len(self._rest)  # the last line has no line break
            line = self._rest[used:end].removesuffix(b"\n")
            try:
                text = self._record(line)
            except BadLine as error:
                batch = self._cut(texts, used, lines)
                return batch, BadLine(f"line {self._state.lines + lines + 1}: {error}")
            used = end
            lines += 1
            if text is not None:
                texts.append(text)
                size += len(text) + 1
        return self._cut(texts, used, lines), None

    def _cut(self, texts: list[bytes], used: int, lines: int) -> _Batch:
        octets, self._rest = self._rest[:used], self._rest[used:]
        return _Batch(texts, octets, lines)

    def _record(self, line: bytes) -> bytes | None:
        record = self._parser.record(line)
        if record is None:
            return None
        partition = record.partition if record.partition is not None else self._options.partition
        if partition is None:
            return b"{%b}" % record.members
        return b'{"partition":%d,%b}' % (partition, record.members)

    # -- the topic

    async def _send(self, batch: _Batch) -> None:
        """Send a batch. Write its end to the file before and after."""
        state = self._state
        first, lines = state.lines + 1, state.lines + batch.lines
        size = state.bytes + len(batch.octets)
        if batch.texts:
            is_new = state.pending is None
            if is_new:
                now_ms = self._clock.now_ms()
                state.pending = _Pending(lines, size, _digest(batch.octets), now_ms)
                self._save()
            options = self._options.of_producer(self._parser)
            key = f"{state.run}-{first}"
            try:
                placed = await send_batch(self._connection, state.topic, batch.texts, key, options)
            except ClientError as error:
                raise self._failed(error, lines, is_new=is_new) from None
            self._summary.add(placed, len(batch.octets))
        state.lines, state.bytes, state.pending = lines, size, None
        self._checked = (self._checked + batch.octets)[-CHECKED_BYTES:]
        state.checked, state.checked_bytes = _digest(self._checked), size
        self._save()

    def _failed(self, error: ClientError, lines: int, *, is_new: bool) -> CommandError:
        """Return the error of a batch that ends at `lines`.

        If nothing of it is written, forget it. Unless it `is_new`, an earlier run may have written
        it, whatever this run knows.
        """
        state = self._state
        if is_new and not error.is_unknown:
            state.pending = None
            self._save()
        elif isinstance(error, Refused) and error.status in CONTENT_REFUSED and state.pending:
            why = f"and its repetition was refused ({error.message})"
            return CommandError(self._advice(state, state.pending, why))
        line_count = plural(state.lines, "line")
        failed = command_error(error)
        failed.args = (
            f"lines {state.lines + 1} to {lines}: {failed} "
            f"({line_count} of the input are in the topic)",
        )
        return failed


def _digest(octets: bytes) -> str:
    return hashlib.blake2b(octets, digest_size=16).hexdigest()
