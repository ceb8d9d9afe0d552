"""Resources of the v3 dialect, with the fields of Confluent's OpenAPI, and a factory of resources.

This module has clusters, brokers, topics, partitions, replicas and configs. The resources of groups
are in service/routes/group_resources_v3.py, the resources of ACLs in service/routes/acls_v3.py.

The API shows the broker that answers as broker 1, the leader of every partition. Any process serves
every request, so a client does not need to choose a broker. `replication_factor` is 1, because the
object store replicates and does not show how.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, Field

from tidelog.service.http.urls import ClientUrl
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.core.topic_configs import ConfigSource, ConfigValue, TopicDefaults, shown
from tidelog.storage.state.partition import Partition

BROKER_ID = 1
"""Number of the logical broker. Every process is broker 1 to its clients."""
ConfigSourceName: TypeAlias = Literal[
    "DYNAMIC_TOPIC_CONFIG",
    "DYNAMIC_DEFAULT_BROKER_CONFIG",
    "STATIC_BROKER_CONFIG",
    "DEFAULT_CONFIG",
]


class Related(BaseModel):
    """A link to another resource."""

    related: str


class Metadata(BaseModel):
    """A resource's URL and name."""

    self_url: str = Field(serialization_alias="self")
    resource_name: str


class ListMetadata(BaseModel):
    """The URL of a list, and the URL of the next page if there is a next page."""

    self_url: str = Field(serialization_alias="self")
    next: str | None = None


class Resource(BaseModel):
    """Fields of every resource."""

    kind: str
    metadata: Metadata
    cluster_id: str


R = TypeVar("R", bound=Resource)


class ResourceList(BaseModel, Generic[R]):
    """Fields of every list."""

    kind: str
    metadata: ListMetadata
    data: list[R]


class ClusterData(Resource):
    kind: Literal["KafkaCluster"] = "KafkaCluster"
    controller: Related
    acls: Related
    brokers: Related
    broker_configs: Related
    consumer_groups: Related
    topics: Related
    partition_reassignments: Related


class BrokerData(Resource):
    kind: Literal["KafkaBroker"] = "KafkaBroker"
    broker_id: int
    host: str
    port: int
    rack: str | None = None
    configs: Related
    partition_replicas: Related


class TopicData(Resource):
    kind: Literal["KafkaTopic"] = "KafkaTopic"
    topic_name: str
    is_internal: bool = False
    replication_factor: int = 1
    partitions_count: int
    partitions: Related
    configs: Related
    partition_reassignments: Related
    authorized_operations: list[str] = []
    table_uri: str | None = Field(
        default=None, description="Delta table of the sealed records; null: in memory only"
    )


class _PartitionResource(Resource):
    topic_name: str
    partition_id: int


class PartitionData(_PartitionResource):
    kind: Literal["KafkaPartition"] = "KafkaPartition"
    leader: Related
    replicas: Related
    reassignment: Related


class PartitionOffsetsData(_PartitionResource):
    """The offsets of a partition that the request asks for."""

    kind: Literal["KafkaPartitionWithOffsets"] = "KafkaPartitionWithOffsets"
    earliest_offset: int | None = None
    latest_offset: int | None = None


class ReplicaData(_PartitionResource):
    kind: Literal["KafkaReplica"] = "KafkaReplica"
    broker_id: int = BROKER_ID
    is_leader: bool = True
    is_in_sync: bool = True
    broker: Related


class ConfigSynonym(BaseModel):
    name: str
    value: str
    source: ConfigSourceName


class ConfigData(Resource):
    """Fields of every config.

    `source` is that of `value`. `synonyms` are the values by precedence: first the one in effect,
    last the built-in default.
    """

    name: str
    value: str
    is_default: bool
    is_read_only: bool = False
    is_sensitive: bool = False
    source: ConfigSourceName
    synonyms: list[ConfigSynonym]


class TopicConfigData(ConfigData):
    kind: Literal["KafkaTopicConfig"] = "KafkaTopicConfig"
    topic_name: str


class ClusterConfigData(ConfigData):
    """A default of the cluster."""

    kind: Literal["KafkaClusterConfig"] = "KafkaClusterConfig"
    config_type: Literal["BROKER"] = "BROKER"


class BrokerConfigData(ConfigData):
    """A default as a broker has it. It is read-only: the cluster's can be changed."""

    kind: Literal["KafkaBrokerConfig"] = "KafkaBrokerConfig"
    broker_id: int
    is_read_only: bool = True


class ClusterList(ResourceList[ClusterData]):
    kind: Literal["KafkaClusterList"] = "KafkaClusterList"


class BrokerList(ResourceList[BrokerData]):
    kind: Literal["KafkaBrokerList"] = "KafkaBrokerList"


class TopicList(ResourceList[TopicData]):
    kind: Literal["KafkaTopicList"] = "KafkaTopicList"


class PartitionList(ResourceList[PartitionData]):
    kind: Literal["KafkaPartitionList"] = "KafkaPartitionList"


class ReplicaList(ResourceList[ReplicaData]):
    kind: Literal["KafkaReplicaList"] = "KafkaReplicaList"


class TopicConfigList(ResourceList[TopicConfigData]):
    kind: Literal["KafkaTopicConfigList"] = "KafkaTopicConfigList"


class ClusterConfigList(ResourceList[ClusterConfigData]):
    kind: Literal["KafkaClusterConfigList"] = "KafkaClusterConfigList"


class BrokerConfigList(ResourceList[BrokerConfigData]):
    kind: Literal["KafkaBrokerConfigList"] = "KafkaBrokerConfigList"


class EmptyList(BaseModel):
    """An empty list, for things that this service does not have: reassignments."""

    kind: str
    metadata: ListMetadata
    data: list[str] = []


class ResourceFactory:
    """Factory of the resources of one response.

    `mount` is the path of the API that the client used, `/v3` or `/kafka/v3`.
    """

    def __init__(self, client_url: ClientUrl, mount: str, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self._client_url = client_url
        self._clusters = f"{client_url.url}{mount}/clusters"
        self._cluster = f"{self._clusters}/{cluster_id}"

    def url(self, *parts: str | int) -> str:
        """Return the URL of the path below the cluster that consists of these parts."""
        return "/".join([self._cluster, *map(str, parts)])

    def listed(self, *parts: str | int) -> ListMetadata:
        return ListMetadata(self_url=self.url(*parts))

    def related(self, *parts: str | int) -> Related:
        return Related(related=self.url(*parts))

    def create(self, kind: type[R], crn: str, path: tuple[str | int, ...], **fields: Any) -> R:
        """Create a resource at `path`. `crn` is the end of its name, after the cluster."""
        name = f"crn:///kafka={self.cluster_id}{crn}"
        metadata = Metadata(self_url=self.url(*path), resource_name=name)
        return kind(metadata=metadata, cluster_id=self.cluster_id, **fields)

    def clusters(self) -> ClusterList:
        return ClusterList(metadata=ListMetadata(self_url=self._clusters), data=[self.cluster()])

    def cluster(self) -> ClusterData:
        return self.create(
            ClusterData,
            "",
            (),
            controller=self.related("brokers", BROKER_ID),
            acls=self.related("acls"),
            brokers=self.related("brokers"),
            broker_configs=self.related("broker-configs"),
            consumer_groups=self.related("consumer-groups"),
            topics=self.related("topics"),
            partition_reassignments=self.related("topics", "-", "partitions", "-", "reassignment"),
        )

    def broker(self) -> BrokerData:
        """Return the logical broker, at the address that the client uses."""
        port = self._client_url.port or (443 if self._client_url.proto == "https" else 80)
        return self._broker(BROKER_ID, self._client_url.host, port)

    def other_broker(self, member: Member) -> BrokerData:
        """Return a live peer, at the address of its liveness object."""
        return self._broker(member.number, urlsplit(member.address).hostname or "", member.port)

    def _broker(self, number: int, host: str, port: int) -> BrokerData:
        path = ("brokers", number)
        return self.create(
            BrokerData,
            f"/broker={number}",
            path,
            broker_id=number,
            host=host,
            port=port,
            configs=self.related(*path, "configs"),
            partition_replicas=self.related(*path, "partition-replicas"),
        )

    def topic(self, name: str, partitions: int, table_uri: str | None) -> TopicData:
        path = ("topics", name)
        return self.create(
            TopicData,
            f"/topic={name}",
            path,
            topic_name=name,
            partitions_count=partitions,
            partitions=self.related(*path, "partitions"),
            configs=self.related(*path, "configs"),
            partition_reassignments=self.related(*path, "partitions", "-", "reassignment"),
            table_uri=table_uri or None,
        )

    def partition(self, topic: str, number: int) -> PartitionData:
        path = ("topics", topic, "partitions", number)
        return self.create(
            PartitionData,
            f"/topic={topic}/partition={number}",
            path,
            topic_name=topic,
            partition_id=number,
            leader=self.related(*path, "replicas", BROKER_ID),
            replicas=self.related(*path, "replicas"),
            reassignment=self.related(*path, "reassignment"),
        )

    def partition_offsets(
        self, topic: str, number: int, partition: Partition, *, earliest: bool, latest: bool
    ) -> PartitionOffsetsData:
        return self.create(
            PartitionOffsetsData,
            f"/topic={topic}/partition={number}/offset",
            ("topics", topic, "partitions", number, "offset"),
            topic_name=topic,
            partition_id=number,
            earliest_offset=partition.log_start_offset if earliest else None,
            latest_offset=partition.high_watermark if latest else None,
        )

    def replica(self, topic: str, number: int) -> ReplicaData:
        return self.create(
            ReplicaData,
            f"/topic={topic}/partition={number}/replica={BROKER_ID}",
            ("topics", topic, "partitions", number, "replicas", BROKER_ID),
            topic_name=topic,
            partition_id=number,
            broker=self.related("brokers", BROKER_ID),
        )

    def config(
        self, topic: str, name: str, configs: Mapping[str, str], defaults: TopicDefaults
    ) -> TopicConfigData:
        """Return a known config of a topic. `configs` are the configs that the topic sets."""
        return self.create(
            TopicConfigData,
            f"/topic={topic}/config={name}",
            ("topics", topic, "configs", name),
            topic_name=topic,
            **_described(name, defaults.values_of_topic(name, configs)),
        )

    def configs(
        self, topic: str, configs: Mapping[str, str], defaults: TopicDefaults
    ) -> list[TopicConfigData]:
        """Return all configs with an effect, and the other configs that the topic sets."""
        return [self.config(topic, name, configs, defaults) for name in shown(configs)]

    def cluster_config(self, name: str, values: Sequence[ConfigValue]) -> ClusterConfigData:
        """Return a default of the cluster."""
        return self.create(
            ClusterConfigData,
            f"/broker-config={name}",
            ("broker-configs", name),
            **_described(name, values),
        )

    def broker_config(
        self, broker: int, name: str, values: Sequence[ConfigValue]
    ) -> BrokerConfigData:
        """Return a default as a broker has it."""
        return self.create(
            BrokerConfigData,
            f"/broker={broker}/config={name}",
            ("brokers", broker, "configs", name),
            broker_id=broker,
            **_described(name, values),
        )


def _described(name: str, values: Sequence[ConfigValue]) -> dict[str, Any]:
    synonyms = [
        ConfigSynonym.model_validate(
            {"name": value.name, "value": value.value, "source": value.source.name}
        )
        for value in values
    ]
    return {
        "name": name,
        "value": values[0].value,
        "is_default": values[0].source == ConfigSource.DEFAULT_CONFIG,
        "source": synonyms[0].source,
        "synonyms": synonyms,
    }
