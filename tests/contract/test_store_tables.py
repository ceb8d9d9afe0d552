"""Delta tables live below the store's own prefix, under the store's own credentials."""

import asyncio
from typing import Protocol

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.moto import Moto
from tests.support.seaweed import ACCESS_KEY, REGION, SECRET_KEY
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.store.s3 import S3Store
from tidelog.storage.store.s3_options import S3Options


class TableStore(ObjectStore, Protocol):
    def table_uri(self, key: str) -> str: ...


@pytest.mark.parametrize(
    "store",
    ["folder", "moto", pytest.param("seaweed", marks=pytest.mark.seaweed)],
    indirect=True,
)
async def test_tables_and_objects_share_a_prefix(store: TableStore) -> None:
    uri = store.table_uri("topics/orders-1")
    options = await store.deltalake_options() if isinstance(store, S3Store) else {}

    def append(number: int) -> None:
        rows = pa.table({"offset": pa.array([number], pa.int64())})
        write_deltalake(uri, rows, mode="append", storage_options=options)

    await asyncio.to_thread(append, 0)
    # Each commit is a create-if-absent too: two at once both end up in the table.
    await asyncio.gather(*(asyncio.to_thread(append, number) for number in (1, 2)))
    table = await asyncio.to_thread(DeltaTable, uri, storage_options=options)
    rows = await asyncio.to_thread(table.to_pyarrow_table)
    assert sorted(rows.column("offset").to_pylist()) == [0, 1, 2]
    keys = [info.key async for info in store.list("topics/orders-1/_delta_log/0")]
    assert keys == [f"topics/orders-1/_delta_log/{number:020d}.json" for number in range(3)]
    assert b'"add"' in await store.get(keys[2])


async def test_options_for_deltalake(moto_server: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials as they are at that moment, for an endpoint of one's own in either style."""
    options = S3Options(endpoint_url=moto_server.endpoint_url, region=REGION)
    store = await S3Store.open(moto_server.bucket, "/a//", options)
    assert store.table_uri("topics/t-1") == f"s3://{moto_server.bucket}/a/topics/t-1"
    told = await store.deltalake_options()
    await store.close()
    assert told == {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ALLOW_HTTP": "true",
        "AWS_CONDITIONAL_PUT": "etag",
        "AWS_ENDPOINT_URL": moto_server.endpoint_url,
        "AWS_REGION": REGION,
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
    }
    monkeypatch.setenv("AWS_SESSION_TOKEN", "for an hour")
    virtual = S3Store("bucket", "", S3Options(endpoint_url="https://s3.test", path_style=False))
    assert await virtual.deltalake_options() == {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_SESSION_TOKEN": "for an hour",
        "AWS_ALLOW_HTTP": "false",
        "AWS_CONDITIONAL_PUT": "etag",
        "AWS_ENDPOINT_URL": "https://bucket.s3.test",
        "AWS_REGION": "us-east-1",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
    }
    aws = S3Store("bucket", "p", S3Options(region="eu-central-1"))
    told = await aws.deltalake_options()
    assert "AWS_ENDPOINT_URL" not in told
    assert (told["AWS_REGION"], told["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"]) == (
        "eu-central-1",
        "true",
    )
