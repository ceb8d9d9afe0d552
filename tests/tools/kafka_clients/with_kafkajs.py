"""kafkajs, from npm: produce, consume in a group, administer."""

import os
import subprocess
from pathlib import Path

from tests.tools.kafka_clients.conftest import CACHE, Cluster, download, needs

VERSION = "2.2.4"
PROGRAM = Path(__file__).parent / "kafkajs" / "client.js"
RUN_S = 300


def test_kafkajs(cluster: Cluster) -> None:
    needs("node", "npm")
    folder = CACHE / f"kafkajs-{VERSION}"
    if not (folder / "node_modules" / "kafkajs").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        download(["npm", "install", "--prefix", str(folder), f"kafkajs@{VERSION}"], folder)
    process = subprocess.run(
        ["node", PROGRAM, cluster.address],
        env={**os.environ, "NODE_PATH": str(folder / "node_modules")},
        check=False,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert "kafkajs passed" in process.stdout, process.stderr[-3000:]
