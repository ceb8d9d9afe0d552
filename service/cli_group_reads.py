"""`tidelog consume --group`: records of a topic as a member of a consumer group.

What was printed is committed, and nothing else: a line that a pipe took is not printed again to the
group, one that was read and not printed is. The instance is removed at the end, so that others read
on at once; one that expired meanwhile (a pipe that nobody drained) is made anew.
"""

import asyncio
import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec import Raw

from service.cli_client import Client, Refused, quoted
from service.cli_consume import UNDECODABLE, Line, line_printer
from service.cli_results import CommandError, NotThere, write_out

WAIT_MS = 2000
"""How long a read without --follow waits before the topic counts as read to its end."""
FOLLOW_MS = 20_000


class GroupOptions(NamedTuple):
    """What the command line says."""

    group: str
    is_latest: bool
    count_max: int | None
    follow: bool
    embedded: str
    is_ndjson: bool
    key_separator: str | None
    fetch_bytes: int
    retry_s: float


class _Where(msgspec.Struct):
    partition: int


_split = msgspec.json.Decoder(list[Raw]).decode
_place = msgspec.json.Decoder(_Where).decode
_decode = msgspec.json.Decoder(Line).decode


async def consume_as_member(server: str | None, topic: str, options: GroupOptions) -> None:
    """Print what comes to this member. Raises CommandError."""
    async with Client(server) as client:
        _ = await client.partitions(topic)  # a topic that does not exist would be waited for
        client.retry_s = math.inf if options.follow else options.retry_s
        printed = 0
        is_over = False
        while not is_over:
            member = _Member(client, topic, options)
            await member.join()
            try:
                printed = await member.run(printed)
                is_over = True
            except NotThere:
                pass  # it expired: what it had printed is committed
            finally:
                await asyncio.shield(member.leave())


class _Member:
    """One instance."""

    def __init__(self, client: Client, topic: str, options: GroupOptions) -> None:
        self._client = client
        self._topic = topic
        self._options = options
        self._path = ""
        self._text: Callable[[Line], bytes] = line_printer(options.embedded, options.key_separator)

    async def join(self) -> None:
        said = {
            "format": self._options.embedded,
            "auto.offset.reset": "latest" if self._options.is_latest else "earliest",
            "auto.commit.enable": False,
            "client.id": "tidelog",
        }
        group = f"/consumers/{quoted(self._options.group)}"
        answer = await self._client.post(group, json=said)
        self._path = f"{group}/instances/{quoted(answer.json()['instance_id'])}"
        await self._client.post(f"{self._path}/subscription", json={"topics": [self._topic]})

    async def leave(self) -> None:
        try:
            self._client.retry_s = 0.0
            await self._client.call("DELETE", self._path)
        except CommandError:
            pass  # it expires

    async def run(self, printed: int) -> int:
        """Until there is enough, or no more; how many are printed then."""
        count_max = self._options.count_max
        while count_max is None or printed < count_max:
            records = await self._read()
            if not records and not self._options.follow:
                break
            if count_max is not None:
                records = records[: count_max - printed]
            if records:
                self._print(records)
                printed += len(records)
                await self._commit(records)
        return printed

    async def _read(self) -> list[Raw]:
        wait_ms = FOLLOW_MS if self._options.follow else WAIT_MS
        try:
            answer = await self._client.get(
                f"{self._path}/records",
                params={"timeout": wait_ms, "max_bytes": self._options.fetch_bytes},
            )
        except Refused as refused:
            if refused.http_status != UNDECODABLE:
                raise
            other = "binary" if self._options.embedded == "text" else "text or binary"
            raise CommandError(f"{refused} (try --format {other})") from None
        return _split(answer.content)

    def _print(self, records: list[Raw]) -> None:
        lines = [_on_one_line(bytes(record)) for record in records]
        if not self._options.is_ndjson:
            lines = [self._text(_decode(line)) for line in lines]
        write_out(b"".join(line + b"\n" for line in lines))

    async def _commit(self, records: list[Raw]) -> None:
        ends = {_place(record).partition: _decode(record).offset + 1 for record in records}
        said = [
            {"topic": self._topic, "partition": number, "offset": offset}
            for number, offset in ends.items()
        ]
        await self._client.post(f"{self._path}/offsets", json={"partitions": said})


def _on_one_line(record: bytes) -> bytes:
    """A record's JSON as it was produced may have line breaks between its parts."""
    return msgspec.json.format(record, indent=-1) if b"\n" in record or b"\r" in record else record
