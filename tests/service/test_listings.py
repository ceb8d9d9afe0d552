"""Each route that answers with a list has pages, or a reason here.

Lists grow with the cluster, but none holds the event loop, even if the cluster's state is at its
bounds.
"""

import typing
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from tests.service.conftest import Broker
from tests.service.keyed import ADMIN, SETTINGS
from tests.service.test_rights import DECLARED, address, inside
from tidelog.service.http.paging import page_of_query
from tidelog.service.server.router import HOT_ROUTES
from tidelog.storage.core.acls import Acl
from tidelog.storage.core.actions import MemberConfig
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.state.access import ACLS_MAX, KEYS_MAX, QUOTAS_MAX, Key
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.committed_offsets import CommittedOffset
from tidelog.storage.state.group_members import GROUP_PARTITIONS_MAX, MEMBERS_OF_GROUP_MAX
from tidelog.storage.state.group_state import ConsumerGroup, GroupMember
from tidelog.storage.state.partition import Partition
from tidelog.storage.state.principal_shares import PARTITIONS_MAX, TOPICS_MAX
from tidelog.storage.state.topic import Topic

CLUSTER = "/clusters/{cluster_id}"
INSTANCE = "/consumers/{consumer_group_id}/instances/{instance}"
CONFIGS = "the configs of one topic: their number is fixed"
V2 = "Confluent's v2 dialect has no pages"
OF_INSTANCE = "v2 has no pages; a group has at most 20,000 partitions"
ONE_ITEM = "it always has one item"
EMPTY = "it is always empty"
RECORDS = "records are bounded by max_records and max_bytes"
FILE = "a file, whose size does not depend on the cluster"

WITHOUT_PAGES = {
    "/topics": V2,
    "/topics/{topic_name}": V2,
    "/topics/{topic_name}/partitions": V2,
    "/topics/{topic_name}/partitions/{partition_id}": "a partition has one replica",
    "/brokers": V2,
    f"{INSTANCE}/subscription": OF_INSTANCE,
    f"{INSTANCE}/assignments": OF_INSTANCE,
    f"{INSTANCE}/offsets": OF_INSTANCE,
    f"{INSTANCE}/records": RECORDS,
    "/topics/{topic_name}/records": RECORDS,
    "/topics/{topic_name}/partitions/{partition_id}/records": RECORDS,
    "/iceberg/v1/config": "the endpoints, whose number is fixed",
    "/iceberg/v1/namespaces": ONE_ITEM,
    "/iceberg/v1/namespaces/{namespace}": "it has no properties",
    "/iceberg/v1/namespaces/{namespace}/tables": "pages of Iceberg: `pageToken` and `pageSize`",
    "/iceberg/v1/namespaces/{namespace}/tables/{topic_name}": "at most 100 snapshots",
    "/tidelog/v1/overview": "sums, the live brokers, and at most 1,000 damaged places",
    "/tidelog/v1/metadata": "sums, 25 entries and 25 checkpoints",
    "/tidelog/v1/topics/{topic_name}": "`first` and `count` are its pages",
    "/tidelog/v1/kafka-clients": "at most 1,000 rows, those with the most connections",
    "/tidelog/v1/compactions": "at most 20 jobs of each broker",
    "/tidelog/v1/health": "the live brokers, one problem of each kind, and at most 500 groups",
    "/tidelog/v1/topic-configs": CONFIGS,
    "/tidelog/v1/groups/{consumer_group_id}/lag-history": "500 series of half an hour",
    "/tidelog/v1/me": "the operations on one resource",
    f"{CLUSTER}/topics/{{topic_name}}": "the operations on one resource",
    f"{CLUSTER}/consumer-groups/{{consumer_group_id}}": "at most 1,000 held clients",
    f"{CLUSTER}/topics/{{topic_name}}/configs": CONFIGS,
    f"{CLUSTER}/topics/{{topic_name}}/default-configs": CONFIGS,
    f"{CLUSTER}/topics/{{topic_name}}/configs/{{name}}": "the sources of one config",
    f"{CLUSTER}/topics/{{topic_name}}/partitions/{{partition_id}}/replicas": ONE_ITEM,
    "/clusters": ONE_ITEM,
    f"{CLUSTER}/brokers/-/configs": CONFIGS,
    f"{CLUSTER}/brokers/{{broker_id}}/configs": CONFIGS,
    f"{CLUSTER}/brokers/{{broker_id}}/configs/{{name}}": "the sources of one config",
    f"{CLUSTER}/broker-configs": CONFIGS,
    f"{CLUSTER}/broker-configs/{{name}}": "the sources of one config",
    f"{CLUSTER}/topics/{{topic_name}}/partitions/-/reassignment": EMPTY,
    "/metrics": "the number of series is bounded",
    "/openapi.json": FILE,
    "/openapi": FILE,
    "/openapi/v3": FILE,
    "/ui": FILE,
    "/docs": FILE,
    "/ui/{path:path}": FILE,
}
"""GET routes whose answer is a list or has one, or is not declared, with the reason."""
HOT = {path for (_, path), route in DECLARED.items() if route in HOT_ROUTES}
READ = sorted(path for method, path in DECLARED if method == "GET")


def has_list(kind: Any) -> bool:
    """Whether a value of this type has items."""
    origin = typing.get_origin(kind) or kind
    if origin in (list, dict, set, tuple):
        return True
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return any(has_list(field.annotation) for field in origin.model_fields.values())
    return any(has_list(argument) for argument in typing.get_args(kind))


def has_pages(dependant: Dependant) -> bool:
    below = dependant.dependencies
    return any(dependency.call is page_of_query or has_pages(dependency) for dependency in below)


def served(broker: Broker) -> dict[str, APIRoute]:
    """FastAPI's GET routes by the path of their declaration."""
    routes = {
        route.path: route
        for route in inside(broker.app).routes
        if isinstance(route, APIRoute) and "GET" in route.methods
    }
    return {path: routes[DECLARED["GET", path].paths[0]] for path in READ if path not in HOT}


pytestmark = pytest.mark.broker(**SETTINGS)


async def test_each_route_of_list_has_pages_or_reason(broker: Broker) -> None:
    routes = served(broker)
    paged = {path for path, route in routes.items() if has_pages(route.dependant)}
    lists = {path for path in READ if path in HOT}
    for path, route in routes.items():
        kind = typing.get_type_hints(route.endpoint)["return"]
        if kind is Response or has_list(kind):
            lists.add(path)
    assert paged <= lists
    assert (lists - paged) ^ WITHOUT_PAGES.keys() == set()
    assert {"/tidelog/v1/keys", "/tidelog/v1/quotas", f"{CLUSTER}/acls"} <= paged


def fill(state: ClusterState) -> None:
    """Raise the state to its bounds, without the WAL."""
    count = PARTITIONS_MAX // TOPICS_MAX
    large = Topic("large", "large", 1, {}, [Partition() for _ in range(GROUP_PARTITIONS_MAX // 2)])
    small = [
        Topic(f"t{number:05}", f"t{number:05}", 1, {}, [Partition() for _ in range(count)])
        for number in range(TOPICS_MAX)
    ]
    for topic in (large, *small):
        state.topics[topic.name] = state._by_id[topic.topic_id] = topic
        topic.inherit(state.defaults)
    access = state.access
    for number in range(KEYS_MAX):
        access._keep(Key(f"k{number}", "User:k", number.to_bytes(32, "big"), number % 100))
    for number in range(QUOTAS_MAX):
        access.quotas[f"User:{number}"] = {"members": 5}
    for number in range(ACLS_MAX):
        access.acls.add(Acl("TOPIC", f"t{number}", "LITERAL", "User:a", "*", "READ", "ALLOW"))
    offsets = state.committed_offsets
    for topic in (large, *small):
        for number in range(len(topic.partitions)):
            offsets._keep("g", topic.topic_id, CommittedOffset(number, 0, -1, "", 0))
    for number in range(5 * TOPICS_MAX):
        offsets._keep(f"g{number}", "t00001", CommittedOffset(0, 0, -1, "", 0))
    group = state.members._groups["g"] = ConsumerGroup("g", 1)
    owned = sorted(
        TopicIdPartition(topic.topic_id, number)
        for topic in small[: GROUP_PARTITIONS_MAX // 2]
        for number in range(2)
    )
    for number in range(MEMBERS_OF_GROUP_MAX):
        name = f"m{number}"
        group.members[name] = GroupMember(
            name, 0, MemberConfig(), owned=owned if not number else []
        )


def paths(broker: Broker) -> Iterator[str]:
    """The address of each GET route, of the largest things."""
    for path in READ:
        if not path.startswith("/consumers/") and not path.endswith("/records"):
            changed = path.replace("{topic_name}", "large").replace("{consumer_id}", "m0")
            yield address(changed.replace("{path:path}", "app.js"), broker)


async def test_no_read_holds_loop_at_bounds_of_state(broker: Broker) -> None:
    await broker.log.topics.create("t", 1, {})
    fill(broker.log.state)
    wrong = []
    for path in paths(broker):
        answer = await broker.http.get(path, headers=ADMIN)
        if answer.status_code >= 500:
            wrong.append((path, answer.status_code))
    assert not wrong
    # No checkpoint of this state: it would be encoded in one callback (DESIGN 12.2).
    broker.log._log.wal._checkpoints.on_loaded(broker.log.state.seq)
