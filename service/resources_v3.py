"""Resources of the v3 dialect: their fields as Confluent's OpenAPI has them, and how they are made.

A cluster here is one logical broker, number 1: any process serves everything, so a list of
processes would only invite clients to choose. Replication is the object store's business and is not
visible to us; what Kafka's clients read from `replication_factor` (how many copies of ours) is 1.
"""

from collections.abc import Iterable
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import BaseModel, Field

from service.paths import Origin
from service.topics import BROKER_ID
from storage.members import Member
from storage.partition import Partition
from storage.state import Topic
from storage.topics import CONFIGS

ConfigSource: TypeAlias = Literal["DYNAMIC_TOPIC_CONFIG", "DEFAULT_CONFIG"]


class Related(BaseModel):
    """A link to another resource."""

    related: str


class Metadata(BaseModel):
    """Where a resource is, and its name."""

    self_url: str = Field(serialization_alias="self")
    resource_name: str


class ListMetadata(BaseModel):
    """Where a list is; there is one page, always."""

    self_url: str = Field(serialization_alias="self")
    next: str | None = None


class ClusterData(BaseModel):
    kind: Literal["KafkaCluster"] = "KafkaCluster"
    metadata: Metadata
    cluster_id: str
    controller: Related
    acls: Related
    brokers: Related
    broker_configs: Related
    consumer_groups: Related
    topics: Related
    partition_reassignments: Related


class BrokerData(BaseModel):
    kind: Literal["KafkaBroker"] = "KafkaBroker"
    metadata: Metadata
    cluster_id: str
    broker_id: int
    host: str
    port: int
    rack: str | None = None
    configs: Related
    partition_replicas: Related


class TopicData(BaseModel):
    kind: Literal["KafkaTopic"] = "KafkaTopic"
    metadata: Metadata
    cluster_id: str
    topic_name: str
    is_internal: bool = False
    replication_factor: int = 1
    partitions_count: int
    partitions: Related
    configs: Related
    partition_reassignments: Related
    authorized_operations: list[str] = []


class PartitionData(BaseModel):
    kind: Literal["KafkaPartition"] = "KafkaPartition"
    metadata: Metadata
    cluster_id: str
    topic_name: str
    partition_id: int
    leader: Related
    replicas: Related
    reassignment: Related


class PartitionOffsetsData(BaseModel):
    """The offset that was not asked for is left out."""

    kind: Literal["KafkaPartitionWithOffsets"] = "KafkaPartitionWithOffsets"
    metadata: Metadata
    cluster_id: str
    topic_name: str
    partition_id: int
    earliest_offset: int | None = None
    latest_offset: int | None = None


class ReplicaData(BaseModel):
    kind: Literal["KafkaReplica"] = "KafkaReplica"
    metadata: Metadata
    cluster_id: str
    topic_name: str
    partition_id: int
    broker_id: int = BROKER_ID
    is_leader: bool = True
    is_in_sync: bool = True
    broker: Related


class ConfigSynonym(BaseModel):
    name: str
    value: str
    source: ConfigSource


class TopicConfigData(BaseModel):
    kind: Literal["KafkaTopicConfig"] = "KafkaTopicConfig"
    metadata: Metadata
    cluster_id: str
    topic_name: str
    name: str
    value: str
    is_default: bool
    is_read_only: bool = False
    is_sensitive: bool = False
    source: ConfigSource
    synonyms: list[ConfigSynonym]


class ClusterList(BaseModel):
    kind: Literal["KafkaClusterList"] = "KafkaClusterList"
    metadata: ListMetadata
    data: list[ClusterData]


class BrokerList(BaseModel):
    kind: Literal["KafkaBrokerList"] = "KafkaBrokerList"
    metadata: ListMetadata
    data: list[BrokerData]


class TopicList(BaseModel):
    kind: Literal["KafkaTopicList"] = "KafkaTopicList"
    metadata: ListMetadata
    data: list[TopicData]


class PartitionList(BaseModel):
    kind: Literal["KafkaPartitionList"] = "KafkaPartitionList"
    metadata: ListMetadata
    data: list[PartitionData]


class ReplicaList(BaseModel):
    kind: Literal["KafkaReplicaList"] = "KafkaReplicaList"
    metadata: ListMetadata
    data: list[ReplicaData]


class TopicConfigList(BaseModel):
    kind: Literal["KafkaTopicConfigList"] = "KafkaTopicConfigList"
    metadata: ListMetadata
    data: list[TopicConfigData]


class EmptyList(BaseModel):
    """A list of what this service does not have: broker configs, reassignments."""

    kind: str
    metadata: ListMetadata
    data: list[str] = []


class Resources:
    """Makes the resources of one answer. `mount` is `/v3` or `/kafka/v3`, as the client asked."""

    def __init__(self, where: Origin, mount: str, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self._where = where
        self._clusters = f"{where.url}{mount}/clusters"
        self._cluster = f"{self._clusters}/{cluster_id}"

    def url(self, *parts: str | int) -> str:
        """Address of what lies below the cluster."""
        return "/".join([self._cluster, *map(str, parts)])

    def listed(self, *parts: str | int) -> ListMetadata:
        """Metadata of the list at that address."""
        return ListMetadata(self_url=self.url(*parts))

    def clusters(self) -> ClusterList:
        return ClusterList(metadata=ListMetadata(self_url=self._clusters), data=[self.cluster()])

    def cluster(self) -> ClusterData:
        return ClusterData(
            metadata=self._metadata(),
            cluster_id=self.cluster_id,
            controller=self._related("brokers", BROKER_ID),
            acls=self._related("acls"),
            brokers=self._related("brokers"),
            broker_configs=self._related("broker-configs"),
            consumer_groups=self._related("consumer-groups"),
            topics=self._related("topics"),
            partition_reassignments=self._related("topics", "-", "partitions", "-", "reassignment"),
        )

    def broker(self) -> BrokerData:
        """Whoever answers, as the client reaches it."""
        port = self._where.port or (443 if self._where.proto == "https" else 80)
        return self._broker(BROKER_ID, self._where.host, port)

    def other_broker(self, member: Member) -> BrokerData:
        """A live peer, by the address that it tells."""
        return self._broker(member.number, urlsplit(member.address).hostname or "", member.port)

    def _broker(self, number: int, host: str, port: int) -> BrokerData:
        at = ("brokers", number)
        return BrokerData(
            metadata=self._metadata(*at, crn=f"/broker={number}"),
            cluster_id=self.cluster_id,
            broker_id=number,
            host=host,
            port=port,
            configs=self._related(*at, "configs"),
            partition_replicas=self._related(*at, "partition-replicas"),
        )

    def topic(self, name: str, partitions: int) -> TopicData:
        at = ("topics", name)
        return TopicData(
            metadata=self._metadata(*at, crn=f"/topic={name}"),
            cluster_id=self.cluster_id,
            topic_name=name,
            partitions_count=partitions,
            partitions=self._related(*at, "partitions"),
            configs=self._related(*at, "configs"),
            partition_reassignments=self._related(*at, "partitions", "-", "reassignment"),
        )

    def topics(self, held: Iterable[Topic]) -> TopicList:
        ordered = sorted(held, key=lambda topic: topic.name)
        data = [self.topic(topic.name, len(topic.partitions)) for topic in ordered]
        return TopicList(metadata=self.listed("topics"), data=data)

    def partition(self, topic: str, number: int) -> PartitionData:
        at = ("topics", topic, "partitions", number)
        return PartitionData(
            metadata=self._metadata(*at, crn=f"/topic={topic}/partition={number}"),
            cluster_id=self.cluster_id,
            topic_name=topic,
            partition_id=number,
            leader=self._related(*at, "replicas", BROKER_ID),
            replicas=self._related(*at, "replicas"),
            reassignment=self._related(*at, "reassignment"),
        )

    def partition_offsets(
        self, topic: str, number: int, held: Partition, *, earliest: bool, latest: bool
    ) -> PartitionOffsetsData:
        at = ("topics", topic, "partitions", number, "offset")
        return PartitionOffsetsData(
            metadata=self._metadata(*at, crn=f"/topic={topic}/partition={number}/offset"),
            cluster_id=self.cluster_id,
            topic_name=topic,
            partition_id=number,
            earliest_offset=held.log_start_offset if earliest else None,
            latest_offset=held.high_watermark if latest else None,
        )

    def replica(self, topic: str, number: int) -> ReplicaData:
        at = ("topics", topic, "partitions", number, "replicas", BROKER_ID)
        crn = f"/topic={topic}/partition={number}/replica={BROKER_ID}"
        return ReplicaData(
            metadata=self._metadata(*at, crn=crn),
            cluster_id=self.cluster_id,
            topic_name=topic,
            partition_id=number,
            broker=self._related("brokers", BROKER_ID),
        )

    def config(self, topic: str, name: str, configs: dict[str, str]) -> TopicConfigData:
        """One config of a topic whose own settings are `configs`; `name` must be a known one."""
        default = CONFIGS[name].default
        synonyms = [ConfigSynonym(name=name, value=default, source="DEFAULT_CONFIG")]
        if name in configs:
            own = ConfigSynonym(name=name, value=configs[name], source="DYNAMIC_TOPIC_CONFIG")
            synonyms.insert(0, own)
        return TopicConfigData(
            metadata=self._metadata(
                "topics", topic, "configs", name, crn=f"/topic={topic}/config={name}"
            ),
            cluster_id=self.cluster_id,
            topic_name=topic,
            name=name,
            value=synonyms[0].value,
            is_default=name not in configs,
            source=synonyms[0].source,
            synonyms=synonyms,
        )

    def configs(self, topic: str, configs: dict[str, str]) -> list[TopicConfigData]:
        """Every config of a topic, set or not."""
        return [self.config(topic, name, configs) for name in CONFIGS]

    def related(self, *parts: str | int) -> Related:
        """A link to what lies below the cluster."""
        return self._related(*parts)

    def metadata(self, *parts: str | int, crn: str) -> Metadata:
        """Of the resource at that address; `crn` is its name after the cluster's."""
        return self._metadata(*parts, crn=crn)

    def _related(self, *parts: str | int) -> Related:
        return Related(related=self.url(*parts))

    def _metadata(self, *parts: str | int, crn: str = "") -> Metadata:
        name = f"crn:///kafka={self.cluster_id}{crn}"
        return Metadata(self_url=self.url(*parts), resource_name=name)
