"""Configs of topics, and the cluster's defaults of them, in Confluent's v3 dialect.

A change is one action of the log, so several configs change together or not at all (I4). The
defaults have the names that Kafka's brokers have for them. `broker-configs` shows all defaults,
also those that the cluster does not set. A broker has the same, and no request changes only its.
"""

from typing import Literal

from fastapi import Request
from pydantic import Field

from tidelog.service.formats.resources_v3 import (
    BrokerConfigData,
    BrokerConfigList,
    ClusterConfigData,
    ClusterConfigList,
    TopicConfigData,
    TopicConfigList,
)
from tidelog.service.formats.strict_bodies import Items, StrictModel
from tidelog.service.http.errors import NoSuchResource
from tidelog.service.http.paging import WantedPage, answer_page
from tidelog.service.http.route import V3, Permission, Route, RouteAccess, RouteDoc
from tidelog.service.operations.change_request import HttpChange
from tidelog.service.operations.configs import ConfigTexts
from tidelog.service.operations.operations import Operations
from tidelog.service.operations.rights import (
    ALTER_CONFIGS,
    ALTER_DEFAULTS,
    DESCRIBE_CONFIGS,
    DESCRIBE_DEFAULTS,
)
from tidelog.service.routes.cluster_v3 import LiveBroker, broker_number
from tidelog.service.routes.dependencies import (
    CREATE_ERRORS,
    ERRORS,
    BrokerOperations,
    CallerChange,
    ConfigValue,
    FreshBroker,
    PathTopic,
    Resources,
    Rights,
    TopicName,
    config_text,
    hosted_topic,
    keys_of_topics,
)
from tidelog.service.security.audit import note
from tidelog.storage.broker import Broker
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.core import topic_configs
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.core.topic_configs import DEFAULTS, TopicDefaults
from tidelog.storage.state.topic import Topic

READ_ONLY = (
    "configs of one broker are read-only: they are settings of its process, and the defaults of "
    "the cluster, which can be changed as broker-configs"
)


class NewValue(StrictModel):
    value: ConfigValue = Field(default=None, examples=["86400000"])


class ConfigChange(StrictModel):
    name: str = Field(examples=["retention.ms"])
    value: ConfigValue = Field(default=None, examples=["86400000"])
    operation: Literal["SET", "DELETE"] | None = None


class ConfigChanges(StrictModel):
    data: Items[ConfigChange]
    validate_only: bool = False


async def list_all_configs(
    broker: FreshBroker,
    make: Resources,
    operations: BrokerOperations,
    rights: Rights,
    page: WantedPage,
) -> TopicConfigList:
    """The configs of all topics whose configs the caller may describe."""

    def shown_of(topic: Topic) -> list[str] | None:
        is_shown = operations.configs.is_shown(rights, topic.name)
        return sorted(topic_configs.shown(topic.configs)) if is_shown else None

    def config(key: tuple[str, str | None]) -> TopicConfigData | None:
        name, of = key
        topic = broker.state.topics.get(name)
        if topic is None or of is None:
            return None
        return make.config(name, of, topic.configs, broker.state.defaults)

    keys = await keys_of_topics(broker, page.position(str, str), shown_of)
    shell = TopicConfigList(metadata=make.listed("topics", "-", "configs"), data=[])
    response: TopicConfigList = await answer_page(page, shell, keys, config)
    return response


async def list_default_configs(
    topic_name: TopicName, broker: FreshBroker, make: Resources
) -> TopicConfigList:
    """The default value of every config: the cluster's, else the built-in one.

    The topic need not exist.
    """
    metadata = make.listed("topics", topic_name, "default-configs")
    return TopicConfigList(
        metadata=metadata, data=make.configs(topic_name, {}, broker.state.defaults)
    )


async def list_configs(context: PathTopic) -> TopicConfigList:
    """Every config of a topic, with the value in effect: the topic's or the default."""
    name = context.topic.name
    return TopicConfigList(
        metadata=context.make.listed("topics", name, "configs"),
        data=context.make.configs(name, context.topic.configs, context.broker.state.defaults),
    )


async def get_config(name: str, context: PathTopic) -> TopicConfigData:
    """One config."""
    if name not in topic_configs.KNOWN:
        raise NoSuchResource(f"Config {name} cannot be found for TOPIC {context.topic.name}.")
    topic, defaults = context.topic, context.broker.state.defaults
    return context.make.config(topic.name, name, topic.configs, defaults)


async def set_config(
    name: str,
    body: NewValue,
    topic_name: TopicName,
    operations: BrokerOperations,
    change: CallerChange,
) -> None:
    """Set one config."""
    await _alter(operations, change, topic_name, [ConfigChange(name=name, value=body.value)])


async def reset_config(
    name: str, topic_name: TopicName, operations: BrokerOperations, change: CallerChange
) -> None:
    """Return one config to its default."""
    await _alter(operations, change, topic_name, [ConfigChange(name=name, operation="DELETE")])


async def alter_configs(
    body: ConfigChanges, topic_name: TopicName, operations: BrokerOperations, change: CallerChange
) -> None:
    """Set and reset several configs together, all or none."""
    await _alter(operations, change, topic_name, body.data, validate_only=body.validate_only)


async def _alter(
    operations: Operations,
    change: HttpChange,
    topic_name: str,
    requested: list[ConfigChange],
    *,
    validate_only: bool = False,
) -> None:
    async def texts_of(_: Topic) -> ConfigTexts:
        return changed_texts(requested)

    with hosted_topic():
        await operations.configs.alter_topic(
            change, topic_name, texts_of, validate_only=validate_only
        )


def changed_texts(requested: list[ConfigChange]) -> dict[str, str | None]:
    """Return the wanted text of each config, None for its default. Raises InvalidRequest."""
    changes: dict[str, str | None] = {}
    for change in requested:
        if change.name in changes:
            raise InvalidRequest(f"config {change.name!r} is given twice")
        value = None
        if change.operation != "DELETE":
            if change.value is None:
                raise InvalidRequest(f"Null value not supported for : {change.name}")
            value = config_text(change.value)
        changes[change.name] = value
    return changes


# -- the cluster's defaults


async def list_cluster_configs(
    request: Request, broker: FreshBroker, make: Resources
) -> ClusterConfigList:
    """Every default of the cluster, with its value in effect and the source.

    If the cluster does not set a default, the source is a setting of this broker, or the built-in
    default.
    """
    return ClusterConfigList(
        metadata=make.listed("broker-configs"),
        data=[
            make.cluster_config(name, _values(request, broker, name)) for name in sorted(DEFAULTS)
        ],
    )


async def get_cluster_config(
    name: str, request: Request, broker: FreshBroker, make: Resources
) -> ClusterConfigData:
    """One default of the cluster."""
    if name not in DEFAULTS:
        raise NoSuchResource(f"Config {name} cannot be found for the brokers of the cluster.")
    return make.cluster_config(name, _values(request, broker, name))


async def set_cluster_config(
    name: str, body: NewValue, operations: BrokerOperations, change: CallerChange
) -> None:
    """Set one default of the cluster. It is in effect for existing topics, too."""
    await _alter_defaults(operations, change, [ConfigChange(name=name, value=body.value)])


async def reset_cluster_config(
    name: str, operations: BrokerOperations, change: CallerChange
) -> None:
    """Remove one default of the cluster. Then the built-in default is in effect."""
    await _alter_defaults(operations, change, [ConfigChange(name=name, operation="DELETE")])


async def alter_cluster_configs(
    body: ConfigChanges, operations: BrokerOperations, change: CallerChange
) -> None:
    """Set and remove several defaults of the cluster together, all or none."""
    await _alter_defaults(operations, change, body.data, validate_only=body.validate_only)


async def _alter_defaults(
    operations: Operations,
    change: HttpChange,
    requested: list[ConfigChange],
    *,
    validate_only: bool = False,
) -> None:
    async def texts_of(_: TopicDefaults) -> ConfigTexts:
        return changed_texts(requested)

    texts = await operations.configs.alter_defaults(change, texts_of, validate_only=validate_only)
    if texts and not validate_only:
        principal = change.rights.principal
        note("%s changed defaults: %s", principal, topic_configs.in_words(texts))


def _values(
    request: Request, broker: Broker, name: str, member: Member | None = None
) -> list[topic_configs.ConfigValue]:
    """Return the values of a default at a live broker, None for this one.

    This broker does not know the settings of the others.
    """
    settings = {} if member is not None else request.app.state.settings.topic_defaults
    return broker.state.defaults.values_of_default(name, settings)


# -- brokers


async def list_broker_configs(
    request: Request, member: LiveBroker, broker: FreshBroker, make: Resources
) -> BrokerConfigList:
    """Every default as the broker has it.

    For a broker that does not answer this request, the values are without its settings.
    """
    number = broker_number(member)
    return BrokerConfigList(
        metadata=make.listed("brokers", number, "configs"),
        data=[
            make.broker_config(number, name, _values(request, broker, name, member))
            for name in sorted(DEFAULTS)
        ],
    )


async def list_all_broker_configs(
    request: Request, broker: FreshBroker, make: Resources
) -> BrokerConfigList:
    """Every default as the broker that answers has it."""
    listed = await list_broker_configs(request, None, broker, make)
    return listed.model_copy(update={"metadata": make.listed("brokers", "-", "configs")})


async def get_broker_config(
    name: str, request: Request, member: LiveBroker, broker: FreshBroker, make: Resources
) -> BrokerConfigData:
    """One default as the broker has it."""
    number = broker_number(member)
    if name not in DEFAULTS:
        raise NoSuchResource(f"Config {name} cannot be found for BROKER {number}.")
    return make.broker_config(number, name, _values(request, broker, name, member))


async def refuse_broker_config(_: LiveBroker) -> None:
    """Refuse the change, because a broker's settings belong to its process.

    `broker-configs` of the cluster can be changed.
    """
    raise InvalidRequest(READ_ONLY)


_TOPIC = "/clusters/{cluster_id}/topics/{topic_name}"
_CONFIG = f"{_TOPIC}/configs/{{name}}"
_ALL = "/clusters/{cluster_id}/topics/-/configs"
_CHECKED = RouteAccess.CHECKED_BY_HANDLER
_DESCRIBE = Permission(DESCRIBE_CONFIGS, "topic_name")
_ALTER = Permission(ALTER_CONFIGS, "topic_name")
_CLUSTER_CONFIG = "/clusters/{cluster_id}/broker-configs/{name}"
_CLUSTER_CONFIGS = "/clusters/{cluster_id}/broker-configs"
_BROKER = "/clusters/{cluster_id}/brokers/{broker_id}"
_BROKER_CONFIG = f"{_BROKER}/configs/{{name}}"
_ALL_OF_BROKERS = "/clusters/{cluster_id}/brokers/-/configs"
_SHOW = Permission(DESCRIBE_DEFAULTS)
_CHANGE = Permission(ALTER_DEFAULTS)
_LABEL = "v3 configs"
_READ_DOC = RouteDoc(ERRORS)
_DOC = RouteDoc(ERRORS | CREATE_ERRORS)
_CHANGE_DOC = RouteDoc(ERRORS | CREATE_ERRORS, 204)

ROUTES = (
    Route("GET", _ALL, list_all_configs, _CHECKED, _LABEL, V3, _DOC),
    Route("GET", f"{_TOPIC}/default-configs", list_default_configs, _DESCRIBE, _LABEL, V3, _DOC),
    Route("GET", f"{_TOPIC}/configs", list_configs, _DESCRIBE, _LABEL, V3, _DOC),
    Route("GET", _CONFIG, get_config, _DESCRIBE, _LABEL, V3, _DOC),
    Route("PUT", _CONFIG, set_config, _ALTER, _LABEL, V3, _CHANGE_DOC),
    Route("DELETE", _CONFIG, reset_config, _ALTER, _LABEL, V3, _CHANGE_DOC),
    Route("POST", f"{_TOPIC}/configs:alter", alter_configs, _ALTER, _LABEL, V3, _CHANGE_DOC),
    Route("GET", _CLUSTER_CONFIGS, list_cluster_configs, _SHOW, _LABEL, V3, _READ_DOC),
    Route("GET", _CLUSTER_CONFIG, get_cluster_config, _SHOW, _LABEL, V3, _READ_DOC),
    Route("PUT", _CLUSTER_CONFIG, set_cluster_config, _CHANGE, _LABEL, V3, _CHANGE_DOC),
    Route("DELETE", _CLUSTER_CONFIG, reset_cluster_config, _CHANGE, _LABEL, V3, _CHANGE_DOC),
    Route(
        "POST",
        f"{_CLUSTER_CONFIGS}:alter",
        alter_cluster_configs,
        _CHANGE,
        _LABEL,
        V3,
        _CHANGE_DOC,
    ),
    Route("GET", _ALL_OF_BROKERS, list_all_broker_configs, _SHOW, _LABEL, V3, _READ_DOC),
    Route("GET", f"{_BROKER}/configs", list_broker_configs, _SHOW, _LABEL, V3, _READ_DOC),
    Route("GET", _BROKER_CONFIG, get_broker_config, _SHOW, _LABEL, V3, _READ_DOC),
    Route("PUT", _BROKER_CONFIG, refuse_broker_config, _CHANGE, _LABEL, V3, _READ_DOC),
    Route("DELETE", _BROKER_CONFIG, refuse_broker_config, _CHANGE, _LABEL, V3, _READ_DOC),
    Route("POST", f"{_BROKER}/configs:alter", refuse_broker_config, _CHANGE, _LABEL, V3, _READ_DOC),
)
