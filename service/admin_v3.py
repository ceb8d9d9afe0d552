"""Clusters, brokers, topics, partitions and offsets in Confluent's v3 dialect.

Served under `/v3` (the REST proxy) and `/kafka/v3` (Confluent Server, Cloud). Bodies and answers
are those of Confluent's OpenAPI, so that its generated clients work; what has no meaning here is
accepted and ignored (replication factors, broker assignments) or listed as empty (reassignments,
broker configs).
"""

from typing import Annotated, NamedTuple, TypeAlias

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from service.caller import Rights, check_creation
from service.errors import NoSuchResource, TopicNotHosted, check_printable_field
from service.http import InvalidParameter
from service.paths import origin
from service.resources_v3 import (
    BrokerData,
    BrokerList,
    ClusterData,
    ClusterList,
    EmptyList,
    ListMetadata,
    PartitionData,
    PartitionList,
    PartitionOffsetsData,
    ReplicaData,
    ReplicaList,
    Resources,
    TopicData,
    TopicList,
)
from service.topics import (
    BROKER_ID,
    CHANGE_ERRORS,
    CREATE_ERRORS,
    ERRORS,
    Asking,
    FreshLog,
    PartitionNumber,
    TopicName,
    broker_log,
    config_text,
    decided,
    partition_number,
    partitions_wanted,
)
from storage.acls import DESCRIBE, OPERATIONS_OF, TOPIC
from storage.errors import InvalidRequest
from storage.log import Log
from storage.members import Member
from storage.state import PARTITIONS_MAX, Topic

MOUNTS = ("/v3", "/kafka/v3")

ConfigValue: TypeAlias = str | int | float | bool | None
"""What clients send as a config's value."""


class NewTopicConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    value: ConfigValue = Field(default=None, description="null is the default")


class NewTopic(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "topic_name": "flights",
                    "partitions_count": 3,
                    "configs": [{"name": "segment.ms", "value": "60000"}],
                }
            ]
        },
    )
    topic_name: str
    partitions_count: int | None = Field(default=None, description="-1 or none: the default")
    replication_factor: int | None = Field(
        default=None, description="accepted and ignored: the object store replicates"
    )
    replicas_assignments: dict[int, list[int]] | None = Field(
        default=None, description="its partitions count, the brokers are ignored"
    )
    configs: list[NewTopicConfig] | None = None
    validate_only: bool = False


class MorePartitions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    partitions_count: int = Field(examples=[6])


# -- what routes share


async def resources(request: Request) -> Resources:
    """Makes resources as this client sees them."""
    path = request.url.path
    server = request.scope.get("server") or ("localhost", None)
    host = f"[{server[0]}]" if ":" in server[0] else server[0]
    where = origin(
        request.headers,
        path,
        proto=request.url.scheme,
        server=host if server[1] is None else f"{host}:{server[1]}",
    )
    mount = next(mount for mount in MOUNTS if path.startswith(f"{mount}/"))
    return Resources(where, mount, broker_log(request).wal.cluster.cluster_id)


Made = Annotated[Resources, Depends(resources)]


async def known_cluster(cluster_id: str, make: Made) -> None:
    """Only one cluster lives here."""
    if cluster_id != make.cluster_id:
        raise NoSuchResource(f"Cluster {cluster_id} cannot be found.")


async def live_broker(request: Request, broker_id: str) -> Member | None:
    """A live peer; None is whoever answers."""
    if broker_id == str(BROKER_ID):
        return None
    for member in broker_log(request).membership.others:
        if broker_id == str(member.number):
            return member
    raise NoSuchResource(f"Broker {broker_id} cannot be found.")


async def leading_broker(broker_id: str) -> None:
    """Every partition has one replica: whoever answers."""
    if broker_id != str(BROKER_ID):
        raise NoSuchResource(f"Broker {broker_id} cannot be found.")


LiveBroker = Annotated[Member | None, Depends(live_broker)]


class Held(NamedTuple):
    """A topic that exists, in a state that was fresh when the request came."""

    log: Log
    topic: Topic
    make: Resources


async def held_topic(topic_name: TopicName, log: FreshLog, make: Made) -> Held:
    """The topic of the path."""
    topic = log.state.topics.get(topic_name)
    if topic is None:
        raise TopicNotHosted(topic_name)
    return Held(log, topic, make)


HeldTopic = Annotated[Held, Depends(held_topic)]
WithOperations = Annotated[
    bool, Query(description="also what who asks may do with each (`authorized_operations`)")
]

clusters = APIRouter(tags=["v3 cluster"], responses=ERRORS)
router = APIRouter(
    prefix="/clusters/{cluster_id}", dependencies=[Depends(known_cluster)], responses=ERRORS
)

# -- cluster and brokers


@clusters.get("/clusters")
async def list_clusters(make: Made) -> ClusterList:
    """The cluster that lives here."""
    return make.clusters()


@router.get("", tags=["v3 cluster"])
async def get_cluster(make: Made) -> ClusterData:
    """The cluster."""
    return make.cluster()


@router.get("/brokers", tags=["v3 cluster"])
async def list_brokers(request: Request, make: Made) -> BrokerList:
    """The brokers that live. 1 is whoever answers: any of them serves everything."""
    others = sorted(broker_log(request).membership.others, key=lambda member: member.number)
    data = [make.broker(), *map(make.other_broker, others)]
    return BrokerList(metadata=make.listed("brokers"), data=data)


@router.get("/brokers/{broker_id}", tags=["v3 cluster"])
async def get_broker(member: LiveBroker, make: Made) -> BrokerData:
    """A broker that lives."""
    return make.broker() if member is None else make.other_broker(member)


@router.get("/brokers/{broker_id}/configs", tags=["v3 cluster"])
async def list_broker_configs(member: LiveBroker, make: Made) -> EmptyList:
    """Empty: a broker's settings are its process's own."""
    at = make.listed("brokers", number_of(member), "configs")
    return EmptyList(kind="KafkaBrokerConfigList", metadata=at)


@router.get("/broker-configs", tags=["v3 cluster"])
async def list_cluster_configs(make: Made) -> EmptyList:
    """Empty: a broker's settings are its process's own."""
    return EmptyList(kind="KafkaClusterConfigList", metadata=make.listed("broker-configs"))


@router.get("/brokers/{broker_id}/partition-replicas", tags=["v3 cluster"])
async def list_broker_replicas(
    member: LiveBroker, log: FreshLog, make: Made, asking: Asking
) -> ReplicaList:
    """All partitions of all topics are broker 1's, whoever answers; the others show none."""
    held = [] if member is not None else log.state.partitions()
    held = [one for one in held if asking.may(DESCRIBE, TOPIC, one[0].name)]
    return ReplicaList(
        metadata=make.listed("brokers", number_of(member), "partition-replicas"),
        data=[make.replica(topic.name, number) for topic, number, _ in held],
    )


def number_of(member: Member | None) -> int:
    return BROKER_ID if member is None else member.number


@router.get("/topics/{topic_name}/partitions/-/reassignment", tags=["v3 cluster"])
async def list_reassignments(topic_name: TopicName, make: Made) -> EmptyList:
    """Empty: partitions lie in the object store and never move."""
    at = make.listed("topics", topic_name, "partitions", "-", "reassignment")
    return EmptyList(kind="KafkaReassignmentList", metadata=at)


# -- topics


@router.get("/topics", tags=["v3 topics"])
async def list_topics(
    log: FreshLog, make: Made, asking: Asking, include_authorized_operations: WithOperations = False
) -> TopicList:
    """All topics that may be described, by name."""
    held = [each for each in log.state.topics.values() if asking.may(DESCRIBE, TOPIC, each.name)]
    found = make.topics(held)
    if include_authorized_operations:
        for each in found.data:
            each.authorized_operations = _operations(asking, each.topic_name)
    return found


@router.post("/topics", status_code=201, tags=["v3 topics"], responses=CREATE_ERRORS)
async def create_topic(
    request: Request,
    response: Response,
    body: NewTopic,
    log: FreshLog,
    make: Made,
    asking: Asking,
) -> TopicData:
    """Create a topic; with `validate_only` 200 and nothing is created."""
    check_printable_field(body.topic_name)
    await check_creation(asking, body.topic_name)
    partitions = partitions_wanted(request, _partitions(body))
    configs = {
        each.name: config_text(each.value) for each in body.configs or [] if each.value is not None
    }
    created = log.create_topic(
        body.topic_name, partitions, configs, validate_only=body.validate_only
    )
    await decided(created)
    made = make.topic(body.topic_name, partitions)
    if body.validate_only:
        response.status_code = 200
    else:
        response.headers["Location"] = made.metadata.self_url
    return made


@router.get("/topics/{topic_name}", tags=["v3 topics"])
async def get_topic(
    held: HeldTopic, asking: Asking, include_authorized_operations: WithOperations = False
) -> TopicData:
    """A topic."""
    found = held.make.topic(held.topic.name, len(held.topic.partitions))
    if include_authorized_operations:
        found.authorized_operations = _operations(asking, held.topic.name)
    return found


@router.patch("/topics/{topic_name}", tags=["v3 topics"], responses=CREATE_ERRORS)
async def add_partitions(body: MorePartitions, held: HeldTopic) -> TopicData:
    """Give a topic more partitions. Records stay where they are; keys map anew from now on."""
    name, has, wanted = held.topic.name, len(held.topic.partitions), body.partitions_count
    if wanted <= has:
        is_same = f"Topic already has {has} partition(s)."
        is_less = (
            f"Topic currently has {has} partitions, which is higher than the requested {wanted}."
        )
        raise InvalidRequest(is_same if wanted == has else is_less)
    if wanted > PARTITIONS_MAX:
        raise InvalidRequest(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {wanted}")
    await decided(held.log.add_partitions(name, wanted))
    return held.make.topic(name, wanted)


@router.delete("/topics/{topic_name}", status_code=204, tags=["v3 topics"], responses=CHANGE_ERRORS)
async def delete_topic(held: HeldTopic) -> None:
    """Delete a topic with all its records."""
    await decided(held.log.delete_topic(held.topic.name))


# -- partitions


@router.get("/topics/{topic_name}/partitions", tags=["v3 topics"])
async def list_partitions(held: HeldTopic) -> PartitionList:
    """The partitions of a topic."""
    name, count = held.topic.name, len(held.topic.partitions)
    return PartitionList(
        metadata=held.make.listed("topics", name, "partitions"),
        data=[held.make.partition(name, number) for number in range(count)],
    )


@router.get("/topics/{topic_name}/partitions/{partition_id}", tags=["v3 topics"])
async def get_partition(partition_id: PartitionNumber, held: HeldTopic) -> PartitionData:
    """One partition."""
    return held.make.partition(held.topic.name, partition_number(held.topic, partition_id))


@router.get(
    "/topics/{topic_name}/partitions/{partition_id}/offset",
    tags=["v3 topics"],
    response_model_exclude_none=True,
)
async def get_partition_offsets(
    partition_id: PartitionNumber,
    held: HeldTopic,
    offset_type: Annotated[
        str, Query(description="`earliest`, `latest` or `earliest_and_latest`")
    ] = "earliest_and_latest",
) -> PartitionOffsetsData:
    """The first offset that is kept, and the offset that the next record gets."""
    words = {
        "earliest": (True, False),
        "latest": (False, True),
        "earliest_and_latest": (True, True),
    }
    if offset_type not in words:
        raise InvalidParameter(f"offset_type={offset_type!r} must be one of {', '.join(words)}")
    earliest, latest = words[offset_type]
    number = partition_number(held.topic, partition_id)
    partition = held.topic.partitions[number]
    return held.make.partition_offsets(
        held.topic.name, number, partition, earliest=earliest, latest=latest
    )


@router.get("/topics/{topic_name}/partitions/{partition_id}/replicas", tags=["v3 topics"])
async def list_replicas(partition_id: PartitionNumber, held: HeldTopic) -> ReplicaList:
    """The one replica: the logical broker's."""
    name, number = held.topic.name, partition_number(held.topic, partition_id)
    at: ListMetadata = held.make.listed("topics", name, "partitions", number, "replicas")
    return ReplicaList(metadata=at, data=[held.make.replica(name, number)])


@router.get(
    "/topics/{topic_name}/partitions/{partition_id}/replicas/{broker_id}",
    tags=["v3 topics"],
    dependencies=[Depends(leading_broker)],
)
async def get_replica(partition_id: PartitionNumber, held: HeldTopic) -> ReplicaData:
    """The logical broker's replica."""
    return held.make.replica(held.topic.name, partition_number(held.topic, partition_id))


@router.get("/topics/{topic_name}/partitions/{partition_id}/reassignment", tags=["v3 topics"])
async def get_reassignment(partition_id: PartitionNumber, held: HeldTopic) -> None:
    """404, always: partitions never move."""
    number = partition_number(held.topic, partition_id)
    raise NoSuchResource(f"Partition {number} of {held.topic.name} is not being reassigned.")


def _operations(asking: Rights, topic: str) -> list[str]:
    return [each for each in OPERATIONS_OF[TOPIC] if asking.may(each, TOPIC, topic)]


def _partitions(body: NewTopic) -> int | None:
    assigned = body.replicas_assignments
    if not assigned:
        return body.partitions_count
    if set(assigned) != set(range(len(assigned))):
        raise InvalidRequest("replicas_assignments must name the partitions 0, 1, 2, ... each once")
    if body.partitions_count not in {None, -1, len(assigned)}:
        raise InvalidRequest(
            f"partitions_count is {body.partitions_count}, replicas_assignments has {len(assigned)}"
        )
    return len(assigned)
