"""The cluster and its brokers in Confluent's v3 dialect.

Served under `/v3` (Confluent's REST proxy) and `/kafka/v3` (Confluent Server, Cloud). Bodies and
responses follow Confluent's OpenAPI document, so clients that are generated from it work. Tidelog
has no configs of brokers and no reassignments, so their lists are empty.
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
from tidelog.service.http.paging import WantedPage, answer_page, in_order
from tidelog.service.http.route import V3, Permission, Route, RouteAccess, RouteDoc
from tidelog.service.routes.dependencies import (
    ERRORS,
    FreshLog,
    Resources,
    Rights,
    TopicName,
    broker_log,
    keys_of_topics,
)
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.core.acls import ALTER_CONFIGS, CLUSTER, DESCRIBE, DESCRIBE_CONFIGS, TOPIC
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.state.cluster_state import Topic

READ_ONLY = "configs of brokers are read-only: they are settings of each broker's process"


async def live_broker(request: Request, broker_id: str) -> Member | None:
    """Return a live peer. If it is the id of this broker, return None. Raises NoSuchResource."""
    if broker_id == str(BROKER_ID):
        return None
    for member in broker_log(request).members().peers:
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
    """The live brokers. The broker that answers always has id 1 in its answer. To clients, broker 1
    leads all partitions, because any broker serves any request."""
    others = {member.number: member for member in broker_log(request).members().peers}
    numbers = await in_order({BROKER_ID, *others}, page.key(int))
    found: BrokerList = await answer_page(
        page,
        BrokerList(metadata=make.listed("brokers"), data=[]),
        numbers,
        lambda number: make.broker() if number == BROKER_ID else make.other_broker(others[number]),
    )
    return found


async def get_broker(member: LiveBroker, make: Resources) -> BrokerData:
    """A live broker."""
    return make.broker() if member is None else make.other_broker(member)


async def list_broker_configs(member: LiveBroker, make: Resources) -> EmptyList:
    """An empty list, because a broker's settings belong to its process."""
    at = make.listed("brokers", _number(member), "configs")
    return EmptyList(kind="KafkaBrokerConfigList", metadata=at)


async def list_cluster_configs(make: Resources) -> EmptyList:
    """An empty list, because a broker's settings belong to its process."""
    return EmptyList(kind="KafkaClusterConfigList", metadata=make.listed("broker-configs"))


async def list_all_broker_configs(make: Resources) -> EmptyList:
    """An empty list, because a broker's settings belong to its process."""
    at = make.listed("brokers", "-", "configs")
    return EmptyList(kind="KafkaBrokerConfigList", metadata=at)


async def get_broker_config(name: str, member: LiveBroker) -> None:
    """Always 404, because no broker has configs."""
    raise NoSuchResource(f"Config {name} cannot be found for BROKER {_number(member)}.")


async def get_cluster_config(name: str) -> None:
    """Always 404, because no broker has configs."""
    raise NoSuchResource(f"Config {name} cannot be found for the brokers of the cluster.")


async def refuse_broker_config(_: LiveBroker) -> None:
    """Refuse the change, because a broker's settings belong to its process."""
    raise InvalidRequest(READ_ONLY)


async def refuse_cluster_config() -> None:
    """Refuse the change, because a broker's settings belong to its process."""
    raise InvalidRequest(READ_ONLY)


async def list_broker_replicas(
    member: LiveBroker, log: FreshLog, make: Resources, rights: Rights, page: WantedPage
) -> ReplicaList:
    """For broker 1, all partitions that the caller may describe. For other brokers, an empty
    list."""
    metadata = make.listed("brokers", _number(member), "partition-replicas")

    def numbers_of(topic: Topic) -> range | None:
        is_shown = rights.may(DESCRIBE, TOPIC, topic.name)
        return range(len(topic.partitions)) if is_shown else None

    def replica(key: tuple[str, int | None]) -> ReplicaData | None:
        name, number = key
        return None if number is None else make.replica(name, number)

    after = page.position(str, int)
    keys = () if member is not None else await keys_of_topics(log, after, numbers_of)
    found: ReplicaList = await answer_page(
        page, ReplicaList(metadata=metadata, data=[]), keys, replica
    )
    return found


async def list_reassignments(topic_name: TopicName, make: Resources) -> EmptyList:
    """An empty list, because partitions are in the object store and never move."""
    at = make.listed("topics", topic_name, "partitions", "-", "reassignment")
    return EmptyList(kind="KafkaReassignmentList", metadata=at)


def _number(member: Member | None) -> int:
    return BROKER_ID if member is None else member.number


_CLUSTER = "/clusters/{cluster_id}"
_BROKER = f"{_CLUSTER}/brokers/{{broker_id}}"
_REASSIGNMENTS = f"{_CLUSTER}/topics/{{topic_name}}/partitions/-/reassignment"
_ALL_CONFIGS = f"{_CLUSTER}/brokers/-/configs"
_BROKER_CONFIG = f"{_BROKER}/configs/{{name}}"
_CLUSTER_CONFIG = f"{_CLUSTER}/broker-configs/{{name}}"
_CONFIGS = Permission(DESCRIBE_CONFIGS, CLUSTER)
_ALTER = Permission(ALTER_CONFIGS, CLUSTER)
_DESCRIBE = Permission(DESCRIBE, TOPIC, "topic_name")
_KEY = RouteAccess.ANY_KEY
_CHECKED = RouteAccess.CHECKED_BY_HANDLER
_LABEL = "v3 cluster"
_DOC = RouteDoc(ERRORS)

ROUTES = (
    Route("GET", "/clusters", list_clusters, _KEY, _LABEL, V3, _DOC),
    Route("GET", _CLUSTER, get_cluster, _KEY, _LABEL, V3, _DOC),
    Route("GET", f"{_CLUSTER}/brokers", list_brokers, _KEY, _LABEL, V3, _DOC),
    Route("GET", _BROKER, get_broker, _KEY, _LABEL, V3, _DOC),
    Route("GET", _ALL_CONFIGS, list_all_broker_configs, _CONFIGS, _LABEL, V3, _DOC),
    Route("GET", f"{_BROKER}/configs", list_broker_configs, _CONFIGS, _LABEL, V3, _DOC),
    Route("GET", f"{_CLUSTER}/broker-configs", list_cluster_configs, _CONFIGS, _LABEL, V3, _DOC),
    Route("GET", _BROKER_CONFIG, get_broker_config, _CONFIGS, _LABEL, V3, _DOC),
    Route("PUT", _BROKER_CONFIG, refuse_broker_config, _ALTER, _LABEL, V3, _DOC),
    Route("DELETE", _BROKER_CONFIG, refuse_broker_config, _ALTER, _LABEL, V3, _DOC),
    Route("POST", f"{_BROKER}/configs:alter", refuse_broker_config, _ALTER, _LABEL, V3, _DOC),
    Route("GET", _CLUSTER_CONFIG, get_cluster_config, _CONFIGS, _LABEL, V3, _DOC),
    Route("PUT", _CLUSTER_CONFIG, refuse_cluster_config, _ALTER, _LABEL, V3, _DOC),
    Route("DELETE", _CLUSTER_CONFIG, refuse_cluster_config, _ALTER, _LABEL, V3, _DOC),
    Route(
        "POST", f"{_CLUSTER}/broker-configs:alter", refuse_cluster_config, _ALTER, _LABEL, V3, _DOC
    ),
    Route("GET", f"{_BROKER}/partition-replicas", list_broker_replicas, _CHECKED, _LABEL, V3, _DOC),
    Route("GET", _REASSIGNMENTS, list_reassignments, _DESCRIBE, _LABEL, V3, _DOC),
)
