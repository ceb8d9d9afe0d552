"""Configs of topics in Confluent's v3 dialect: values and their sources.

A change is one action of the log, so several configs change together or not at all (I4).
"""

from typing import Literal

from pydantic import Field

from tidelog.service.formats.bodies import StrictModel
from tidelog.service.formats.resources_v3 import TopicConfigData, TopicConfigList, configs_shown
from tidelog.service.http.errors import NoSuchResource
from tidelog.service.http.paging import WantedPage, answer_page
from tidelog.service.http.route import V3, Permission, Route, RouteAccess, RouteDoc
from tidelog.service.routes.dependencies import (
    CREATE_ERRORS,
    ERRORS,
    ConfigValue,
    FreshLog,
    PathTopic,
    Resources,
    Rights,
    TopicContext,
    TopicName,
    config_text,
    decided,
    keys_of_topics,
)
from tidelog.storage.core import topic_configs
from tidelog.storage.core.acls import ALTER_CONFIGS, DESCRIBE_CONFIGS, TOPIC
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.state.cluster_state import Topic


class NewValue(StrictModel):
    value: ConfigValue = Field(default=None, examples=["86400000"])


class ConfigChange(StrictModel):
    name: str = Field(examples=["retention.ms"])
    value: ConfigValue = Field(default=None, examples=["86400000"])
    operation: Literal["SET", "DELETE"] | None = None


class ConfigChanges(StrictModel):
    data: list[ConfigChange]
    validate_only: bool = False


async def list_all_configs(
    log: FreshLog, make: Resources, rights: Rights, page: WantedPage
) -> TopicConfigList:
    """The configs of all topics whose configs the caller may describe."""

    def shown_of(topic: Topic) -> list[str] | None:
        is_shown = rights.may(DESCRIBE_CONFIGS, TOPIC, topic.name)
        return sorted(configs_shown(topic.configs)) if is_shown else None

    def config(key: tuple[str, str | None]) -> TopicConfigData | None:
        name, of = key
        topic = log.state.topics.get(name)
        return None if topic is None or of is None else make.config(name, of, topic.configs)

    keys = await keys_of_topics(log, page.position(str, str), shown_of)
    shell = TopicConfigList(metadata=make.listed("topics", "-", "configs"), data=[])
    found: TopicConfigList = await answer_page(page, shell, keys, config)
    return found


async def list_default_configs(topic_name: TopicName, make: Resources) -> TopicConfigList:
    """The default value of every config. The topic need not exist."""
    at = make.listed("topics", topic_name, "default-configs")
    return TopicConfigList(metadata=at, data=make.configs(topic_name, {}))


async def list_configs(context: PathTopic) -> TopicConfigList:
    """Every config of a topic, with the topic's value or the default."""
    name = context.topic.name
    return TopicConfigList(
        metadata=context.make.listed("topics", name, "configs"),
        data=context.make.configs(name, context.topic.configs),
    )


async def get_config(name: str, context: PathTopic) -> TopicConfigData:
    """One config."""
    if name not in topic_configs.KNOWN:
        raise NoSuchResource(f"Config {name} cannot be found for TOPIC {context.topic.name}.")
    return context.make.config(context.topic.name, name, context.topic.configs)


async def set_config(name: str, body: NewValue, context: PathTopic) -> None:
    """Set one config."""
    await _alter(context, [ConfigChange(name=name, value=body.value)])


async def reset_config(name: str, context: PathTopic) -> None:
    """Return one config to its default."""
    await _alter(context, [ConfigChange(name=name, operation="DELETE")])


async def alter_configs(body: ConfigChanges, context: PathTopic) -> None:
    """Set and reset several configs together, all or none."""
    await _alter(context, body.data, validate_only=body.validate_only)


async def _alter(
    context: TopicContext, requested: list[ConfigChange], *, validate_only: bool = False
) -> None:
    changes: dict[str, str | None] = {}
    for change in requested:
        if change.name in changes:
            raise InvalidRequest(f"config {change.name!r} is given twice")
        value = None
        if change.operation != "DELETE":
            if change.value is None:
                raise InvalidRequest(f"Null value not supported for : {change.name}")
            value = config_text(change.value)
        if value is not None or change.name not in topic_configs.KNOWN:
            topic_configs.check(change.name, value or "")
        changes[change.name] = value
    if changes and not validate_only:
        await decided(context.log.alter_topic(context.topic.name, changes))


_TOPIC = "/clusters/{cluster_id}/topics/{topic_name}"
_CONFIG = f"{_TOPIC}/configs/{{name}}"
_ALL = "/clusters/{cluster_id}/topics/-/configs"
_CHECKED = RouteAccess.CHECKED_BY_HANDLER
_DESCRIBE = Permission(DESCRIBE_CONFIGS, TOPIC, "topic_name")
_ALTER = Permission(ALTER_CONFIGS, TOPIC, "topic_name")
_LABEL = "v3 configs"
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
)
