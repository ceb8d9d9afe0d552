"""Each operation checks its caller's rights before all else, for each kind of principal.

The broker is in memory.
"""

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import pytest

from tests.support.logs import MANUAL, append, closing, opened
from tidelog.service.operations import rights as declared_rights
from tidelog.service.operations.change_request import Change
from tidelog.service.operations.configs import ConfigTexts
from tidelog.service.operations.operations import Operations
from tidelog.service.operations.rights import check_all
from tidelog.service.operations.topics import NewTopic, UnknownTopicId
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
from tidelog.service.telemetry.lag_times import LagTimes
from tidelog.storage.broker import Broker
from tidelog.storage.core.acls import (
    ALTER,
    ALTER_CONFIGS,
    CLUSTER,
    CLUSTER_NAME,
    CREATE,
    DELETE,
    DESCRIBE,
    DESCRIBE_CONFIGS,
    GROUP,
    IDEMPOTENT_WRITE,
    READ,
    RIGHTS_TO,
    TOPIC,
    WRITE,
    Acl,
    AclFilter,
    Right,
)
from tidelog.storage.core.actions import (
    CommitOffsets,
    CreateAcls,
    GroupOffset,
    MemberConfig,
    SetQuotas,
)
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.model import TopicIdPartition, TopicPartition
from tidelog.storage.state.access import MUTATION_RATE
from tidelog.storage.state.group_state import NO_GENERATION, GroupMember
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.memory import MemoryStore

T = TypeVar("T")
Grant = tuple[Right, str]


class GrantedRights(_AllRights):
    """The rights of a principal with these permissions, and no others."""

    principal, host, proof = "alice", "127.0.0.1", ("k", "", 0)

    def __init__(self, granted: frozenset[Grant]) -> None:
        self._granted = granted

    def may(self, right: Right, name: str = CLUSTER_NAME) -> bool:
        return (right, name) in self._granted

    async def check(self, right: Right, name: str = CLUSTER_NAME) -> None:
        if not self.may(right, name):
            raise forbidden(self.principal, right, name)


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
    """A call of an operation.

    It has the sets of rights of which each suffices, whether a call is one change, and whether it
    commits. `denied` is what a caller without the rights gets: an error, or a value that shows
    nothing.
    """

    call: Callable[[Operations, Change, Topic], object]
    sufficient: tuple[frozenset[Grant], ...]
    is_charged: bool = True
    commits: bool = True
    denied: object = Forbidden


def reading(
    call: Callable[[Operations, Change, Topic], object],
    *sufficient: frozenset[Grant],
    denied: object = Forbidden,
) -> Operation:
    """An operation that changes nothing."""
    return Operation(call, sufficient, is_charged=False, commits=False, denied=denied)


def topic_rights(*operations: str, name: str = "t") -> frozenset[Grant]:
    return frozenset((Right(operation, TOPIC), name) for operation in operations)


def group_right(operation: str) -> frozenset[Grant]:
    return frozenset({(Right(operation, GROUP), "g")})


def cluster_right(operation: str) -> frozenset[Grant]:
    return frozenset({(Right(operation, CLUSTER), CLUSTER_NAME)})


def texts(name: str) -> Callable[[object], Awaitable[ConfigTexts]]:
    async def texts_of(_: object) -> ConfigTexts:
        return {name: "1000"}

    return texts_of


async def partitions_of_t(topic: Topic) -> list[TopicIdPartition]:
    return [TopicIdPartition(topic.topic_id, 0)]


async def partitions_to_reset() -> list[TopicPartition]:
    return [TopicPartition("t", 0)]


async def offset_one(_: TopicPartition) -> int:
    return 1


async def shown_partitions(ops: Operations, rights: CallerRights, topic: Topic) -> object:
    return [*await ops.groups.shown_partitions(rights, await partitions_of_t(topic))]


async def total_lag(ops: Operations, rights: CallerRights) -> int:
    lags = await ops.groups.lags(rights, "g", LagTimes(ops.groups._broker))
    return (await lags.summary()).total


MEMBER = GroupMember("m", 0, MemberConfig(), topics=["t"])
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
    "topics.of_id": reading(
        lambda ops, change, topic: ops.topics.of_id(change.rights, topic.topic_id),
        topic_rights(DESCRIBE),
        denied=UnknownTopicId,
    ),
    "topics.is_shown": reading(
        lambda ops, change, _: ops.topics.is_shown(change.rights, "t"),
        topic_rights(DESCRIBE),
        denied=False,
    ),
    "topics.shown": reading(
        lambda ops, change, _: ops.topics.shown(change.rights, "t"),
        topic_rights(DESCRIBE),
        denied=None,
    ),
    "topics.table_uri": reading(
        lambda ops, change, _: ops.topics.table_uri(change.rights, "t"),
        topic_rights(DESCRIBE),
        denied=None,
    ),
    "topics.all_shown": reading(
        lambda ops, change, _: ops.topics.all_shown(change.rights),
        topic_rights(DESCRIBE),
        denied=[],
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
    "topics.planned_deletion": reading(
        lambda ops, change, _: ops.topics.planned_deletion(change.rights, "t", {0: 1}),
        topic_rights(DELETE),
    ),
    "configs.is_shown": reading(
        lambda ops, change, _: ops.configs.is_shown(change.rights, "t"),
        topic_rights(DESCRIBE_CONFIGS),
        denied=False,
    ),
    "configs.check_topic_description": reading(
        lambda ops, change, _: ops.configs.check_topic_description(change.rights, "t"),
        topic_rights(DESCRIBE_CONFIGS),
    ),
    "configs.check_defaults_description": reading(
        lambda ops, change, _: ops.configs.check_defaults_description(change.rights),
        cluster_right(DESCRIBE_CONFIGS),
    ),
    "configs.check_alteration": reading(
        lambda ops, change, _: ops.configs.check_alteration(change.rights),
        cluster_right(ALTER_CONFIGS),
    ),
    "configs.alter_topic": Operation(
        lambda ops, change, _: ops.configs.alter_topic(change, "t", texts("retention.ms")),
        (topic_rights(ALTER_CONFIGS),),
    ),
    "configs.alter_defaults": Operation(
        lambda ops, change, _: ops.configs.alter_defaults(change, texts("log.retention.ms")),
        (cluster_right(ALTER_CONFIGS),),
    ),
    "access.acls": reading(
        lambda ops, change, _: ops.access.acls(change.rights, AclFilter()),
        cluster_right(DESCRIBE),
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
    "groups.is_shown": reading(
        lambda ops, change, _: ops.groups.is_shown(change.rights, "g"),
        group_right(DESCRIBE),
        cluster_right(DESCRIBE),
        denied=False,
    ),
    "groups.shown_subscription": reading(
        lambda ops, change, _: ops.groups.shown_subscription(change.rights, MEMBER),
        topic_rights(DESCRIBE),
        denied=[],
    ),
    "groups.shown_partitions": reading(
        lambda ops, change, topic: shown_partitions(ops, change.rights, topic),
        topic_rights(DESCRIBE),
        denied=[],
    ),
    "groups.committed_topics": reading(
        lambda ops, change, _: ops.groups.committed_topics(change.rights, "g"),
        topic_rights(DESCRIBE),
        denied=[],
    ),
    "groups.committed_offset": reading(
        lambda ops, change, _: ops.groups.committed_offset(
            change.rights, "g", TopicPartition("t", 0)
        ),
        topic_rights(DESCRIBE),
        denied=None,
    ),
    "groups.lags": reading(
        lambda ops, change, _: total_lag(ops, change.rights), topic_rights(DESCRIBE), denied=0
    ),
    "groups.delete": Operation(
        lambda ops, change, _: ops.groups.delete(change, "g"), (group_right(DELETE),)
    ),
    "groups.delete_offsets": Operation(
        lambda ops, change, topic: ops.groups.delete_offsets(
            change, "g", lambda: partitions_of_t(topic)
        ),
        (group_right(DELETE),),
    ),
    "groups.reset_offsets": Operation(
        lambda ops, change, _: ops.groups.reset_offsets(
            change, "g", [], partitions_to_reset, offset_one
        ),
        (group_right(READ) | topic_rights(READ),),
    ),
    "records.reserve_producer_id": reading(
        lambda ops, change, _: ops.records.reserve_producer_id(change.rights),
        topic_rights(WRITE),
        cluster_right(IDEMPOTENT_WRITE),
    ),
    "records.check_transaction": reading(
        lambda ops, change, _: ops.records.check_transaction(
            change.rights, ["new"], [("g", ["t"])]
        ),
        topic_rights(WRITE, name="new") | group_right(READ) | topic_rights(READ),
    ),
    "records.check_matched": reading(
        lambda ops, change, _: ops.records.check_matched(change.rights, "t"), topic_rights(READ)
    ),
}
NAMES_OF = {TOPIC: ("t", "new"), GROUP: ("g",), CLUSTER: (CLUSTER_NAME,)}
ALL = frozenset(
    (right, name) for kind, names in NAMES_OF.items() for right in RIGHTS_TO[kind] for name in names
)
STRANGER = frozenset((right, "u") for kind in (TOPIC, GROUP) for right in RIGHTS_TO[kind])
RIGHTS = {name: right for name, right in vars(declared_rights).items() if isinstance(right, Right)}


async def broker_with_topic(store: MemoryStore) -> Broker:
    """Return a broker with two records in `t`-0, and a group, an ACL, a key and quotas."""
    broker = await opened(store, MANUAL)
    await broker.topics.create("t", 2, {})
    await append(broker, "a", "b")
    offset = GroupOffset(broker.state.topic("t").topic_id, 0, 0)
    commit = CommitOffsets("g", NO_GENERATION, [offset])
    await broker.records.transact([], [commit], size=0, is_json=False)
    await broker.access.create_key("User:carol", key_id=KEY_ID)
    acl = Acl(TOPIC, "t", "LITERAL", "User:carol", "*", READ, "ALLOW")
    await broker.access.change(CreateAcls([acl]), SetQuotas("User:carol", {"request_rate": 5}))
    return broker


def operations_on(broker: Broker) -> Operations:
    return Operations.of(broker, RequestSettings(auto_create_topics=True).topic_defaults)


def fingerprint(broker: Broker) -> object:
    """Configs and log starts of all topics, the defaults, access, and the offsets of `g`."""
    topics = {
        name: (topic.configs, [partition.log_start_offset for partition in topic.partitions])
        for name, topic in broker.state.topics.items()
    }
    access = broker.state.access
    lists = [*access.acls], [*access.keys], dict(access.quotas)
    return topics, dict(broker.state.defaults.values), lists, broker.groups.committed_offsets("g")


async def outcome(name: str, broker: Broker, change: Change) -> object:
    """Return the error of an operation, or its result."""
    try:
        result = OPERATIONS[name].call(operations_on(broker), change, broker.state.topic("t"))
        return await result if inspect.isawaitable(result) else result
    except LogError as error:
        return error


def is_denied(name: str, result: object) -> bool:
    denied = OPERATIONS[name].denied
    return isinstance(result, denied) if isinstance(denied, type) else result == denied


def test_every_operation_is_tried() -> None:
    names = {
        f"{part}.{name}"
        for part, kind in Operations.__annotations__.items()
        for name, method in inspect.getmembers(kind, inspect.isfunction)
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
            assert is_denied(name, await outcome(name, broker, change))
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
            result = await outcome(name, broker, change)
            assert not isinstance(result, LogError)
            assert not is_denied(name, result)
            assert change.charges == OPERATIONS[name].is_charged
            assert (fingerprint(broker) != before) == bool(change.committed)
            assert bool(change.committed) == OPERATIONS[name].commits


@pytest.mark.parametrize("name", [name for name, op in OPERATIONS.items() if op.is_charged])
async def test_throttled_caller_changes_nothing(name: str) -> None:
    broker = await broker_with_topic(MemoryStore())
    async with closing(broker):
        before = fingerprint(broker)
        change = RecordedChange(ALL_RIGHTS, is_throttled=True)
        assert isinstance(await outcome(name, broker, change), QuotaExceeded)
        assert (fingerprint(broker), change.committed) == (before, [])


@pytest.mark.parametrize("right", RIGHTS.values(), ids=RIGHTS)
async def test_right_is_of_those_that_have_it(right: Right) -> None:
    granted = GrantedRights(frozenset({(right, "n")}))
    others = ALL | STRANGER - {(right, "u")}
    for caller in (NO_RIGHTS, GrantedRights(others)):
        assert not caller.may(right, "n")
        for check in (caller.check(right, "n"), check_all(caller, right, ["n"])):
            with pytest.raises(Forbidden):
                await check
    for caller in (ALL_RIGHTS, granted):
        assert caller.may(right, "n")
        await check_all(caller, right, ["n", "n"])
    with pytest.raises(Forbidden):
        await check_all(granted, right, ["n", "m"])
