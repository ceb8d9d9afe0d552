"""franz-go and sarama: Go programs that produce, consume in groups, and administer."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.kafka_clients.conftest import CACHE, Cluster, download, needs

PROGRAMS = Path(__file__).with_name("go")
RUN_S = 300
SARAMA_VERSIONS = ("0.11.0.0", "1.0.0", "2.8.0", "4.1.0")
"""The versions of Kafka in sarama's settings. It uses the requests of that version."""


@pytest.fixture(scope="module")
def go() -> Path:
    """Build the programs; return their folder."""
    needs("go")
    folder = CACHE / "go"
    folder.mkdir(parents=True, exist_ok=True)
    download(["go", "mod", "download"], PROGRAMS)
    done = subprocess.run(
        ["go", "build", "-o", f"{folder}{os.sep}", "./..."],
        cwd=PROGRAMS,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def _run(program: Path, *arguments: str) -> str:
    done = subprocess.run(
        [program, *arguments], check=False, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def test_franz_go(cluster: Cluster, go: Path) -> None:
    assert "franz-go passed" in _run(go / "franz", cluster.address)


@pytest.mark.parametrize("version", SARAMA_VERSIONS)
def test_sarama(cluster: Cluster, go: Path, version: str) -> None:
    assert "sarama passed" in _run(go / "sarama", cluster.address, version)
