"""Operations at a broker whose view is older than what another broker has acknowledged (I3)."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.service.conftest import Broker, broker_on
from tests.service.keyed import ADMIN, SETTINGS, allow, assert_denied, key_of
from tidelog.storage.core.acls import AclFilter
from tidelog.storage.core.actions import DeleteAcls
from tidelog.storage.store.memory import MemoryStore

EVE = "User:eve"


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Broker, Broker]]:
    """Two brokers on one store that read the WAL only when they are asked."""
    async with AsyncExitStack() as stack:
        store = MemoryStore()
        first, second = [
            await stack.enter_async_context(broker_on(store, name, **SETTINGS)) for name in "ab"
        ]
        yield first, second


async def test_topic_that_was_created_again_is_deleted(pair: tuple[Broker, Broker]) -> None:
    first, second = pair
    await first.log.topics.create("t", 1, {})
    await second.log.refresh()
    await first.log.topics.delete("t")
    await first.log.topics.create("t", 1, {})
    cluster = first.log.identity.cluster_id
    answer = await second.http.delete(f"/v3/clusters/{cluster}/topics/t", headers=ADMIN)
    assert answer.status_code == 204
    await first.log.refresh()
    assert not first.log.state.topics


async def test_right_that_was_taken_away_creates_nothing(pair: tuple[Broker, Broker]) -> None:
    first, second = pair
    key = await key_of(first.log, EVE)
    await allow(first.log, EVE, "CREATE", "CLUSTER", "kafka-cluster")
    await second.log.refresh()
    acls = [acl for acl in first.log.state.access.acls if AclFilter(principal=EVE).matches(acl)]
    await first.log.access.change(DeleteAcls(acls))
    body = {"topic_name": "new", "partitions_count": 1}
    assert_denied(await second.http.post("/admin/topics", json=body, headers=key))
    assert not second.log.state.topics


@pytest.mark.broker(topics={"t": 1}, **SETTINGS)
async def test_denied_requests_are_charged(broker: Broker) -> None:
    key = await key_of(broker.log, EVE)
    quotas = {"request_rate": 1}
    await broker.http.put(f"/tidelog/v1/quotas/{EVE}", json=quotas, headers=ADMIN)
    statuses = [(await broker.http.get("/topics/t", headers=key)).status_code for _ in range(30)]
    assert statuses[0] == 403
    assert statuses.count(429) > 20
