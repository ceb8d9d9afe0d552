"""`make cluster`: an S3 server, brokers and a balancer, up and down again, nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from deploy.local.balancer import installed_balancer
from tests.support.pace import is_within
from tests.support.ports import free_port
from tests.system.checks import json_values

pytestmark = [
    pytest.mark.skipif(installed_balancer() is None, reason="needs nginx or haproxy"),
]
JSON = "application/vnd.kafka.json.v2+json"


def children(pid: int) -> set[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return {int(child) for child in listed.split()}


def test_a_cluster_comes_up_and_goes_away(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-u", "-m", "deploy.local.cluster"]
    command += ["--brokers", "3", "--store", f"file://{tmp_path}/store", "--port", str(port)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if "Ctrl-C" in line:
                break
        started = children(process.pid)
        assert len(started) == 4, output
        brokers = re.findall(r"broker +(http://\S+)", output)
        assert len(brokers) == 3
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            topic = {"topic_name": "t", "partitions_count": 1}
            client.post("/admin/topics", json=topic).raise_for_status()
            placed = []
            for number in range(12):
                body = {"records": [{"value": number}]}
                answer = client.post("/topics/t", json=body, headers={"content-type": JSON})
                placed.append(answer.raise_for_status().json()["offsets"][0]["offset"])
            assert placed == list(range(12))
        for url in (*brokers, f"http://127.0.0.1:{port}"):
            assert json_values(url) == list(range(12))
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 0
        assert is_within(time.monotonic() - began, 30)
        assert not any(Path(f"/proc/{child}").exists() for child in started)
        assert not list(tmp_path.glob("tidelog-cluster-*"))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        process.stdout.close()
