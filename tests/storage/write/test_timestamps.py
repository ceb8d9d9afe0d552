"""Records stamped absurdly are refused before the ack, by Kafka's bounds and with Kafka's names."""

import numpy as np
import pyarrow as pa
import pytest

from tests.support.logs import append, closing, opened, with_topic
from tests.support.records import rows
from tidelog.storage.codec import chunk
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.core import levels
from tidelog.storage.core.errors import InvalidConfig, InvalidTimestamp
from tidelog.storage.core.topic_configs import CONFIGS, effective
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.write.requests import check_timestamps

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
AFTER, BEFORE = "message.timestamp.after.max.ms", "message.timestamp.before.max.ms"


def columns(*stamps: int) -> pa.RecordBatch:
    batch = chunk.batch_of_rows([rows(*["v"] * len(stamps), timestamps=list(stamps))])
    assert np.array_equal(chunk.timestamps_us(batch.column("timestamp")) // 1000, stamps)
    return batch


def is_accepted(stamp: int, **configs: str) -> bool:
    config = effective({name.replace("_", "."): value for name, value in configs.items()})
    said = set()
    for records in (rows("a", "b", timestamps=[NOW_MS, stamp]), columns(NOW_MS, stamp)):
        try:
            check_timestamps("t", records, config, NOW_MS)
            said.add("")
        except InvalidTimestamp as error:
            said.add(str(error))
    (why,) = said
    assert why == "" or why.startswith(f"record 1 for topic 't' has timestamp {stamp}, ")
    return not why


def test_the_defaults_are_kafkas() -> None:
    assert (CONFIGS[AFTER].default, CONFIGS[BEFORE].default) == ("3600000", str(2**63 - 1))
    assert is_accepted(NOW_MS + HOUR_MS)
    assert not is_accepted(NOW_MS + HOUR_MS + 1)
    assert not is_accepted(253_402_300_799_999)
    assert is_accepted(0)


def test_both_bounds_are_inclusive_and_settable() -> None:
    assert is_accepted(NOW_MS - 10, message_timestamp_before_max_ms="10")
    assert not is_accepted(NOW_MS - 11, message_timestamp_before_max_ms="10")
    assert is_accepted(NOW_MS, message_timestamp_after_max_ms="0")
    assert not is_accepted(NOW_MS + 1, message_timestamp_after_max_ms="0")
    assert is_accepted(253_402_300_799_999, message_timestamp_after_max_ms=str(2**63 - 1))


def test_a_topic_with_append_time_takes_any_timestamp() -> None:
    stamped = "LogAppendTime"
    assert is_accepted(253_402_300_799_999, message_timestamp_type=stamped)


async def test_a_refused_request_writes_nothing_and_a_retry_of_an_accepted_one_is_not_checked() -> (
    None
):
    async with closing(await with_topic(MemoryStore(), configs={BEFORE: "1000"})) as log:
        last, now_ms = log.state.seq, log.clock.now_ms()
        with pytest.raises(InvalidTimestamp, match=f"{AFTER} is 3600000"):
            await append(log, "far", timestamps=[now_ms + 2 * HOUR_MS])
        assert (log.state.seq, log.writer.buffered_bytes) == (last, 0)
        key = IdempotencyKey("k", b"f" * 16, 1)
        topic = log.state.topic("t")
        request = [(0, rows("once", timestamps=[now_ms]))]
        first = await log.append(topic, request, size=4, is_json=False, key=key)
        log.clock.advance(60.0)  # type: ignore[attr-defined]
        assert first == await log.append(topic, request, size=4, is_json=False, key=key)
        with pytest.raises(InvalidTimestamp, match=f"60000 ms before .* {BEFORE} is 1000"):
            await log.append(topic, request, size=4, is_json=False)


async def test_a_cluster_of_the_first_level_has_the_defaults_only() -> None:
    """Version 0.1 refuses a commit that sets a config it does not know: so does `apply` (I4)."""

    async with closing(await opened(MemoryStore())) as log:
        log.wal._state = ClusterState("c0ffee", levels.FIRST)
        with pytest.raises(InvalidConfig, match=r"needs level 2 .* run tidelog upgrade"):
            await log.create_topic("t", 1, {AFTER: "1"})
