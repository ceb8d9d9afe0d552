"""Settings of the listener for Kafka's own protocol."""

import dataclasses
import re
from collections.abc import Iterator

from tidelog.service.settings.fields import LOG, ms_of, setting
from tidelog.service.settings.listeners import PORTS, ListenerSettings

ANY_HOSTS = ("0.0.0.0", "::", "[::]")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_ZONE = re.compile(r"[A-Za-z0-9._-]{0,64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KafkaSettings(ListenerSettings):
    """The port for Kafka clients, and what Metadata says about this broker."""

    kafka_port: int = setting(
        "port for clients of Kafka's own protocol; 0 for none. Kafka's port is 9092. With `workers` above 1, the workers share this port, and worker N alone also has the port `kafka_port` + N",
        default=0,
        limits=PORTS,
    )
    kafka_host: str = setting(
        "address to listen on for Kafka clients; if empty, the value of `host`"
    )
    kafka_advertised: str = setting(
        "`HOST:PORT` at which Kafka clients reach this broker, as Metadata names it. If it is empty, the broker builds it from `kafka_host` and `kafka_port`. With `workers` above 1, worker N adds N to the port"
    )
    kafka_node_id: int = setting(
        "node id of this broker for Kafka clients, different for each broker; with `workers` above 1, that of the first worker. With 0, the broker takes a hash of its random id",
        default=0,
        limits=(0, 2**31 - 1),
    )
    kafka_group_delay_ms: int = setting(
        "how long the first rebalance of an empty group of Kafka clients waits for more members; Kafka's `group.initial.rebalance.delay.ms`. Every first read of a group waits for it",
        default=ms_of(LOG.group_delay_s),
        limits=(0, 500),
    )
    zone: str = setting(
        "availability zone of this broker. The brokers of a zone read each object with the records of other zones once, for all of them. Kafka clients whose client id has `az=ZONE` are sent to the brokers of their zone, if there are any"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not _ZONE.fullmatch(self.zone):
            yield f"zone: {self.zone!r} has characters other than letters, digits, . _ and -"
        if self.kafka_port:
            yield from self._problems_of_ports()
        elif self.kafka_advertised or self.kafka_node_id or self.kafka_host:
            yield "kafka_host, kafka_advertised and kafka_node_id need kafka_port"

    def _problems_of_ports(self) -> Iterator[str]:
        ports = [self.kafka_port]
        if self.kafka_advertised:
            if not _ADDRESS.fullmatch(self.kafka_advertised):
                yield f"kafka_advertised: {self.kafka_advertised!r} is not HOST:PORT"
                return
            host, port = address_of(self.kafka_advertised)
            ports.append(port)
            if host in ANY_HOSTS:
                yield f"kafka_advertised: clients cannot connect to {host}: give a name or an address"
        worker_ports = self.workers if self.workers > 1 else 0
        if max(ports) + worker_ports > PORTS[1] or not min(ports):
            yield f"kafka_port and kafka_advertised: ports 1 to {PORTS[1] - worker_ports}, with all workers"
        same_host = self.kafka_host in ("", self.host)
        if same_host and self.kafka_port <= self.port <= self.kafka_port + worker_ports:
            yield f"port {self.port} is for HTTP and for Kafka clients: change kafka_port"


def address_of(advertised: str) -> tuple[str, int]:
    """Return host and port of a valid `kafka_advertised`."""
    host, _, port = advertised.rpartition(":")
    return host.strip("[]"), int(port)
