"""A service in the caller's process, without a port."""

import asyncio

import pytest

from tests.service.conftest import http_client, placed, post
from tidelog.service.server.kafka import KafkaPorts
from tidelog.service.server.service import Ports, Service
from tidelog.service.settings.settings import Settings
from tidelog.storage.core.errors import StoreUnfit, Unavailable
from tidelog.storage.store.memory import MemoryStore


def settings(**more: object) -> Settings:
    return Settings(**{"store": "memory://", "auto_create_topics": True, **more})


async def test_service_serves_requests_without_port() -> None:
    async with Service.open(settings()) as service, http_client(service.app) as http:
        assert placed(await post(http, [{"value": 1}])) == [(0, 0)]
        assert (await http.get("/healthy")).status_code == 200
        assert service.broker.name in (await http.get("/metrics")).text
        assert service.kafka is None


async def test_next_service_on_store_of_caller_has_records() -> None:
    """The end of a service flushes, and leaves the caller's store open."""
    store = MemoryStore()
    for offset in range(3):
        async with (
            Service.open(settings(broker_id=f"b{offset}"), store=store) as service,
            http_client(service.app) as http,
        ):
            assert placed(await post(http, [{"value": offset}])) == [(0, offset)]
            await post(http, [{"value": "local"}], path="/topics/u", acks="1")
    async with Service.open(settings(), store=store) as service:
        ends = {
            name: topic.partitions[0].high_watermark
            for name, topic in service.broker.state.topics.items()
        }
        assert ends == {"t": 3, "u": 3}
    await store.close()


async def test_service_that_cannot_start_closes_its_broker() -> None:
    store = MemoryStore()
    async with Service.open(settings(), store=store) as service:
        await service.broker.access.create_key("User:alice")
        broker = service.broker
    with pytest.raises(StoreUnfit, match="keys or ACLs, but security is off"):
        async with Service.open(settings(), store=store):
            raise AssertionError("it must not start")
    with pytest.raises(Unavailable):
        await broker.topics.create("t", 1, {})
    await asyncio.sleep(0)  # cancelled tasks end
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in tasks if task.get_name().startswith("tidelog")]


async def test_service_with_ports_for_kafka_has_listener() -> None:
    ports = Ports(kafka=KafkaPorts([], "broker.example", 9092))
    async with Service.open(settings(kafka_port=9092), ports=ports) as service:
        assert service.kafka is not None
        (listener,) = service.advertised
        assert (listener.host, listener.port) == ("broker.example", 9092)
        await service.kafka.close()


@pytest.mark.parametrize(("admin_key", "is_warned"), [("", True), ("k" * 40, False)])
async def test_security_without_any_key_is_warned_of(
    caplog: pytest.LogCaptureFixture, admin_key: str, *, is_warned: bool
) -> None:
    async with Service.open(settings(security="keys", admin_key=admin_key)):
        assert ("no key exists: set admin_key" in caplog.text) is is_warned
