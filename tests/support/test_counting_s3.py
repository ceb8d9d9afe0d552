"""The counting server counts each request once, with its client, verb and kind of object."""

import random
import statistics

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.support.counting_s3 import Counts, Latency, Request, RunningServer
from tests.support.seaweed import ACCESS_KEY, REGION, SECRET_KEY
from tidelog.storage.core import object_keys
from tidelog.storage.store.s3 import S3Store
from tidelog.storage.store.s3_options import S3Options
from tidelog.storage.tables.delta import open_table

LEAST, MOST = 0.5, 2.0


async def opened(server: RunningServer, prefix: str) -> S3Store:
    options = S3Options(endpoint_url=server.endpoint_url, region=REGION)
    store = await S3Store.open(server.bucket, prefix, options)
    server.reset()
    return store


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (object_keys.wal(7), "wal"),
        (f"logs/{object_keys.checkpoint(7)}", "checkpoints"),
        (object_keys.data("ab12", 5), "data"),
        (object_keys.broker("broker-1"), "brokers"),
        (object_keys.maintenance("collect"), "maintenance"),
        (f"{object_keys.topic('t', '12')}/_delta_log/{0:020d}.json", "table log"),
        (f"{object_keys.topic('t', '12')}/{object_keys.segment(0, 0, 9, 'ab')}", "segment"),
        (object_keys.CLUSTER, "cluster"),
        ("logs/", "other"),
    ],
)
def test_kind_of_an_object_is_in_its_key(key: str, kind: str) -> None:
    assert object_keys.kind(key) == kind


async def test_each_request_of_a_store_is_counted_once(counting_s3: RunningServer) -> None:
    store = await opened(counting_s3, "counted")
    await store.create(object_keys.wal(1), [b"abc"])
    await store.create(object_keys.wal(1), [b"abc"])
    await store.get_range(object_keys.wal(1), 1, 1)
    assert [info.key async for info in store.list("wal/")] == [object_keys.wal(1)]
    await store.delete([object_keys.wal(1)])
    counts = counting_s3.counts()
    await store.close()
    assert counts.requests == {
        Request("tidelog", "PUT", "wal", 200): 1,
        Request("tidelog", "PUT", "wal", 412): 1,
        Request("tidelog", "GET", "wal", 206): 1,
        Request("tidelog", "LIST", "wal", 200): 1,
        Request("tidelog", "DELETE", "wal", 200): 1,
    }
    assert counts.bytes_in["tidelog"] > 6
    assert counts.of(verb="PUT") == 2


async def test_requests_of_deltalake_are_seen(counting_s3: RunningServer) -> None:
    store = await opened(counting_s3, "seen")
    table = open_table(store, "topics/t-1", "t")
    await table.refresh()
    counts = counting_s3.counts()
    await store.close()
    assert counts.of(client="deltalake", kind="table log", verb="LIST") == 1
    assert counts.of(client="tidelog") == 0


def test_words_of_s3_for_what_is_not_there(counting_s3: RunningServer) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=counting_s3.endpoint_url,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
    with pytest.raises(ClientError, match="NoSuchKey"):
        client.get_object(Bucket=counting_s3.bucket, Key="words/none")
    client.put_object(Bucket=counting_s3.bucket, Key="words/empty", Body=b"")
    with pytest.raises(ClientError, match="InvalidRange"):
        client.get_object(Bucket=counting_s3.bucket, Key="words/empty", Range="bytes=0-1")
    names = [f"words/{folder}/{number}" for folder in "ab" for number in range(2)]
    for name in names:
        client.put_object(Bucket=counting_s3.bucket, Key=name, Body=b"x")
    page = client.list_objects_v2(
        Bucket=counting_s3.bucket, Prefix="words/", Delimiter="/", MaxKeys=1
    )
    assert [folder["Prefix"] for folder in page["CommonPrefixes"]] == ["words/a/"]
    rest = client.list_objects_v2(
        Bucket=counting_s3.bucket,
        Prefix="words/",
        Delimiter="/",
        ContinuationToken=page["NextContinuationToken"],
    )
    assert [folder["Prefix"] for folder in rest["CommonPrefixes"]] == ["words/b/"]
    assert [item["Key"] for item in rest["Contents"]] == ["words/empty"]
    client.close()


def test_latency_has_its_median_and_counts_bytes() -> None:
    draw, latency = random.Random(7), Latency(write_s=0.06, read_s=0.03, bytes_per_s=1e6)
    for verb, median_s in (("PUT", 0.06), ("LIST", 0.06), ("GET", 0.03)):
        drawn_s = statistics.median(latency.drawn_s(draw, verb, 0) for _ in range(1000))
        assert LEAST * median_s < drawn_s < MOST * median_s
    assert latency.drawn_s(draw, "GET", 10**7) > 10
    assert Latency().drawn_s(draw, "PUT", 10**9) == 0


def test_counts_are_added_by_field(counting_s3: RunningServer) -> None:
    counts = Counts(counting_s3.counts().requests.__class__(), {}, {}, 0)
    counts.requests[Request("tidelog", "GET", "wal", 404)] = 3
    counts.requests[Request("tidelog", "GET", "data", 200)] = 2
    assert (counts.of(verb="GET"), counts.of(status=404), counts.of()) == (5, 3, 5)
