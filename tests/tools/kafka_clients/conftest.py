"""One broker behind a relay, for all clients; downloads of clients in a cache folder."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.broker import Broker
from tests.support.ports import free_port
from tests.support.seaweed import Seaweed
from tests.tools.kafka_clients.relay import Relay, Seen

CACHE = Path(
    os.environ.get("KAFKA_CLIENTS_CACHE", Path.home() / ".cache" / "tidelog-kafka-clients")
)
"""Keeps the downloads for the next run."""
TABLE = Path(__file__).with_name("versions.json")
POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion>
<groupId>tidelog</groupId><artifactId>clients</artifactId><version>1</version>
<packaging>pom</packaging>
<dependencies>{dependencies}</dependencies></project>
"""
DEPENDENCY = """<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>
<exclusions><exclusion><groupId>org.apache.hadoop</groupId><artifactId>*</artifactId></exclusion>
</exclusions></dependency>
"""


class Cluster(NamedTuple):
    """A broker, and the address at which clients reach it."""

    broker: Broker
    address: str
    seen: Seen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-versions",
        action="store_true",
        help="write the versions that clients used into versions.json",
    )
    parser.addoption(
        "--store",
        choices=("folder", "seaweed"),
        default="folder",
        help="the store of the broker: a folder, or S3 by SeaweedFS",
    )


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    port, target = free_port(), free_port()
    relay = Relay(port, target)
    folder = tmp_path_factory.mktemp("kafka-clients")
    settings: dict[str, object] = {"kafka_port": target, "kafka_advertised": relay.address}
    with contextlib.ExitStack() as stack:
        stack.enter_context(relay.running())
        store = None
        if request.config.getoption("--store") == "seaweed":
            seaweed: Seaweed = request.getfixturevalue("seaweed")
            store = f"s3://{seaweed.bucket}/log"
            settings |= {"s3_endpoint": seaweed.endpoint_url}
        broker = stack.enter_context(Broker(folder, store, **settings))
        yield Cluster(broker, relay.address, relay.seen)


@pytest.fixture(scope="session")
def jars() -> Callable[..., str]:
    """Return a class path with Maven's packages `group:name:version` and what they need."""

    def fetched(name: str, *packages: str) -> str:
        needs("mvn", "java")
        folder = CACHE / name
        if not (folder / "jars").is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            dependencies = "".join(DEPENDENCY.format(*package.split(":")) for package in packages)
            (folder / "pom.xml").write_text(POM.format(dependencies=dependencies))
            new_folder = folder / "made"
            target = f"-DoutputDirectory={new_folder}"
            download(["mvn", "-B", "-q", "dependency:copy-dependencies", target], folder)
            new_folder.rename(folder / "jars")
        return f"{folder / 'jars'}/*"

    return fetched


def needs(*programs: str) -> None:
    """Skip the test unless these programs are installed."""
    if missing := [program for program in programs if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")


def download(command: Sequence[str], folder: Path) -> None:
    """Run a program that downloads packages; skip the test if it fails."""
    process = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if process.returncode:
        output = (process.stdout + process.stderr).strip()[-500:]
        pytest.skip(f"no download by `{command[0]}`: {output}")


@pytest.fixture(scope="session", autouse=True)
def _versions(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """At the end, compare what the clients asked for with the table."""
    yield
    versions_of_software = {
        software: {api: sorted(versions) for api, versions in sorted(apis.items())}
        for software, apis in sorted(cluster.seen.items())
    }
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if request.config.getoption("--write-versions"):
        for software, apis in versions_of_software.items():
            versions_of_api = table.setdefault(software, {})
            for api, versions in apis.items():
                versions_of_api[api] = sorted({*versions, *versions_of_api.get(api, ())})
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        return
    wrong = [
        f"{software}: {api} {versions}, not {versions_of_api.get(api, 'in the table')}"
        for software, apis in versions_of_software.items()
        # The system's kcat has any version.
        if (versions_of_api := table.get(software)) is not None
        or not software.startswith("librdkafka ")
        for api, versions in apis.items()
        if not {*versions} <= {*(versions_of_api := versions_of_api or {}).get(api, ())}
    ]
    assert not wrong, "; ".join([*wrong, "look at it, then run with ARGS=--write-versions"])
