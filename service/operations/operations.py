"""All operations of a broker."""

from collections.abc import Mapping
from typing import NamedTuple

from tidelog.service.operations.acls_keys_quotas import AccessOperations
from tidelog.service.operations.configs import ConfigOperations
from tidelog.service.operations.groups import GroupOperations
from tidelog.service.operations.records import RecordOperations
from tidelog.service.operations.topics import TopicOperations
from tidelog.storage.broker import Broker


class Operations(NamedTuple):
    """The operations by what they are about."""

    topics: TopicOperations
    configs: ConfigOperations
    access: AccessOperations
    groups: GroupOperations
    records: RecordOperations

    @classmethod
    def of(cls, broker: Broker, topic_defaults: Mapping[str, str]) -> "Operations":
        """Return the operations of a broker.

        `topic_defaults` are those that the broker's settings give
        (`RequestSettings.topic_defaults`).
        """
        return cls(
            TopicOperations(broker, topic_defaults),
            ConfigOperations(broker),
            AccessOperations(broker),
            GroupOperations(broker),
            RecordOperations(broker),
        )
