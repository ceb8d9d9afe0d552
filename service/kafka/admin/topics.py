"""CreateTopics, DeleteTopics, CreatePartitions, DeleteRecords.

The object store replicates, so each valid replication factor is accepted, and the answer has the
factor 1. If a request assigns partitions to brokers, a broker uses only the number of these
partitions.
"""

from collections.abc import Iterable, Mapping
from operator import attrgetter

from tidelog.service.kafka.admin.calls import AdminCall, ChangeRefused, distinct
from tidelog.service.kafka.admin.configs import ConfigEntry, entries_of
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.errors import Code, RequestKind
from tidelog.service.kafka.messages.primitives import ZERO_UUID
from tidelog.service.kafka.messages.topics import (
    CreatableTopic,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeletableTopicResult,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
    DeleteRecordsTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from tidelog.service.operations.change_request import for_each
from tidelog.service.operations.topics import LogStartMove, NewTopic
from tidelog.service.slices import sliced
from tidelog.storage.core.errors import LogError

REPLICATION_FACTOR = 1
DEFAULT = -1
"""In a request: the default number of partitions, or the default replication factor."""
FIRST_BY_ID = 6
"""The first version of DeleteTopics that has ids."""
CREATED_MAX = 1_000
"""Topics that one request may create: the answer has 2 KiB of configs for each."""
NO_OFFSET = -1


class Topics:
    """The APIs of topics. One per listener."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._broker = context.broker
        self._topics = context.operations.topics

    def apis(self) -> Iterable[Api]:
        """Return the rows of these APIs."""
        return (
            Api(CreateTopicsRequest, CreateTopicsResponse, self.create_topics),
            Api(DeleteTopicsRequest, DeleteTopicsResponse, self.delete_topics),
            Api(DeleteRecordsRequest, DeleteRecordsResponse, self.delete_records),
            Api(CreatePartitionsRequest, CreatePartitionsResponse, self.create_partitions),
        )

    # -- CreateTopics

    async def create_topics(
        self, request: CreateTopicsRequest, client: ApiClient
    ) -> CreateTopicsResponse:
        """Answer CreateTopics. With `validate_only`, create nothing."""
        call = AdminCall(self._context, "CreateTopics", client)
        topics, repeated_names = await distinct(request.topics, attrgetter("name"))
        are_many = len(topics) > CREATED_MAX

        async def serve(requested_topic: CreatableTopic) -> CreatableTopicResult:
            result = CreatableTopicResult(
                name=requested_topic.name, error_code=Code.NONE, error_message=None
            )
            outcome = await call.outcome(
                _too_many()
                if are_many
                else self._create(
                    call,
                    requested_topic,
                    result,
                    requested_topic.name in repeated_names,
                    request.validate_only,
                )
            )
            result.error_code, result.error_message = outcome
            return result

        results = await for_each(topics, serve)
        return CreateTopicsResponse(throttle_time_ms=call.throttle_ms, topics=results)

    async def _create(
        self,
        call: AdminCall,
        requested_topic: CreatableTopic,
        result: CreatableTopicResult,
        is_twice: bool,
        validate_only: bool,
    ) -> None:
        """Create a topic, or only check the request, and describe the topic in the result."""
        name = requested_topic.name
        if is_twice:
            raise ChangeRefused(Code.INVALID_REQUEST, f"topic {name!r} is in the request twice")
        partitions = await self._topics.create(
            call, name, lambda: _new_topic(requested_topic), validate_only=validate_only
        )
        configs: Mapping[str, str] = _configs(requested_topic)
        if not validate_only:
            call.warn_of_configs(name, configs)
            if (created := self._broker.state.topics.get(name)) is not None:
                result.topic_id, configs = bytes.fromhex(created.topic_id), created.configs
        if not self._context.operations.configs.is_shown(call.rights, name):
            result.topic_config_error_code = Code.TOPIC_AUTHORIZATION_FAILED
            return
        result.num_partitions = partitions
        result.replication_factor = REPLICATION_FACTOR
        result.configs = [
            _creatable(entry) for entry in entries_of(configs, self._broker.state.defaults)
        ]

    # -- DeleteTopics

    async def delete_topics(
        self, request: DeleteTopicsRequest, client: ApiClient
    ) -> DeleteTopicsResponse:
        """Answer DeleteTopics, by names and by ids."""
        call = AdminCall(self._context, "DeleteTopics", client)
        if client.version >= FIRST_BY_ID:
            topics, repeated_topics = await distinct(request.topics, attrgetter("name", "topic_id"))
        else:
            names, named_twice = await distinct(request.topic_names, str)
            repeated_topics = {(name, ZERO_UUID) for name in named_twice}
            topics = [
                DeleteTopicState(name=name, topic_id=ZERO_UUID) async for name in sliced(names)
            ]

        async def serve(topic: DeleteTopicState) -> DeletableTopicResult:
            result = DeletableTopicResult(
                name=topic.name, topic_id=topic.topic_id, error_code=Code.NONE
            )
            is_twice = (topic.name, topic.topic_id) in repeated_topics
            outcome = await call.outcome(self._delete(call, result, is_twice))
            result.error_code, result.error_message = outcome
            return result

        results = await for_each(topics, serve)
        return DeleteTopicsResponse(throttle_time_ms=call.throttle_ms, responses=results)

    async def _delete(self, call: AdminCall, result: DeletableTopicResult, is_twice: bool) -> None:
        """Delete a topic, and put its name and its id into the result."""
        name, topic_id = result.name, result.topic_id
        if is_twice or (name is None) == (topic_id == ZERO_UUID):
            raise ChangeRefused(
                Code.INVALID_REQUEST, "each topic must be named once, by its name or by its id"
            )
        if name is None:
            topic = await self._topics.of_id(call.rights, topic_id.hex())
            name = result.name = topic.name
        topic = await self._topics.delete(
            call, name, "" if topic_id == ZERO_UUID else topic_id.hex()
        )
        result.topic_id = bytes.fromhex(topic.topic_id)

    # -- CreatePartitions

    async def create_partitions(
        self, request: CreatePartitionsRequest, client: ApiClient
    ) -> CreatePartitionsResponse:
        """Answer CreatePartitions. With `validate_only`, change nothing."""
        call = AdminCall(self._context, "CreatePartitions", client)
        topics, repeated_names = await distinct(request.topics, attrgetter("name"))

        async def serve(requested_topic: CreatePartitionsTopic) -> CreatePartitionsTopicResult:
            is_twice = requested_topic.name in repeated_names
            growth = self._grow(call, requested_topic, is_twice, request.validate_only)
            code, message = await call.outcome(growth)
            return CreatePartitionsTopicResult(
                name=requested_topic.name, error_code=code, error_message=message
            )

        results = await for_each(topics, serve)
        return CreatePartitionsResponse(throttle_time_ms=call.throttle_ms, results=results)

    async def _grow(
        self,
        call: AdminCall,
        requested_topic: CreatePartitionsTopic,
        is_twice: bool,
        validate_only: bool,
    ) -> None:
        name, count = requested_topic.name, requested_topic.count
        if is_twice:
            raise ChangeRefused(Code.INVALID_REQUEST, f"topic {name!r} is in the request twice")
        assigned = None
        if requested_topic.assignments is not None:
            _check_assignments(
                [assignment.broker_ids for assignment in requested_topic.assignments]
            )
            assigned = len(requested_topic.assignments)
        await self._topics.add_partitions(
            call, name, count, assigned=assigned, validate_only=validate_only
        )

    # -- DeleteRecords

    async def delete_records(
        self, request: DeleteRecordsRequest, client: ApiClient
    ) -> DeleteRecordsResponse:
        """Answer DeleteRecords: move log starts."""
        call = AdminCall(self._context, "DeleteRecords", client)

        answers = [
            await self._delete_records(call, topic) async for topic in sliced(request.topics)
        ]
        return DeleteRecordsResponse(throttle_time_ms=call.throttle_ms, topics=answers)

    async def _delete_records(
        self, call: AdminCall, topic: DeleteRecordsTopic
    ) -> DeleteRecordsTopicResult:
        offsets = [
            (requested_partition.partition_index, requested_partition.offset)
            for requested_partition in topic.partitions
        ]
        outcomes: list[LogStartMove | LogError] = []

        async def delete() -> None:
            outcomes.extend(await self._topics.delete_records(call, topic.name, offsets))

        refusal = await call.outcome(delete())
        results = [
            DeleteRecordsPartitionResult(
                partition_index=number, low_watermark=NO_OFFSET, error_code=refusal.code
            )
            async for number, _ in sliced(offsets)
        ]
        async for result, outcome in sliced(zip(results, outcomes, strict=False)):
            if isinstance(outcome, LogError):
                result.error_code = self._context.code(call.api, outcome, RequestKind.ADMIN)
            else:
                result.low_watermark = outcome.log_start_offset
        return DeleteRecordsTopicResult(name=topic.name, partitions=results)


async def _too_many() -> None:
    raise ChangeRefused(
        Code.INVALID_REQUEST, f"a request creates at most {CREATED_MAX} topics: send several"
    )


def _check_assignments(brokers: list[list[int]]) -> None:
    if not all(brokers):
        raise ChangeRefused(Code.INVALID_REPLICA_ASSIGNMENT, "each assignment must name a broker")


def _new_topic(requested_topic: CreatableTopic) -> NewTopic:
    """Return the topic that a request wants. Raises ChangeRefused."""
    _check_assignments([assignment.broker_ids for assignment in requested_topic.assignments])
    if requested_topic.replication_factor < 1 and requested_topic.replication_factor != DEFAULT:
        raise ChangeRefused(
            Code.INVALID_REPLICATION_FACTOR,
            f"replication factor {requested_topic.replication_factor}: use -1, or 1 or more",
        )
    count = None if requested_topic.num_partitions == DEFAULT else requested_topic.num_partitions
    assigned = [assignment.partition_index for assignment in requested_topic.assignments]
    return NewTopic(count, _configs(requested_topic), assigned)


def _configs(requested_topic: CreatableTopic) -> dict[str, str]:
    """Return the configs of a new topic. Raises ChangeRefused."""
    configs: dict[str, str] = {}
    for config in requested_topic.configs:
        if config.value is None:
            raise ChangeRefused(
                Code.INVALID_CONFIG, f"config {config.name!r} of a new topic has no value"
            )
        configs[config.name] = config.value
    return configs


def _creatable(entry: ConfigEntry) -> CreatableTopicConfigs:
    return CreatableTopicConfigs(
        name=entry.name,
        value=entry.values[0].value,
        read_only=False,
        config_source=entry.values[0].source,
        is_sensitive=False,
    )
