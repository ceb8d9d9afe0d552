"""Several brokers on one store, as processes: the same log at each of them (I1 to I6).

Any of them is killed, stopped or terminated.
"""

import contextlib
import secrets
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import Broker, tidelog
from tests.support.history import violations
from tests.support.pace import is_within
from tests.support.seaweed import REGION, Seaweed
from tests.system.checks import check_chain, check_retries, new_topic, the_log
from tests.system.client import Client
from tests.system.load import Load, Mix, Reading
from tests.system.several import QUICK, brokers, metrics, sequencer_first, stopped, total
from tidelog.storage.store.s3 import S3Store
from tidelog.storage.store.s3_options import S3Options

PARTITIONS = 3


@pytest.mark.seaweed
async def test_three_brokers_one_log(seaweed: Seaweed, tmp_path: Path) -> None:
    """A producer to each broker and a consumer on each: one dense log, to the byte."""
    topic, seed = new_topic(), secrets.randbits(32)
    print(f"seed {seed}")
    prefix = f"{secrets.token_hex(4)}/logs"
    store, endpoint = f"s3://{seaweed.bucket}/{prefix}", seaweed.endpoint_url
    patient = QUICK | {"sequencer_timeout_ms": 10_000}  # of a machine that does a lot besides
    with brokers(tmp_path, store=store, s3_endpoint=endpoint, **patient) as cluster:
        with Client(cluster[0].base_url) as client:
            client.create_topic(topic, PARTITIONS, segment_ms=500)
        with contextlib.ExitStack() as stack:
            loads = [
                stack.enter_context(
                    Load(
                        broker.base_url,
                        Mix(topic, PARTITIONS, 2, pause_s=0.0, first=10 * number),
                        seed,
                    )
                )
                for number, broker in enumerate(cluster)
            ]
            readings = [
                stack.enter_context(Reading(broker.base_url, topic, number))
                for number, broker in enumerate(cluster)
            ]
            for load in loads:
                load.wait_for_acks(40)
            sent = [sending for load in loads for sending in load.finish()]
        assert [reading.failures for reading in readings] == [[]] * len(readings)
        rows = [all_rows(broker, topic) for broker in cluster]
        assert rows[0] == rows[1] == rows[2]
        log = the_log(cluster[0], topic, PARTITIONS)
        assert violations([sending.request for sending in sent], log) == []
        for broker in cluster:  # I3, and keys hold at every broker
            check_retries(
                broker, topic, [sending for sending in sent if sending.request.is_acked][-20:]
            )
        assert (
            violations(
                [sending.request for sending in sent], the_log(cluster[0], topic, PARTITIONS)
            )
            == []
        )
        puts, committed = total(cluster, "wal_puts"), total(cluster, "wal_entries_committed")
        assert puts <= 1.1 * committed
        assert total(cluster, "drafts") > 1.05 * committed, "nothing rode with another's"
        for broker in cluster:
            started = time.monotonic()
            assert broker.stop() == 0, broker.log()
            assert is_within(time.monotonic() - started, 10)
            assert "Traceback" not in broker.log()
    scrubbed = tidelog("scrub", "--store", store, TIDELOG_S3_ENDPOINT=endpoint)
    assert b"DAMAGED" not in scrubbed.stdout
    opened_store = await S3Store.open(
        seaweed.bucket, prefix, S3Options(endpoint_url=endpoint, region=REGION)
    )
    assert [info.key async for info in opened_store.list("brokers/")] == [], "they have all left"
    await opened_store.close()


def all_rows(broker: Broker, topic: str) -> list[list[dict[str, Any]]]:
    """Every record of every partition with all that readers get: timestamps and headers, too."""
    with Client(broker.base_url) as client:
        return [client.rows(topic, number) for number in range(PARTITIONS)]


@pytest.mark.parametrize("role", [0, 1])
def test_a_broker_stopped_for_longer_than_its_view_may_be_old(tmp_path: Path, role: int) -> None:
    """The sequencer, and one that is not."""
    topic, seed = new_topic(), secrets.randbits(32)
    short_lived = {
        "wal_view_age_max_ms": 1000,
        "wal_retention_ms": 4000,
        "test_bounds": True,
        "poll_interval_ms": 100,
    }
    with brokers(tmp_path, **QUICK, **short_lived) as cluster:
        with Client(cluster[0].base_url) as client:
            client.create_topic(topic, PARTITIONS)
        victim = sequencer_first(cluster)[role]
        other_urls = [broker.base_url for broker in cluster if broker is not victim]
        with (
            Load([broker.base_url for broker in cluster], Mix(topic, PARTITIONS, 6), seed) as load,
            Load(other_urls, Mix(topic, PARTITIONS, 2, first=50), seed) as elsewhere,
        ):
            load.wait_for_acks(100)
            with stopped(victim):
                time.sleep(2.5)
                elsewhere.wait_for_acks(20)
                end = [
                    len(records)
                    for records in the_log(
                        next(it for it in cluster if it is not victim), topic, PARTITIONS
                    ).values()
                ]
            log_records = the_log(victim, topic, PARTITIONS)
            assert all(len(log_records[number]) >= end[number] for number in log_records), (
                "it serves what is old"
            )
            load.wait_for_acks(100)
            sent = [*load.finish(), *elsewhere.finish()]
        logs = [the_log(broker, topic, PARTITIONS) for broker in cluster]
        assert logs[0] == logs[1] == logs[2]
        assert violations([sending.request for sending in sent], logs[0]) == []
        assert metrics(victim)["tidelog_wal_void_total"] >= 1
    check_chain(tmp_path / "store")
