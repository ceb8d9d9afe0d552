"""Settings of the listener for Kafka's own protocol, and settings for which the cluster may have a
default."""

import re
from typing import Any

from tidelog.service.settings.fields import setting

KAFKA_PORT = setting(
    0,
    "port for clients of Kafka's own protocol; 0 for none. Kafka's port is 9092. With `workers` above 1, the workers share this port, and worker N alone also has the port `kafka_port` + N",
    low=0,
    high=65535,
)
KAFKA_HOST = setting("", "address to listen on for Kafka clients; if empty, the value of `host`")
KAFKA_ADVERTISED = setting(
    "",
    "`HOST:PORT` at which Kafka clients reach this broker, as Metadata names it. If it is empty, the broker builds it from `kafka_host` and `kafka_port`. With `workers` above 1, worker N adds N to the port",
)
KAFKA_NODE_ID = setting(
    0,
    "node id of this broker for Kafka clients, different for each broker; with `workers` above 1, that of the first worker. With 0, the broker takes a hash of its random id",
    low=0,
    high=2**31 - 1,
)
KAFKA_GROUP_DELAY_MS = setting(
    50,
    "how long the first rebalance of an empty group of Kafka clients waits for more members; Kafka's `group.initial.rebalance.delay.ms`. Every first read of a group waits for it",
    low=0,
    high=500,
)
ZONE = setting(
    "",
    "availability zone of this broker. Kafka clients whose client id has `az=ZONE` are sent to the brokers of their zone, if there are any",
)
DEFAULT_PARTITIONS = setting(
    1,
    "partitions of a new topic if the request gives no number and the cluster has no default `num.partitions`",
    low=1,
    high=10_000,
)
AUTO_CREATE_TOPICS = setting(
    False,
    "whether a request creates a topic that does not exist, if the cluster has no default `auto.create.topics.enable`: a produce request, or a Kafka client's request for metadata that allows it",
)
ANY_HOSTS = ("0.0.0.0", "::", "[::]")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_ZONE = re.compile(r"[A-Za-z0-9._-]{0,64}")
_PORT_MAX = 65535


def address_of(advertised: str) -> tuple[str, int]:
    """Return host and port of a valid `kafka_advertised`."""
    host, _, port = advertised.rpartition(":")
    return host.strip("[]"), int(port)


def why_not(settings: Any) -> str | None:
    """Return why these settings cannot be used. If they can, return None."""
    if not _ZONE.fullmatch(settings.zone):
        return f"zone: {settings.zone!r} has characters other than letters, digits, . _ and -"
    if not settings.kafka_port:
        if settings.kafka_advertised or settings.kafka_node_id or settings.kafka_host:
            return "kafka_host, kafka_advertised and kafka_node_id need kafka_port"
        return None
    ports = [settings.kafka_port]
    if settings.kafka_advertised:
        if not _ADDRESS.fullmatch(settings.kafka_advertised):
            return f"kafka_advertised: {settings.kafka_advertised!r} is not HOST:PORT"
        host, port = address_of(settings.kafka_advertised)
        ports.append(port)
        if host in ANY_HOSTS:
            return f"kafka_advertised: clients cannot connect to {host}: give a name or an address"
    more = settings.workers if settings.workers > 1 else 0
    if max(ports) + more > _PORT_MAX or not min(ports):
        return f"kafka_port and kafka_advertised: ports 1 to {_PORT_MAX - more}, with all workers"
    same_host = settings.kafka_host in ("", settings.host)
    if same_host and settings.kafka_port <= settings.port <= settings.kafka_port + more:
        return f"port {settings.port} is for HTTP and for Kafka clients: change kafka_port"
    return None
