"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs.

Topic configs are those of storage.core.topic_configs, the same as in REST. They include configs of
Kafka that have no effect here: a broker stores and shows them. A broker refuses every unknown name.
The broker resource without a name has the cluster's defaults, by Kafka's names for configs of
brokers. A request may change these defaults. The resource of one broker shows the defaults that are
in effect at this broker. A request that sets a config of one broker is refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

from tidelog.service.kafka.admin.calls import AdminCall, ChangeRefused, distinct
from tidelog.service.kafka.answer_forms import EncodedAnswer
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import ApiClient
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
from tidelog.service.operations.change_request import for_each
from tidelog.service.operations.configs import ConfigTexts
from tidelog.service.slices import sliced
from tidelog.storage.core import topic_configs
from tidelog.storage.core.topic_configs import (
    MIN_INSYNC_REPLICAS,
    ConfigKey,
    ConfigSource,
    ConfigValue,
    TopicDefaults,
)
from tidelog.storage.state.topic import Topic

OF_TOPIC, OF_BROKER, OF_CLIENT_METRICS, OF_GROUP = 2, 4, 16, 32
"""Types of resources. There are no client metrics, and groups have no configs."""
SET, DELETE, APPEND, SUBTRACT = range(4)
BOOLEAN, STRING, LONG, DOUBLE, LIST = 1, 2, 5, 6, 7
"""Types of values."""
THROTTLED_REPLICAS = (
    "follower.replication.throttled.replicas",
    "leader.replication.throttled.replicas",
)
INLINE_MAX = 20
"""Resources of an answer that the event loop builds. Larger answers are built in a thread."""


class ConfigEntry(NamedTuple):
    """One config of an answer.

    `values` has the effective value first, then the values of lower precedence.
    """

    name: str
    values: Sequence[ConfigValue]
    kind: int
    doc: str


class Changed(NamedTuple):
    """The target of a request: the configs of a topic, or the defaults of the cluster.

    `own` are the texts that the target sets now; `values` returns the values of a known name, as a
    ConfigEntry has them.
    """

    known: Mapping[str, ConfigKey]
    own: Mapping[str, str]
    values: Callable[[str], Sequence[ConfigValue]]


def entries_of(configs: Mapping[str, str], defaults: TopicDefaults) -> list[ConfigEntry]:
    """Return the configs of a topic that sets `configs`, as far as a listing has them.

    These are all configs with an effect, those without an effect that the topic sets, and
    `min.insync.replicas`, because kafka-topics needs it.
    """
    names = dict.fromkeys([*topic_configs.shown(configs), MIN_INSYNC_REPLICAS])
    return [_entry(name, configs, defaults) for name in names]


def _entry(name: str, configs: Mapping[str, str], defaults: TopicDefaults) -> ConfigEntry:
    key = topic_configs.KNOWN[name]
    values = defaults.values_of_topic(name, configs)
    return ConfigEntry(name, values, _kind(name, key), key.doc)


def _kind(name: str, key: ConfigKey) -> int:
    match key.parse(key.default):
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
    return BOOLEAN if key.default in ("true", "false") else STRING


class Configs:
    """The APIs of configs.

    One per listener. `node_id` is the node id of the listener, which is the name of its broker
    resource.
    """

    def __init__(self, context: Context, node_id: int) -> None:
        self._context = context
        self._broker = context.broker
        self._operations = context.operations.configs
        self._node_id = node_id

    def apis(self) -> Iterable[Api]:
        """Return the rows of these APIs."""
        return (
            Api(
                DescribeConfigsRequest,
                DescribeConfigsResponse,
                self.describe_configs,
                is_waiting=True,
            ),
            Api(AlterConfigsRequest, AlterConfigsResponse, self.alter_configs),
            Api(
                IncrementalAlterConfigsRequest,
                IncrementalAlterConfigsResponse,
                self.incremental_alter_configs,
            ),
        )

    # -- DescribeConfigs

    async def describe_configs(
        self, request: DescribeConfigsRequest, client: ApiClient
    ) -> DescribeConfigsResponse | EncodedAnswer:
        """Answer DescribeConfigs."""
        call = AdminCall(self._context, "DescribeConfigs", client)
        topics = self._broker.state.topics
        resources = {
            (resource.resource_type, resource.resource_name): resource
            for resource in request.resources
        }
        if any(kind == OF_TOPIC and name not in topics for kind, name in resources):
            code, message = await call.outcome(self._broker.refresh())
            if code:
                failed = [_undescribed(resource, code, message) for resource in resources.values()]
                return DescribeConfigsResponse(throttle_time_ms=0, results=failed)
        results, described = [], list[tuple[DescribeConfigsResult, Topic | None]]()
        async for resource in sliced(resources.values()):
            forbidden = _forbidden(resource.resource_type)
            code, message = await call.outcome(self._check(call, resource), forbidden)
            results.append(_undescribed(resource, code, message))
            if not code:
                described.append((results[-1], topics.get(resource.resource_name)))
        response = DescribeConfigsResponse(throttle_time_ms=0, results=results)

        def describe() -> None:
            for result, topic in described:
                config_names = resources[
                    result.resource_type, result.resource_name
                ].configuration_keys
                result.configs = self._described(result, topic, config_names, request)

        if len(described) <= INLINE_MAX:
            describe()
            return response

        def encode() -> list[bytes | memoryview]:
            describe()
            return encoder(DescribeConfigsResponse, client.version)(response)

        return await self._context.encoded(client.rights, encode)

    async def _check(self, call: AdminCall, resource: DescribeConfigsResource) -> None:
        """Raise an error if the resource or its type is unknown, or the client may not see it."""
        kind, name = resource.resource_type, resource.resource_name
        if kind == OF_TOPIC:
            await self._operations.check_topic_description(call.rights, name)
            return
        await self._operations.check_defaults_description(call.rights)
        if kind == OF_BROKER:
            self._check_node(name)
        elif kind not in (OF_CLIENT_METRICS, OF_GROUP):
            raise ChangeRefused(Code.INVALID_REQUEST, f"resources of type {kind} have no configs")

    def _check_node(self, name: str) -> None:
        """Raise ChangeRefused unless the name is empty (all brokers), or this broker's node id."""
        if name not in ("", str(self._node_id)):
            raise ChangeRefused(
                Code.INVALID_REQUEST, f"this broker has the node id {self._node_id}, not {name!r}"
            )

    def _described(
        self,
        result: DescribeConfigsResult,
        topic: Topic | None,
        config_names: Sequence[str] | None,
        request: DescribeConfigsRequest,
    ) -> list[DescribeConfigsResourceResult]:
        is_topic = result.resource_type == OF_TOPIC
        if is_topic:
            own = {} if topic is None else topic.configs
            defaults = self._broker.state.defaults
            entries = entries_of(own, defaults)
            names = set(config_names or ()) & topic_configs.WITHOUT_EFFECT.keys()
            names -= {entry.name for entry in entries}
            entries += [_entry(name, {}, defaults) for name in sorted(names)]
        elif result.resource_type == OF_BROKER:
            entries = self._of_broker(is_cluster=not result.resource_name)
        else:
            entries = []
        if config_names:  # as in Kafka, an empty list asks for all
            requested_names = set(config_names)
            entries = [entry for entry in entries if entry.name in requested_names]
        is_read_only = not is_topic and bool(result.resource_name)
        return [
            DescribeConfigsResourceResult(
                name=entry.name,
                value=entry.values[0].value,
                read_only=is_read_only,
                config_source=entry.values[0].source,
                is_sensitive=False,
                synonyms=_synonyms(entry) if request.include_synonyms else [],
                config_type=entry.kind,
                documentation=entry.doc if request.include_documentation else None,
            )
            for entry in entries
        ]

    def _of_broker(self, *, is_cluster: bool) -> list[ConfigEntry]:
        """Return the defaults in effect at this broker.

        If `is_cluster`, as in Kafka, return only those that the cluster sets.
        """
        own = self._broker.state.defaults.values
        entries = [
            ConfigEntry(name, self._default_values(name), _kind(name, key), key.doc)
            for name, key in topic_configs.DEFAULTS.items()
            if name in own or not is_cluster
        ]
        if not is_cluster:
            for name in ("default.replication.factor", MIN_INSYNC_REPLICAS):
                value = ConfigValue(name, "1", ConfigSource.DEFAULT_CONFIG)
                entries.append(ConfigEntry(name, [value], LONG, "the object store replicates"))
        return entries

    def _default_values(self, name: str) -> Sequence[ConfigValue]:
        values = self._context.settings.topic_defaults
        return self._broker.state.defaults.values_of_default(name, values)

    # -- AlterConfigs, IncrementalAlterConfigs

    async def alter_configs(
        self, request: AlterConfigsRequest, client: ApiClient
    ) -> AlterConfigsResponse:
        """Answer AlterConfigs: configs that a resource does not name get their defaults."""

        def changes_of(changed: Changed, resource: AlterConfigsResource) -> dict[str, str | None]:
            changes: dict[str, str | None] = dict.fromkeys(changed.own)
            for config in resource.configs:
                changes[config.name] = _given(config.name, config.value)
            return changes

        call = AdminCall(self._context, "AlterConfigs", client)
        responses = await self._alter(call, request.resources, changes_of, request.validate_only)
        return AlterConfigsResponse(throttle_time_ms=call.throttle_ms, responses=responses)

    async def incremental_alter_configs(
        self, request: IncrementalAlterConfigsRequest, client: ApiClient
    ) -> IncrementalAlterConfigsResponse:
        """Answer IncrementalAlterConfigs.

        If two clients append to a list at once, one of the two values may be lost.
        """

        def changes_of(
            changed: Changed, resource: IncrementalAlterConfigsResource
        ) -> dict[str, str | None]:
            return {
                config.name: _changed(changed, config.name, config.config_operation, config.value)
                for config in resource.configs
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
        changes_of: "Callable[[Changed, Any], dict[str, str | None]]",
        validate_only: bool,
    ) -> list[AlterConfigsResourceResponse]:
        identity = attrgetter("resource_type", "resource_name")
        changed, repeated_resources = await distinct(
            cast("Sequence[AnyResource]", resources), identity
        )

        async def change(resource: "AnyResource") -> None:
            kind, name = resource.resource_type, resource.resource_name
            if (kind, name) in repeated_resources:
                raise ChangeRefused(
                    Code.INVALID_REQUEST, f"resource {name!r} is in the request twice"
                )
            if kind == OF_BROKER and name:
                await self._reset_broker(call, resource)
                return
            if kind == OF_TOPIC:
                await self._alter_topic(call, name, resource, changes_of, validate_only)
            else:
                await self._alter_defaults(call, resource, changes_of, validate_only)

        async def serve(resource: "AnyResource") -> AlterConfigsResourceResponse:
            forbidden = _forbidden(resource.resource_type)
            code, message = await call.outcome(change(resource), forbidden)
            return AlterConfigsResourceResponse(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )

        return await for_each(changed, serve)

    async def _alter_topic(
        self,
        call: AdminCall,
        name: str,
        resource: "AnyResource",
        changes_of: "Callable[[Changed, Any], dict[str, str | None]]",
        validate_only: bool,
    ) -> None:
        async def texts_of(topic: Topic) -> ConfigTexts:
            await _check_once(resource)
            defaults = self._broker.state.defaults

            def values(config: str) -> list[ConfigValue]:
                return defaults.values_of_topic(config, topic.configs)

            return changes_of(Changed(topic_configs.KNOWN, topic.configs, values), resource)

        texts = await self._operations.alter_topic(
            call, name, texts_of, validate_only=validate_only
        )
        if not validate_only:
            call.warn_of_configs(name, texts)

    async def _reset_broker(self, call: AdminCall, resource: "AnyResource") -> None:
        """Take a request that only deletes configs of this broker, which has none.

        kafka-reassign-partitions deletes its throttles in this way. Raise ChangeRefused for every
        other request.
        """
        await self._operations.check_alteration(call.rights)
        name = resource.resource_name
        self._check_node(name)
        if any(getattr(config, "config_operation", SET) != DELETE for config in resource.configs):
            raise ChangeRefused(
                Code.INVALID_CONFIG,
                f"broker {name} has no configs of its own that a request can change: change its "
                "settings, or the defaults of the cluster (the broker resource without a name, "
                "--entity-default)",
            )

    async def _alter_defaults(
        self,
        call: AdminCall,
        resource: "AnyResource",
        changes_of: "Callable[[Changed, Any], dict[str, str | None]]",
        validate_only: bool,
    ) -> None:
        if resource.resource_type != OF_BROKER:
            await self._operations.check_alteration(call.rights)
            kind = resource.resource_type
            raise ChangeRefused(Code.INVALID_REQUEST, f"resources of type {kind} have no configs")

        async def texts_of(defaults: TopicDefaults) -> ConfigTexts:
            await _check_once(resource)
            target = Changed(topic_configs.DEFAULTS, defaults.values, self._default_values)
            return changes_of(target, resource)

        await self._operations.alter_defaults(call, texts_of, validate_only=validate_only)


AnyResource = AlterConfigsResource | IncrementalAlterConfigsResource


async def _check_once(resource: AnyResource) -> None:
    """Raise ChangeRefused if a config is given twice."""
    _, again = await distinct(resource.configs, attrgetter("name"))
    if again:
        raise ChangeRefused(Code.INVALID_REQUEST, f"config {min(again)!r} is given twice")


def _forbidden(kind: int) -> Code:
    """Return the code of a refused right to a resource of this type."""
    is_topic = kind == OF_TOPIC
    return Code.TOPIC_AUTHORIZATION_FAILED if is_topic else Code.CLUSTER_AUTHORIZATION_FAILED


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


def _synonyms(entry: ConfigEntry) -> list[DescribeConfigsSynonym]:
    return [
        DescribeConfigsSynonym(
            name=config_value.name, value=config_value.value, source=config_value.source
        )
        for config_value in entry.values
    ]


def _given(name: str, value: str | None) -> str:
    if value is None:
        raise ChangeRefused(Code.INVALID_REQUEST, f"config {name!r} has no value")
    return value


def _changed(changed: Changed, name: str, operation: int, value: str | None) -> str | None:
    """Return the new value of a config, None for its default.

    Raises ChangeRefused and InvalidConfig.
    """
    if operation == DELETE:
        return None
    text = _given(name, value)
    if operation == SET:
        return text
    if operation not in (APPEND, SUBTRACT):
        raise ChangeRefused(
            Code.INVALID_REQUEST, f"config {name!r}: operation {operation} is unknown"
        )
    key = changed.known.get(name)
    if key is None or _kind(name, key) != LIST:
        raise ChangeRefused(
            Code.INVALID_CONFIG, f"config {name!r} is no list: only lists take APPEND and SUBTRACT"
        )
    old_parts = _listed(changed.values(name)[0].value)
    parts = _listed(text)
    if operation == APPEND:
        return ",".join([*old_parts, *(part for part in parts if part not in old_parts)])
    return ",".join(part for part in old_parts if part not in parts)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
