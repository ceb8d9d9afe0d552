"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs.

Configs of topics are those of REST (storage.core.topic_configs): names that Kafka has and tidelog
does not need are kept and shown, and every other name is refused. A broker shows the defaults of
topics, under the names that Kafka's brokers have for them. Requests to change them are refused.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tidelog.service.kafka.admin.calls import AdminCall, Refused, repeated
from tidelog.service.kafka.client import Client, Encoded
from tidelog.service.kafka.context import Context
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages.compiler import encoder
from tidelog.service.kafka.messages.configs import (
    AlterConfigsRequest,
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    AlterConfigsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
    IncrementalAlterConfigsResponse,
)
from tidelog.storage.core import topic_configs
from tidelog.storage.core.acls import ALTER_CONFIGS, CLUSTER, CLUSTER_NAME, DESCRIBE_CONFIGS, TOPIC
from tidelog.storage.state.cluster_state import Topic

OF_TOPIC, OF_BROKER, OF_CLIENT_METRICS, OF_GROUP = 2, 4, 16, 32
"""Types of resources. There are no client metrics, and groups have no configs."""
TOPIC_SOURCE, STATIC_SOURCE, DEFAULT_SOURCE = 1, 4, 5
"""Sources of a value: the topic, the settings of the broker, the default."""
SET, DELETE, APPEND, SUBTRACT = range(4)
BOOLEAN, STRING, LONG, DOUBLE, LIST = 1, 2, 5, 6, 7
"""Types of values."""
THROTTLED_REPLICAS = (
    "follower.replication.throttled.replicas",
    "leader.replication.throttled.replicas",
)
INLINE_MAX = 20
"""Resources of an answer that the event loop builds. Larger answers are built in a thread."""

BROKER_NAMES: Mapping[str, str] = {
    "cleanup.policy": "log.cleanup.policy",
    "compression.type": "compression.type",
    "delete.retention.ms": "log.cleaner.delete.retention.ms",
    "max.message.bytes": "message.max.bytes",
    "message.timestamp.after.max.ms": "log.message.timestamp.after.max.ms",
    "message.timestamp.before.max.ms": "log.message.timestamp.before.max.ms",
    "message.timestamp.type": "log.message.timestamp.type",
    "min.cleanable.dirty.ratio": "log.cleaner.min.cleanable.ratio",
    "min.compaction.lag.ms": "log.cleaner.min.compaction.lag.ms",
    "retention.bytes": "log.retention.bytes",
    "retention.ms": "log.retention.ms",
    "segment.bytes": "log.segment.bytes",
    "segment.ms": "log.roll.ms",
}
"""Names that Kafka's brokers have for the defaults of topic configs."""


class Entry(NamedTuple):
    """One config as clients see it. `source` is that of `value`."""

    name: str
    value: str
    source: int
    default: str
    kind: int
    doc: str


def entries_of(configs: Mapping[str, str], source: int) -> list[Entry]:
    """Return the configs with an effect, and the others that `configs` sets; the values in
    `configs` are from `source`."""
    names = [*topic_configs.CONFIGS, *sorted(configs.keys() & topic_configs.WITHOUT_EFFECT.keys())]
    return [_entry(name, configs.get(name), source) for name in names]


def _entry(name: str, value: str | None, source: int) -> Entry:
    known = topic_configs.KNOWN[name]
    if value is None:
        value, source = known.default, DEFAULT_SOURCE
    return Entry(name, value, source, known.default, _kind(name), known.doc)


def _kind(name: str) -> int:
    known = topic_configs.KNOWN[name]
    match known.parse(known.default):
        case int():
            return LONG
        case float():
            return DOUBLE
        case frozenset():
            return LIST
        case _:
            pass
    if name in THROTTLED_REPLICAS:
        return LIST
    return BOOLEAN if known.default in ("true", "false") else STRING


class Configs:
    """The APIs of configs. One per listener, whose node id clients give."""

    def __init__(self, context: Context, node_id: int) -> None:
        self._context = context
        self._broker = context.broker
        self._node_id = node_id

    # -- DescribeConfigs

    async def describe_configs(
        self, request: DescribeConfigsRequest, client: Client
    ) -> DescribeConfigsResponse | Encoded:
        """Answer DescribeConfigs."""
        call = AdminCall(self._context, "DescribeConfigs", client)
        topics = self._broker.state.topics
        wanted = {(each.resource_type, each.resource_name): each for each in request.resources}
        if any(kind == OF_TOPIC and name not in topics for kind, name in wanted):
            code, message = await call.outcome(self._broker.refresh())
            if code:
                failed = [_undescribed(each, code, message) for each in wanted.values()]
                return DescribeConfigsResponse(throttle_time_ms=0, results=failed)
        results, described = [], list[tuple[DescribeConfigsResult, Topic | None]]()
        for each in wanted.values():
            is_topic = each.resource_type == OF_TOPIC
            forbidden = (
                Code.TOPIC_AUTHORIZATION_FAILED if is_topic else Code.CLUSTER_AUTHORIZATION_FAILED
            )
            code, message = await call.outcome(self._check(call, each), forbidden)
            results.append(_undescribed(each, code, message))
            if not code:
                described.append((results[-1], topics.get(each.resource_name)))
        response = DescribeConfigsResponse(throttle_time_ms=0, results=results)

        def describe() -> None:
            for result, topic in described:
                asked = wanted[result.resource_type, result.resource_name].configuration_keys
                result.configs = self._described(result, topic, asked, request)

        if len(described) <= INLINE_MAX:
            describe()
            return response

        def encode() -> Encoded:
            describe()
            return Encoded(encoder(DescribeConfigsResponse, client.version)(response))

        return await asyncio.to_thread(encode)

    async def _check(self, call: AdminCall, resource: DescribeConfigsResource) -> None:
        """Raise unless the client may see the configs of a resource, and it has some."""
        kind, name = resource.resource_type, resource.resource_name
        if kind == OF_TOPIC:
            await call.rights.check(DESCRIBE_CONFIGS, TOPIC, name)
            self._broker.state.topic(name)
            return
        await call.rights.check(DESCRIBE_CONFIGS, CLUSTER, CLUSTER_NAME)
        if kind == OF_BROKER:
            self._check_node(name)
        elif kind not in (OF_CLIENT_METRICS, OF_GROUP):
            raise Refused(Code.INVALID_REQUEST, f"resources of type {kind} have no configs")

    def _check_node(self, name: str) -> None:
        """Raise Refused unless the name is empty (all brokers), or this broker's node id."""
        if name not in ("", str(self._node_id)):
            raise Refused(
                Code.INVALID_REQUEST, f"this broker has the node id {self._node_id}, not {name!r}"
            )

    def _described(
        self,
        result: DescribeConfigsResult,
        topic: Topic | None,
        asked: Sequence[str] | None,
        request: DescribeConfigsRequest,
    ) -> list[DescribeConfigsResourceResult]:
        is_topic = result.resource_type == OF_TOPIC
        if is_topic:
            entries = entries_of({} if topic is None else topic.configs, TOPIC_SOURCE)
            names = set(asked or ()) & topic_configs.WITHOUT_EFFECT.keys()
            entries += [
                _entry(name, None, DEFAULT_SOURCE)
                for name in sorted(names - {entry.name for entry in entries})
            ]
        elif result.resource_type == OF_BROKER and result.resource_name:
            entries = self._of_broker()
        else:
            entries = []
        if asked:  # as in Kafka, an empty list asks for all
            wanted = set(asked)
            entries = [entry for entry in entries if entry.name in wanted]
        return [
            DescribeConfigsResourceResult(
                name=entry.name,
                value=entry.value,
                read_only=not is_topic,
                config_source=entry.source,
                is_sensitive=False,
                synonyms=_synonyms(entry) if request.include_synonyms else [],
                config_type=entry.kind,
                documentation=entry.doc if request.include_documentation else None,
            )
            for entry in entries
        ]

    def _of_broker(self) -> list[Entry]:
        """Return the defaults of topics, and the settings that Kafka has names for."""
        settings = self._context.settings
        auto = "true" if settings.auto_create_topics else "false"
        count = str(settings.default_partitions)
        found = [
            entry._replace(name=BROKER_NAMES[entry.name])
            for entry in entries_of({}, DEFAULT_SOURCE)
            if entry.name in BROKER_NAMES
        ]
        return [
            Entry("auto.create.topics.enable", auto, STATIC_SOURCE, "false", BOOLEAN, ""),
            Entry("default.replication.factor", "1", DEFAULT_SOURCE, "1", LONG, ""),
            Entry("num.partitions", count, STATIC_SOURCE, "1", LONG, ""),
            *found,
        ]

    # -- AlterConfigs, IncrementalAlterConfigs

    async def alter_configs(
        self, request: AlterConfigsRequest, client: Client
    ) -> AlterConfigsResponse:
        """Answer AlterConfigs: configs that a resource does not name get their defaults."""

        def changes_of(topic: Topic, resource: AlterConfigsResource) -> dict[str, str | None]:
            changes: dict[str, str | None] = dict.fromkeys(topic.configs)
            for each in resource.configs:
                changes[each.name] = _given(each.name, each.value)
            return changes

        call = AdminCall(self._context, "AlterConfigs", client)
        responses = await self._alter(call, request.resources, changes_of, request.validate_only)
        return AlterConfigsResponse(throttle_time_ms=call.throttle_ms, responses=responses)

    async def incremental_alter_configs(
        self, request: IncrementalAlterConfigsRequest, client: Client
    ) -> IncrementalAlterConfigsResponse:
        """Answer IncrementalAlterConfigs. If two clients append to a list at once, one of the two
        values may be lost."""

        def changes_of(
            topic: Topic, resource: IncrementalAlterConfigsResource
        ) -> dict[str, str | None]:
            return {
                each.name: _changed(topic, each.name, each.config_operation, each.value)
                for each in resource.configs
            }

        call = AdminCall(self._context, "IncrementalAlterConfigs", client)
        responses = await self._alter(call, request.resources, changes_of, request.validate_only)
        return IncrementalAlterConfigsResponse(
            throttle_time_ms=call.throttle_ms, responses=responses
        )

    async def _alter(
        self,
        call: AdminCall,
        resources: "Sequence[AlterConfigsResource] | Sequence[IncrementalAlterConfigsResource]",
        changes_of: "Callable[[Topic, Any], dict[str, str | None]]",
        validate_only: bool,
    ) -> list[AlterConfigsResourceResponse]:
        twice = repeated((each.resource_type, each.resource_name) for each in resources)
        distinct = {(each.resource_type, each.resource_name): each for each in resources}

        async def change(resource: "AnyResource") -> None:
            kind, name = resource.resource_type, resource.resource_name
            if (kind, name) in twice:
                raise Refused(Code.INVALID_REQUEST, f"resource {name!r} is in the request twice")
            if kind != OF_TOPIC:
                await self._refuse(call, kind, name)
            await call.begin(ALTER_CONFIGS, name)
            await self._broker.refresh()
            names = [each.name for each in resource.configs]
            if again := repeated(names):
                raise Refused(Code.INVALID_REQUEST, f"config {min(again)!r} is given twice")
            changes = changes_of(self._broker.state.topic(name), resource)
            for config, value in changes.items():
                if value is not None or config not in topic_configs.KNOWN:
                    topic_configs.canonical(config, value or "", self._broker.state.level)
            if changes and not validate_only:
                await call.commit(name, self._broker.alter_topic(name, changes))

        async def serve(resource: "AnyResource") -> AlterConfigsResourceResponse:
            is_topic = resource.resource_type == OF_TOPIC
            forbidden = (
                Code.TOPIC_AUTHORIZATION_FAILED if is_topic else Code.CLUSTER_AUTHORIZATION_FAILED
            )
            code, message = await call.outcome(change(resource), forbidden)
            return AlterConfigsResourceResponse(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )

        return await call.for_each(list(distinct.values()), serve)

    async def _refuse(self, call: AdminCall, kind: int, name: str) -> None:
        """Raise the refusal of a resource that is no topic."""
        await call.rights.check(ALTER_CONFIGS, CLUSTER, CLUSTER_NAME)
        if kind != OF_BROKER:
            raise Refused(Code.INVALID_REQUEST, f"resources of type {kind} have no configs")
        self._check_node(name)
        raise Refused(
            Code.INVALID_CONFIG,
            "configs of brokers cannot be changed by this request: change the broker's settings",
        )


AnyResource = AlterConfigsResource | IncrementalAlterConfigsResource


def _undescribed(
    resource: DescribeConfigsResource, code: Code, message: str | None
) -> DescribeConfigsResult:
    return DescribeConfigsResult(
        error_code=code,
        error_message=message,
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
        configs=[],
    )


def _synonyms(entry: Entry) -> list[DescribeConfigsSynonym]:
    found = [DescribeConfigsSynonym(name=entry.name, value=entry.value, source=entry.source)]
    if entry.source != DEFAULT_SOURCE:
        found.append(
            DescribeConfigsSynonym(name=entry.name, value=entry.default, source=DEFAULT_SOURCE)
        )
    return found


def _given(name: str, value: str | None) -> str:
    if value is None:
        raise Refused(Code.INVALID_REQUEST, f"config {name!r} has no value")
    return value


def _changed(topic: Topic, name: str, operation: int, value: str | None) -> str | None:
    """Return the new value of a config, None for its default. Raises Refused, InvalidConfig."""
    if operation == DELETE:
        return None
    given = _given(name, value)
    if operation == SET:
        return given
    if operation not in (APPEND, SUBTRACT):
        raise Refused(Code.INVALID_REQUEST, f"config {name!r}: operation {operation} is unknown")
    if name not in topic_configs.KNOWN or _kind(name) != LIST:
        raise Refused(
            Code.INVALID_CONFIG, f"config {name!r} is no list: only lists take APPEND and SUBTRACT"
        )
    before = _listed(topic.configs.get(name, topic_configs.KNOWN[name].default))
    parts = _listed(given)
    if operation == APPEND:
        return ",".join([*before, *(part for part in parts if part not in before)])
    return ",".join(part for part in before if part not in parts)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
