"""A broker and its commands on MinIO: produce, consume, a group, seal, scrub, maintain, a restart.

`make test-minio` runs this. MinIO is `minio` on the PATH, or Go builds it from the Go module proxy
into .venv/go, once: 2 minutes on two free cores, 40 on a busy machine. Without Go, the tests are
skipped.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.broker import Broker, tidelog, until
from tests.support.ports import free_port

MODULE = "github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c"
ROOT = Path(__file__).parents[3]
GO_BIN = Path(sys.prefix) / "go"
BUILD_S = 3600.0
USER, PASSWORD, REGION, BUCKET = "tidelog", "tidelog-secret", "us-east-1", "log"
RECORDS = 20_000


@pytest.fixture(scope="module")
def program() -> Path:
    """The program `minio`. Skips the test if there is none and Go cannot build it."""
    for path in (shutil.which("minio"), shutil.which("minio", path=str(GO_BIN))):
        if path is not None:
            return Path(path)
    if shutil.which("go") is None:
        pytest.skip("minio is not installed, and without Go it cannot be built")
    built = subprocess.run(
        ["nice", "-n", "19", "go", "install", MODULE],
        env={**os.environ, "GOBIN": str(GO_BIN)},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    if built.returncode:
        pytest.skip(f"Go cannot build {MODULE}: {built.stderr.strip().splitlines()[-1]}")
    return GO_BIN / "minio"


@contextmanager
def running(program: Path, folder: Path) -> Iterator[str]:
    """A server on this machine; yields its URL."""
    port, console = free_port(), free_port()
    command = [program, "server", folder / "data", "--address", f"127.0.0.1:{port}"]
    command += ["--console-address", f"127.0.0.1:{console}"]
    environment = {
        **os.environ,
        "MINIO_ROOT_USER": USER,
        "MINIO_ROOT_PASSWORD": PASSWORD,
        "HOME": str(folder),
    }
    url = f"http://127.0.0.1:{port}"

    def is_live() -> bool:
        assert process.poll() is None, (folder / "minio.log").read_text()
        try:
            return httpx.get(f"{url}/minio/health/live", trust_env=False).is_success
        except httpx.TransportError:
            return False

    with open(folder / "minio.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        until(is_live)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def store(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """The variables of a store in a bucket, which the job of docker-compose.yml has created."""
    folder = tmp_path / "minio"
    folder.mkdir()
    with running(program, folder) as url:
        variables = {
            "AWS_ACCESS_KEY_ID": USER,
            "AWS_SECRET_ACCESS_KEY": PASSWORD,
            "TIDELOG_STORE": f"s3://{BUCKET}/{secrets.token_hex(4)}",
            "TIDELOG_S3_ENDPOINT": url,
            "TIDELOG_S3_REGION": REGION,
        }
        for name, value in variables.items():
            if name.startswith("AWS_"):
                monkeypatch.setenv(name, value)
        job = [sys.executable, ROOT / "deploy" / "compose" / "create_bucket.py"]
        subprocess.run(job, env={**os.environ, **variables}, timeout=120, check=True)
        yield variables


def test_the_whole_way_of_records(store: dict[str, str], tmp_path: Path) -> None:
    lines = "".join(f"k{number % 97}|{number}\n" for number in range(RECORDS))
    expected = sorted(str(number) for number in range(RECORDS))
    settings = {"s3_endpoint": store["TIDELOG_S3_ENDPOINT"], "s3_region": REGION}
    with Broker(tmp_path, store["TIDELOG_STORE"], hot_dir=tmp_path / "hot", **settings) as broker:
        broker.create_topic("t", 4)
        broker.cli("produce", "t", "--key-separator", "|", stdin=lines)
        assert values(broker, "--from", "beginning") == expected
        assert values(broker, "--group", "g", "--from", "beginning") == expected
        assert json.loads(broker.cli("groups", "lag", "g", "--json").stdout)["lag"] == 0
        broker.cli("seal", "t")
        until(lambda: metric(broker, "tidelog_sealed_records_total") >= RECORDS)
        assert metric(broker, "tidelog_wal_unknown_total") == 0
        assert metric(broker, "tidelog_flushes_failed_total") == 0
        broker.kill()
        broker.start()
        broker.cli("produce", "t", "--key-separator", "|", stdin="k1|more\n")
        assert values(broker, "--from", "beginning") == sorted([*expected, "more"])
        assert values(broker, "--group", "g") == ["more"], "the group continues"
        assert broker.stop() == 0
    assert b"whole: " in tidelog("scrub", **store).stdout
    tidelog("maintain", "--yes", **store)
    assert b"whole: " in tidelog("scrub", **store).stdout


def values(broker: Broker, *options: str) -> list[str]:
    output = broker.cli("consume", "t", *options).stdout.decode()
    return sorted(output.splitlines())


def metric(broker: Broker, name: str) -> float:
    text = httpx.get(f"{broker.base_url}/metrics", trust_env=False).text
    numbers = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name)]
    assert numbers, f"there is no metric {name}"
    return sum(map(float, numbers))


def test_a_store_without_credentials_names_the_cause(
    store: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    variables = {**store, "AWS_SECRET_ACCESS_KEY": "wrong-secret"}
    process = tidelog("scrub", status=3, **variables)
    (line,) = process.stderr.decode().splitlines()
    assert "SignatureDoesNotMatch" in line or "403" in line, line
