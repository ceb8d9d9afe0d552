"""The cluster and its brokers in Confluent's v3 dialect.

Served under `/v3` (Confluent's REST proxy) and `/kafka/v3` (Confluent Server, Cloud). Bodies and
responses follow Confluent's OpenAPI document, so clients that are generated from it work. Tidelog
has no reassignments, so their list is empty. Configs are in configs_v3.py.
"""

from typing import Annotated

from fastapi import Depends, Request

from tidelog.service.formats.resources_v3 import (
    BROKER_ID,
    BrokerData,
    BrokerList,
    ClusterData,
    ClusterList,
    EmptyList,
    ReplicaData,
    ReplicaList,
)
from tidelog.service.http.errors import NoSuchResource
from tidelog.service.http.paging import WantedPage, answer_page
from tidelog.service.http.route import V3, Permission, Route, RouteAccess, RouteDoc
from tidelog.service.operations.rights import DESCRIBE_TOPIC
from tidelog.service.routes.dependencies import (
    ERRORS,
    BrokerOperations,
    FreshBroker,
    Resources,
    Rights,
    TopicName,
    broker_of,
    keys_of_topics,
)
from tidelog.service.slices import in_order
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.state.topic import Topic


async def live_broker(request: Request, broker_id: str) -> Member | None:
    """Return a live peer. If it is the id of this broker, return None. Raises NoSuchResource."""
    if broker_id == str(BROKER_ID):
        return None
    for member in broker_of(request).cluster.members().peers:
        if broker_id == str(member.number):
            return member
    raise NoSuchResource(f"Broker {broker_id} cannot be found.")


LiveBroker = Annotated[Member | None, Depends(live_broker)]


async def list_clusters(make: Resources) -> ClusterList:
    """The one cluster of this broker."""
    return make.clusters()


async def get_cluster(make: Resources) -> ClusterData:
    """The cluster."""
    return make.cluster()


async def list_brokers(request: Request, make: Resources, page: WantedPage) -> BrokerList:
    """The live brokers.

    The broker that answers always has id 1 in its answer. To clients, broker 1 leads all
    partitions, because any broker serves any request.
    """
    peers = {member.number: member for member in broker_of(request).cluster.members().peers}
    numbers = await in_order({BROKER_ID, *peers}, page.key(int))
    response: BrokerList = await answer_page(
        page,
        BrokerList(metadata=make.listed("brokers"), data=[]),
        numbers,
        lambda number: make.broker() if number == BROKER_ID else make.other_broker(peers[number]),
    )
    return response


async def get_broker(member: LiveBroker, make: Resources) -> BrokerData:
    """A live broker."""
    return make.broker() if member is None else make.other_broker(member)


async def list_broker_replicas(
    member: LiveBroker,
    broker: FreshBroker,
    make: Resources,
    operations: BrokerOperations,
    rights: Rights,
    page: WantedPage,
) -> ReplicaList:
    """For broker 1, all partitions that the caller may describe.

    For other brokers, an empty list.
    """
    metadata = make.listed("brokers", broker_number(member), "partition-replicas")

    def numbers_of(topic: Topic) -> range | None:
        is_shown = operations.topics.is_shown(rights, topic.name)
        return range(len(topic.partitions)) if is_shown else None

    def replica(key: tuple[str, int | None]) -> ReplicaData | None:
        name, number = key
        return None if number is None else make.replica(name, number)

    start_key = page.position(str, int)
    keys = () if member is not None else await keys_of_topics(broker, start_key, numbers_of)
    response: ReplicaList = await answer_page(
        page, ReplicaList(metadata=metadata, data=[]), keys, replica
    )
    return response


async def list_reassignments(topic_name: TopicName, make: Resources) -> EmptyList:
    """An empty list, because partitions are in the object store and never move."""
    metadata = make.listed("topics", topic_name, "partitions", "-", "reassignment")
    return EmptyList(kind="KafkaReassignmentList", metadata=metadata)


def broker_number(member: Member | None) -> int:
    return BROKER_ID if member is None else member.number


_CLUSTER = "/clusters/{cluster_id}"
_BROKER = f"{_CLUSTER}/brokers/{{broker_id}}"
_REASSIGNMENTS = f"{_CLUSTER}/topics/{{topic_name}}/partitions/-/reassignment"
_DESCRIBE = Permission(DESCRIBE_TOPIC, "topic_name")
_KEY = RouteAccess.ANY_KEY
_CHECKED = RouteAccess.CHECKED_BY_HANDLER
_LABEL = "v3 cluster"
_DOC = RouteDoc(ERRORS)

ROUTES = (
    Route("GET", "/clusters", list_clusters, _KEY, _LABEL, V3, _DOC),
    Route("GET", _CLUSTER, get_cluster, _KEY, _LABEL, V3, _DOC),
    Route("GET", f"{_CLUSTER}/brokers", list_brokers, _KEY, _LABEL, V3, _DOC),
    Route("GET", _BROKER, get_broker, _KEY, _LABEL, V3, _DOC),
    Route("GET", f"{_BROKER}/partition-replicas", list_broker_replicas, _CHECKED, _LABEL, V3, _DOC),
    Route("GET", _REASSIGNMENTS, list_reassignments, _DESCRIBE, _LABEL, V3, _DOC),
)
