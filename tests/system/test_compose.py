"""docker-compose.yml without Docker: its brokers, balancer and jobs as processes.

Commands, environment and configuration are those of the files.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from deploy.demo.broker_process import BrokerProcess
from deploy.local import compose
from deploy.local.balancer import compose_config, installed_balancer, running
from tests.support.broker import until
from tests.support.ports import free_port_pairs
from tests.support.seaweed import running_seaweed

DEPLOY = compose.COMPOSE_FILE.parent
JSON = "application/vnd.kafka.json.v2+json"


def test_the_balancer_that_is_mounted_is_that_of_make_cluster() -> None:
    assert (DEPLOY / "compose" / "nginx.conf").read_text() == compose_config()


@contextmanager
def composed(folder: Path) -> Iterator[tuple[list[BrokerProcess], compose.Translation]]:
    """The default S3 server, the bucket's job, the brokers: started in the order of the file.

    Not in the file is another bucket, by which the server is known to answer.
    """
    services = compose.services()
    s3_server = services["seaweedfs"]
    with ExitStack() as stack:
        server = stack.enter_context(
            running_seaweed("another", s3_server["command"], s3_server["environment"])
        )
        address = server.endpoint_url.removeprefix("http://")
        translation = compose.Translation(folder, {"s3:9000": address})
        bucket = services["bucket"]
        process = subprocess.run(
            compose.command(bucket),
            env=compose.job_environment("bucket", bucket, translation),
            timeout=60,
            check=False,
        )
        assert process.returncode == 0
        broker_processes = [
            compose.broker_process(name, service, translation, folder)
            for name, service in compose.brokers(services).items()
        ]
        for broker in broker_processes:
            stack.callback(broker.kill)
        with ThreadPoolExecutor(len(broker_processes)) as pool:
            list(pool.map(BrokerProcess.start, broker_processes))
        yield broker_processes, translation


@contextmanager
def balanced(folder: Path, brokers: list[BrokerProcess]) -> Iterator[str]:
    """The mounted configuration, with this machine's addresses for Docker's names."""
    program = installed_balancer()
    assert program is not None
    port = free_port_pairs(1)[0]
    config = (DEPLOY / "compose" / "nginx.conf").read_text().replace("/tmp", str(folder))
    config = config.replace("0.0.0.0:8080", f"127.0.0.1:{port}").replace(" resolve;", ";")
    config = re.sub(r"^ *resolver .*\n", "", config, flags=re.MULTILINE)
    for number, broker in enumerate(brokers, 1):
        config = config.replace(f"broker-{number}:8082", f"127.0.0.1:{broker.port}")
    with running(program, config, folder, port):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.seaweed
@pytest.mark.skipif(
    (installed_balancer() or ("",))[0] != "nginx", reason="needs nginx: its wheel has none here"
)
def test_what_compose_says_is_a_cluster(tmp_path: Path) -> None:
    with composed(tmp_path) as (brokers, translation), balanced(tmp_path, brokers) as url:
        assert len(brokers) == 3
        until(lambda: all("tidelog_live_brokers 3.0" in metrics(broker) for broker in brokers))
        with httpx.Client(base_url=url, timeout=30) as client:
            topic = {"topic_name": "t", "partitions_count": 1}
            client.post("/admin/topics", json=topic).raise_for_status()
            for number in range(9):
                body = {"records": [{"value": number}]}
                answer = client.post("/topics/t", json=body, headers={"content-type": JSON})
                assert answer.raise_for_status().json()["offsets"][0]["offset"] == number
            path = "/topics/t/partitions/0/records?offset=0"
            records = client.get(path, headers={"accept": JSON}).raise_for_status().json()
        assert [record["value"] for record in records] == list(range(9))
        assert sum("tidelog_http_requests_total" in metrics(broker) for broker in brokers) == 3
        for broker in brokers:
            assert is_healthy(broker)
        maintained(translation)
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(BrokerProcess.stop, brokers)) == [0, 0, 0]
        assert not is_healthy(brokers[0])


def metrics(broker: BrokerProcess) -> str:
    return httpx.get(f"{broker.base_url}/metrics").raise_for_status().text


def is_healthy(broker: BrokerProcess) -> bool:
    """Run the image's health check."""
    text = (DEPLOY / "Dockerfile").read_text()
    match = re.search(r"HEALTHCHECK (?:.*\\\n *)?CMD (\[.*\])", text)
    assert match is not None
    command = json.loads(match[1].replace(":8082/", f":{broker.port}/"))
    process = subprocess.run(command, capture_output=True, timeout=10, check=False)
    return process.returncode == 0


def maintained(translation: compose.Translation) -> None:
    """One round of the maintenance job, which does not end by itself."""
    job = compose.services()["maintain"]
    process = subprocess.Popen(
        compose.command(job),
        env=compose.job_environment("maintain", job, translation) | {"PATH": path_with_tidelog()},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if "collect" in line:
                break
        assert "nothing to retain" in output, output
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def path_with_tidelog() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"
