"""`open_store` finds what a URL leads to; the probe refuses, by name, a store that lies."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import pytest

from tests.support.moto import Moto
from tests.support.ports import free_port
from tests.support.seaweed import REGION
from tidelog.storage.core.errors import ObjectNotFound, StoreRefused, StoreUnfit, Unavailable
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import Created, ObjectInfo, ObjectStore
from tidelog.storage.store.open import open_store
from tidelog.storage.store.probe import probe
from tidelog.storage.store.s3 import S3Store
from tidelog.storage.store.s3_options import S3Options

CLOCK = SystemClock()


async def test_every_store_passes_and_is_left_as_it_was(store: ObjectStore) -> None:
    await store.create("cluster.json", [b"{}"])
    await asyncio.gather(probe(store, CLOCK), probe(store, CLOCK))
    assert [info.key async for info in store.list("")] == ["cluster.json"]


class Overwrites(MemoryStore):
    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        await self.put(key, parts)
        return Created.DONE


class LooksFirst(MemoryStore):
    """Looks, then stores: right unless two come at once."""

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        if key in self._objects:
            return Created.EXISTS
        await asyncio.sleep(0)
        await self.put(key, parts)
        return Created.DONE


class OverwritesAndDenies(MemoryStore):
    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        outcome = await super().create(key, parts)
        if b"".join(parts) == b"overwritten":
            await self.put(key, parts)
        return outcome


class NeverCreates(MemoryStore):
    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        return Created.EXISTS


class IgnoresRanges(MemoryStore):
    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return await self.get(key)


class EndsRangesOneLate(MemoryStore):
    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return await super().get_range(key, start, length + 1)


class RemembersMisses(MemoryStore):
    """A cache in front, which also caches that there was nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._misses: set[str] = set()

    async def get(self, key: str) -> bytes:
        try:
            if key in self._misses:
                raise ObjectNotFound(key)
            return await super().get(key)
        except ObjectNotFound:
            self._misses.add(key)
            raise


class ReadsStale(MemoryStore):
    """Keeps the bytes of the last to come, and says that the first won."""

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        outcome = await super().create(key, parts)
        await self.put(key, parts)
        return outcome


class ListsLate(MemoryStore):
    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        return
        yield


class ListsAsTree(MemoryStore):
    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        start = start_after.split("/")
        listing = super().list(prefix)
        infos = [info async for info in listing]
        for info in sorted(infos, key=lambda it: it.key.split("/")):
            if info.key.split("/") > start:
                yield info


class Keeps(MemoryStore):
    async def delete(self, keys: Iterable[str]) -> None:
        pass


class Refuses(MemoryStore):
    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        raise StoreRefused("AccessDenied")


class Silent(MemoryStore):
    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        return Created.UNKNOWN


class Conflicts(MemoryStore):
    """S3: 409 for the second request while the first is still being stored."""

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        outcome = await super().create(key, parts)
        is_race = outcome is Created.EXISTS and b"".join(parts) != b"overwritten"
        return Created.UNKNOWN if is_race else outcome


@pytest.mark.parametrize(
    ("liar", "test_name"),
    [
        (Overwrites(), "create-if-absent"),
        (LooksFirst(), "create-if-absent"),
        (OverwritesAndDenies(), "create-if-absent"),
        (NeverCreates(), "create-if-absent"),
        (IgnoresRanges(), "range GET"),
        (EndsRangesOneLate(), "range GET"),
        (RemembersMisses(), "read-after-write"),
        (ReadsStale(), "read-after-write"),
        (ListsLate(), "LIST"),
        (ListsAsTree(), "LIST"),
        (Keeps(), "DELETE"),
        (Refuses(), "writing"),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, MemoryStore) else "",
)
async def test_probe_refuses_an_unfit_store_by_name(liar: MemoryStore, test_name: str) -> None:
    with pytest.raises(
        StoreUnfit, match=f"^memory:// cannot store a log: the test of {test_name} failed: "
    ):
        await probe(liar, CLOCK)
    if not isinstance(liar, Keeps | ListsLate):
        assert [info.key async for info in liar.list("")] == []


async def test_a_store_that_does_not_answer_is_no_liar() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        await probe(Silent(), CLOCK, retry_s=0.0)


async def test_probe_accepts_an_unknown_outcome_of_a_lost_create() -> None:
    store = Conflicts()
    await probe(store, CLOCK)
    assert [info.key async for info in store.list("")] == []


async def test_urls_lead_to_stores(tmp_path: Path, moto_server: Moto) -> None:
    options = S3Options(endpoint_url=moto_server.endpoint_url, region=REGION)
    folder = tmp_path / "a folder" / "100%"
    kind_by_url = {
        "memory://": (MemoryStore, "memory://"),
        str(folder): (FolderStore, folder.as_uri()),
        folder.as_uri(): (FolderStore, folder.as_uri()),
        f"s3://{moto_server.bucket}": (S3Store, f"s3://{moto_server.bucket}"),
        f"s3://{moto_server.bucket}/a/b/": (S3Store, f"s3://{moto_server.bucket}/a/b"),
    }
    for url, (kind, canonical) in kind_by_url.items():
        opened_store = await open_store(url, s3=options)
        assert isinstance(opened_store, kind)
        assert opened_store.url == canonical
        await opened_store.create("found", [b"it"])
        await opened_store.close()
    assert (folder / "found").read_bytes() == b"it"


async def test_a_relative_path_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened_store = await open_store("some/data")
    assert opened_store.url == (tmp_path / "some/data").as_uri()
    await opened_store.close()


@pytest.mark.parametrize("url", ["", "gs://b/c", "s3://", "s3:///c", "file://host/a", "file:///"])
async def test_a_url_that_leads_nowhere_is_refused(url: str) -> None:
    with pytest.raises(StoreUnfit, match="store url"):
        await open_store(url)


async def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnfit, match=r"folder .*/file/data cannot be written: .*ENOTDIR"):
        await open_store(f"{tmp_path}/file/data")


async def test_a_missing_bucket_is_refused(moto_server: Moto) -> None:
    options = S3Options(endpoint_url=moto_server.endpoint_url, region=REGION)
    with pytest.raises(StoreUnfit, match=r"s3://nowhere/x .*NoSuchBucket \(404\).*create the buck"):
        await open_store("s3://nowhere/x", s3=options)


async def test_unreachable_server(aws_credentials: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    endpoint_url = f"http://127.0.0.1:{free_port()}"
    options = S3Options(endpoint_url=endpoint_url, region=REGION, attempts_max=1)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await open_store("s3://bucket", s3=options)
