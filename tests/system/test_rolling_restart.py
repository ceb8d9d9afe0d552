"""Brokers that are restarted one after the other while plain clients work: no request fails."""

import http.client
import threading
from pathlib import Path

import pytest

from deploy.local.balancer import ARGUMENTS, balancer, installed_balancer
from tests.support.broker import Broker, until
from tests.system.checks import json_values
from tests.system.restart_load import RestartLoad
from tests.system.several import brokers

MANY = 10_000
SHORT_DRAIN_MS = 1500
"""Longer than the time in which HAProxy's health check finds out."""


@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_request_fails_while_brokers_are_restarted(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program = installed_balancer(name)
    if program is None:
        pytest.skip(f"{name} is not installed: apt install {name}")
    wanted: int = request.config.getoption("--restart-requests")
    rolls, drain = (2, {}) if wanted >= MANY else (1, {"drain_ms": SHORT_DRAIN_MS})
    with brokers(tmp_path, **drain) as made:
        ports = [broker.port for broker in made]
        with balancer(tmp_path, ports, program=program) as port:
            made[0].create_topic("t", 3)
            made[0].create_topic("empty")
            load = RestartLoad(port)
            with load.at_work():
                for broker in made * rolls:
                    load.wait_for(wanted // (4 * rolls))
                    assert broker.stop() == 0, broker.log()
                    broker.start()
                load.wait_for(max(wanted - load.asked.total(), wanted // 10))
            print(f"{name}: {load.asked.total()} requests {dict(load.asked)}")
            print("\n".join(load.failures))
        found = [
            value
            for number in range(3)
            for value in json_values(made[0].base_url, "&max_bytes=60000000", partition=number)
        ]
    assert load.failures == []
    assert sorted(found) == sorted(load.acked)


def _ask_until_refused(port: int, is_keeping: bool, wrong: list[str], count: list[int]) -> None:
    """Ask one broker, honouring `Connection: close`, until it takes no new connection."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while True:
        try:
            client.connect()
        except ConnectionRefusedError:
            return
        try:
            while True:
                client.request("GET", "/topics")
                answer = client.getresponse()
                answer.read()
                count.append(answer.status)
                if answer.will_close or not is_keeping:
                    break
        except (OSError, http.client.HTTPException) as error:
            wrong.append(repr(error))
        client.close()


def test_a_client_of_one_broker_meets_no_reset(tmp_path: Path) -> None:
    with Broker(tmp_path, drain_ms=500) as broker:
        wrong: list[str] = []
        counts: list[list[int]] = [[] for _ in range(8)]
        threads = [
            threading.Thread(
                target=_ask_until_refused, args=(broker.port, number % 2 == 0, wrong, count)
            )
            for number, count in enumerate(counts)
        ]
        for thread in threads:
            thread.start()
        until(lambda: all(len(count) > 20 for count in counts))
        assert broker.stop() == 0
        for thread in threads:
            thread.join()
    assert wrong == []
    assert {status for count in counts for status in count} == {200}
