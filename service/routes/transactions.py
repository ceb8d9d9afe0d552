"""POST /v3/clusters/{c}/transactions: records and offsets of groups, all or nothing.

The records are for several topics. No other proxy has this route. One request is one commit (I4),
so a client can consume, transform and produce exactly once without a coordinator. Results and
committed offsets are in one commit. If the client does not know the outcome, it repeats the request
with its Idempotency-Key.

The route checks as much as it can before the log gets anything (I6). Between these checks and the
commit, a topic may be deleted, or a generation may become old. So `apply` checks again, and refuses
the whole request if a check fails.

**On a crash**: before the commit, nothing is written. After the commit, a retry gets the response
that the crash prevented.
"""

from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from tidelog.service.formats.transactions import (
    GroupOffsets,
    TransactionRecords,
    TransactionRequest,
    decode_transaction,
)
from tidelog.service.http.media_types import JSON
from tidelog.service.http.request import HttpRequest, HttpResponse
from tidelog.service.http.route import V3, Answer, Body, Content, Route, RouteAccess, RouteDoc
from tidelog.service.operations.records import RecordOperations
from tidelog.service.routes.dependencies import check_cluster
from tidelog.service.routes.produce import IDEMPOTENCY_KEY, LINGER, RETRY_ERRORS, Produce
from tidelog.service.routes.produce_requests import body_of, client_key, linger_of
from tidelog.service.security.caller import CallerRights, rights_of
from tidelog.service.settings.requests import RequestSettings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.broker import Broker
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.codec.partitioner import RecordPartitions
from tidelog.storage.core.actions import CommitOffsets, GroupOffset
from tidelog.storage.core.errors import (
    IdempotencyMismatch,
    InvalidRequest,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.model import AppendedRange
from tidelog.storage.runtime.request_context import PRINCIPAL
from tidelog.storage.state.access import PRODUCER_BYTE_RATE
from tidelog.storage.state.topic import Topic

DECODE_INLINE_BYTES = 64 * 1024
"""Bodies of at most this size are decoded on the event loop. A record takes ~4 us."""


class TransactionReport(msgspec.Struct):
    """The position of each record, in the request's order, and the committed offsets."""

    cluster_id: str
    topics: list[dict[str, Any]]
    consumer_groups: list[dict[str, Any]]


class _Plan(NamedTuple):
    """A request with its topics and its records' partitions."""

    parts: list[tuple[Topic, RecordPartitions]]
    offsets: list[CommitOffsets]
    key: IdempotencyKey | None


class Transactions:
    """The route of transactions. One per broker."""

    def __init__(
        self,
        broker: Broker,
        records: RecordOperations,
        settings: RequestSettings,
        produce: Produce,
        counters: HttpCounters,
    ) -> None:
        self._broker = broker
        self._settings = settings
        self._produce = produce
        self._counters = counters
        self._records = records

    async def transact(self, call: HttpRequest, cluster: str) -> HttpResponse:
        """Commit a transaction."""
        check_cluster(cluster, self._broker.identity.cluster_id)
        name, linger_s = client_key(call), linger_of(call)
        rights = rights_of(call.scope)
        body = await body_of(call, rights, self._settings.request_bytes_max)
        request = await self._decode(call, body)
        size = len(body)
        rights.record(PRODUCER_BYTE_RATE, max(request.weight - size, 0))
        if name is None:
            body = b""  # only a key needs its fingerprint
        await self._records.check_transaction(
            rights,
            [records.name for records in request.topics],
            [
                (group.consumer_group_id, [offset.topic_name for offset in group.offsets])
                for group in request.groups
            ],
        )
        try:
            return await self._commit(request, body, size, name, rights, linger_s)
        except (UnknownTopic, UnknownPartition, IdempotencyMismatch):
            # Nothing is written (I6), and the view may be old, so refresh it and try once more. A
            # topic may have been created again, or have got more partitions.
            await self._broker.refresh()
            return await self._commit(request, body, size, name, rights, linger_s)

    async def _commit(
        self,
        request: TransactionRequest,
        body: bytes,
        size: int,
        name: str | None,
        rights: CallerRights,
        linger_s: float | None,
    ) -> HttpResponse:
        plan = await self._plan(request, body, name, rights)
        placements = await self._broker.records.transact(
            [
                (topic, places, records.produced.rows)
                for (topic, places), records in zip(plan.parts, request.topics, strict=True)
            ],
            plan.offsets,
            size=max(size, request.weight),
            is_json=all(records.produced.is_json for records in request.topics),
            key=plan.key,
            linger_s=linger_s,
        )
        self._counters.add_records_in(request.records, size)
        all_places = self._places_of_first(plan, request)
        return HttpResponse(200, self._response(request, all_places, placements), JSON)

    async def _decode(self, call: HttpRequest, body: bytes) -> TransactionRequest:
        now_ms = self._broker.store_time.now_ms()
        if len(body) <= DECODE_INLINE_BYTES:
            return decode_transaction(body, now_ms)
        decode = partial(decode_transaction, body, now_ms)
        return await self._produce.decode_large(call, body, decode, attrgetter("weight"))

    async def _plan(
        self, request: TransactionRequest, body: bytes, name: str | None, rights: CallerRights
    ) -> _Plan:
        """Find the topics, check the records, and choose the records' partitions.

        With an idempotency key, the records' partitions depend only on the content and on each
        topic's number of partitions. These numbers are stored with the key, so a retry gets the
        same partitions on any broker.
        """
        topics = [await self._produce.topic(records.name, rights) for records in request.topics]
        offsets = [self._commit_of(group) for group in request.groups]
        key = None
        if name is not None:
            # Ids, because a request to a topic that was deleted and created again is another
            # request.
            ids = [topic.topic_id for topic in topics]
            ids += [offset.topic_id for commit in offsets for offset in commit.offsets]
            target = f"transactions/{'/'.join(ids)}"
            mark = await self._produce.fingerprint(rights, target, body)
            key = IdempotencyKey(name, mark, [len(topic.partitions) for topic in topics])
        parts = []
        for topic, records in zip(topics, request.topics, strict=True):
            try:
                await self._produce.check(records.produced, topic.config, key)
            except InvalidRequest as error:
                raise type(error)(f"topic {topic.name!r}: {error}") from error
            parts.append((topic, self._place(records, key, len(topic.partitions))))
        return _Plan(parts, offsets, key)

    def _commit_of(self, group: GroupOffsets) -> CommitOffsets:
        offsets = []
        for offset in group.offsets:
            topic, number = self._broker.state.topic(offset.topic_name), offset.partition_id
            if number >= len(topic.partitions):
                raise UnknownPartition(topic.name, number, len(topic.partitions))
            metadata = offset.metadata or ""
            offsets.append(GroupOffset(topic.topic_id, number, offset.offset, metadata=metadata))
        member = group.consumer_id or ""
        return CommitOffsets(group.consumer_group_id, group.generation, offsets, member)

    def _place(
        self, records: TransactionRecords, key: IdempotencyKey | None, count: int
    ) -> RecordPartitions:
        return self._produce.place_among(records.name, count, records.produced, None, key)

    def _places_of_first(self, plan: _Plan, request: TransactionRequest) -> list[RecordPartitions]:
        """Return the partitions that the first request with this key gave to the records.

        The appended ranges are those of the first request, too. Topics may have got more partitions
        since then.
        """
        placed = [places for _, places in plan.parts]
        if plan.key is None:
            return placed
        key_record = self._broker.state.idempotency_record(plan.key.key, PRINCIPAL.get())
        if key_record is None or key_record.claim.partitions == plan.key.partitions:
            return placed
        counts = key_record.claim.partitions
        assert isinstance(counts, list), "another route's fingerprint differs"
        return [
            self._place(records, plan.key, count)
            for records, count in zip(request.topics, counts, strict=True)
        ]

    def _response(
        self,
        request: TransactionRequest,
        all_places: list[RecordPartitions],
        placements: list[AppendedRange],
    ) -> bytes:
        """Return the body of the response.

        It depends only on the request and the commit, so a retry gets the same bytes.
        """
        following = {
            (placement.topic, placement.partition): placement.base_offset
            for placement in placements
        }
        topics: list[dict[str, Any]] = []
        for records, places in zip(request.topics, all_places, strict=True):
            reports = []
            for number in range(records.produced.count):
                partition = places if isinstance(places, int) else int(places[number])
                offset = following[records.name, partition]
                following[records.name, partition] += 1
                reports.append({"partition_id": partition, "offset": offset})
            topics.append({"topic_name": records.name, "records": reports})
        groups = [
            {"consumer_group_id": group.consumer_group_id, "offsets": group.offsets}
            for group in request.groups
        ]
        cluster_id = self._broker.identity.cluster_id
        return msgspec.json.encode(TransactionReport(cluster_id, topics, groups))


EXAMPLE = {
    "topics": [
        {
            "topic_name": "delays",
            "records": [
                {
                    "key": {"type": "STRING", "data": "N14228"},
                    "value": {"type": "JSON", "data": {"delay_minutes": 2}},
                }
            ],
        },
        {"topic_name": "audit", "records": [{"value": {"type": "STRING", "data": "0-41"}}]},
    ],
    "consumer_groups": [
        {
            "consumer_group_id": "enrich",
            "offsets": [{"topic_name": "flights", "partition_id": 0, "offset": 42}],
        }
    ],
}
_EXAMPLE_ANSWER = {
    "cluster_id": "c0ffee",
    "topics": [
        {"topic_name": "delays", "records": [{"partition_id": 2, "offset": 1017}]},
        {"topic_name": "audit", "records": [{"partition_id": 0, "offset": 9}]},
    ],
    "consumer_groups": [
        {
            "consumer_group_id": "enrich",
            "offsets": [{"topic_name": "flights", "partition_id": 0, "offset": 42, "metadata": ""}],
        }
    ],
}
_TEXT = """\
One commit has records for up to 100 topics and offsets of consumer groups. Readers see the whole
commit or nothing, also after a crash. Records have the fields of the v3 `records` route (types
`JSON`, `STRING` and `BINARY`), 10,000 records at most. A committed offset is the offset of the next
record to read. `acks` is always all.

**Consume, transform, produce, exactly once** takes two requests in a loop. It needs no transaction
coordinator, and each request may go to any broker:

```
next = 0                                                     # or, after a start:
GET  /v3/clusters/{c}/consumer-groups/enrich/offsets         # 404: nothing committed yet
loop:
  GET  /topics/flights/partitions/0/records?offset={next}&timeout=5000
                                                             # 200, Tidelog-Next-Offset: 42
  POST /v3/clusters/{c}/transactions                         # the results, and
       Idempotency-Key: "enrich-flights-0-{next}"            # {"topic_name": "flights",
                                                             #  "partition_id": 0, "offset": 42}
  next = 42
```

After a crash, the client continues at the committed offset. The results of a batch and its offset
are both committed, or neither is. After 503, 504 or a lost response, send the same body with the
same key: the response is that of the first request.

A consumer instance sends its instance id as `consumer_id`, and the `generation` of its read
(`Tidelog-Generation`). If the partition has another owner since that read, or the instance is
deleted, the response is 409/40903. Then delete the instance and create another, which continues at
the committed offset. Without both fields, the client commits without being a member of the group. A
group with subscribed members rejects this commit. In any other group, the client must itself ensure
that no other client commits offsets of its partitions.
"""

ROUTES = (
    Route(
        "POST",
        "/clusters/{cluster_id}/transactions",
        Transactions.transact,
        RouteAccess.CHECKED_BY_HANDLER,
        "transactions",
        V3,
        RouteDoc(
            {
                400: "an invalid Idempotency-Key or Linger, or an incomplete body",
                404: "404 another cluster, 40401 unknown topic, 40402 unknown partition",
                408: "40801: a record with a schema, but there is no schema registry",
                409: "40903: the group has another generation; nothing is written",
                413: "the body, or a record, is over its limit",
                422: "the body is not a transaction (the message says where), or the "
                "Idempotency-Key was used for another body",
                **RETRY_ERRORS,
            },
            tag="v3 consumer groups",
            summary="Produce to several topics and commit offsets, all or nothing",
            text=_TEXT,
            parameters=(IDEMPOTENCY_KEY, LINGER),
            body=Body(JSON, EXAMPLE),
            answers={
                200: Answer(
                    "The whole request is committed. The body has the position of each record, in "
                    "the request's order, and the committed offsets of each group.",
                    (Content((JSON,), (TransactionReport,), _EXAMPLE_ANSWER),),
                )
            },
        ),
        is_ack=True,
        body=None,
    ),
)
