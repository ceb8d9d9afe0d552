"""Delta's own part of the manifest: a log for other engines, checkpoints, syncs, lost answers."""

import http.client
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import deltalake
import pytest

from tests.contract.test_table import PREFIX, file, files_of, fresh, seal
from tests.support.clock import ManualClock
from tests.support.moto import Moto
from tests.support.seaweed import REGION
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import CommitUnknown, StoreUnfit, TableInDoubt, Unavailable
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.s3 import S3Store
from tidelog.storage.store.s3_options import S3Options
from tidelog.storage.tables import commit_put, delta_json, delta_log
from tidelog.storage.tables import delta as table
from tidelog.storage.tables.delta import DeltaManifest, open_table
from tidelog.storage.tables.manifest import ManifestConflict, Table, seal_app_id

# --- Delta on a folder


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[FolderStore]:
    store = FolderStore(tmp_path / "a folder")
    yield store
    await store.close()


def delta(folder: FolderStore) -> DeltaManifest:
    return DeltaManifest(folder, PREFIX, "orders")


def log_of(folder: FolderStore) -> Path:
    return Path(folder.table_uri(PREFIX), "_delta_log")


def actions(folder: FolderStore, version: int) -> list[dict]:
    lines = (log_of(folder) / f"{version:020d}.json").read_text().splitlines()
    return [json.loads(line) for line in lines]


async def seal_often(delta_table: Table, steps: Sequence[int]) -> None:
    for step in steps:
        await delta_table.add([file(0, 10 * step, 10 * step + 10)], seal(10 * step + 10))


async def test_the_log_says_what_engines_need(folder: FolderStore) -> None:
    delta_table = delta(folder)
    await delta_table.add([file(0, 0, 10)], seal(10))
    await delta_table.add([file(7, 5, 10)._replace(rows=2)], {"compact": 1})
    delta_table_again = deltalake.DeltaTable(folder.table_uri(PREFIX))
    assert delta_table_again.metadata().name == "orders"
    assert delta_table_again.metadata().partition_columns == ["partition"]
    assert (
        delta_table_again.protocol().min_reader_version,
        delta_table_again.protocol().min_writer_version,
    ) == (1, 2)
    [add] = [line["add"] for line in actions(folder, 1) if "add" in line]
    assert add["path"] == object_keys.segment(0, 0, 10, "ab12")
    assert add["partitionValues"] == {"partition": "0"}
    assert add["dataChange"] is True
    assert json.loads(add["stats"]) == {
        "numRecords": 10,
        "minValues": {"offset": 0, "timestamp": "2023-11-14T22:13:20.000Z"},
        "maxValues": {"offset": 9, "timestamp": "2023-11-14T22:13:20.999999Z"},
        "nullCount": {"offset": 0, "timestamp": 0},
        "tightBounds": True,
    }
    assert {"txn": {"appId": "seal-0", "version": 10}} in actions(folder, 1)
    [add] = [line["add"] for line in actions(folder, 2) if "add" in line]
    assert json.loads(add["stats"])["tightBounds"] is False


def clean_up(folder: FolderStore) -> None:
    """Delete the versions before the newest checkpoint, as a collection does after seven days."""
    log = log_of(folder)
    newest = max(path.name[:20] for path in log.glob("*.checkpoint.parquet"))
    for path in log.glob("0*"):
        if path.name[:20] < newest:
            path.unlink()


async def test_checkpoints_keep_log(folder: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CHECKPOINT_INTERVAL", 5)
    monkeypatch.setitem(table._PROPERTIES, "delta.checkpointInterval", "5")
    delta_table, stale = delta(folder), delta(folder)
    await seal_often(delta_table, [0])
    assert len(await files_of(stale)) == 1
    assert await stale.transaction_version(seal_app_id(0)) == 10
    await seal_often(delta_table, range(1, 12))
    log = log_of(folder)
    assert (log / "00000000000000000009.checkpoint.parquet").exists()
    assert (log / "00000000000000000000.json").exists()
    for path in log.iterdir():
        os.utime(path, (1_000_000_000, 1_000_000_000))
    await seal_often(delta_table, range(12, 14))
    foreign = deltalake.DeltaTable(folder.table_uri(PREFIX))
    foreign.create_checkpoint()
    foreign.alter.set_table_properties({"delta.checkpointInterval": "5"})
    foreign.create_checkpoint()
    for version in range(15):
        assert (log / f"{version:020}.json").exists()
    clean_up(folder)
    # A view from before that continues from the checkpoint.
    await stale.refresh()
    assert await files_of(stale) == await files_of(delta_table)
    assert await stale.transaction_version(seal_app_id(0)) == 140
    with pytest.raises(ManifestConflict):
        await stale.add([file(0, 130, 150, unique="bad")], seal(150))
    await seal_often(stale, [14])


@pytest.mark.parametrize(
    ("text", "kept_ms"),
    [
        ("interval 7 days", 604_800_000),
        ("interval 1 week", 604_800_000),
        ("INTERVAL 36 HOURS", 129_600_000),
        ("90 seconds", 90_000),
        ("interval 1 month", None),
        ("always", None),
    ],
)
def test_how_long_a_table_keeps_its_log(text: str, kept_ms: int | None) -> None:
    assert delta_json.interval_ms(text) == kept_ms


async def test_an_operator_sets_how_long_a_table_keeps_its_log(folder: FolderStore) -> None:
    delta_table = delta(folder)
    await seal_often(delta_table, [0])
    assert await delta_table.log_retention_ms() == 604_800_000
    foreign = deltalake.DeltaTable(folder.table_uri(PREFIX))
    foreign.alter.set_table_properties({"delta.logRetentionDuration": "interval 30 days"})
    await delta_table.refresh()
    assert await delta_table.log_retention_ms() == 30 * 86_400_000


@pytest.mark.parametrize("age_s", [3600.0, 8 * 86_400.0])
async def test_stale_commit_refused(
    folder: FolderStore, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    monkeypatch.setattr(table, "CHECKPOINT_INTERVAL", 5)
    monkeypatch.setitem(table._PROPERTIES, "delta.checkpointInterval", "5")
    clock = ManualClock()
    delta_table, stale = delta(folder), DeltaManifest(folder, PREFIX, "orders", clock)
    await seal_often(delta_table, range(3))
    assert await stale.transaction_version(seal_app_id(0)) == 30
    await seal_often(delta_table, range(3, 16))
    clean_up(folder)
    clock.advance(age_s)
    with pytest.raises((ManifestConflict, CommitUnknown)):
        await stale.add([file(0, 30, 35, unique="bad")], seal(35))
    assert len(await files_of(stale)) == 16
    await seal_often(stale, [16])


async def test_transactions_are_read(folder: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    delta_table, other = delta(folder), delta(folder)
    await seal_often(delta_table, [0])
    assert await other.transaction_version(seal_app_id(0)) == 10
    await seal_often(delta_table, range(1, 4))
    monkeypatch.setattr(deltalake.DeltaTable, "transaction_version", None)  # a call would raise
    await other.refresh()
    assert await other.transaction_version(seal_app_id(0)) == 40
    await seal_often(other, [4])


async def test_synced_before_counted(folder: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = delta_log.sync_path
    monkeypatch.setattr(delta_log, "sync_path", lambda path: (synced.append(path.name), sync(path)))
    delta_table, other = delta(folder), delta(folder)
    await seal_often(delta_table, [0])
    # deltalake made version 0; the store made version 1 durable itself.
    assert {"00000000000000000000.json", "_delta_log"} <= set(synced)
    await seal_often(delta_table, [1])
    synced.clear()
    # Another process's commit may not be on the disk yet: a hole below ours would cost the table.
    await other.refresh()
    assert {f"{version:020d}.json" for version in range(3)} <= set(synced)
    synced.clear()
    await other.refresh()
    assert synced == []


async def test_a_damaged_log_is_in_doubt_until_it_can_be_read(folder: FolderStore) -> None:
    delta_table = delta(folder)
    await seal_often(delta_table, range(2))
    last = log_of(folder) / "00000000000000000002.json"
    good = last.read_bytes()
    last.write_bytes(good[:300])
    other = delta(folder)
    with pytest.raises(TableInDoubt, match=last.name):
        await other.segments(0)
    last.write_bytes(good)
    assert len(await files_of(other)) == 2
    assert len(await files_of(delta_table)) == 2


async def test_a_commit_that_fails_otherwise_is_unknown(folder: FolderStore) -> None:
    delta_table = delta(folder)
    await seal_often(delta_table, range(2))
    (log_of(folder) / "00000000000000000003.json").mkdir()
    with pytest.raises(CommitUnknown):
        await seal_often(delta_table, [2])
    (log_of(folder) / "00000000000000000003.json").rmdir()
    await delta_table.refresh()
    assert await delta_table.transaction_version(seal_app_id(0)) == 20
    await seal_often(delta_table, [2])


async def test_a_path_that_delta_cannot_open_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnfit):
        delta(FolderStore(tmp_path / "a%20b"))


# --- Delta on S3


class LossyProxy:
    """Stands before an S3 and loses the answer to a PUT of a Delta version, once.

    The object is stored; the client gets an error and retries.
    """

    def __init__(self, endpoint_url: str, how: str) -> None:
        self.lost: list[str] = []
        self.how = how
        self.is_away = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(endpoint_url))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.endpoint_url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "LossyProxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self, endpoint_url: str) -> type[BaseHTTPRequestHandler]:
        proxy, host = self, endpoint_url.removeprefix("http://")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if proxy.is_away:
                    self.close_connection = True
                    return
                with closing(http.client.HTTPConnection(host)) as server:
                    server.request(self.command, self.path, body, dict(self.headers))
                    answer = server.getresponse()
                    status, content = answer.status, answer.read()
                    headers = answer.getheaders()
                is_version = re.search(r"_delta_log/0*[1-9]\d*\.json$", self.path)
                if self.command == "PUT" and is_version and not proxy.lost:
                    proxy.lost.append(self.path)
                    if proxy.how == "dropped":
                        self.close_connection = True
                        return
                    status, content, headers = 500, b"", []
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in {"transfer-encoding", "connection", "content-length"}:
                        self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Quietly."""

        return Handler


@pytest.mark.parametrize("how", ["dropped", "500"])
async def test_a_lost_answer_is_not_a_lost_commit(moto_server: Moto, how: str) -> None:
    prefix = f"lossy-{how}"
    with LossyProxy(moto_server.endpoint_url, how) as proxy:
        options = S3Options(endpoint_url=proxy.endpoint_url, region=REGION)
        store = await S3Store.open(moto_server.bucket, prefix, options)
        delta_table = open_table(store, PREFIX, "orders")
        await delta_table.add([file(0, 0, 10)], seal(10))
        assert len(proxy.lost) == 1
        assert await fresh(lambda: open_table(store, PREFIX, "orders")) == [file(0, 0, 10)]
        await delta_table.add([file(0, 10, 20)], seal(20))
        assert delta_table.version == 2
        await store.close()


async def test_commit_to_absent_store_is_unknown(
    moto_server: Moto, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LossyProxy(moto_server.endpoint_url, "500") as proxy:
        options = S3Options(endpoint_url=proxy.endpoint_url, region=REGION)
        store = await S3Store.open(moto_server.bucket, "away", options)
        delta_table, other = [open_table(store, PREFIX, "orders") for _ in range(2)]
        await delta_table.add([file(0, 0, 10)], seal(10))
        proxy.is_away = True
        monkeypatch.setattr(commit_put, "PUT_PAUSES_S", (0.05, 0.05))
        with pytest.raises(CommitUnknown):
            await delta_table.add([file(0, 10, 20)], seal(20))
        with pytest.raises(Unavailable):
            await delta_table.refresh()
        with pytest.raises(Unavailable):
            await other.segments(0)
        assert await files_of(delta_table) == [file(0, 0, 10)], "what was loaded stays"
        proxy.is_away = False
        await delta_table.add([file(0, 10, 20)], seal(20))
        assert await files_of(other) == [file(0, 0, 10), file(0, 10, 20)]
        await store.close()
