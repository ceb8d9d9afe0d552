"""Confluent's v3 produce: a stream of concatenated JSON records, and batches with an answer each.

Each record is a request of its own, committed with whatever else is under way; reports come in the
order of the records. An `Idempotency-Key` on the stream stands for all its records: record number n
is known as `<key>/<n>`, an entry of a batch as `<key>/<id>`.
"""

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import msgspec

from service import wire_in, wire_v3
from service.caller import Rights, rights_of
from service.errors import TopicNotHosted, error_response
from service.http import JSON, Answer, Call
from service.produce import Produce, client_key, fingerprint
from service.settings import Settings
from service.telemetry import HttpCounters
from storage.access import PRODUCER_BYTE_RATE
from storage.acls import TOPIC, WRITE
from storage.entry import IdempotencyKey
from storage.errors import InvalidRequest, LogError, UnknownPartition, UnknownTopic
from storage.log import Log
from storage.partitioner import Places
from storage.state import Topic
from storage.writer import Acks

Report: TypeAlias = dict[str, Any]

IN_FLIGHT_MAX = 1000
"""Records of one stream that wait for their commit; then the client waits (I10)."""


class UnknownCluster(InvalidRequest):
    """The path names a cluster that is not this one."""

    status = 404
    code = 404


class ProduceV3:
    """The v3 produce routes. One per broker."""

    def __init__(
        self, broker: Log, settings: Settings, produce: Produce, counters: HttpCounters
    ) -> None:
        self._log = broker
        self._settings = settings
        self._produce = produce
        self._counters = counters

    async def stream(self, call: Call, cluster: str, topic_name: str) -> None:
        """POST .../records: reports are sent while records still come."""
        rights = rights_of(call.scope)
        rights.pay(PRODUCER_BYTE_RATE)
        await self._topic(cluster, topic_name, rights)
        key = client_key(call)
        reports: asyncio.Queue[asyncio.Task[Report] | None] = asyncio.Queue(IN_FLIGHT_MAX)
        sender = asyncio.create_task(_send_reports(call, reports))
        number = 0
        try:
            try:
                async for record in _records(call):
                    name = None if key is None else f"{key}/{number}"
                    report = asyncio.create_task(self._report(topic_name, record, name, rights))
                    # A stream whose client is gone has a sender that is done: stop reading.
                    await _put(reports, report, sender)
                    number += 1
            except InvalidRequest as error:
                if not number:
                    raise
                # Nothing after this can be told apart: the last report says so.
                await _put(reports, asyncio.create_task(_refused(error)), sender)
            if not number:
                raise wire_in.InvalidBody("the body is empty")
            await _put(reports, None, sender)
            await sender
        finally:
            sender.cancel()

    async def batch(self, call: Call, cluster: str, topic_name: str) -> Answer:
        """POST .../records:batch: 207 with successes and failures by id."""
        rights = rights_of(call.scope)
        rights.pay(PRODUCER_BYTE_RATE)
        await self._topic(cluster, topic_name, rights)
        key = client_key(call)
        body = await call.body(self._settings.request_bytes_max)
        entries = wire_v3.decode_v3_batch(body)
        reports = await asyncio.gather(
            *(
                self._report(
                    topic_name, record, None if key is None else f"{key}/{entry_id}", rights
                )
                for entry_id, record in entries
            )
        )
        successes: list[Report] = []
        failures: list[Report] = []
        for (entry_id, _), report in zip(entries, reports, strict=True):
            is_done = report["error_code"] == 200
            (successes if is_done else failures).append({"id": entry_id, **report})
        said = msgspec.json.encode({"successes": successes, "failures": failures})
        return Answer(207, said, JSON)

    async def _topic(self, cluster: str, name: str, rights: Rights) -> Topic:
        check_cluster(self._log, cluster)
        try:
            return await self._produce.topic(name, rights)
        except UnknownTopic as error:
            raise TopicNotHosted(name) from error

    async def _report(
        self, topic_name: str, record: bytes, name: str | None, rights: Rights
    ) -> Report:
        """Append one record; what to say of it, whatever happens."""
        try:
            # Each by itself: a stream may last longer than a key, and than a quota.
            await rights.check(WRITE, TOPIC, topic_name)
            return await self._append(topic_name, record, name, rights)
        except UnknownTopic:
            return await _refused(TopicNotHosted(topic_name))
        except LogError as error:
            return await _refused(error)

    async def _append(
        self, topic_name: str, record: bytes, name: str | None, rights: Rights
    ) -> Report:
        decoded = wire_v3.decode_v3_record(record, self._log.clock.now_ms())
        said: list[int | None] | None = None if decoded.partition is None else [decoded.partition]
        produced = wire_in.Produced(decoded.rows, said, decoded.is_json, 1)
        # Looked up for each record: in the day that a stream may last the topic may go, and grow.
        topic = await self._produce.topic(topic_name, rights)
        try:
            key, places = self._placed(topic, produced, record, name)
        except UnknownPartition:
            topic = await self._produce.newest(topic)
            key, places = self._placed(topic, produced, record, name)
        rights.pay(PRODUCER_BYTE_RATE, len(record))
        placements = await self._produce.append(topic, produced, places, Acks.ALL, key, len(record))
        self._counters.add_records_in(1, len(record), topic.name)
        assert placements is not None, "acks=all gives placements"
        (placement,) = placements
        return {
            "error_code": 200,
            "cluster_id": self._log.wal.cluster.cluster_id,
            "topic_name": topic.name,
            "partition_id": placement.partition,
            "offset": placement.base_offset,
            "timestamp": _instant(decoded.rows.timestamps[0]),
            "key": _shown(decoded.key),
            "value": _shown(decoded.value),
        }

    def _placed(
        self, topic: Topic, produced: wire_in.Produced, record: bytes, name: str | None
    ) -> tuple[IdempotencyKey | None, Places]:
        key = None
        if name is not None:
            mark = fingerprint(f"{topic.topic_id}/v3", record)
            key = IdempotencyKey(name, mark, len(topic.partitions))
        return key, self._produce.place(topic, produced, None, key)


def check_cluster(broker: Log, cluster: str) -> None:
    """Raises UnknownCluster unless this is the one that lives here."""
    if cluster != broker.wal.cluster.cluster_id:
        raise UnknownCluster(f"Cluster {cluster} cannot be found.")


async def _records(call: Call) -> AsyncIterator[bytes]:
    """Each JSON object of the body as soon as it is whole; what is none, in its place."""
    stream = wire_v3.ObjectStream()
    more = True
    while more:
        message = await call.receive()
        if message["type"] == "http.disconnect":
            return
        more = message.get("more_body", False)
        for record in stream.feed(message.get("body", b"")):
            yield record
        stream.feed(b"")  # what was wrong behind those is said now, not with the next piece
    stream.finish()


async def _refused(error: LogError) -> Report:
    answer = error_response(error)
    return {"error_code": answer.code, "message": answer.message}


async def _put(
    reports: "asyncio.Queue[asyncio.Task[Report] | None]",
    report: "asyncio.Task[Report] | None",
    sender: "asyncio.Task[None]",
) -> None:
    putting = asyncio.ensure_future(reports.put(report))
    await asyncio.wait({putting, sender}, return_when=asyncio.FIRST_COMPLETED)
    if not putting.done():
        putting.cancel()
        sender.result()


async def _send_reports(call: Call, reports: "asyncio.Queue[asyncio.Task[Report] | None]") -> None:
    is_started = False
    while (task := await reports.get()) is not None:
        body = msgspec.json.encode(await task)
        if not is_started:
            await call.start_stream(JSON)
            is_started = True
        await call.chunk(body + b"\r\n")
    await call.end()


def _shown(shown: wire_v3.Shown | None) -> dict[str, Any] | None:
    return None if shown is None else shown._asdict()


def _instant(timestamp_ms: int) -> str:
    instant = dt.datetime.fromtimestamp(timestamp_ms / 1000, dt.UTC)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")
