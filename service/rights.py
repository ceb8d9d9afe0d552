"""What each route needs, in Kafka's words: one table, closed by default.

A route that is not here is nobody's (tests/service/test_rights.py walks them all). `Need` is asked
before the handler runs; what is in a body, and what a listing shows, the handler asks itself.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, TypeAlias

from storage.acls import (
    ALTER,
    ALTER_CONFIGS,
    CLUSTER,
    CLUSTER_NAME,
    DELETE,
    DESCRIBE,
    DESCRIBE_CONFIGS,
    GROUP,
    READ,
    TOPIC,
    WRITE,
)


class Need(NamedTuple):
    """An operation on a resource; `parameter` of the path has its name."""

    operation: str
    resource_type: str
    parameter: str = ""

    def name(self, parameters: Mapping[str, str]) -> str:
        return parameters[self.parameter] if self.parameter else CLUSTER_NAME


class Open(Enum):
    """What needs no operation."""

    PUBLIC = "everybody, without a key"
    ANY_KEY = "whoever has a key"
    INSIDE = "whoever has a key; what the request is about, or shows, the handler asks for"


Rule: TypeAlias = Need | Open

WRITE_TOPIC = Need(WRITE, TOPIC, "topic_name")
READ_TOPIC = Need(READ, TOPIC, "topic_name")
READ_GROUP = Need(READ, GROUP, "consumer_group_id")
_DESCRIBE_TOPIC = Need(DESCRIBE, TOPIC, "topic_name")
_ALTER_TOPIC = Need(ALTER, TOPIC, "topic_name")
_CONFIGS = Need(DESCRIBE_CONFIGS, TOPIC, "topic_name")
_ALTER_CONFIGS = Need(ALTER_CONFIGS, TOPIC, "topic_name")
_DESCRIBE_GROUP = Need(DESCRIBE, GROUP, "consumer_group_id")
_DESCRIBE_CLUSTER = Need(DESCRIBE, CLUSTER)
_ALTER_CLUSTER = Need(ALTER, CLUSTER)
_CLUSTER_CONFIGS = Need(DESCRIBE_CONFIGS, CLUSTER)
_ALTER_CLUSTER_CONFIGS = Need(ALTER_CONFIGS, CLUSTER)

_TOPIC_V2 = "/topics/{topic_name}"
_INSTANCE = "/consumers/{consumer_group_id}/instances/{instance}"
_V3 = "/clusters/{cluster_id}"
_TOPIC_V3 = f"{_V3}/topics/{{topic_name}}"
_GROUP_V3 = f"{_V3}/consumer-groups/{{consumer_group_id}}"
_OURS = "/tidelog/v1"

RULES: Mapping[tuple[str, str], Rule] = {
    # Health says nothing of what is in the log. Metrics name topics and groups, so they need a key:
    # a scraper has a header for it, and the right is Kafka's for looking at a cluster.
    ("GET", "/_health"): Open.PUBLIC,
    ("GET", "/healthy"): Open.PUBLIC,
    ("GET", "/startup"): Open.PUBLIC,
    ("GET", "/ready"): Open.PUBLIC,
    ("GET", "/status/ready"): Open.PUBLIC,
    ("GET", "/metrics"): _DESCRIBE_CLUSTER,
    ("GET", "/"): Open.ANY_KEY,
    ("GET", "/openapi.json"): Open.ANY_KEY,
    # The console's files are those of every installation; who logs in has no key yet.
    ("GET", "/docs"): Open.PUBLIC,
    ("GET", "/ui"): Open.PUBLIC,
    ("GET", "/ui/{path:path}"): Open.PUBLIC,
    ("POST", f"{_OURS}/login"): Open.PUBLIC,
    ("POST", f"{_OURS}/logout"): Open.PUBLIC,
    ("GET", f"{_OURS}/me"): Open.ANY_KEY,
    # Records
    ("POST", _TOPIC_V2): WRITE_TOPIC,
    ("POST", f"{_TOPIC_V2}/partitions/{{partition_id}}"): WRITE_TOPIC,
    ("GET", f"{_TOPIC_V2}/partitions/{{partition_id}}/records"): READ_TOPIC,
    ("POST", f"{_TOPIC_V3}/records"): WRITE_TOPIC,
    ("POST", f"{_TOPIC_V3}/records:batch"): WRITE_TOPIC,
    ("POST", f"{_V3}/transactions"): Open.INSIDE,
    # Consumer instances: topics are asked for inside
    ("POST", "/consumers/{consumer_group_id}"): READ_GROUP,
    ("DELETE", _INSTANCE): READ_GROUP,
    ("POST", f"{_INSTANCE}/subscription"): READ_GROUP,
    ("GET", f"{_INSTANCE}/subscription"): READ_GROUP,
    ("DELETE", f"{_INSTANCE}/subscription"): READ_GROUP,
    ("POST", f"{_INSTANCE}/assignments"): READ_GROUP,
    ("GET", f"{_INSTANCE}/assignments"): READ_GROUP,
    ("GET", f"{_INSTANCE}/records"): READ_GROUP,
    ("POST", f"{_INSTANCE}/offsets"): READ_GROUP,
    ("GET", f"{_INSTANCE}/offsets"): READ_GROUP,
    ("POST", f"{_INSTANCE}/positions"): READ_GROUP,
    ("POST", f"{_INSTANCE}/positions/beginning"): READ_GROUP,
    ("POST", f"{_INSTANCE}/positions/end"): READ_GROUP,
    # Topics, v2
    ("GET", "/topics"): Open.INSIDE,
    ("GET", _TOPIC_V2): _DESCRIBE_TOPIC,
    ("GET", f"{_TOPIC_V2}/partitions"): _DESCRIBE_TOPIC,
    ("GET", f"{_TOPIC_V2}/partitions/{{partition_id}}"): _DESCRIBE_TOPIC,
    ("GET", f"{_TOPIC_V2}/partitions/{{partition_id}}/offsets"): _DESCRIBE_TOPIC,
    ("GET", "/brokers"): Open.ANY_KEY,
    ("POST", "/admin/topics"): Open.INSIDE,
    ("POST", "/admin/topics/{topic_name}/seal"): _ALTER_TOPIC,
    # The cluster, v3
    ("GET", "/clusters"): Open.ANY_KEY,
    ("GET", _V3): Open.ANY_KEY,
    ("GET", f"{_V3}/brokers"): Open.ANY_KEY,
    ("GET", f"{_V3}/brokers/{{broker_id}}"): Open.ANY_KEY,
    ("GET", f"{_V3}/brokers/{{broker_id}}/configs"): _CLUSTER_CONFIGS,
    ("GET", f"{_V3}/broker-configs"): _CLUSTER_CONFIGS,
    ("GET", f"{_V3}/brokers/{{broker_id}}/partition-replicas"): Open.INSIDE,
    # Topics, v3
    ("GET", f"{_V3}/topics"): Open.INSIDE,
    ("POST", f"{_V3}/topics"): Open.INSIDE,
    ("GET", _TOPIC_V3): _DESCRIBE_TOPIC,
    ("PATCH", _TOPIC_V3): _ALTER_TOPIC,
    ("DELETE", _TOPIC_V3): Need(DELETE, TOPIC, "topic_name"),
    ("GET", f"{_TOPIC_V3}/partitions"): _DESCRIBE_TOPIC,
    ("GET", f"{_TOPIC_V3}/partitions/-/reassignment"): _DESCRIBE_TOPIC,
    ("GET", f"{_TOPIC_V3}/partitions/{{partition_id}}"): _DESCRIBE_TOPIC,
    ("GET", f"{_TOPIC_V3}/partitions/{{partition_id}}/offset"): _DESCRIBE_TOPIC,
    ("GET", f"{_TOPIC_V3}/partitions/{{partition_id}}/replicas"): _DESCRIBE_TOPIC,
    ("GET", f"{_TOPIC_V3}/partitions/{{partition_id}}/replicas/{{broker_id}}"): _DESCRIBE_TOPIC,
    ("GET", f"{_TOPIC_V3}/partitions/{{partition_id}}/reassignment"): _DESCRIBE_TOPIC,
    ("GET", f"{_V3}/topics/-/configs"): Open.INSIDE,
    ("GET", f"{_TOPIC_V3}/default-configs"): _CONFIGS,
    ("GET", f"{_TOPIC_V3}/configs"): _CONFIGS,
    ("GET", f"{_TOPIC_V3}/configs/{{name}}"): _CONFIGS,
    ("PUT", f"{_TOPIC_V3}/configs/{{name}}"): _ALTER_CONFIGS,
    ("DELETE", f"{_TOPIC_V3}/configs/{{name}}"): _ALTER_CONFIGS,
    ("POST", f"{_TOPIC_V3}/configs:alter"): _ALTER_CONFIGS,
    # Groups, v3
    ("GET", f"{_V3}/consumer-groups"): Open.INSIDE,
    ("GET", _GROUP_V3): _DESCRIBE_GROUP,
    ("DELETE", _GROUP_V3): Need(DELETE, GROUP, "consumer_group_id"),
    ("GET", f"{_GROUP_V3}/offsets"): _DESCRIBE_GROUP,
    ("POST", f"{_GROUP_V3}/offsets:reset"): READ_GROUP,
    ("GET", f"{_GROUP_V3}/consumers"): _DESCRIBE_GROUP,
    ("GET", f"{_GROUP_V3}/consumers/{{consumer_id}}"): _DESCRIBE_GROUP,
    ("GET", f"{_GROUP_V3}/consumers/{{consumer_id}}/assignments"): _DESCRIBE_GROUP,
    (
        "GET",
        f"{_GROUP_V3}/consumers/{{consumer_id}}/assignments/{{topic_name}}"
        "/partitions/{partition_id}",
    ): _DESCRIBE_GROUP,
    ("GET", f"{_GROUP_V3}/lag-summary"): _DESCRIBE_GROUP,
    ("GET", f"{_GROUP_V3}/lags"): _DESCRIBE_GROUP,
    ("GET", f"{_GROUP_V3}/lags/{{topic_name}}/partitions/{{partition_id}}"): _DESCRIBE_GROUP,
    # Security itself, with the rights that Kafka has for ACLs, SCRAM credentials and client quotas
    ("GET", f"{_V3}/acls"): _DESCRIBE_CLUSTER,
    ("POST", f"{_V3}/acls"): _ALTER_CLUSTER,
    ("DELETE", f"{_V3}/acls"): _ALTER_CLUSTER,
    ("POST", f"{_V3}/acls:batch"): _ALTER_CLUSTER,
    ("GET", f"{_OURS}/keys"): _DESCRIBE_CLUSTER,
    ("POST", f"{_OURS}/keys"): _ALTER_CLUSTER,
    ("DELETE", f"{_OURS}/keys/{{key_id}}"): _ALTER_CLUSTER,
    ("GET", f"{_OURS}/quotas"): _CLUSTER_CONFIGS,
    ("PUT", f"{_OURS}/quotas/{{principal}}"): _ALTER_CLUSTER_CONFIGS,
    ("DELETE", f"{_OURS}/quotas/{{principal}}"): _ALTER_CLUSTER_CONFIGS,
    # What the console shows
    ("GET", f"{_OURS}/overview"): _DESCRIBE_CLUSTER,
    ("GET", f"{_OURS}/topics"): Open.INSIDE,
    ("GET", f"{_OURS}/topics/{{topic_name}}"): _DESCRIBE_TOPIC,
    ("GET", f"{_OURS}/topic-configs"): Open.ANY_KEY,
    ("GET", f"{_OURS}/groups"): Open.INSIDE,
    ("GET", f"{_OURS}/groups/{{consumer_group_id}}/lag-history"): _DESCRIBE_GROUP,
    ("GET", f"{_OURS}/metadata"): _DESCRIBE_CLUSTER,
}

_MOUNTS = ("/kafka/v3", "/v3")
PUBLIC_PATHS = frozenset(
    path for (_, path), rule in RULES.items() if rule is Open.PUBLIC and "{" not in path
)


def rule_of(method: str, route: str) -> Rule | None:
    """By the route's template, with or without the mount of the v3 dialect; None: closed."""
    for mount in _MOUNTS:
        if route.startswith(f"{mount}/"):
            route = route.removeprefix(mount)
            break
    return RULES.get((method, route))


def is_public(method: str, path: str, accept: str = "") -> bool:
    """Whether a request of this path is answered without a key."""
    if path == "/":
        return method == "GET" and "text/html" in accept  # led to the console, and its login
    return path in PUBLIC_PATHS or path.startswith("/ui/")
