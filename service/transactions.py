"""POST /v3/clusters/{c}/transactions: records for several topics and offsets of groups, as one.

Ours: no other proxy has it. One request is one commit (I4), so consume, transform and produce is
exactly once without a coordinator: the results and how far the group has read are committed
together, and a client that does not know the outcome sends the same again with its Idempotency-Key.

Everything that can be checked here is, before anything is handed to the log (I6): what may change
until the commit (a topic deleted, a generation that is over) is checked again by `apply`, and
refuses the whole. Dying between commit and answer leaves the commit, and a retry gets its answer.
"""

import asyncio
from typing import Any, NamedTuple

import msgspec

from service.caller import Rights, rights_of
from service.http import JSON, Answer, Call
from service.produce import Produce, check_records, client_key, fingerprint
from service.produce_v3 import check_cluster
from service.settings import Settings
from service.telemetry import HttpCounters
from service.wire_transactions import GroupOffsets, TopicRecords, Transaction, decode_transaction
from storage.access import PRODUCER_BYTE_RATE
from storage.acls import GROUP, READ, TOPIC, WRITE
from storage.entry import CommitOffsets, GroupOffset, IdempotencyKey
from storage.errors import IdempotencyMismatch, InvalidRequest, UnknownPartition, UnknownTopic
from storage.log import Log
from storage.model import Placement
from storage.partitioner import Places
from storage.state import Topic

DECODE_INLINE_BYTES = 64 * 1024
"""Smaller bodies are decoded on the loop; a record takes ~4 us."""


class _Plan(NamedTuple):
    """A request with its topics found and its records placed."""

    parts: list[tuple[Topic, Places]]
    offsets: list[CommitOffsets]
    key: IdempotencyKey | None


class Transactions:
    """The route. One per broker."""

    def __init__(
        self, broker: Log, settings: Settings, produce: Produce, counters: HttpCounters
    ) -> None:
        self._log = broker
        self._settings = settings
        self._produce = produce
        self._counters = counters

    async def serve(self, call: Call, cluster: str) -> Answer:
        """Commit it; where each record lies and which offsets are committed."""
        check_cluster(self._log, cluster)
        name = client_key(call)
        rights = rights_of(call.scope)
        rights.pay(PRODUCER_BYTE_RATE)
        body = await call.body(self._settings.request_bytes_max)
        asked = await self._decode(body)
        await _check_rights(rights, asked)
        rights.pay(PRODUCER_BYTE_RATE, len(body))
        try:
            return await self._commit(asked, body, name, rights)
        except (UnknownTopic, UnknownPartition, IdempotencyMismatch):
            # A definite no (I6). Our view may be old, of a topic that was made anew or has grown.
            await self._log.wal.refresh()
            return await self._commit(asked, body, name, rights)

    async def _commit(
        self, asked: Transaction, body: bytes, name: str | None, rights: Rights
    ) -> Answer:
        plan = await self._plan(asked, body, name, rights)
        placements = await self._log.exactly_once.transact(
            [
                (topic, places, records.produced.rows)
                for (topic, places), records in zip(plan.parts, asked.topics, strict=True)
            ],
            plan.offsets,
            size=len(body),
            is_json=all(records.produced.is_json for records in asked.topics),
            key=plan.key,
        )
        self._counters.add_records_in(asked.records, len(body))
        all_places = self._places_of_first(plan, asked)
        return Answer(200, self._said(asked, all_places, placements), JSON)

    async def _decode(self, body: bytes) -> Transaction:
        now_ms = self._log.clock.now_ms()
        if len(body) <= DECODE_INLINE_BYTES:
            return decode_transaction(body, now_ms)
        return await asyncio.to_thread(decode_transaction, body, now_ms)

    async def _plan(
        self, asked: Transaction, body: bytes, name: str | None, rights: Rights
    ) -> _Plan:
        """Find the topics, check what is said of them, and place the records.

        A keyed request is placed by nothing but its content and the numbers of partitions, which
        are remembered with its key: a retry gets the same places, on any broker.
        """
        topics = [await self._produce.topic(records.name, rights) for records in asked.topics]
        offsets = [self._commit_of(group) for group in asked.groups]
        key = None
        if name is not None:
            # By ids: a topic that was made anew under its name makes another request of it.
            ids = [topic.topic_id for topic in topics]
            ids += [each.topic_id for commit in offsets for each in commit.offsets]
            mark = fingerprint(f"transactions/{'/'.join(ids)}", body)
            key = IdempotencyKey(name, mark, [len(topic.partitions) for topic in topics])
        parts = []
        for topic, records in zip(topics, asked.topics, strict=True):
            try:
                check_records(records.produced.rows, self._log.state.config(topic))
            except InvalidRequest as error:
                raise type(error)(f"topic {topic.name!r}: {error}") from error
            parts.append((topic, self._place(records, key, len(topic.partitions))))
        return _Plan(parts, offsets, key)

    def _commit_of(self, group: GroupOffsets) -> CommitOffsets:
        offsets = []
        for topic_name, number, offset, metadata in group.offsets:
            topic = self._log.state.topic(topic_name)
            if number >= len(topic.partitions):
                raise UnknownPartition(topic_name, number, len(topic.partitions))
            offsets.append(GroupOffset(topic.topic_id, number, offset, metadata=metadata))
        return CommitOffsets(group.group_id, group.generation, offsets, group.consumer_id)

    def _place(self, records: TopicRecords, key: IdempotencyKey | None, count: int) -> Places:
        return self._produce.place_among(records.name, count, records.produced, None, key)

    def _places_of_first(self, plan: _Plan, asked: Transaction) -> list[Places]:
        """Where the records went when the request was first made: the topics may have grown since
        then, and the placements are of that time."""
        placed = [places for _, places in plan.parts]
        known = None if plan.key is None else self._log.state.remembered(plan.key.key)
        if plan.key is None or known is None or known.claim.partitions == plan.key.partitions:
            return placed
        counts = known.claim.partitions
        assert isinstance(counts, list), "its fingerprint is of another route"
        return [
            self._place(records, plan.key, count)
            for records, count in zip(asked.topics, counts, strict=True)
        ]

    def _said(
        self, asked: Transaction, all_places: list[Places], placements: list[Placement]
    ) -> bytes:
        """The answer: all of it follows from the request and the commit, so that a retry is
        answered the same to the byte."""
        following = {(each.topic, each.partition): each.base_offset for each in placements}
        topics: list[dict[str, Any]] = []
        for records, places in zip(asked.topics, all_places, strict=True):
            reports = []
            for number in range(records.produced.count):
                partition = places if isinstance(places, int) else int(places[number])
                offset = following[records.name, partition]
                following[records.name, partition] += 1
                reports.append({"partition_id": partition, "offset": offset})
            topics.append({"topic_name": records.name, "records": reports})
        groups = [
            {
                "consumer_group_id": group.group_id,
                "offsets": [
                    {
                        "topic_name": each.topic,
                        "partition_id": each.partition,
                        "offset": each.offset,
                        "metadata": each.metadata,
                    }
                    for each in group.offsets
                ],
            }
            for group in asked.groups
        ]
        return msgspec.json.encode(
            {
                "cluster_id": self._log.wal.cluster.cluster_id,
                "topics": topics,
                "consumer_groups": groups,
            }
        )


async def _check_rights(rights: Rights, asked: Transaction) -> None:
    """As Kafka asks of a transaction's parts. Raises Forbidden."""
    for records in asked.topics:
        await rights.check(WRITE, TOPIC, records.name)
    for group in asked.groups:
        await rights.check(READ, GROUP, group.group_id)
        for name in {each.topic for each in group.offsets}:
            await rights.check(READ, TOPIC, name)
