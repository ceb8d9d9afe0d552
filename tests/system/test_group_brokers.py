"""Consumer instances that no broker owns: each request goes to a random one, and brokers die."""

import contextlib
import random
import secrets
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.broker import Broker
from tests.system.checks import new_topic
from tests.system.client import Client, wait_until
from tests.system.several import QUICK, brokers

JSON = "application/vnd.kafka.json.v2+json"
PLAIN = {"content-type": "application/vnd.kafka.v2+json"}


PARTITIONS = 4
PATIENT = QUICK | {"broker_timeout_ms": 30_000}
"""A slow broker does not count as crashed: no broker takes a group from another."""
TAKEN = "its coordinator cannot be reached"
"""The log message of a broker that takes one all the same."""


class Anywhere:
    """A client behind a balancer that sends each request to another broker.

    It repeats what fails as clients do: what was not acked, or may be repeated.
    """

    def __init__(self, cluster: list[Broker], seed: int) -> None:
        self.found = cluster
        self._random = random.Random(seed)
        self._http = httpx.Client(timeout=20)
        self.repeated = 0

    def close(self) -> None:
        self._http.close()

    def __call__(self, method: str, path: str, **options: Any) -> httpx.Response:
        for _ in range(50):
            broker = self._random.choice(self.found)
            try:
                answer = self._http.request(method, f"{broker.base_url}{path}", **options)
            except httpx.TransportError:
                pass
            else:
                if answer.status_code not in (429, 503, 504):
                    return answer
            self.repeated += 1
            time.sleep(0.05)
        raise AssertionError(f"{method} {path} is not answered by any broker")


class Instance:
    """A consumer instance behind that balancer."""

    def __init__(self, anywhere: Anywhere, group: str, topic: str) -> None:
        self._anywhere = anywhere
        self.topic = topic
        body = {"name": "only", "format": "json", "auto.offset.reset": "earliest"}
        answer = anywhere("POST", f"/consumers/{group}", json=body, headers=PLAIN)
        assert answer.status_code == 200, answer.text
        self.base = f"/consumers/{group}/instances/only"

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._anywhere(method, f"{self.base}{path}", json=body, headers=PLAIN)
        assert answer.status_code in (200, 204), answer.text
        return answer.json() if answer.content else None

    def read(self, query: str) -> list[int]:
        return [record["value"] for record in self("GET", f"/records?{query}")]

    def committed(self) -> list[int]:
        partitions = [{"topic": self.topic, "partition": number} for number in range(PARTITIONS)]
        offsets = self("GET", "/offsets", {"partitions": partitions})["offsets"]
        return [row["offset"] for row in offsets]


def produce(anywhere: Anywhere, topic: str) -> list[int]:
    """Each partition gets records: an empty one would have no committed offset."""
    values = list(range(300))
    for first in range(0, len(values), 20):
        records = [
            {"value": value, "partition": first // 20 % PARTITIONS}
            for value in values[first : first + 20]
        ]
        headers = {"content-type": JSON, "idempotency-key": f'"{topic}-{first}"'}
        answer = anywhere("POST", f"/topics/{topic}", json={"records": records}, headers=headers)
        assert answer.status_code == 200, answer.text
    return values


def check_coordinator(cluster_brokers: list[Broker], group: str) -> None:
    """All brokers name the same coordinator. Each broker is broker 1 in its own answers."""
    named = []
    for broker in cluster_brokers:
        with httpx.Client(base_url=broker.base_url) as http:
            (cluster,) = http.get("/v3/clusters").json()["data"]
            path = f"/v3/clusters/{cluster['cluster_id']}/consumer-groups/{group}"
            related = http.get(path).json()["coordinator"]["related"]
            answer = http.get(related)
            assert answer.status_code == 200, answer.text
            named.append(answer.json()["broker_id"])
    other_numbers = {number for number in named if number != 1}
    assert (named.count(1), len(other_numbers)) == (1, 1), named


def was_calm(cluster: list[Broker]) -> bool:
    return not any(TAKEN in broker.log() for broker in cluster)


def is_committed(instance: Instance, count: int) -> bool:
    """The next read acknowledges the last one's records, or returns them again.

    It returns the records that a replaced coordinator had not committed.
    """
    instance.read("timeout=0")
    return sum(instance.committed()) == count


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_whole_life_of_an_instance_at_any_broker(tmp_path: Path, is_killed: bool) -> None:
    topic, seed = new_topic(), secrets.randbits(32)
    print(f"seed {seed}")
    with (
        brokers(tmp_path, **(QUICK if is_killed else PATIENT)) as cluster,
        contextlib.closing(Anywhere(cluster, seed)) as anywhere,
    ):
        with Client(cluster[0].base_url) as client:
            client.create_topic(topic, PARTITIONS)
        values = produce(anywhere, topic)
        instance = Instance(anywhere, f"g-{topic}", topic)
        instance("POST", "/subscription", {"topics": [topic]})
        assert instance("GET", "/subscription") == {"topics": [topic]}
        assert len(instance("GET", "/assignments")["partitions"]) == PARTITIONS
        if not is_killed:
            check_coordinator(cluster, f"g-{topic}")
        read: list[int] = []
        while (numbers := instance.read("max_bytes=200&timeout=500")) or set(read) != set(values):
            read += numbers
            if is_killed and len(anywhere.found) == len(cluster) and len(read) > 100:
                dead = random.Random(seed).choice(cluster)  # the coordinator, or another
                dead.kill()
                anywhere.found = [broker for broker in cluster if broker is not dead]
        if was_calm(cluster) and not is_killed:
            assert sorted(read) == values  # each once: nothing went wrong
        wait_until(lambda: is_committed(instance, len(values)), "the commits by themselves")

        # The position of the seek, at any broker that is asked next.
        ends = instance.committed()
        first = {"topic": topic, "partition": 0}
        instance("POST", "/positions/beginning", {"partitions": [first]})
        assert len(instance.read("timeout=500")) == ends[0]
        instance("POST", "/positions", {"offsets": [first | {"offset": ends[0] - 3}]})
        assert len(instance.read("timeout=500")) == 3
        instance("POST", "/positions/beginning", {"partitions": [first]})
        instance("POST", "/positions/end", {"partitions": [first]})
        assert instance.read("timeout=0") == []
        instance("POST", "/offsets", {"offsets": [first | {"offset": 6}]})
        assert instance.committed() == [7, *ends[1:]]
        instance("DELETE", "")
        answer = anywhere("GET", f"{instance.base}/records", headers={"accept": JSON})
        assert answer.status_code == 404
        assert is_killed or not was_calm(cluster) or anywhere.repeated == 0
        bugs = [broker.log()[-3000:] for broker in anywhere.found if "Traceback" in broker.log()]
        assert not bugs, bugs[0]
