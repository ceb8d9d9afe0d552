"""CreateTopics, DeleteTopics, CreatePartitions, DeleteRecords.

The object store replicates, so each valid replication factor is accepted, and the answer has the
factor 1. If a request assigns partitions to brokers, a broker uses only the number of these
partitions.
"""

from operator import attrgetter

from tidelog.service.http.paging import sliced
from tidelog.service.kafka.admin.calls import AdminCall, ChangeRefused, distinct
from tidelog.service.kafka.admin.configs import ConfigEntry, entries_of
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.context import Context
from tidelog.service.kafka.errors import Code
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
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
    DeleteRecordsTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from tidelog.service.security.caller import check_creation
from tidelog.storage.core.acls import ALTER, DELETE, DESCRIBE, DESCRIBE_CONFIGS, TOPIC
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.core.topic_configs import PARTITIONS_MAX
from tidelog.storage.state.cluster_state import Topic
from tidelog.storage.state.topic_checks import TOPIC_NAME_MAX, is_new_topic_name

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

    # -- CreateTopics

    async def create_topics(
        self, request: CreateTopicsRequest, client: ApiClient
    ) -> CreateTopicsResponse:
        """Answer CreateTopics. With `validate_only`, create nothing."""
        call = AdminCall(self._context, "CreateTopics", client)
        topics, twice = await distinct(request.topics, attrgetter("name"))
        are_many = len(topics) > CREATED_MAX

        async def serve(wanted: CreatableTopic) -> CreatableTopicResult:
            outcome = await call.outcome(
                _too_many()
                if are_many
                else self._create(call, wanted, wanted.name in twice, request.validate_only)
            )
            if outcome.code:
                return CreatableTopicResult(
                    name=wanted.name, error_code=outcome.code, error_message=outcome.message
                )
            return self._created(call, wanted, request.validate_only)

        results = await call.for_each(topics, serve)
        return CreateTopicsResponse(throttle_time_ms=call.throttle_ms, topics=results)

    async def _create(
        self, call: AdminCall, wanted: CreatableTopic, is_twice: bool, validate_only: bool
    ) -> None:
        if is_twice:
            raise ChangeRefused(
                Code.INVALID_REQUEST, f"topic {wanted.name!r} is in the request twice"
            )
        await check_creation(call.rights, wanted.name)
        if not is_new_topic_name(wanted.name):
            raise ChangeRefused(
                Code.INVALID_TOPIC_EXCEPTION,
                f"topic name {wanted.name[:TOPIC_NAME_MAX]!r} is illegal: use 1 to "
                f"{TOPIC_NAME_MAX} characters of a-z A-Z 0-9 . _ - but not the name . or ..",
            )
        if wanted.num_partitions == DEFAULT:
            await self._broker.refresh()  # another broker may have changed the default
        partitions = self._partitions(wanted)
        if wanted.replication_factor < 1 and wanted.replication_factor != DEFAULT:
            raise ChangeRefused(
                Code.INVALID_REPLICATION_FACTOR,
                f"replication factor {wanted.replication_factor}: use -1, or 1 or more",
            )
        configs = _configs(wanted)
        call.charge()
        change = self._broker.create_topic(
            wanted.name, partitions, configs, validate_only=validate_only
        )
        if validate_only:
            await change
        else:
            await call.commit(wanted.name, change)
            call.warn_of_configs(wanted.name, configs)

    def _partitions(self, wanted: CreatableTopic) -> int:
        """Return the number of partitions. Raises Refused."""
        count, assigned = wanted.num_partitions, wanted.assignments
        if assigned:
            _check_assignments([assignment.broker_ids for assignment in assigned])
            if {assignment.partition_index for assignment in assigned} != {*range(len(assigned))}:
                raise ChangeRefused(
                    Code.INVALID_REPLICA_ASSIGNMENT,
                    "assignments must name the partitions 0, 1, 2, ... each once",
                )
            if count not in (DEFAULT, len(assigned)):
                raise ChangeRefused(
                    Code.INVALID_REQUEST,
                    f"{count} partitions are wanted, but {len(assigned)} are assigned to brokers",
                )
            count = len(assigned)
        elif count == DEFAULT:
            setting = self._context.settings.default_partitions
            count = self._broker.state.defaults.partitions(setting)
        if not 1 <= count <= PARTITIONS_MAX:
            raise ChangeRefused(
                Code.INVALID_PARTITIONS,
                f"a topic has 1 to {PARTITIONS_MAX} partitions, not {count}",
            )
        return count

    def _created(
        self, call: AdminCall, wanted: CreatableTopic, validate_only: bool
    ) -> CreatableTopicResult:
        """Return the answer for a topic that was created, or only checked (`validate_only`)."""
        topic = None if validate_only else self._broker.state.topics.get(wanted.name)
        result = CreatableTopicResult(
            name=wanted.name,
            topic_id=ZERO_UUID if topic is None else bytes.fromhex(topic.topic_id),
            error_code=Code.NONE,
            error_message=None,
        )
        if not call.rights.may(DESCRIBE_CONFIGS, TOPIC, wanted.name):
            result.topic_config_error_code = Code.TOPIC_AUTHORIZATION_FAILED
            return result
        configs = _configs(wanted) if topic is None else topic.configs
        result.num_partitions = self._partitions(wanted)
        result.replication_factor = REPLICATION_FACTOR
        result.configs = [
            _creatable(entry) for entry in entries_of(configs, self._broker.state.defaults)
        ]
        return result

    # -- DeleteTopics

    async def delete_topics(
        self, request: DeleteTopicsRequest, client: ApiClient
    ) -> DeleteTopicsResponse:
        """Answer DeleteTopics, by names and by ids."""
        call = AdminCall(self._context, "DeleteTopics", client)
        if client.version >= FIRST_BY_ID:
            topics, twice = await distinct(request.topics, attrgetter("name", "topic_id"))
        else:
            names, named_twice = await distinct(request.topic_names, str)
            twice = {(name, ZERO_UUID) for name in named_twice}
            topics = [
                DeleteTopicState(name=name, topic_id=ZERO_UUID) async for name in sliced(names)
            ]

        async def serve(topic: DeleteTopicState) -> DeletableTopicResult:
            result = DeletableTopicResult(
                name=topic.name, topic_id=topic.topic_id, error_code=Code.NONE
            )
            is_twice = (topic.name, topic.topic_id) in twice
            outcome = await call.outcome(self._delete(call, result, is_twice))
            result.error_code, result.error_message = outcome
            return result

        results = await call.for_each(topics, serve)
        return DeleteTopicsResponse(throttle_time_ms=call.throttle_ms, responses=results)

    async def _delete(self, call: AdminCall, result: DeletableTopicResult, is_twice: bool) -> None:
        """Delete a topic, and put its name and its id into the result."""
        name, topic_id = result.name, result.topic_id
        if is_twice or (name is None) == (topic_id == ZERO_UUID):
            raise ChangeRefused(
                Code.INVALID_REQUEST, "each topic must be named once, by its name or by its id"
            )
        if name is None:
            topic = await self._topic_of_id(topic_id)
            if topic is None or not call.rights.may(DESCRIBE, TOPIC, topic.name):
                raise ChangeRefused(
                    Code.UNKNOWN_TOPIC_ID, f"there is no topic of id {topic_id.hex()}"
                )
            name = result.name = topic.name
        await call.begin(DELETE, name)
        topic = self._broker.state.topics.get(name)
        if topic_id != ZERO_UUID and (topic is None or topic.topic_id != topic_id.hex()):
            raise ChangeRefused(Code.UNKNOWN_TOPIC_ID, f"there is no topic of id {topic_id.hex()}")
        await call.commit(name, self._broker.delete_topic(name))
        if topic is not None:
            result.topic_id = bytes.fromhex(topic.topic_id)

    async def _topic_of_id(self, topic_id: bytes) -> Topic | None:
        if self._broker.state.topic_of_id(topic_id.hex()) is None:
            await self._broker.refresh()
        return self._broker.state.topic_of_id(topic_id.hex())

    # -- CreatePartitions

    async def create_partitions(
        self, request: CreatePartitionsRequest, client: ApiClient
    ) -> CreatePartitionsResponse:
        """Answer CreatePartitions. With `validate_only`, change nothing."""
        call = AdminCall(self._context, "CreatePartitions", client)
        topics, twice = await distinct(request.topics, attrgetter("name"))

        async def serve(wanted: CreatePartitionsTopic) -> CreatePartitionsTopicResult:
            is_twice = wanted.name in twice
            growth = self._grow(call, wanted, is_twice, request.validate_only)
            code, message = await call.outcome(growth)
            return CreatePartitionsTopicResult(
                name=wanted.name, error_code=code, error_message=message
            )

        results = await call.for_each(topics, serve)
        return CreatePartitionsResponse(throttle_time_ms=call.throttle_ms, results=results)

    async def _grow(
        self, call: AdminCall, wanted: CreatePartitionsTopic, is_twice: bool, validate_only: bool
    ) -> None:
        name, count = wanted.name, wanted.count
        if is_twice:
            raise ChangeRefused(Code.INVALID_REQUEST, f"topic {name!r} is in the request twice")
        await call.begin(ALTER, name)
        await self._broker.refresh()
        has = len(self._broker.state.topic(name).partitions)
        if not has < count <= PARTITIONS_MAX:
            raise ChangeRefused(
                Code.INVALID_PARTITIONS,
                f"topic {name!r} has {has} partitions: the number must be greater and at most "
                f"{PARTITIONS_MAX}, not {count}",
            )
        if wanted.assignments is not None:
            _check_assignments([assignment.broker_ids for assignment in wanted.assignments])
            if len(wanted.assignments) != count - has:
                raise ChangeRefused(
                    Code.INVALID_REPLICA_ASSIGNMENT,
                    f"{len(wanted.assignments)} assignments for {count - has} new partitions",
                )
        if validate_only:
            return
        try:
            await call.commit(name, self._broker.add_partitions(name, count))
        except InvalidRequest as error:  # another client has added partitions
            raise ChangeRefused(Code.INVALID_PARTITIONS, str(error)) from error

    # -- DeleteRecords

    async def delete_records(
        self, request: DeleteRecordsRequest, client: ApiClient
    ) -> DeleteRecordsResponse:
        """Answer DeleteRecords: move log starts."""
        call = AdminCall(self._context, "DeleteRecords", client)

        async def serve_topic(topic: DeleteRecordsTopic) -> DeleteRecordsTopicResult:
            refusal = await call.outcome(call.begin(DELETE, topic.name))

            async def serve(wanted: DeleteRecordsPartition) -> DeleteRecordsPartitionResult:
                result = DeleteRecordsPartitionResult(
                    partition_index=wanted.partition_index,
                    low_watermark=NO_OFFSET,
                    error_code=refusal.code,
                )
                if not refusal.code:
                    deletion = self._delete_records(call, topic.name, wanted, result)
                    result.error_code = (await call.outcome(deletion)).code
                return result

            results = await call.for_each(topic.partitions, serve)
            return DeleteRecordsTopicResult(name=topic.name, partitions=results)

        answers = [await serve_topic(topic) async for topic in sliced(request.topics)]
        return DeleteRecordsResponse(throttle_time_ms=call.throttle_ms, topics=answers)

    async def _delete_records(
        self,
        call: AdminCall,
        name: str,
        wanted: DeleteRecordsPartition,
        result: DeleteRecordsPartitionResult,
    ) -> None:
        change = self._broker.delete_records(name, wanted.partition_index, wanted.offset)
        label = f"{name}-{wanted.partition_index} below {wanted.offset}"
        result.low_watermark = await call.commit(label, change)


async def _too_many() -> None:
    raise ChangeRefused(
        Code.INVALID_REQUEST, f"a request creates at most {CREATED_MAX} topics: send several"
    )


def _check_assignments(brokers: list[list[int]]) -> None:
    if not all(brokers):
        raise ChangeRefused(Code.INVALID_REPLICA_ASSIGNMENT, "each assignment must name a broker")


def _configs(wanted: CreatableTopic) -> dict[str, str]:
    """Return the configs of a new topic. Raises Refused."""
    configs: dict[str, str] = {}
    for config in wanted.configs:
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
