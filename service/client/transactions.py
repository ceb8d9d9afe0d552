"""AsyncTransaction: records of several topics and offsets of groups in one commit.

One request is the whole transaction, so nothing is in the log before `commit`, and readers see all
of it or nothing. The request has an Idempotency-Key: `commit` repeats it for up to `delivery_s`, on
any broker. If the outcome stays unknown, a later `commit` of the same object repeats the same
request. A caller that continues after its own crash passes an `idempotency_key` that it can compute
again from its input, for example from the first offset that it has read.
"""

import os
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from tidelog.service.client.connection import Connection
from tidelog.service.client.errors import BadArgument, ClientError
from tidelog.service.client.records import Headers, ProduceFormat, headers_of_write, v3_record
from tidelog.storage.core.model import TopicPartition


class GroupConsumer(Protocol):
    """A consumer whose offsets a transaction commits."""

    def group_offsets(self) -> dict[str, Any] | None: ...
    def committed_elsewhere(self, offsets: Mapping[TopicPartition, int]) -> None: ...


class AsyncTransaction:
    """One transaction, from its first record to `commit`.

    `async with` commits it at the end; after an exception in the block, nothing is sent.
    """

    def __init__(
        self,
        connection: Connection,
        fmt: ProduceFormat = "binary",
        idempotency_key: str | None = None,
        delivery_s: float = 120.0,
        flush_ms: float | None = None,
    ) -> None:
        self._connection = connection
        self._format = fmt
        self._delivery_s = delivery_s
        self._flush_ms = flush_ms
        self._key = idempotency_key or os.urandom(16).hex()
        self._topics: dict[str, list[dict[str, Any]]] = {}
        self._groups: dict[str, dict[str, Any]] = {}
        self._members: list[tuple[GroupConsumer, dict[TopicPartition, int]]] = []
        self._body = b""

    async def __aenter__(self) -> "AsyncTransaction":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.commit()

    def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        *,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Add a record. Raises BadArgument."""
        self._check_open()
        record = v3_record(self._format, value, key, headers, partition, timestamp_ms)
        self._topics.setdefault(topic, []).append(record)

    def commit_offsets(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Commit the offsets at which `group` continues, by (topic, partition).

        The group has no members; a member uses `commit_positions`.
        """
        self._check_open()
        listed = self._groups.setdefault(group, {"consumer_group_id": group, "offsets": []})
        listed["offsets"] += [_offset(partition, offset) for partition, offset in offsets.items()]

    def commit_positions(self, consumer: GroupConsumer) -> None:
        """Commit the offsets of all records that `consumer` has delivered.

        It needs a group and auto_commit=False. If its partitions go to another member before the
        commit, the broker rejects the transaction (Refused, status 409), and the other member reads
        the records.
        """
        self._check_open()
        group_offsets = consumer.group_offsets()
        if group_offsets is None:
            return
        self._groups[group_offsets["consumer_group_id"]] = group_offsets
        self._members.append(
            (
                consumer,
                {
                    TopicPartition(
                        group_offset["topic_name"], group_offset["partition_id"]
                    ): group_offset["offset"]
                    for group_offset in group_offsets["offsets"]
                },
            )
        )

    async def commit(self) -> None:
        """Commit all records and offsets.

        An empty transaction sends nothing. Raises ClientError: then nothing is committed, unless
        the error `is_unknown`.
        """
        if not self._body:
            if not self._topics and not self._groups:
                return
            self._body = msgspec.json.encode(
                {
                    "topics": [
                        {"topic_name": topic, "records": records}
                        for topic, records in self._topics.items()
                    ],
                    "consumer_groups": list(self._groups.values()),
                }
            )
        try:
            cluster = await self._connection.cluster(retry_s=self._delivery_s)
        except ClientError as error:
            error.is_unknown = False  # the transaction was not sent
            raise
        answer = await self._connection.call(
            "POST",
            f"{cluster}/transactions",
            headers=headers_of_write("application/json", self._key, self._flush_ms),
            content=self._body,
            retry_s=self._delivery_s,
        )
        report = self._connection.json_of(answer)
        if not isinstance(report, dict) or "consumer_groups" not in report:
            raise self._connection.is_no_broker()
        for consumer, offsets in self._members:
            consumer.committed_elsewhere(offsets)

    def _check_open(self) -> None:
        if self._body:
            raise BadArgument("the transaction is committed already: begin another one")


def _offset(partition: tuple[str, int], offset: int) -> dict[str, Any]:
    return {"topic_name": partition[0], "partition_id": partition[1], "offset": offset}
