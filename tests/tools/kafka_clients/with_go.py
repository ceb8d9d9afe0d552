"""franz-go and sarama: Go programs that produce, consume in groups, and administer."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.tools.kafka_clients.conftest import CACHE, Cluster, download, needs

PROGRAMS = Path(__file__).with_name("go")
RUN_S = 300
KGOS_TESTS = {
    "group": "TestGroupETL|TestGroupSimple",
    "issues": "TestIssue325|TestIssue337|TestIssue434|TestIssue523|TestIssue648|TestIssue810|"
    "TestIssue865|TestIssue1034|TestIssue769|TestIssue831|TestIssue1377",
    "partitions": "TestAddRemovePartitions|TestDirectPartitionPurge|TestPauseIssue489|"
    "TestPauseIssueOct2023|TestConsumeTopicRetrieval|TestConsumeTopicRetrieval_Many",
    "client": "TestMaxVersions|TestPing|TestClient_Produce|TestClient_ProduceLargeMessages|"
    "TestIssueFetchLargerThanBrokerMaxReadBytes|TestHookPollStart",
}
"""Tests of franz-go itself that need a cluster. The others need transactions, share groups, groups
of the new protocol, or the topic __consumer_offsets (TestConsumeRegex)."""
KGOS_RECORDS = 5000
SARAMA_VERSIONS = ("0.11.0.0", "1.0.0", "2.8.0", "4.1.0")
"""The versions of Kafka in sarama's settings. It uses the requests of that version."""


def _folder(name: str) -> Path:
    """Download the modules of the programs; return a folder of the cache for what is built."""
    needs("go")
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    download(["go", "mod", "download"], PROGRAMS)
    return folder


def _go(*arguments: str, folder: Path) -> str:
    process = subprocess.run(
        ["go", *arguments], cwd=folder, check=False, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def go() -> Path:
    """Build the programs; return their folder."""
    folder = _folder("go")
    _go("build", "-o", f"{folder}{os.sep}", "./...", folder=PROGRAMS)
    return folder


def _run(program: Path, *arguments: str) -> str:
    process = subprocess.run(
        [program, *arguments], check=False, capture_output=True, text=True, timeout=RUN_S
    )
    assert process.returncode == 0, process.stdout[-1000:] + process.stderr[-3000:]
    return process.stdout


def test_franz_go(cluster: Cluster, go: Path) -> None:
    assert "franz-go passed" in _run(go / "franz", cluster.address)


@pytest.fixture(scope="module")
def kgos_tests() -> Path:
    """Build franz-go's own tests, from the sources of its module."""
    program = _folder("kgo") / "kgo.test"
    output = _go("list", "-m", "-f", "{{.Dir}}", "github.com/twmb/franz-go", folder=PROGRAMS)
    module = Path(output.strip())
    download(["go", "mod", "download"], module)
    _go("test", "-c", "-o", str(program), "./pkg/kgo", folder=module)
    return program


@pytest.mark.parametrize("part", KGOS_TESTS)
def test_kgos_own_tests(cluster: Cluster, kgos_tests: Path, part: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "KGO_SEEDS": cluster.address,
        "KGO_TEST_RF": "1",
        "KGO_TEST_RECORDS": str(KGOS_RECORDS),
    }
    process = subprocess.run(
        [kgos_tests, "-test.v", "-test.run", f"^({KGOS_TESTS[part]})$"],
        check=False,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        cwd=tmp_path,
        env=environment,
    )
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-1000:]
    assert process.stdout.count("--- PASS: ") >= KGOS_TESTS[part].count("|") + 1, process.stdout[
        -3000:
    ]


@pytest.mark.parametrize("version", SARAMA_VERSIONS)
def test_sarama(cluster: Cluster, go: Path, version: str) -> None:
    assert "sarama passed" in _run(go / "sarama", cluster.address, version)
