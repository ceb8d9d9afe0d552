"""A real broker under clients that stop in the middle, beside a neighbour who must not fail."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.service.test_idle_connections import produce
from tests.support.broker import Broker

MIB = 1 << 20
CONNECTIONS = 30
HEAD = b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.kafka.json.v2+json\r\n"
FETCH = b"GET /topics/big/partitions/0/records?max_bytes=1048576 HTTP/1.1\r\nHost: x\r\n\r\n"
ATTACKS = {
    "nothing": b"",
    "half a head": b"GET /healthy HTTP/1.1\r\nHost: x\r\n",
    "a head that does not end": b"GET /healthy HTTP/1.1\r\nx: " + b"y" * MIB,
    "many fields": b"GET /healthy HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 100_000,
    "a body that stops": HEAD + b"Content-Length: %d\r\n\r\n" % MIB + b" " * (MIB // 2),
    "chunks that stop": HEAD + b"Transfer-Encoding: chunked\r\n\r\n80000\r\n" + b" " * (MIB // 2),
    "answers that are not read": FETCH * 90,
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    budgets = {"buffer_bytes_max": 4 * MIB, "request_bytes_max": MIB}
    folder: Path = tmp_path_factory.mktemp("admission")
    with Broker(folder, fetch_bytes_in_flight=4 * MIB, **budgets) as broker:
        broker.create_topic("t")
        broker.create_topic("big")
        with httpx.Client(base_url=broker.base_url) as client:
            for _ in range(4):
                body = '{"records":[{"value":"%s"}]}' % ("x" * (MIB // 2))
                headers = {"content-type": "application/vnd.kafka.json.v2+json"}
                client.post("/topics/big", content=body, headers=headers).raise_for_status()
        yield broker


@contextmanager
def attacked(broker: Broker, data: bytes) -> Iterator[None]:
    """Connections that send this, and read nothing."""

    def send(connection: socket.socket) -> None:
        try:
            connection.sendall(data)
        except OSError:  # the broker has closed it, or its buffers are full
            return

    with ExitStack() as stack:
        threads = []
        for _ in range(CONNECTIONS):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(5)
            connection.connect((broker.address, broker.port))
            stack.enter_context(connection)
            threads.append(threading.Thread(target=send, args=(connection,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        yield


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_neighbour_is_served_and_all_bytes_come_back(broker: Broker, attack: str) -> None:
    with httpx.Client(base_url=broker.base_url, timeout=240) as neighbour:
        assert produce(neighbour) == 200
        with attacked(broker, ATTACKS[attack]):
            assert [produce(neighbour) for _ in range(5)] == [200] * 5
            assert neighbour.get("/healthy").status_code == 200
            series = metrics(neighbour)
            assert all(
                series[f'tidelog_budget_bytes{{budget="{name}"}}'] <= 4 * MIB for name in BUDGETS
            )
        while any(
            metrics(neighbour)[f'tidelog_budget_bytes{{budget="{name}"}}'] for name in BUDGETS
        ):
            pass  # the test's time limit ends this
        most = sum(value for name, value in series.items() if "memory_max_bytes" in name)
        assert series["process_resident_memory_bytes"] < most + PROCESS_BYTES


BUDGETS = ("bodies", "answers")
PROCESS_BYTES = 512 * MIB
"""For the needs of a process without a record: about 200 MiB."""


def metrics(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }
