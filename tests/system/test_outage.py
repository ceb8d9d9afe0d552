"""A broker on SeaweedFS whose way to the store is cut for a while."""

import json
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.broker import Broker
from tests.support.pace import slowness
from tests.support.seaweed import Seaweed
from tests.support.threads import Threads
from tests.system.client import wait_until
from tests.system.lossy import LossyProxy

DARK_S = 20.0
FULL_SPEED_S = 10.0
PRODUCERS = 4
ACKS = 50
PAUSE_S = 0.01
"""Of a producer after each request: the test needs a rate, not the broker's best."""


@pytest.mark.seaweed
def test_a_broker_is_at_full_speed_soon_after_a_dark_store(
    seaweed: Seaweed, tmp_path: Path
) -> None:
    store = f"s3://{seaweed.bucket}/outage"
    by_second: Counter[int] = Counter()
    acked: list[int] = []
    ended = threading.Event()
    with (
        LossyProxy(seaweed.endpoint_url, 1) as proxy,
        Broker(tmp_path, store, s3_endpoint=proxy.url, hot_dir=tmp_path / "hot") as broker,
    ):
        broker.create_topic("t")

        def produce(first: int) -> None:
            number = first
            with httpx.Client(base_url=broker.base_url, timeout=60.0) as client:
                while not ended.is_set():
                    body = json.dumps({"records": [{"value": number}]})
                    headers = {"content-type": "application/vnd.kafka.json.v2+json"}
                    answer = client.post("/topics/t", content=body, headers=headers)
                    if answer.status_code == 200:
                        acked.append(number)
                        by_second[int(time.monotonic())] += 1
                    time.sleep(PAUSE_S if answer.status_code == 200 else 0.1)
                    number += PRODUCERS

        works = [partial(produce, first) for first in range(PRODUCERS)]
        with Threads(*works, stop=ended):
            wait_until(lambda: len(acked) >= ACKS, "acks")
            time.sleep(3.0)
            old_count = by_second[int(time.monotonic()) - 2]
            with proxy.losing(answers=1.0, requests=1.0):
                time.sleep(DARK_S)
                assert _ready(broker) == 503
            light_s = time.monotonic()
            assert old_count > 0

            def is_at_speed() -> bool:  # the machine may be slower now, not so much
                later_counts = [
                    count for second, count in list(by_second.items()) if second > light_s
                ]
                return max(later_counts, default=0) >= old_count / 3

            wait_until(is_at_speed, "full speed", FULL_SPEED_S * slowness() + 3.0)
            wait_until(lambda: _ready(broker) == 200, "readiness")
        numbers = [json.loads(record["value"]) for record in broker.records("t")]
    assert sorted(set(numbers)) == sorted(numbers)
    assert not set(acked) - set(numbers)


def _ready(broker: Broker) -> int:
    return httpx.get(f"{broker.base_url}/ready").status_code
