"""OffsetCommit, OffsetFetch and OffsetDelete."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from tidelog.service.kafka.admin.calls import ChangeRefused, GroupCall
from tidelog.service.kafka.answer_forms import EncodedAnswer
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.errors import Code, RequestKind
from tidelog.service.kafka.messages import consumer_protocol
from tidelog.service.kafka.messages import group_offsets as messages
from tidelog.service.kafka.messages.primitives import ZERO_UUID, MalformedMessage
from tidelog.service.kafka.wide_answers import answered
from tidelog.service.operations.groups import UnknownGroup
from tidelog.service.operations.rights import (
    DESCRIBE_GROUP,
    DESCRIBE_TOPIC,
    FETCH,
    JOIN_GROUP,
)
from tidelog.service.slices import Slices, sliced
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import GroupOffset
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.groups.kafka_requests import GroupPhase, Identity
from tidelog.storage.state.committed_offsets import CommittedOffset, check_offset
from tidelog.storage.state.topic import Topic

BY_ID = 10
"""The first version of OffsetCommit and OffsetFetch that names topics by id."""
RESETS = (-1, -2)
"""The latest and the earliest offset. kafkajs commits one of the two to reset a partition of a
group. Then the group has no offset in that partition, and the settings of its next member decide
where the member begins."""
GROUPS_FROM = 8
"""The first version of OffsetFetch with several groups."""
NO_OFFSET = -1
CONSUMER = "consumer"
AUDITED_S = 60.0
"""An admin client that sets the offsets of a group is no member of it. A consumer that chooses its
partitions itself is no member, either, and commits every few seconds. A broker cannot distinguish
their requests. So the commits of one principal and address to one group have one audit line in this
time, and commits to more than AUDITED_GROUPS groups are only counted."""
AUDITED_GROUPS = 10
AUDITED_MAX = 1_000
"""Principals, by address, whose last audit lines are remembered (I10)."""
LEFT_OUT_S = 10.0
"""Time from the first commit without a line to the line that counts such commits."""


class _Asked(NamedTuple):
    """One topic of OffsetFetch."""

    name: str
    topic_id: bytes
    partitions: list[int]

    @classmethod
    async def of(
        cls, topics: Iterable[messages.OffsetFetchRequestTopics | messages.OffsetFetchRequestTopic]
    ) -> list["_Asked"]:
        """Return each partition once.

        A request may name it thousands of times, and the answer has up to METADATA_BYTES_MAX bytes
        for each.
        """
        numbers_by_topic: dict[tuple[str, bytes], dict[int, None]] = {}
        async for topic in sliced(topics):
            key = topic.name, getattr(topic, "topic_id", ZERO_UUID)
            numbers_by_topic.setdefault(key, {}).update(dict.fromkeys(topic.partition_indexes))
        return [cls(*key, list(numbers)) for key, numbers in numbers_by_topic.items()]


_DeletedTopic: TypeAlias = messages.OffsetDeleteResponseTopic
_Topic: TypeAlias = messages.OffsetFetchResponseTopics | messages.OffsetFetchResponseTopic
"""The answers for one topic of OffsetFetch, from version GROUPS_FROM on and up to it."""


@dataclass(slots=True)
class _Audited:
    """The groups that have an audit line of one principal and address since `began_s`.

    `left_out` is the number of commits to other groups that no line has counted yet.
    """

    began_s: float
    groups: set[str] = field(default_factory=set)
    left_out: int = 0


class KafkaGroupOffsets:
    """The APIs of committed offsets. One per listener."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._broker = context.broker
        self._groups = context.broker.groups.kafka
        self._audited: dict[tuple[str, str], _Audited] = {}
        """The audit lines about clients that are no members, by principal and address, the oldest
        first."""

    def apis(self) -> Iterable[Api]:
        """Return the rows of these APIs."""
        return (
            Api(messages.OffsetCommitRequest, messages.OffsetCommitResponse, self.commit),
            Api(
                messages.OffsetFetchRequest,
                messages.OffsetFetchResponse,
                self.fetch,
                is_waiting=True,
            ),
            Api(messages.OffsetDeleteRequest, messages.OffsetDeleteResponse, self.delete),
        )

    # -- OffsetCommit

    async def commit(
        self, request: messages.OffsetCommitRequest, client: ApiClient
    ) -> messages.OffsetCommitResponse:
        """Answer OffsetCommit.

        One commit has all valid offsets, and deletes the offsets of partitions that are reset. If a
        partition is named more than once, its last offset counts. A commit that resets partitions
        is a mutation: if the quota is used up, it does nothing, and clients repeat it.
        """
        api, context = "OffsetCommit", self._context
        refusal = await context.group_refusal(api, client, JOIN_GROUP, request.group_id)
        codes: dict[tuple[int, int], Code] = {}
        valid: dict[TopicIdPartition, GroupOffset | None] = {}
        slices = Slices()
        for topic_index, asked_topic in enumerate([] if refusal else request.topics):
            await slices.pause()
            topic = self._topic(asked_topic.name, asked_topic.topic_id, client)
            why = await context.topic_refusal(api, client, FETCH, topic, asked_topic.name)
            for number, partition in enumerate(asked_topic.partitions):
                await slices.pause()
                code = why or self._add(valid, topic, partition)
                if code:
                    codes[topic_index, number] = code
        throttle_ms = 0
        if not refusal and (valid or not codes):
            refusal, throttle_ms = await self._commit(request, client, valid)
        return messages.OffsetCommitResponse(
            throttle_time_ms=throttle_ms,
            topics=[
                messages.OffsetCommitResponseTopic(
                    name=asked_topic.name,
                    topic_id=asked_topic.topic_id,
                    partitions=[
                        messages.OffsetCommitResponsePartition(
                            partition_index=partition.partition_index,
                            error_code=codes.get((topic_index, number), refusal),
                        )
                        async for number, partition in sliced(enumerate(asked_topic.partitions))
                    ],
                )
                async for topic_index, asked_topic in sliced(enumerate(request.topics))
            ],
        )

    async def _commit(
        self,
        request: messages.OffsetCommitRequest,
        client: ApiClient,
        valid: Mapping[TopicIdPartition, GroupOffset | None],
    ) -> tuple[Code, int]:
        """Return the code of the commit, and how long the client waits, in ms."""
        offsets = [offset for offset in valid.values() if offset is not None]
        gone_partitions = [partition for partition, offset in valid.items() if offset is None]
        if gone_partitions:
            call = GroupCall(self._context, "OffsetCommit", client)
            if code := call.quota_refusal():
                return code, call.throttle_ms
        identity = Identity(request.member_id, request.group_instance_id or "")
        generation = request.generation_id_or_member_epoch
        try:
            code = Code(
                await self._groups.commit_offsets(
                    request.group_id, identity, generation, offsets, gone_partitions
                )
            )
        except LogError as error:
            code = self._context.code("OffsetCommit", error, RequestKind.GROUP)
        else:
            if code:
                self._context.refusal("OffsetCommit", code)
        if valid and not request.member_id and code in (Code.NONE, Code.REQUEST_TIMED_OUT):
            self._audit_commit(request.group_id, client, code)
        return code, 0

    def _audit_commit(self, group_id: str, client: ApiClient, code: Code) -> None:
        """Write an audit line about the commit of a client that is no member, or count it."""
        by, now_s = (client.rights.principal, client.host), self._broker.clock.boot_s()
        audited = self._audited.get(by)
        if audited is None or now_s >= audited.began_s + AUDITED_S:
            self._audited.pop(by, None)
            if len(self._audited) >= AUDITED_MAX:
                del self._audited[next(iter(self._audited))]
            audited = self._audited[by] = _Audited(now_s)
        if group_id in audited.groups:
            return
        if len(audited.groups) < AUDITED_GROUPS:
            audited.groups.add(group_id)
            self._context.audit_change("OffsetCommit", client, group_id, code)
            return
        if not audited.left_out:
            loop = asyncio.get_running_loop()
            loop.call_later(LEFT_OUT_S, self._audit_left_out, audited, client)
        audited.left_out += 1

    def _audit_left_out(self, audited: _Audited, client: ApiClient) -> None:
        count, audited.left_out = audited.left_out, 0
        self._context.audit_change("OffsetCommit", client, f"{count} times to other groups")

    def _add(
        self,
        valid: dict[TopicIdPartition, GroupOffset | None],
        topic: Topic | None,
        partition: messages.OffsetCommitRequestPartition,
    ) -> Code:
        """Add the offset to `valid`, or None if it is one of `RESETS`.

        If the offset cannot be committed, return the code.
        """
        if topic is None or not 0 <= partition.partition_index < len(topic.partitions):
            return self._context.refusal("OffsetCommit", Code.UNKNOWN_TOPIC_OR_PARTITION)
        place = TopicIdPartition(topic.topic_id, partition.partition_index)
        if partition.committed_offset in RESETS:
            valid[place] = None
            return Code.NONE
        offset = GroupOffset(
            topic.topic_id,
            partition.partition_index,
            partition.committed_offset,
            max(partition.committed_leader_epoch, -1),
            partition.committed_metadata or "",
        )
        refusal = check_offset(offset)
        if refusal is not None:
            return self._context.code("OffsetCommit", refusal, RequestKind.GROUP)
        valid[place] = offset
        return Code.NONE

    # -- OffsetFetch

    async def fetch(
        self, request: messages.OffsetFetchRequest, client: ApiClient
    ) -> messages.OffsetFetchResponse | EncodedAnswer:
        """Answer OffsetFetch, from a view that has all offsets committed before the request."""
        code = Code.NONE
        try:
            await self._broker.refresh()
        except LogError as error:
            code = self._context.code("OffsetFetch", error, RequestKind.GROUP)
        if client.version >= GROUPS_FROM:
            response = await self._fetch_groups(request, client, code)
            topics: Sequence[_Topic] = [
                topic for group in response.groups for topic in group.topics
            ]
        else:
            response = await self._fetch_group(request, client, code)
            topics = response.topics
        elements = len(topics) + sum(len(topic.partitions) for topic in topics)
        return await answered(self._context, client, response, elements)

    async def _fetch_groups(
        self, request: messages.OffsetFetchRequest, client: ApiClient, code: Code
    ) -> messages.OffsetFetchResponse:
        groups = []
        # Each group once, or twice: with all its topics, and with some.
        distinct = {(group.group_id, group.topics is None): group for group in request.groups}
        async for group in sliced(distinct.values()):
            refusal = code or await self._context.group_refusal(
                "OffsetFetch", client, DESCRIBE_GROUP, group.group_id
            )
            topics = group.topics
            asked_topics = None if topics is None else await _Asked.of(topics)
            answers = [] if refusal else await self._fetch(group.group_id, asked_topics, client)
            groups.append(
                messages.OffsetFetchResponseGroup(
                    group_id=group.group_id, topics=answers, error_code=refusal
                )
            )
        return messages.OffsetFetchResponse(groups=groups)

    async def _fetch_group(
        self, request: messages.OffsetFetchRequest, client: ApiClient, code: Code
    ) -> messages.OffsetFetchResponse:
        refusal = code or await self._context.group_refusal(
            "OffsetFetch", client, DESCRIBE_GROUP, request.group_id
        )
        asked_topics = None
        if request.topics is not None:
            asked_topics = await _Asked.of(request.topics)
        if refusal and client.version < 2:  # version 1 has no error of the request
            answers = [
                await _refused(asked_topic, client.version, refusal)
                for asked_topic in asked_topics or ()
            ]
        else:
            answers = [] if refusal else await self._fetch(request.group_id, asked_topics, client)
        return messages.OffsetFetchResponse(topics=answers, error_code=refusal)

    async def _fetch(
        self, group_id: str, asked_topics: list["_Asked"] | None, client: ApiClient
    ) -> list[Any]:
        """Return the offsets in these partitions, or all in topics that the client may see.

        They have the form of the topics in an answer of the client's version.
        """
        committed = self._broker.state.committed_offsets.of_group(group_id)
        answers: list[_Topic] = []
        if asked_topics is None:
            operations = self._context.operations.groups
            shown_topics = await operations.committed_topics(client.rights, group_id)
            async for shown_topic in sliced(shown_topics):
                numbers = sorted(committed.get(shown_topic.topic_id, {}))
                if numbers:  # none if the topic was deleted during a pause
                    answers.append(await self._committed(group_id, shown_topic, numbers, client))
            return answers
        async for asked_topic in sliced(asked_topics):
            topic = self._topic(asked_topic.name, asked_topic.topic_id, client)
            name, api = asked_topic.name if topic is None else topic.name, "OffsetFetch"
            if name:
                code = await self._context.right_refusal(api, client, DESCRIBE_TOPIC, name)
            else:
                code = self._context.refusal(api, Code.UNKNOWN_TOPIC_ID)
            if topic is None or code:
                answers.append(await _refused(asked_topic, client.version, code))
            else:
                answers.append(
                    await self._committed(group_id, topic, asked_topic.partitions, client)
                )
        return answers

    async def _committed(
        self, group_id: str, topic: Topic, numbers: Iterable[int], client: ApiClient
    ) -> _Topic:
        version = client.version
        offsets = self._broker.state.committed_offsets.of_group(group_id).get(topic.topic_id, {})
        partitions = [
            _partition(version, number, offsets.get(number)) async for number in sliced(numbers)
        ]
        return _topic(version, topic.name, bytes.fromhex(topic.topic_id), partitions)

    # -- OffsetDelete

    async def delete(
        self, request: messages.OffsetDeleteRequest, client: ApiClient
    ) -> messages.OffsetDeleteResponse:
        """Answer OffsetDelete. Offsets of topics to which members subscribe stay."""
        api, group_id, context = "OffsetDelete", request.group_id, self._context
        call, answers = GroupCall(context, api, client), list[_DeletedTopic]()

        async def partitions_of() -> list[TopicIdPartition]:
            partitions: list[TopicIdPartition] = []
            subscribed = self._subscribed(group_id)
            async for asked_topic in sliced(request.topics):
                answers.append(await self._deleted(asked_topic, subscribed, client, partitions))
            return partitions

        code = context.group_id_refusal(api, group_id)
        if not code:
            deletion = context.operations.groups.delete_offsets(call, group_id, partitions_of)
            code = await call.code(deletion)
        return messages.OffsetDeleteResponse(
            error_code=code, throttle_time_ms=call.throttle_ms, topics=[] if code else answers
        )

    async def _deleted(
        self,
        asked_topic: messages.OffsetDeleteRequestTopic,
        subscribed: set[str] | None,
        client: ApiClient,
        partitions: list[TopicIdPartition],
    ) -> _DeletedTopic:
        """Return a topic's answer, and add the partitions without an error to `partitions`."""
        api, context, name = "OffsetDelete", self._context, asked_topic.name
        topic = self._broker.state.topics.get(name)
        refusal = await context.topic_refusal(api, client, FETCH, topic, name)
        if not refusal and (subscribed is None or name in subscribed):
            refusal = context.refusal(api, Code.GROUP_SUBSCRIBED_TO_TOPIC)
        answers = []
        async for partition in sliced(asked_topic.partitions):
            code, number = refusal, partition.partition_index
            if topic is None or not 0 <= number < len(topic.partitions):
                code = refusal or context.refusal(api, Code.UNKNOWN_TOPIC_OR_PARTITION)
            elif not refusal:
                partitions.append(TopicIdPartition(topic.topic_id, number))
            answers.append(
                messages.OffsetDeleteResponsePartition(partition_index=number, error_code=code)
            )
        return messages.OffsetDeleteResponseTopic(name=name, partitions=answers)

    def _subscribed(self, group_id: str) -> set[str] | None:
        """Return the topics to which the members of a group subscribe.

        If a member's metadata does not decode, return None: then each topic counts as subscribed.
        Raises ChangeRefused if no offset of the group can be deleted, and UnknownGroup.
        """
        if not self._groups.is_coordinator(group_id):
            raise ChangeRefused(Code.NOT_COORDINATOR, "ask the coordinator")
        state = self._broker.state
        if state.level < format_levels.KAFKA:  # an older broker cannot read such an entry
            raise ChangeRefused(Code.UNSUPPORTED_VERSION, "the cluster's level is too old")
        described = self._groups.describe(group_id)
        if described is not None and described.phase is not GroupPhase.EMPTY:
            if described.protocol_type != CONSUMER:
                raise ChangeRefused(Code.NON_EMPTY_GROUP, "the members are not consumers")
            topic_names: set[str] = set()
            for member in described.members:
                try:
                    topic_names.update(
                        consumer_protocol.decode_subscription(member.metadata).topics
                    )
                except MalformedMessage:
                    return None
            return topic_names
        group = state.members.get(group_id)
        if group is not None and group.members:
            return {name for member in group.members.values() for name in member.topics}
        if group_id not in state.committed_offsets and group is None:
            raise UnknownGroup(group_id)
        return set()

    def _topic(self, name: str, topic_id: bytes, client: ApiClient) -> Topic | None:
        return self._context.topic(name, topic_id if client.version >= BY_ID else None)


def _partition(
    version: int, number: int, committed: CommittedOffset | None, code: Code = Code.NONE
) -> Any:
    kind: Any = messages.OffsetFetchResponsePartitions
    if version < GROUPS_FROM:
        kind = messages.OffsetFetchResponsePartition
    return kind(
        partition_index=number,
        committed_offset=NO_OFFSET if committed is None else committed.offset,
        committed_leader_epoch=-1 if committed is None else committed.leader_epoch,
        metadata="" if committed is None else committed.metadata,
        error_code=code,
    )


def _topic(version: int, name: str, topic_id: bytes, partitions: list[Any]) -> _Topic:
    if version < GROUPS_FROM:
        return messages.OffsetFetchResponseTopic(name=name, partitions=partitions)
    return messages.OffsetFetchResponseTopics(name=name, topic_id=topic_id, partitions=partitions)


async def _refused(asked_topic: _Asked, version: int, code: Code) -> Any:
    """Return the answers for partitions whose offsets the client may not see."""
    partitions = [
        _partition(version, number, None, code) async for number in sliced(asked_topic.partitions)
    ]
    return _topic(version, asked_topic.name, asked_topic.topic_id, partitions)
