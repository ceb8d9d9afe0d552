"""AsyncAdmin: what it changes is what it lists afterwards."""

import pytest

from tests.service.client.faults import FaultyTransport
from tests.service.conftest import Broker, post
from tests.service.keyed import ADMIN_KEY, secured
from tidelog.client import AsyncAdmin, NotFound
from tidelog.service.client.connection import Connection
from tidelog.storage.store.memory import MemoryStore


def admin_of(broker: Broker, key: str | None = None) -> AsyncAdmin:
    return AsyncAdmin(Connection("a:1", key=key, transport=FaultyTransport(broker.app)))


async def test_topic_is_created_changed_and_deleted(broker: Broker) -> None:
    admin = admin_of(broker)
    async with admin.connection:
        made = await admin.create_topic("new", 2, {"retention.ms": "1000"})
        assert made["partitions_count"] == 2
        assert (await admin.add_partitions("new", 3))["partitions_count"] == 3
        await admin.alter_configs("new", {"retention.ms": None, "segment.ms": "61000"})
        configs = await admin.configs("new")
        assert (configs["retention.ms"], configs["segment.ms"]) == ("604800000", "61000")
        assert "new" in [topic["topic_name"] for topic in await admin.topics()]
        assert await admin.offsets("new") == dict.fromkeys(range(3), (0, 0))
        assert (await admin.topic("new"))["partitions_count"] == 3
        await admin.delete_topic("new")
        with pytest.raises(NotFound):
            await admin.topic("new")
        assert len(await admin.brokers()) == 1


async def test_group_is_reset_and_deleted(broker: Broker, topic: str) -> None:
    await post(broker.http, [{"value": n, "partition": n % 3} for n in range(6)])
    admin = admin_of(broker)
    async with admin.connection:
        moved = await admin.reset_group("g", to="LATEST", topic_name=topic)
        assert [partition["offset"] for partition in moved] == [2, 2, 2]
        assert len(await admin.group_offsets("g")) == 3
        assert [partition["lag"] for partition in await admin.lag("g")] == [0, 0, 0]
        assert [group["consumer_group_id"] for group in await admin.groups()] == ["g"]
        assert (await admin.group("g"))["consumers"] == []
        await admin.delete_group("g")
        assert await admin.groups() == []


async def test_acls_are_created_listed_and_deleted() -> None:
    acl = {
        "resource_type": "TOPIC",
        "resource_name": "t",
        "pattern_type": "LITERAL",
        "principal": "User:u",
        "host": "*",
        "operation": "READ",
        "permission": "ALLOW",
    }
    async with secured(MemoryStore()) as broker:
        admin = admin_of(broker, ADMIN_KEY)
        async with admin.connection:
            await admin.create_acl(**acl)
            for acls in (await admin.acls(principal="User:u"), await admin.delete_acls(**acl)):
                assert [acl.items() <= shown_acl.items() for shown_acl in acls] == [True]
            assert await admin.acls() == []
