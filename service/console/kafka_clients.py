"""The route that lists the connected Kafka clients, for the console and `tidelog clients`."""

import msgspec
from fastapi import Request
from pydantic import BaseModel, Field

from tidelog.service.http.route import TIDELOG, Permission, Route, RouteDoc
from tidelog.service.operations.rights import DESCRIBE_CLUSTER
from tidelog.service.routes.dependencies import broker_of
from tidelog.service.telemetry import kafka_clients


class KafkaClient(BaseModel):
    """The connections of one client to one broker.

    They have the same client id, library, principal and address. The counters are sums over the
    connections that are open.
    """

    broker: str = Field(description="name of the broker")
    broker_id: int
    client_id: str
    software_name: str = Field(description="the client's library; empty if it did not name one")
    software_version: str
    principal: str = Field(description="empty without a proved principal")
    address: str = Field(description="the address that connects")
    is_tls: bool
    connections: int
    requests: int
    bytes_in: int = Field(description="bytes of requests that are answered")
    bytes_out: int = Field(description="bytes of answers")
    connected_ms: int = Field(description="time of the oldest of the connections")


class KafkaClients(BaseModel):
    """The Kafka clients that are connected to the brokers of the cluster."""

    now_ms: int
    connections: int = Field(description="connections to the brokers that answered")
    is_truncated: bool = Field(
        description=f"there are more than {kafka_clients.ROWS_MAX} rows; `clients` has those with "
        "the most connections"
    )
    missing_brokers: list[str] = Field(
        description="names of the live brokers that did not answer within a second"
    )
    clients: list[KafkaClient]


async def list_kafka_clients(request: Request) -> KafkaClients:
    """List the Kafka clients that are connected to the brokers of the cluster.

    Those with the most connections are first. The broker asks the other brokers.
    """
    source: kafka_clients.ConnectedClients = request.app.state.reports.kafka_clients
    clients = await source.all()
    return KafkaClients(
        now_ms=broker_of(request).clock.now_ms(),
        connections=clients.connections,
        is_truncated=clients.is_truncated,
        missing_brokers=clients.missing,
        clients=[
            KafkaClient(broker=broker.name, broker_id=broker.number, **msgspec.structs.asdict(row))
            for broker, row in clients.rows
        ],
    )


_DESCRIBE_CLUSTER = Permission(DESCRIBE_CLUSTER)

ROUTES = (
    Route(
        "GET",
        "/kafka-clients",
        list_kafka_clients,
        _DESCRIBE_CLUSTER,
        "console",
        TIDELOG,
        RouteDoc(),
    ),
)
