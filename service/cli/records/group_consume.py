"""`tidelog consume --group`: print the records of a topic as a member of a consumer group.

The command commits exactly the printed records. The group reads again the records that the command
fetched and did not print. At the end the command deletes its instance, so that other members
continue at once. If the reader of the pipe blocks for longer than the session timeout, the instance
expires before the commit. Then the command creates another instance, and the group reads the last
printed records again.
"""

import asyncio
import math

import msgspec
from msgspec import Raw

from tidelog.service.cli.client import Client
from tidelog.service.cli.records.consume import (
    ConsumeOptions,
    Line,
    Skipped,
    line_printer,
    read_records,
)
from tidelog.service.cli.requests import quoted
from tidelog.service.cli.results import CommandError, NotThere, write_out

WAIT_MS = 2000
"""Timeout of a read without --follow; an empty response means the end of this member's
partitions."""
FOLLOW_MS = 20_000


class _RecordPartition(msgspec.Struct):
    partition: int


_split = msgspec.json.Decoder(list[Raw]).decode
_decode_partition = msgspec.json.Decoder(_RecordPartition).decode
_decode = msgspec.json.Decoder(Line).decode


async def consume_as_member(
    client: Client, topic: str, group: str, options: ConsumeOptions
) -> None:
    """Print the records of this member's partitions. Raises CommandError."""
    async with client:
        # A subscription to a missing topic would wait for the topic, so fail here.
        _ = await client.partitions(topic)
        client.retry_s = math.inf if options.follow else options.retry_s
        printed = 0
        is_over = False
        skipped = Skipped()
        while not is_over:
            member = _Member(client, topic, group, options, skipped)
            await member.join()
            try:
                printed = await member.run(printed)
                is_over = True
            except NotThere:
                pass  # the instance expired; the next one continues at the committed offsets
            finally:
                await asyncio.shield(member.leave())
        skipped.show()


class _Member:
    """One consumer instance, from `join` to `leave`."""

    def __init__(
        self, client: Client, topic: str, group: str, options: ConsumeOptions, skipped: Skipped
    ) -> None:
        self._skipped = skipped
        self._client = client
        self._topic = topic
        self._group = f"/consumers/{quoted(group)}"
        self._options = options
        self._path = ""
        self._text = line_printer(options)

    async def join(self) -> None:
        body = {
            "format": self._options.embedded,
            "auto.offset.reset": "latest" if self._options.start == "end" else "earliest",
            "auto.commit.enable": False,
            "client.id": "tidelog",
            "on.error": self._options.on_error,
        }
        answer = await self._client.post(self._group, json=body)
        self._path = f"{self._group}/instances/{quoted(answer.json()['instance_id'])}"
        await self._client.post(f"{self._path}/subscription", json={"topics": [self._topic]})

    async def leave(self) -> None:
        try:
            self._client.retry_s = 0.0
            await self._client.call("DELETE", self._path)
        except CommandError:
            pass  # the instance expires

    async def run(self, printed: int) -> int:
        """Print records until `count_max` or the end. Return the number of all printed records,
        which includes the `printed` records of earlier instances."""
        count_max = self._options.count_max
        while count_max is None or printed < count_max:
            records, skipped = await self._read()
            if not records and not skipped and not self._options.follow:
                break
            if count_max is not None:
                records = records[: count_max - printed]
            if records:
                self._print(records)
                printed += len(records)
                await self._commit(records)
        return printed

    async def _read(self) -> tuple[list[Raw], int]:
        """Return the next records, and the number of skipped records."""
        wait_ms = FOLLOW_MS if self._options.follow else WAIT_MS
        params = {"timeout": wait_ms, "max_bytes": self._options.fetch_bytes}
        path = f"{self._path}/records"
        answer = await read_records(self._client, path, self._options, params=params)
        return _split(answer.content), self._skipped.add(answer)

    def _print(self, records: list[Raw]) -> None:
        lines = [_on_one_line(bytes(record)) for record in records]
        if not self._options.is_ndjson:
            lines = [self._text(_decode(line)) for line in lines]
        write_out(b"".join(line + b"\n" for line in lines))

    async def _commit(self, records: list[Raw]) -> None:
        ends = {
            _decode_partition(record).partition: _decode(record).offset + 1 for record in records
        }
        partitions = [
            {"topic": self._topic, "partition": number, "offset": offset}
            for number, offset in ends.items()
        ]
        await self._client.post(f"{self._path}/offsets", json={"partitions": partitions})


def _on_one_line(record: bytes) -> bytes:
    """Remove line breaks that a producer may have sent between the tokens of a record's JSON."""
    return msgspec.json.format(record, indent=-1) if b"\n" in record or b"\r" in record else record
