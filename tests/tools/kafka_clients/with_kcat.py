"""kcat, from Debian's package: metadata, produce, consume, groups, offsets by time."""

import subprocess
import time

import pytest

from tests.tools.kafka_clients.conftest import Cluster, needs

RUN_S = 120
LINES = [f"line {n}" for n in range(200)]


def _kcat(cluster: Cluster, *arguments: str, stdin: str = "") -> str:
    needs("kcat")
    process = subprocess.run(
        ["kcat", "-b", cluster.address, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_kcat(cluster: Cluster, codec: str) -> None:
    topic = f"kcat-{codec}"
    needs("kcat")
    cluster.broker.create_topic(topic)
    began_ms = time.time_ns() // 10**6
    _kcat(cluster, "-P", "-t", topic, "-z", codec, "-H", "h=v", stdin="\n".join(LINES))
    output = _kcat(cluster, "-L", "-t", topic)
    assert f'topic "{topic}" with 1 partitions' in output
    read = ("-C", "-q", "-e", "-t", topic)
    assert _kcat(cluster, *read, "-o", "beginning").splitlines() == LINES
    assert _kcat(cluster, *read, "-o", f"s@{began_ms}").splitlines() == LINES
    assert _kcat(cluster, *read, "-o", "-5").splitlines() == LINES[-5:]
    assert _kcat(cluster, *read, "-o", "100", "-f", "%o %h\n", "-c", "1") == "100 h=v\n"
    group = _kcat(
        cluster, "-q", "-X", "auto.offset.reset=earliest", "-c", "200", "-G", topic, topic
    )
    assert group.splitlines() == LINES
    assert _kcat(cluster, "-Q", "-t", f"{topic}:0:-1").strip() == f"{topic} [0] offset 200"
