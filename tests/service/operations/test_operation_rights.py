"""Each operation checks its caller's rights before all else, for each kind of principal.

The broker is in memory.
"""

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import pytest

from tests.support.logs import MANUAL, append, closing, opened
from tidelog.service.operations.change import Change
from tidelog.service.operations.configs import ConfigTexts
from tidelog.service.operations.operations import Operations
from tidelog.service.operations.topics import NewTopic
from tidelog.service.security.caller import (
    ALL_RIGHTS,
    NO_RIGHTS,
    CallerRights,
    Forbidden,
    QuotaExceeded,
    _AllRights,
    forbidden,
)
from tidelog.service.settings.requests import RequestSettings
from tidelog.storage.broker import Broker
from tidelog.storage.core.acls import (
    ALTER,
    ALTER_CONFIGS,
    CLUSTER,
    CLUSTER_NAME,
    CREATE,
    DELETE,
    DESCRIBE,
    OPERATIONS_OF,
    READ,
    TOPIC,
    Acl,
    AclFilter,
)
from tidelog.storage.core.actions import CreateAcls, SetQuotas
from tidelog.storage.core.errors import LogError, UnknownTopic
from tidelog.storage.state.access import MUTATION_RATE
from tidelog.storage.state.cluster_state import Topic
from tidelog.storage.store.memory import MemoryStore

T = TypeVar("T")
Right = tuple[str, str, str]


class GrantedRights(_AllRights):
    """The rights of a principal with these permissions, and no others."""

    principal, host, proof = "alice", "127.0.0.1", ("k", "", 0)

    def __init__(self, granted: frozenset[Right]) -> None:
        self._granted = granted

    def may(self, operation: str, resource_type: str, name: str) -> bool:
        return (operation, resource_type, name) in self._granted

    async def check(self, operation: str, resource_type: str, name: str) -> None:
        if not self.may(operation, resource_type, name):
            raise forbidden(self.principal, operation, resource_type, name)


class RecordedChange:
    """A change that counts its charges, and has the names of what it commits."""

    def __init__(self, rights: CallerRights, *, is_throttled: bool = False) -> None:
        self.rights = rights
        self.charges = 0
        self.committed: list[str] = []
        self._is_throttled = is_throttled

    def charge(self) -> None:
        self.charges += 1
        if self._is_throttled:
            raise QuotaExceeded("alice", MUTATION_RATE, 1.0, 1.0)

    async def commit(self, name: str, change: Coroutine[Any, Any, T]) -> T:
        self.committed.append(name)
        return await change


class Operation(NamedTuple):
    """A call, the sets of rights of which each suffices, and whether a call is one change."""

    call: Callable[[Operations, Change, Topic], Awaitable[object]]
    sufficient: tuple[frozenset[Right], ...]
    is_charged: bool = True


def topic_rights(*operations: str, name: str = "t") -> frozenset[Right]:
    return frozenset((operation, TOPIC, name) for operation in operations)


def cluster_right(operation: str) -> frozenset[Right]:
    return frozenset({(operation, CLUSTER, CLUSTER_NAME)})


def texts(name: str) -> Callable[[object], Awaitable[ConfigTexts]]:
    async def texts_of(_: object) -> ConfigTexts:
        return {name: "1000"}

    return texts_of


KEY_ID = "ab" * 8
CREATION = (topic_rights(CREATE, name="new"), cluster_right(CREATE))
OPERATIONS = {
    "topics.create": Operation(
        lambda ops, change, _: ops.topics.create(change, "new", lambda: NewTopic(1, {})), CREATION
    ),
    "topics.create_on_demand": Operation(
        lambda ops, change, _: ops.topics.create_on_demand(change, "new"),
        CREATION,
        is_charged=False,
    ),
    "topics.of_id": Operation(
        lambda ops, change, topic: ops.topics.of_id(change.rights, topic.topic_id),
        (topic_rights(DESCRIBE),),
        is_charged=False,
    ),
    "topics.delete": Operation(
        lambda ops, change, _: ops.topics.delete(change, "t"), (topic_rights(DELETE),)
    ),
    "topics.add_partitions": Operation(
        lambda ops, change, _: ops.topics.add_partitions(change, "t", 3), (topic_rights(ALTER),)
    ),
    "topics.delete_records": Operation(
        lambda ops, change, _: ops.topics.delete_records(change, "t", [(0, 1)]),
        (topic_rights(DELETE),),
    ),
    "topics.planned_deletion": Operation(
        lambda ops, change, _: ops.topics.planned_deletion(change.rights, "t", {0: 1}),
        (topic_rights(DELETE),),
        is_charged=False,
    ),
    "configs.alter_topic": Operation(
        lambda ops, change, _: ops.configs.alter_topic(change, "t", texts("retention.ms")),
        (topic_rights(ALTER_CONFIGS),),
    ),
    "configs.alter_defaults": Operation(
        lambda ops, change, _: ops.configs.alter_defaults(change, texts("log.retention.ms")),
        (cluster_right(ALTER_CONFIGS),),
    ),
    "access.acls": Operation(
        lambda ops, change, _: ops.access.acls(change.rights, AclFilter()),
        (cluster_right(DESCRIBE),),
        is_charged=False,
    ),
    "access.create_acls": Operation(
        lambda ops, change, _: ops.access.create_acls(
            change, [Acl(TOPIC, "u", "LITERAL", "User:bob", "*", READ, "ALLOW")]
        ),
        (cluster_right(ALTER),),
    ),
    "access.delete_acls": Operation(
        lambda ops, change, _: ops.access.delete_acls(change, AclFilter()), (cluster_right(ALTER),)
    ),
    "access.create_key": Operation(
        lambda ops, change, _: ops.access.create_key(change, "User:bob", None, "", None),
        (cluster_right(ALTER),),
    ),
    "access.delete_key": Operation(
        lambda ops, change, _: ops.access.delete_key(change, KEY_ID), (cluster_right(ALTER),)
    ),
    "access.set_quotas": Operation(
        lambda ops, change, _: ops.access.set_quotas(change, "User:bob", {"request_rate": 7}),
        (cluster_right(ALTER_CONFIGS),),
    ),
    "access.delete_quotas": Operation(
        lambda ops, change, _: ops.access.delete_quotas(change, "User:carol"),
        (cluster_right(ALTER_CONFIGS),),
    ),
}
READS = ("topics.of_id", "topics.planned_deletion", "access.acls")
ALL = frozenset(
    (operation, kind, name)
    for kind, names in ((TOPIC, ("t", "new")), (CLUSTER, (CLUSTER_NAME,)))
    for operation in OPERATIONS_OF[kind]
    for name in names
)
STRANGER = frozenset((operation, TOPIC, "u") for operation in OPERATIONS_OF[TOPIC])


async def broker_with_topic(store: MemoryStore) -> Broker:
    """`t`-0 and -1, with two records in `t`-0; an ACL, a key and a principal with quotas."""
    broker = await opened(store, MANUAL)
    await broker.create_topic("t", 2, {})
    await append(broker, "a", "b")
    await broker.access.create_key("User:carol", key_id=KEY_ID)
    acl = Acl(TOPIC, "t", "LITERAL", "User:carol", "*", READ, "ALLOW")
    await broker.access.change(CreateAcls([acl]), SetQuotas("User:carol", {"request_rate": 5}))
    return broker


def operations_on(broker: Broker) -> Operations:
    return Operations.of(broker, RequestSettings(auto_create_topics=True).topic_defaults)


def fingerprint(broker: Broker) -> object:
    """Configs and log starts of all topics, the defaults, and access."""
    topics = {
        name: (topic.configs, [partition.log_start_offset for partition in topic.partitions])
        for name, topic in broker.state.topics.items()
    }
    access = broker.state.access
    lists = [*access.acls], [*access.keys], dict(access.quotas)
    return topics, dict(broker.state.defaults.values), lists


async def outcome(name: str, broker: Broker, change: Change) -> LogError | None:
    try:
        await OPERATIONS[name].call(operations_on(broker), change, broker.state.topic("t"))
    except LogError as error:
        return error
    return None


def test_every_operation_is_tried() -> None:
    names = {
        f"{part}.{name}"
        for part, kind in Operations.__annotations__.items()
        for name, method in inspect.getmembers(kind, inspect.iscoroutinefunction)
        if not name.startswith("_")
    }
    assert names == OPERATIONS.keys()


@pytest.mark.parametrize("name", OPERATIONS)
async def test_caller_without_right_changes_nothing_and_is_not_charged(name: str) -> None:
    """Each right alone, all but the sufficient ones, those of another tenant, and none."""
    sufficient = OPERATIONS[name].sufficient
    beside = ALL.difference(*sufficient)
    principals = [frozenset({right}) for right in sorted(beside)]
    principals += [beside, STRANGER, frozenset()]
    broker = await broker_with_topic(MemoryStore())
    async with closing(broker):
        before = fingerprint(broker)
        rights: list[CallerRights] = [GrantedRights(granted) for granted in principals]
        for caller in [NO_RIGHTS, *rights]:
            change = RecordedChange(caller)
            error = await outcome(name, broker, change)
            assert isinstance(error, UnknownTopic if name == "topics.of_id" else Forbidden)
            assert (change.charges, change.committed) == (0, [])
            assert fingerprint(broker) == before


@pytest.mark.parametrize("name", OPERATIONS)
async def test_each_sufficient_right_suffices(name: str) -> None:
    rights: list[CallerRights] = [GrantedRights(set_) for set_ in OPERATIONS[name].sufficient]
    for caller in [ALL_RIGHTS, *rights]:
        broker = await broker_with_topic(MemoryStore())
        async with closing(broker):
            before = fingerprint(broker)
            change = RecordedChange(caller)
            assert await outcome(name, broker, change) is None
            assert change.charges == OPERATIONS[name].is_charged
            assert (fingerprint(broker) != before) == bool(change.committed)
            assert bool(change.committed) == (name not in READS)


@pytest.mark.parametrize("name", [name for name, op in OPERATIONS.items() if op.is_charged])
async def test_throttled_caller_changes_nothing(name: str) -> None:
    broker = await broker_with_topic(MemoryStore())
    async with closing(broker):
        before = fingerprint(broker)
        change = RecordedChange(ALL_RIGHTS, is_throttled=True)
        assert isinstance(await outcome(name, broker, change), QuotaExceeded)
        assert (fingerprint(broker), change.committed) == (before, [])
