"""A member of a REST group whose own timeout ends a read while a broker stands still.

It then reads on: no record is passed over, though the answer went to a closed socket.
"""

import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.broker import Broker
from tests.system.several import QUICK, brokers, stopped

JSON = "application/vnd.kafka.json.v2+json"
PLAIN = {"content-type": "application/vnd.kafka.v2+json"}
STALL_S = 0.3
MEMBER = "/consumers/g/instances/only"


def _post(broker: Broker, path: str, body: Any, media_type: str = PLAIN["content-type"]) -> Any:
    answer = httpx.post(
        f"{broker.base_url}{path}", json=body, headers={"content-type": media_type}, timeout=20
    )
    answer.raise_for_status()
    return answer.json() if answer.content else None


def _join(broker: Broker) -> None:
    body = {"name": "only", "format": "json", "auto.offset.reset": "earliest"}
    _post(broker, "/consumers/g", body)
    _post(broker, f"{MEMBER}/subscription", {"topics": ["t"]})


def _produce(broker: Broker, first: int) -> list[int]:
    values = list(range(first, first + 10))
    records = [{"value": value} for value in values]
    _post(broker, "/topics/t", {"records": records}, JSON)
    return values


def _read(broker: Broker) -> list[int]:
    answer = httpx.get(f"{broker.base_url}{MEMBER}/records?timeout=300", timeout=20)
    answer.raise_for_status()
    return [record["value"] for record in answer.json()]


def _give_up(broker: Broker, stalled: Broker) -> None:
    """Send a read to the broker while another stands still, and close before the answer."""
    address = urlsplit(broker.base_url)
    head = f"GET {MEMBER}/records?timeout=1000 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    port = (address.hostname, address.port)
    with stopped(stalled), socket.create_connection(port) as connection:
        connection.sendall(head.encode())
        time.sleep(STALL_S)


def test_read_on_after_a_lost_answer_passes_over_no_record(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        broker.create_topic("t")
        _join(broker)
        lost = []
        for number in range(10):
            values = _produce(broker, 10 * number)
            _give_up(broker, stalled=broker)
            received: list[int] = []
            for _ in range(3):
                received += _read(broker)
            if received != values:
                lost.append((values, received))
        assert not lost


@pytest.mark.parametrize("stalled", ["coordinator", "forwarder"])
def test_lost_answer_of_a_forwarded_read_passes_over_no_record(
    tmp_path: Path, stalled: str
) -> None:
    patient = QUICK | {"broker_timeout_ms": 30_000}
    with brokers(tmp_path, 2, **patient) as (coordinator, forwarder):
        coordinator.create_topic("t")
        _join(coordinator)
        values = _produce(coordinator, 0)
        _give_up(forwarder, stalled=coordinator if stalled == "coordinator" else forwarder)
        received: list[int] = []
        while len(set(received)) < len(values):
            received += _read(forwarder)
        assert received == values
        new_values = _produce(coordinator, 10)
        assert [*_read(forwarder), *_read(coordinator)] == new_values
