"""Brokers that cannot start: one line that says what and where, a status, no traceback.

An operator gets one line, and a supervisor sees that the process ended.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from tests.support import tuned_cli
from tests.support.broker import CLI_S, Broker, environment, error_line, tidelog
from tests.support.ports import free_port
from tests.support.records import creating
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, Seaweed
from tests.system.client import Client
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.wal.view import WalView

FAILED = 1
WRONG_USAGE = 2
UNREACHABLE = 3


def refusal(store: str | Path, *flags: str, status: int = UNREACHABLE, **variables: str) -> str:
    """Return the error line of a broker that does not start; `tidelog` waits CLI_S at most."""
    command = ["serve", "--store", str(store), "--port", "0", *flags]
    process = tidelog(*command, status=status, **variables)
    assert process.stdout == b""
    return error_line(process)


# -- what is no store


def test_a_url_that_names_no_store() -> None:
    error = refusal("gopher://burrow/7", status=WRONG_USAGE)
    assert "'gopher://burrow/7' is none of memory://, file:///folder, a path, s3://" in error


def test_a_store_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert f"folder {tmp_path}/file/below cannot be written" in refusal(tmp_path / "file/below")
    assert (tmp_path / "file").read_text() == "not a folder"


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Not even root can write there."""
    bind = ["mount", "--bind", str(folder), str(folder)]
    if os.geteuid() != 0 or subprocess.run(bind, capture_output=True, check=False).returncode:
        mode = folder.stat().st_mode
        folder.chmod(0o500)
        try:
            yield
        finally:
            folder.chmod(mode)
        return
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(sys.platform != "linux" and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    with read_only(folder):
        error = refusal(folder)
    assert f"folder {folder} cannot be written" in error
    assert "mount it writable" in error or "let the broker's user write there" in error
    assert list(folder.iterdir()) == []


# -- S3


class Careless(BaseHTTPRequestHandler):
    """An S3 that takes no notice of If-None-Match, as many still are."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.objects[urlsplit(self.path).path] = body
        self._answer(200)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if "list-type" in parse_qs(url.query):
            self._answer(
                200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
            )
        elif (body := self.objects.get(url.path)) is not None:
            self._answer(200, body)
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"<DeleteResult></DeleteResult>")

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def careless() -> Iterator[str]:
    handler = type("Handler", (Careless,), {"objects": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_s3_that_overwrites(careless: str, aws_credentials: None) -> None:
    error = refusal("s3://b/p", "--s3-endpoint", careless)
    assert "s3://b/p cannot store a log: the test of create-if-absent failed" in error
    assert "both of two concurrent creates succeeded" in error


def test_an_s3_address_without_a_server(aws_credentials: None) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    tuning = json.dumps({"service": {"start_retry_s": 2.0}})
    command = [sys.executable, "-P", tuned_cli.__file__, tuning, "serve", "--port", "0"]
    store = ["--store", "s3://b/p", "--s3-endpoint", endpoint]
    process = subprocess.run(
        [*command, *store], capture_output=True, env=environment(), timeout=CLI_S, check=False
    )
    assert process.returncode == UNREACHABLE
    *waiting, error = process.stderr.decode().splitlines()
    for line in waiting:
        assert "s3://b/p cannot be reached" in line
        assert "; trying again for " in line
    assert error.startswith("tidelog: s3://b/p cannot be reached")
    assert endpoint in error


def test_an_s3_without_credentials(tmp_path: Path, aws_credentials: None) -> None:
    nothing = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": str(tmp_path)}
    error = refusal("s3://b/p", "--s3-endpoint", f"http://127.0.0.1:{free_port()}", **nothing)
    assert "s3://b/p cannot be used" in error
    assert "check the AWS credentials" in error


@pytest.mark.seaweed
def test_a_bucket_that_is_not_there(seaweed: Seaweed) -> None:
    error = refusal("s3://no-such-bucket/p", "--s3-endpoint", seaweed.endpoint_url)
    assert "s3://no-such-bucket/p cannot be used: NoSuchBucket (404)" in error
    assert "create the bucket or correct its name" in error


@pytest.mark.seaweed
def test_a_wrong_secret(seaweed: Seaweed) -> None:
    error = refusal(
        f"s3://{seaweed.bucket}/p",
        "--s3-endpoint",
        seaweed.endpoint_url,
        AWS_ACCESS_KEY_ID=ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=f"not {SECRET_KEY}",
    )
    assert "SignatureDoesNotMatch (403)" in error
    assert "check the AWS credentials" in error
    assert SECRET_KEY not in error


# -- what lies in the store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cluster of five topics in so many entries, and no checkpoint."""
    asyncio.run(_found(tmp_path / "store"))
    return tmp_path / "store"


async def _found(folder: Path) -> None:
    store, clock = FolderStore(folder), SystemClock()
    wal = await WalView.open(store, clock, "b", cluster_id="c0ffee")
    for number in range(5):
        topic_id = clock.new_id().hex()
        await wal.commit(creating(clock, f"t{number}", topic_id=topic_id))
    await wal.close()
    await store.close()


async def _checkpoint(folder: Path) -> None:
    store = FolderStore(folder)
    wal = await WalView.open(store, SystemClock(), "b", cluster_id="c0ffee")
    await wal.checkpoint()
    await wal.close()
    await store.close()


def spoil(path: Path, position: int) -> None:
    """Turn one bit."""
    body = bytearray(path.read_bytes())
    body[position] ^= 0x10
    path.write_bytes(body)


def test_a_wal_without_its_cluster(folder: Path) -> None:
    (folder / "cluster.json").unlink()
    error = refusal(folder)
    assert f"{folder.as_uri()} has wal/{1:020} but no cluster.json" in error
    assert not (folder / "cluster.json").exists()


@pytest.mark.parametrize("body", [b"", b'{"format":1,"cluster_id":"\xff"}'])
def test_a_cluster_json_that_is_none(folder: Path, body: bytes) -> None:
    (folder / "cluster.json").write_bytes(body)
    assert f"{folder.as_uri()}/cluster.json is invalid" in refusal(folder)


def test_a_cluster_of_a_later_format(folder: Path) -> None:
    (folder / "cluster.json").write_text('{"format":9,"cluster_id":"c0ffee","created_ms":1}')
    error = refusal(folder)
    assert "object cluster.json has level 9 of the format, this version reads up to" in error
    assert "it needs a newer tidelog" in error


def test_another_cluster_than_asked_for(folder: Path) -> None:
    error = refusal(folder, "--cluster-id", "decaf")
    assert f"{folder.as_uri()} belongs to cluster c0ffee, not to decaf" in error


def test_a_wal_entry_with_a_flipped_bit_in_both_headers(folder: Path) -> None:
    entry = folder / f"wal/{3:020}"
    spoil(entry, 40)
    spoil(entry, -40)  # the copy of the header is the end of an entry without chunks
    error = refusal(folder, status=FAILED)
    assert f"object wal/{3:020} is corrupt: checksum of the header differs" in error
    assert "see tidelog repair" in error


def test_a_wal_entry_that_is_missing(folder: Path) -> None:
    (folder / f"wal/{3:020}").unlink()
    error = refusal(folder, status=FAILED)
    assert f"object wal/{3:020} is corrupt: is missing, but later entries exist" in error


def test_a_wal_that_no_checkpoint_covers_any_more(folder: Path) -> None:
    asyncio.run(_checkpoint(folder))
    spoil(folder / f"checkpoints/{5:020}", 40)
    for number in range(1, 4):
        (folder / f"wal/{number:020}").unlink()
    process = tidelog("serve", "--store", str(folder), "--port", "0", status=UNREACHABLE)
    *warned, error = process.stderr.decode().splitlines()
    assert all(f"object checkpoints/{5:020} is corrupt" in line for line in warned)
    assert f"tidelog: {folder.as_uri()}: the WAL begins at wal/{4:020} and no checkpoint" in error


def test_a_corrupt_checkpoint_is_passed_over(folder: Path, tmp_path: Path) -> None:
    asyncio.run(_checkpoint(folder))
    spoil(folder / f"checkpoints/{5:020}", 40)
    with Broker(tmp_path, str(folder)) as broker:
        assert f"object checkpoints/{5:020} is corrupt" in broker.log()
        with Client(broker.base_url) as client:
            assert client.call("GET", "/topics").json() == ["t0", "t1", "t2", "t3", "t4"]


# -- hot logs


def test_a_hot_dir_of_another_cluster(folder: Path, tmp_path: Path) -> None:
    hot = tmp_path / "hot"
    patient = {"hot_dir": hot, "flush_interval_ms": 60_000, "produce_timeout_ms": 120_000}
    with Broker(tmp_path / "other", **patient) as broker:
        broker.create_topic("t")
        with Client(broker.base_url) as client:
            body = b'{"records":[{"value":"eA=="}]}'
            assert client.call("POST", "/topics/t?acks=1", body).status == 200
    (hot_file,) = hot.iterdir()
    error = refusal(folder, "--hot-dir", str(hot))
    assert f"hot log {hot_file} belongs to cluster" in error
    assert "not to c0ffee" in error
    assert hot_file.exists()


def test_a_hot_log_that_is_none(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.hot").write_bytes(b"TIDEHOT1")
    assert f"hot log {tmp_path}/notes.hot" in refusal(folder, "--hot-dir", str(tmp_path))


def test_a_hot_dir_that_is_none(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refusal(folder, "--hot-dir", str(tmp_path / "file"), status=FAILED)
    assert f"{tmp_path}/file" in error


# -- the rest of the machine


def test_a_port_that_is_taken(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = ["serve", "--store", str(folder), "--port", str(port), "--log-level", "error"]
        process = tidelog(*command, status=FAILED)
    assert f"cannot listen on 127.0.0.1:{port}: another process uses the port" in error_line(
        process
    )


def test_a_start_on_a_port_in_use_creates_no_cluster(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        tidelog("serve", "--store", f"{tmp_path}/new", "--port", str(port), status=FAILED)
    assert not (tmp_path / "new").exists()


def test_an_address_of_another_machine(folder: Path) -> None:
    error = refusal(folder, "--host", "192.0.2.7", status=FAILED)
    assert "cannot listen on 192.0.2.7:0: this machine does not have the address" in error
    error = refusal(folder, "--peer-host", "192.0.2.7", status=FAILED)
    assert "cannot listen for peers on 192.0.2.7:0: this machine does not have the address" in error


# -- commands that only read


def test_a_scrub_writes_nothing(folder: Path, tmp_path: Path) -> None:
    with read_only(folder):
        tidelog("scrub", "--store", str(folder))
        tidelog("retain", "--store", str(folder))
    (tmp_path / "empty").mkdir()
    process = tidelog("scrub", "--store", f"{tmp_path}/empty", status=UNREACHABLE)
    assert "holds no cluster" in error_line(process)
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_full_disk(tmp_path: Path) -> None:
    limited = [sys.executable, "-c", LIMITED, "serve", "--store", str(tmp_path / "store")]
    process = subprocess.run(
        limited, capture_output=True, env=environment(), timeout=60, check=False
    )
    assert process.returncode == UNREACHABLE
    error = error_line(process)
    assert "the test of writing failed" in error
    assert "raise the file size limit (ulimit -f)" in error


LIMITED = """
import resource, signal, sys
from tidelog.service.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
sys.argv[0] = "tidelog"
sys.exit(main())
"""


# -- stores that may not be served


def with_key(folder: Path) -> None:
    """A cluster with one key, and the cluster's secret."""

    async def make() -> None:
        store = FolderStore(folder)
        broker = await LogBroker.open(store, LogSettings(is_sealing=False), clock=SystemClock())
        await broker.access.create_key("User:alice")
        await broker.cluster.secret()
        await broker.close()
        await store.close()

    asyncio.run(make())


def test_a_cluster_with_keys_without_security(tmp_path: Path) -> None:
    with_key(tmp_path / "store")
    error = refusal(tmp_path / "store")
    assert error.startswith(
        f"the cluster in {(tmp_path / 'store').as_uri()} has keys or ACLs, but "
    )
    with Broker(tmp_path, security_off_with_keys=True) as broker:
        broker.create_topic("t")
        assert httpx.get(f"{broker.base_url}/topics").json() == ["t"]


def test_a_secret_that_others_can_read(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with_key(store)
    secret = store / "secret.json"
    secret.chmod(0o644)
    error = refusal(store, "--security", "keys")
    assert error == f"other users can read or change {secret} (mode 0644): chmod 0600 {secret}"
    secret.chmod(0o600)
    key = tmp_path / "key"
    key.write_text("k" * 30)
    key.chmod(0o644)
    error = refusal(store, "--security", "keys", "--admin-key", f"@{key}", status=WRONG_USAGE)
    assert f"chmod 0600 {key}" in error
