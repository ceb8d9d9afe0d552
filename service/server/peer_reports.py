"""Reports of a broker and of its peers: metrics, rates, Kafka clients, compactions."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from tidelog.service.operations.compaction_jobs import Compact, Compactions, no_store
from tidelog.service.peers.client import COMPACTIONS, KAFKA_CLIENTS, METRICS, VITALS
from tidelog.service.routes.broker_info import VERSION
from tidelog.service.server.router import ACK_LABELS
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.service.telemetry.kafka_clients import ConnectedClient, ConnectedClients
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.service.telemetry.metrics import Telemetry, Worker
from tidelog.service.telemetry.rates import RateSampler
from tidelog.storage.broker import Broker


async def no_peers(_: str) -> Sequence[bytes]:
    """Return no answers: the default of a broker without peers."""
    return ()


class Reports(NamedTuple):
    """The reports of one broker. Owned by one event loop."""

    telemetry: Telemetry
    rates: RateSampler
    kafka_clients: ConnectedClients
    compactions: Compactions

    @classmethod
    def of(
        cls,
        broker: Broker,
        counters: HttpCounters,
        maintenance: MaintenanceCounters | None = None,
        worker: Worker | None = None,
        connections: Collection[ConnectedClient] = (),
        compact: Compact = no_store,
        ask: Callable[[str], Awaitable[Sequence[bytes]]] = no_peers,
    ) -> "Reports":
        """Return the reports of a broker.

        `connections` has its open connections of Kafka clients at each time; `ask` returns the
        reports of its peers by their path.
        """
        telemetry = Telemetry(broker, counters, VERSION, maintenance, worker)
        rates = RateSampler(
            broker,
            counters,
            VERSION,
            0 if worker is None else worker.number,
            lambda: ask(VITALS),
            ack_labels=ACK_LABELS,
            telemetry=telemetry,
        )
        kafka_clients = ConnectedClients(broker, connections, lambda: ask(KAFKA_CLIENTS))
        compactions = Compactions(broker, compact, lambda: ask(COMPACTIONS))
        return cls(telemetry, rates, kafka_clients, compactions)

    def by_path(self) -> Mapping[str, Callable[[], bytes | Awaitable[bytes]]]:
        """Return the encoded reports by the path at which peers ask for them."""
        return {
            METRICS: self.telemetry.text,
            VITALS: self.rates.encoded,
            KAFKA_CLIENTS: self.kafka_clients.encoded,
            COMPACTIONS: self.compactions.encoded,
        }
