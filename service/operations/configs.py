"""Operations on the configs of topics, and on the cluster's defaults of them.

A change is one action of the log, so several configs change together or not at all (I4).
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from tidelog.service.operations.change_request import Change, begin
from tidelog.service.operations.rights import (
    ALTER_CONFIGS,
    ALTER_DEFAULTS,
    DESCRIBE_CONFIGS,
    DESCRIBE_DEFAULTS,
)
from tidelog.service.security.caller import CallerRights
from tidelog.storage.broker import Broker
from tidelog.storage.core import topic_configs
from tidelog.storage.core.topic_configs import TopicDefaults
from tidelog.storage.state.topic import Topic

ConfigTexts: TypeAlias = Mapping[str, str | None]
"""By name of a config: its new text, None to remove it."""


class ConfigOperations:
    """Stateless."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def is_shown(self, rights: CallerRights, topic: str) -> bool:
        """Whether the caller may describe the configs of a topic."""
        return rights.may(DESCRIBE_CONFIGS, topic)

    async def check_topic_description(self, rights: CallerRights, name: str) -> None:
        """Raise Forbidden unless the caller may describe the configs of a topic.

        If the view does not have the topic, raise UnknownTopic.
        """
        await rights.check(DESCRIBE_CONFIGS, name)
        self._broker.state.topic(name)

    async def check_defaults_description(self, rights: CallerRights) -> None:
        """Raise Forbidden unless the caller may describe the cluster's defaults."""
        await rights.check(DESCRIBE_DEFAULTS)

    async def check_alteration(self, rights: CallerRights) -> None:
        """Raise Forbidden unless the caller may alter the defaults, which the request leaves."""
        await rights.check(ALTER_DEFAULTS)

    async def alter_topic(
        self,
        change: Change,
        name: str,
        texts_of: Callable[[Topic], Awaitable[ConfigTexts]],
        *,
        validate_only: bool = False,
    ) -> ConfigTexts:
        """Set and reset configs of a topic.

        `texts_of` gets the newest state of the topic. Return what was changed. Raises Forbidden,
        QuotaExceeded, UnknownTopic, InvalidConfig, the errors of `texts_of`, and those of a commit.
        """
        await begin(self._broker, change, ALTER_CONFIGS, name)
        state = self._broker.state
        new_texts = await texts_of(state.topic(name))
        texts = topic_configs.canonical_changes(new_texts, state.level)
        if texts and not validate_only:
            await change.commit(name, self._broker.topics.alter(name, texts))
        return texts

    async def alter_defaults(
        self,
        change: Change,
        texts_of: Callable[[TopicDefaults], Awaitable[ConfigTexts]],
        *,
        validate_only: bool = False,
    ) -> ConfigTexts:
        """Set and remove defaults of the cluster, by Kafka's names for configs of brokers.

        The rest is as in `alter_topic`.
        """
        await begin(self._broker, change, ALTER_DEFAULTS)
        state = self._broker.state
        new_texts = await texts_of(state.defaults)
        texts = topic_configs.canonical_defaults(new_texts, state.level)
        if texts and not validate_only:
            label = f"defaults: {topic_configs.in_words(texts)}"
            await change.commit(label, self._broker.topics.set_defaults(texts))
        return texts
