"""A SeaweedFS of our own: a local S3 whose create-if-absent is atomic (from 4.18 on).

It listens on 127.0.0.1 alone, keeps its files in one temporary directory, and is stopped by its
process id. Up in a second; down in two, because it takes leave of its own services.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.ports import free_port_pairs

ACCESS_KEY = "tidelog"
SECRET_KEY = "tidelog-secret"
REGION = "us-east-1"
DATA = "/data"
"""A folder in arguments. A temporary directory replaces it."""
ARGUMENTS = (
    *("mini", f"-dir={DATA}", "-master.telemetry=false", "-webdav=false", "-admin.ui=false"),
    *("-s3.autoCreateBucket=false", "-master.volumeSizeLimitMB=64", "-volume.preStopSeconds=0"),
)
CREDENTIALS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}

_SERVICES = ("master", "volume", "filer", "s3", "admin")
_STARTS = 3
_START_S = 240.0
_STOP_S = 5.0


class Seaweed(NamedTuple):
    """A running server and a bucket in it. Credentials: `ACCESS_KEY`, `SECRET_KEY`."""

    endpoint_url: str
    bucket: str
    pid: int


@contextmanager
def running_seaweed(
    bucket: str = "tidelog",
    arguments: Sequence[str] = ARGUMENTS,
    credentials: Mapping[str, str] = CREDENTIALS,
) -> Iterator[Seaweed]:
    """A server with one bucket. Another bucket costs it seven volumes: use prefixes.

    It runs `weed` with these arguments, and with those that keep it on this machine and apart from
    other servers: addresses, ports, sockets. The last of two arguments counts.
    """
    for attempt in range(1, _STARTS + 1):
        directory = Path(tempfile.mkdtemp(prefix="tidelog-seaweed-"))
        ports = dict(zip(_SERVICES, free_port_pairs(len(_SERVICES)), strict=True))
        process = _start(directory, [*arguments, f"-bucket={bucket}"], ports, credentials)
        try:
            endpoint_url = f"http://127.0.0.1:{ports['s3']}"
            if _answers(process, endpoint_url, bucket, credentials):
                yield Seaweed(endpoint_url, bucket, process.pid)
                return
            if attempt == _STARTS:  # else another process took a port between search and start
                log = (directory / "log").read_text(errors="replace")
                raise RuntimeError(f"SeaweedFS does not start:\n{log[-3000:]}")
        finally:
            _stop(process)
            shutil.rmtree(directory, ignore_errors=True)
            for (
                port
            ) in ports.values():  # its gRPC sockets live outside of any directory it is given
                for socket in Path("/tmp").glob(f"seaweedfs-*-{port + 10_000}.sock"):
                    socket.unlink(missing_ok=True)


def _start(
    directory: Path,
    arguments: Sequence[str],
    ports: Mapping[str, int],
    credentials: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("weed"))]
    command += [argument.replace(f"={DATA}", f"={directory}{DATA}") for argument in arguments]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{name}.localSocket={directory}/{name}.sock" for name in ("filer", "s3")]
    for name, port in ports.items():
        command += [f"-{name}.port={port}", f"-{name}.port.grpc={port + 10_000}"]
    (directory / "data").mkdir()
    own = {"TMPDIR": str(directory), "HOME": str(directory)}
    with open(directory / "log", "wb") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, **credentials, **own},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _answers(
    process: subprocess.Popen[bytes],
    endpoint_url: str,
    bucket: str,
    credentials: Mapping[str, str],
) -> bool:
    """Whether the bucket is there before the process or the waiting time ends."""
    client = boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name=REGION,
        aws_access_key_id=credentials["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=credentials["AWS_SECRET_ACCESS_KEY"],
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=5),
    )
    deadline = time.monotonic() + _START_S
    with closing(client):
        while time.monotonic() < deadline and process.poll() is None:
            try:
                client.head_bucket(Bucket=bucket)
            except (BotoCoreError, ClientError):
                time.sleep(0.02)
            else:
                return process.poll() is None
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
