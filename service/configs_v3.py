"""Configs of topics in Confluent's v3 dialect: all of them with where their values come from.

A change is one action of the log, so several configs change at once or not at all (I4).
"""

from typing import Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from service.admin_v3 import ConfigValue, Held, HeldTopic, Made, known_cluster
from service.errors import NoSuchResource
from service.resources_v3 import TopicConfigData, TopicConfigList
from service.topics import CREATE_ERRORS, ERRORS, Asking, FreshLog, TopicName, config_text, decided
from storage import topics
from storage.acls import DESCRIBE_CONFIGS, TOPIC
from storage.errors import InvalidRequest


class NewValue(BaseModel):
    model_config = ConfigDict(extra="forbid")
    value: ConfigValue = Field(default=None, examples=["86400000"])


class ConfigChange(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(examples=["retention.ms"])
    value: ConfigValue = Field(default=None, examples=["86400000"])
    operation: Literal["SET", "DELETE"] | None = None


class ConfigChanges(BaseModel):
    model_config = ConfigDict(extra="forbid")
    data: list[ConfigChange]
    validate_only: bool = False


router = APIRouter(
    prefix="/clusters/{cluster_id}/topics",
    tags=["v3 configs"],
    dependencies=[Depends(known_cluster)],
    responses=ERRORS | CREATE_ERRORS,
)


@router.get("/-/configs")
async def list_all_configs(log: FreshLog, make: Made, asking: Asking) -> TopicConfigList:
    """The configs of all topics of which they may be described."""
    data = [
        each
        for topic in log.state.topics.values()
        if asking.may(DESCRIBE_CONFIGS, TOPIC, topic.name)
        for each in make.configs(topic.name, topic.configs)
    ]
    return TopicConfigList(metadata=make.listed("topics", "-", "configs"), data=data)


@router.get("/{topic_name}/default-configs")
async def list_default_configs(topic_name: TopicName, make: Made) -> TopicConfigList:
    """The configs that a topic without any of its own has; it need not exist."""
    at = make.listed("topics", topic_name, "default-configs")
    return TopicConfigList(metadata=at, data=make.configs(topic_name, {}))


@router.get("/{topic_name}/configs")
async def list_configs(held: HeldTopic) -> TopicConfigList:
    """Every config of a topic, set or default."""
    name = held.topic.name
    return TopicConfigList(
        metadata=held.make.listed("topics", name, "configs"),
        data=held.make.configs(name, held.topic.configs),
    )


@router.get("/{topic_name}/configs/{name}")
async def get_config(name: str, held: HeldTopic) -> TopicConfigData:
    """One config."""
    if name not in topics.CONFIGS:
        raise NoSuchResource(f"Config {name} cannot be found for TOPIC {held.topic.name}.")
    return held.make.config(held.topic.name, name, held.topic.configs)


@router.put("/{topic_name}/configs/{name}", status_code=204)
async def set_config(name: str, body: NewValue, held: HeldTopic) -> None:
    """Set one config."""
    await _alter(held, [ConfigChange(name=name, value=body.value)])


@router.delete("/{topic_name}/configs/{name}", status_code=204)
async def reset_config(name: str, held: HeldTopic) -> None:
    """Return one config to its default."""
    await _alter(held, [ConfigChange(name=name, operation="DELETE")])


@router.post("/{topic_name}/configs:alter", status_code=204)
async def alter_configs(body: ConfigChanges, held: HeldTopic) -> None:
    """Set and reset several configs at once, all or none."""
    await _alter(held, body.data, validate_only=body.validate_only)


async def _alter(held: Held, asked: list[ConfigChange], *, validate_only: bool = False) -> None:
    changes: dict[str, str | None] = {}
    for change in asked:
        if change.name in changes:
            raise InvalidRequest(f"config {change.name!r} is given twice")
        value = None
        if change.operation != "DELETE":
            if change.value is None:
                raise InvalidRequest(f"Null value not supported for : {change.name}")
            value = config_text(change.value)
        if value is not None or change.name not in topics.CONFIGS:
            topics.check(change.name, value or "")
        changes[change.name] = value
    if changes and not validate_only:
        await decided(held.log.alter_topic(held.topic.name, changes))
