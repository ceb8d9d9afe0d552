"""A topic of the cluster state: its configs and its partitions. Pure."""

from collections.abc import Mapping
from functools import cached_property

import msgspec

from tidelog.storage.core import object_keys, topic_configs
from tidelog.storage.core.topic_configs import (
    NO_DEFAULTS,
    TopicConfig,
    TopicDefaults,
)
from tidelog.storage.state.partition import Partition


class Topic(msgspec.Struct, array_like=True, forbid_unknown_fields=True, dict=True):
    """One topic.

    If a topic is created again under the same name, it gets another `topic_id`. `configs` are the
    configs that the topic sets; `config` has the effective ones.
    """

    name: str
    topic_id: str
    created_ms: int
    configs: dict[str, str]
    partitions: list[Partition]

    @property
    def prefix(self) -> str:
        return object_keys.topic(self.name, self.topic_id)

    def alter(self, changes: Mapping[str, str | None]) -> None:
        """Set these configs. None resets a config to its default."""
        self.configs = self._configs_after(changes)
        self.inherit(self.defaults)

    def config_after(self, changes: Mapping[str, str | None]) -> TopicConfig:
        """Return the effective configs that the topic would have after `alter`."""
        return topic_configs.effective(self._configs_after(changes), self.defaults)

    def _configs_after(self, changes: Mapping[str, str | None]) -> dict[str, str]:
        entries = (self.configs | dict(changes)).items()
        return {name: text for name, text in entries if text is not None}

    @cached_property
    def defaults(self) -> TopicDefaults:
        """The cluster's defaults. The state sets them; a deleted topic keeps its last ones."""
        return NO_DEFAULTS

    @cached_property
    def config(self) -> TopicConfig:
        """The effective configs. All code that obeys configs reads this."""
        return topic_configs.effective(self.configs, self.defaults)

    def inherit(self, defaults: TopicDefaults) -> None:
        """Take these defaults of the cluster."""
        self.defaults = defaults
        self.__dict__.pop("config", None)

    def grow(self, partitions: int) -> int:
        """Grow to this number of partitions; return how many are new."""
        new_partitions = [Partition() for _ in range(len(self.partitions), partitions)]
        self.partitions += new_partitions
        return len(new_partitions)


class DeletedTopic(
    msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True
):
    """The record of a deleted topic. It is kept until the topic's prefix has no objects."""

    name: str
    topic_id: str
    deleted_ms: int
