"""Routes that say what a change of configs would make retention delete, before the change."""

from pydantic import BaseModel, Field

from tidelog.compaction.retention_preview import Expiry, expiries
from tidelog.service.formats.strict_bodies import Items, StrictModel
from tidelog.service.http.route import TIDELOG, Permission, Route, RouteDoc
from tidelog.service.operations.rights import ALTER_CONFIGS, ALTER_DEFAULTS
from tidelog.service.routes.configs_v3 import ConfigChange, changed_texts
from tidelog.service.routes.dependencies import CREATE_ERRORS, ERRORS, FreshBroker, TopicName
from tidelog.service.slices import sliced
from tidelog.storage.core import topic_configs
from tidelog.storage.state.topic import Topic

TOPICS_MAX = 1_000
"""Topics whose tables one request reads."""


class PreviewedChanges(StrictModel):
    data: Items[ConfigChange]


class ExpiringPartition(BaseModel):
    partition_id: int
    log_start_offset: int = Field(description="first record that the change deletes")
    next_log_start_offset: int = Field(description="first record that it keeps")
    records: int
    bytes: int


class ExpiringTopic(BaseModel):
    """Records that retention would delete because of a change.

    Other records, which retention deletes also without the change, do not count.
    """

    topic_name: str
    records: int
    bytes: int = Field(description="of these records, as they are stored")
    partitions: list[ExpiringPartition]


class ExpiringTopics(BaseModel):
    records: int
    bytes: int
    topics: list[ExpiringTopic]
    has_more: bool = Field(description="more topics than these change; their records do not count")


async def preview_topic(
    topic_name: TopicName, body: PreviewedChanges, broker: FreshBroker
) -> ExpiringTopic:
    """Preview the records that retention would delete if these configs of a topic changed."""
    topic = broker.state.topic(topic_name)
    changes = topic_configs.canonical_changes(changed_texts(body.data), broker.state.level)
    return _topic(topic, await expiries(broker, topic, topic.config_after(changes)))


async def preview_defaults(body: PreviewedChanges, broker: FreshBroker) -> ExpiringTopics:
    """Preview the records that retention would delete if these defaults of the cluster changed."""
    changes = topic_configs.canonical_defaults(changed_texts(body.data), broker.state.level)
    defaults = broker.state.defaults.changed(changes)
    topics: list[ExpiringTopic] = []
    changed = 0
    async for topic in sliced(list(broker.state.topics.values())):
        config = topic_configs.effective(topic.configs, defaults)
        if config == topic.config:
            continue
        changed += 1
        if changed > TOPICS_MAX:
            break
        if expired := await expiries(broker, topic, config):
            topics.append(_topic(topic, expired))
    return ExpiringTopics(
        records=sum(topic.records for topic in topics),
        bytes=sum(topic.bytes for topic in topics),
        topics=sorted(topics, key=lambda topic: -topic.records),
        has_more=changed > TOPICS_MAX,
    )


def _topic(topic: Topic, expired: list[Expiry]) -> ExpiringTopic:
    partitions = [
        ExpiringPartition(
            partition_id=expiry.partition,
            log_start_offset=expiry.start,
            next_log_start_offset=expiry.end,
            records=expiry.records,
            bytes=expiry.size,
        )
        for expiry in expired
    ]
    return ExpiringTopic(
        topic_name=topic.name,
        records=sum(expiry.records for expiry in expired),
        bytes=sum(expiry.size for expiry in expired),
        partitions=partitions,
    )


_ALTER = Permission(ALTER_CONFIGS, "topic_name")
_CHANGE = Permission(ALTER_DEFAULTS)
_DOC = RouteDoc(ERRORS | CREATE_ERRORS)
_TOPIC = "/topics/{topic_name}/configs:preview"

ROUTES = (
    Route("POST", _TOPIC, preview_topic, _ALTER, "topics", TIDELOG, _DOC),
    Route("POST", "/defaults:preview", preview_defaults, _CHANGE, "topics", TIDELOG, _DOC),
)
