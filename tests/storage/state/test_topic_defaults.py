"""Defaults of topics in the cluster state, and the sizes of changes of configs (I4)."""

import asyncio

import msgspec
import pytest

from tests.storage.state.test_cluster_state import (
    FIRST,
    IDS,
    Spec,
    appending,
    applied,
    chunk,
    encoded,
)
from tests.support.logs import append, kill, opened, read_values
from tidelog.storage.codec.entry import Commit, Entry, encode_header
from tidelog.storage.core import format_levels, topic_configs
from tidelog.storage.core.actions import AlterTopic, AnyAction, DeleteTopic, SetTopicDefaults
from tidelog.storage.core.errors import Corrupt, InvalidConfig, InvalidRequest, LogError
from tidelog.storage.core.topic_configs import BROKER_NAMES, CONFIGS, DEFAULTS, ConfigSource
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.memory import MemoryStore


def do(state: ClusterState, action: AnyAction, at_ms: int = 10) -> LogError | None:
    decoded = encoded(state, Spec(at_ms, [], [Commit(b"", [action])]))
    return state.apply(decoded, "wal/x").outcomes[0].refusal


def started() -> ClusterState:
    state = ClusterState("c")
    applied(state, FIRST)
    return state


def test_each_config_has_a_default_of_the_cluster() -> None:
    assert all(BROKER_NAMES.values())
    assert len(set(BROKER_NAMES.values())) == len(BROKER_NAMES)
    assert {*BROKER_NAMES.values(), "num.partitions", "auto.create.topics.enable"} == {*DEFAULTS}
    for name, key in DEFAULTS.items():
        assert topic_configs.canonical_defaults({name: key.default}, 4) == {name: key.default}


def test_the_topics_value_precedes_the_clusters_and_that_the_built_in_one() -> None:
    state = started()
    alpha, beta = state.topic("alpha"), state.topic("beta")
    assert do(state, SetTopicDefaults({"log.roll.ms": "2000", "log.retention.ms": "9"})) is None
    assert do(state, AlterTopic(IDS[0], {"segment.ms": "1000"})) is None
    assert (alpha.config.segment_ms, alpha.config.retention_ms) == (1000, 9)
    assert (beta.config.segment_ms, beta.config.retention_ms) == (2000, 9)
    assert beta.config.segment_bytes == int(CONFIGS["segment.bytes"].default)
    values = state.defaults.values_of_topic("segment.ms", alpha.configs)
    assert [tuple(value) for value in values] == [
        ("segment.ms", "1000", ConfigSource.DYNAMIC_TOPIC_CONFIG),
        ("log.roll.ms", "2000", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG),
        ("log.roll.ms", CONFIGS["segment.ms"].default, ConfigSource.DEFAULT_CONFIG),
    ]
    assert do(state, AlterTopic(IDS[0], {"segment.ms": None})) is None
    assert alpha.config.segment_ms == 2000
    # A restart has the same; a removed default is the built-in one again.
    again = ClusterState.decode(state.encode(), "checkpoints/x")
    assert again.encode() == state.encode()
    assert again.topic("alpha").config == alpha.config
    assert do(state, SetTopicDefaults({"log.roll.ms": None, "unknown": None})) is None
    assert beta.config.segment_ms == int(CONFIGS["segment.ms"].default)
    assert state.defaults.values == {"log.retention.ms": "9"}


def test_a_deleted_topic_keeps_its_configs_for_the_seal_that_still_runs() -> None:
    state = started()
    assert do(state, SetTopicDefaults({"log.roll.ms": "2000"})) is None
    topic = state.topic("alpha")
    assert do(state, DeleteTopic(IDS[0])) is None
    assert do(state, SetTopicDefaults({"log.roll.ms": "3000"})) is None
    assert (topic.config.segment_ms, state.topic("beta").config.segment_ms) == (2000, 3000)


def test_a_default_clock_stamps_what_is_appended_after_it() -> None:
    state = started()
    stamps = SetTopicDefaults({"log.message.timestamp.type": "LogAppendTime"})
    applied(state, appending((0, 0, 1), chunks=[chunk(1)], at_ms=20))
    assert do(state, stamps, at_ms=30) is None
    applied(state, appending((0, 0, 1), chunks=[chunk(1)], at_ms=40))
    tail = state.partition("alpha", 0).tail
    assert [run.append_ms for run in tail] == [-1, 40]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"log.roll.ms": "1000", "log.retention.ms": "soon"}, "invalid value 'soon'"),
        ({"num.partitions": "0"}, "must be 1 to 10000"),
        ({"segment.ms": "1000"}, "use the name log.roll.ms"),
        ({"min.insync.replicas": "2"}, "cannot have a default"),
        ({"log.dirs": "/x"}, "unknown default"),
        ({"log.cleanup.policy": "delete," * 143 + "delete"}, "the limit is 1000"),
    ],
)
def test_invalid_defaults_are_refused_together(values: dict[str, str | None], why: str) -> None:
    state = started()
    refusal = do(state, SetTopicDefaults(values))
    assert isinstance(refusal, InvalidConfig)
    assert why in str(refusal)
    assert state.defaults.values == {}


def test_an_invalid_value_of_a_topic_does_not_count() -> None:
    """A newer version, or an older one, may have other values."""
    defaults = topic_configs.TopicDefaults({"log.roll.ms": "2000", "log.retention.ms": "?"})
    config = topic_configs.effective({"segment.ms": "soon"}, defaults)
    assert config.segment_ms == 2000
    assert config.retention_ms == int(CONFIGS["retention.ms"].default)


def test_settings_of_the_broker_are_below_the_clusters_defaults() -> None:
    none, defaults = (
        topic_configs.NO_DEFAULTS,
        topic_configs.TopicDefaults({"num.partitions": "6", "auto.create.topics.enable": "false"}),
    )
    assert (none.partitions(3), defaults.partitions(3)) == (3, 6)
    assert [none.is_auto_create(is_enabled) for is_enabled in (True, False)] == [True, False]
    assert [defaults.is_auto_create(is_enabled) for is_enabled in (True, False)] == [False, False]
    values = defaults.values_of_default("num.partitions", {"num.partitions": "3"})
    assert [(value.value, value.source) for value in values] == [("6", 3), ("3", 4), ("1", 5)]


@pytest.mark.parametrize("level", [format_levels.FIRST, 2, 3])
def test_levels_below_4_have_no_defaults(level: int) -> None:
    state = ClusterState("c", level)
    action = SetTopicDefaults({"log.roll.ms": "2000"})
    refusal = state._check(action, [])
    assert isinstance(refusal, InvalidConfig)
    assert "need level 4 of the format" in str(refusal)
    assert "run tidelog upgrade" in str(refusal)
    commits = [Commit(b"", [action])]
    with pytest.raises(InvalidRequest, match="from level 4 on"):
        encode_header(Entry(level, 1, b"", b"", "b", 1, [], commits))
    raw = msgspec.msgpack.decode(state.encode())
    if level > format_levels.FIRST:
        missing: list[object] = [[{}, {}, {}, [{}, {}]]] if level == 2 else []
        raw += [*missing, None, {"log.roll.ms": "2000"}]
        with pytest.raises(Corrupt):
            ClusterState.decode(msgspec.msgpack.encode(raw), "checkpoints/x")


HEADER_BYTES_MAX = 64 * 1024
"""Of an entry here, instead of 64 MiB: all sizes of these tests are a thousandth."""
TOPICS = 17


def policy_of(size: int) -> dict[str, str | None]:
    """A valid value of so many bytes, which says no more than `delete`."""
    return {"cleanup.policy": "delete" + ",delete" * (size // len(",delete"))}


async def test_large_config_changes_do_not_end_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.storage.codec.entry.HEADER_BYTES_MAX", HEADER_BYTES_MAX)
    log = await opened(MemoryStore())
    watch = asyncio.create_task(log.run_until_failed())
    names = [f"t{number}" for number in range(TOPICS)]
    try:
        for name in names:
            await log.topics.create(name, 1, {})
        policy = policy_of(4 * 1024)
        work = [log.topics.alter(name, policy) for name in names]
        outcomes = await asyncio.gather(*work, return_exceptions=True)
        assert not watch.done(), "a task of the broker has ended"
        assert all(outcome is None or isinstance(outcome, InvalidConfig) for outcome in outcomes), (
            outcomes
        )
        await append(log, "after", topic="t0")
        assert await read_values(log, topic="t0") == ["after"]
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await kill(log)


@pytest.mark.parametrize("way", ["create", "alter"])
async def test_the_state_keeps_no_more_of_a_config_than_it_says(way: str) -> None:
    log = await opened(MemoryStore())
    try:
        policy = policy_of(100_000)
        try:
            if way == "create":
                await log.topics.create("t", 1, dict(policy))
            else:
                await log.topics.create("t", 1, {})
                await log.topics.alter("t", policy)
        except LogError:
            pass  # to refuse it is as good
        assert len(log.state.encode()) < 1000
    finally:
        await kill(log)
