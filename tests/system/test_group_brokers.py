"""Consumer instances that no broker owns: each request goes to a random one, and brokers die."""

import contextlib
import random
import secrets
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.broker import Broker
from tests.system.checks import new_topic
from tests.system.client import Client
from tests.system.several import QUICK, brokers

JSON = "application/vnd.kafka.json.v2+json"
PLAIN = {"content-type": "application/vnd.kafka.v2+json"}


class Anywhere:
    """A client behind a balancer that sends each request to another broker, and repeats what fails
    as clients do: what was not acked, or may be repeated."""

    def __init__(self, found: list[Broker], seed: int) -> None:
        self.found = found
        self._random = random.Random(seed)
        self._http = httpx.Client(timeout=20)
        self.repeated = 0

    def close(self) -> None:
        self._http.close()

    def __call__(self, method: str, path: str, **more: Any) -> httpx.Response:
        for _ in range(50):
            broker = self._random.choice(self.found)
            try:
                answer = self._http.request(method, f"{broker.base_url}{path}", **more)
            except httpx.TransportError:
                self.repeated += 1
                continue
            if answer.status_code not in (429, 503, 504):
                return answer
            self.repeated += 1
        raise AssertionError(f"{method} {path} is not answered by anybody")


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_whole_life_of_an_instance_at_any_broker(tmp_path: Path, is_killed: bool) -> None:
    topic, seed = new_topic(), secrets.randbits(32)
    print(f"seed {seed}")
    # On a machine that does a lot besides nobody but the dead counts as dead: a coordinator that
    # changes forgets what was returned and not yet committed.
    patient = QUICK | {"member_timeout_ms": 4000 if is_killed else 30_000}
    with (
        brokers(tmp_path, **patient) as found,
        contextlib.closing(Anywhere(found, seed)) as anywhere,
    ):
        with Client(found[0].base_url) as client:
            client.create_topic(topic, 4)
        values = list(range(300))
        for first in range(0, len(values), 20):
            records = [{"value": value} for value in values[first : first + 20]]
            headers = {"content-type": JSON, "idempotency-key": f'"{topic}-{first}"'}
            body = {"records": records}
            answer = anywhere("POST", f"/topics/{topic}", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
        group, name = f"g-{topic}", "only"
        settings = {"name": name, "format": "json", "auto.offset.reset": "earliest"}
        made = anywhere("POST", f"/consumers/{group}", json=settings, headers=PLAIN)
        assert made.status_code == 200, made.text
        base = f"/consumers/{group}/instances/{name}"
        topics = {"topics": [topic]}
        assert (
            anywhere("POST", f"{base}/subscription", json=topics, headers=PLAIN).status_code == 204
        )
        read: list[int] = []
        killed = False
        while set(read) != set(values):
            path = f"{base}/records?max_bytes=200&timeout=500"
            answer = anywhere("GET", path, headers={"accept": JSON})
            assert answer.status_code == 200, answer.text
            read += [record["value"] for record in answer.json()]
            if is_killed and not killed and len(read) > 100:
                found[1].kill()
                killed = True
                anywhere.found = [found[0], found[2]]
        if not is_killed:
            assert sorted(read) == values  # each once: nothing went wrong
        assert anywhere("POST", f"{base}/offsets", headers=PLAIN).status_code in (200, 204)
        held = [{"topic": topic, "partition": number} for number in range(4)]
        body = {"partitions": held}
        offsets = anywhere("GET", f"{base}/offsets", json=body, headers=PLAIN).json()["offsets"]
        assert sum(each["offset"] for each in offsets) == len(values)
        assert anywhere("DELETE", base, headers=PLAIN).status_code == 204
        assert anywhere("GET", f"{base}/records", headers={"accept": JSON}).status_code == 404
        assert is_killed or anywhere.repeated == 0
        forwarded = [broker for broker in anywhere.found if "Traceback" in broker.log()]
        assert not forwarded, forwarded[0].log()[-3000:]
