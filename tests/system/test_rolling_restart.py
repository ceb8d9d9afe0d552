"""Brokers that are restarted one after the other while plain clients work: no request fails."""

import http.client
import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

from deploy.local.balancer import ARGUMENTS, balancer, installed_balancer
from tests.support.broker import Broker, until
from tests.system.checks import json_values
from tests.system.restart_load import JSON, RestartLoad
from tests.system.several import brokers
from tidelog.service.settings.settings import Settings

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
    request_count: int = request.config.getoption("--restart-requests")
    is_long = request_count >= MANY
    rolls, drain_ms = (2, Settings.drain_ms) if is_long else (1, SHORT_DRAIN_MS)
    with brokers(tmp_path, drain_ms=drain_ms) as cluster:
        ports = [broker.port for broker in cluster]
        with balancer(tmp_path, ports, program=program) as port:
            cluster[0].create_topic("t", 3)
            cluster[0].create_topic("empty")
            with RestartLoad(port) as load:
                for broker in cluster * rolls:
                    load.wait_for(request_count // (4 * rolls))
                    assert broker.stop() == 0, broker.log()
                    broker.start()
                    _wait_for_balancer(port, broker)
                load.wait_for(max(request_count - load.asked.total(), request_count // 10))
            print(f"{name}: {load.asked.total()} requests {dict(load.asked)}")
            print("\n".join(load.failures))
        values = [
            value
            for number in range(3)
            for value in json_values(cluster[0].base_url, "&max_bytes=60000000", partition=number)
        ]
    assert load.failures == []
    assert sorted(values) == sorted(load.acked)


def _wait_for_balancer(port: int, broker: Broker) -> None:
    """Wait until the balancer sends requests to the broker, as an operator does.

    Without it, before the next restart, a slow balancer may know no broker that is ready.
    """
    started = _started(broker.port)
    until(lambda: _started(port) == started)


def _started(port: int) -> str:
    """The line of the metrics with the start time of the broker that answers."""
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text.splitlines()
    return next((line for line in lines if line.startswith("process_start_time_seconds ")), "")


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
                with client.getresponse() as answer:
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


def test_a_draining_broker_is_not_ready_but_serves_until_a_second_signal(tmp_path: Path) -> None:
    with Broker(tmp_path, drain_ms=600_000) as broker:
        broker.create_topic("t")
        idle = http.client.HTTPConnection("127.0.0.1", broker.port, timeout=60)
        idle.connect()  # the drain does not end early
        os.kill(broker.pid, signal.SIGTERM)
        until(lambda: httpx.get(f"{broker.base_url}/ready").status_code == 503)
        body = {"records": [{"value": 1}]}
        produced = httpx.post(
            f"{broker.base_url}/topics/t", json=body, headers={"content-type": JSON}
        )
        assert produced.status_code == 200
        assert produced.headers["connection"] == "close"
        assert httpx.get(f"{broker.base_url}/healthy").status_code == 200
        assert broker.stop() == 0
        idle.close()
