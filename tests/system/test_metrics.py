"""/metrics on the guarantee about cost: a flush is one conditional PUT."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.broker import Broker
from tests.support.history import Request, Written, violations
from tests.system.checks import new_topic, the_log
from tests.system.client import Client

PARTITIONS = 3


def test_a_flush_is_one_request(tmp_path: Path) -> None:
    """One broker, many producers at once: as many conditional PUTs as there are entries."""
    topic, wal = new_topic(), tmp_path / "store" / "wal"
    with Broker(tmp_path) as broker, Client(broker.base_url) as client:
        client.create_topic(topic, PARTITIONS)
        requests = [
            Request([Written(b'"%d"' % number, None, number % PARTITIONS)], is_keyed=False)
            for number in range(400)
        ]

        def send(requests: list[Request]) -> None:
            with Client(broker.base_url) as own:
                for request in requests:
                    own.send(topic, request)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(send, [requests[first::8] for first in range(8)]))
        metrics = client.metrics()
        entries = len(list(wal.iterdir()))
        assert metrics["tidelog_requests_per_flush"] == 1.0
        assert metrics["tidelog_wal_puts_total"] == entries
        assert metrics["tidelog_flushes_total"] == entries
        assert metrics["tidelog_appended_records_total"] == 400
        assert entries < 400, "producers share flushes"
        assert violations(requests, the_log(broker, topic, PARTITIONS)) == []
