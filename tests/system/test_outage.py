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
from tests.system.lossy import LossyProxy

DARK_S = 20.0
FULL_SPEED_S = 10.0
PRODUCERS = 4


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
                    else:
                        time.sleep(0.1)
                    number += PRODUCERS

        works = [partial(produce, first) for first in range(PRODUCERS)]
        with Threads(*works, stop=ended):
            time.sleep(6.0)
            old_count = by_second[int(time.monotonic()) - 2]
            with proxy.losing(answers=1.0, requests=1.0):
                time.sleep(DARK_S)
                assert httpx.get(f"{broker.base_url}/ready").status_code == 503
            light_s = time.monotonic()
            time.sleep(FULL_SPEED_S * slowness() + 3.0)
            assert httpx.get(f"{broker.base_url}/ready").status_code == 200
        later_counts = [number for second, number in by_second.items() if second > light_s]
        assert old_count > 0
        assert max(later_counts, default=0) >= old_count / 3, (
            "the machine may be slower now, not so much"
        )
        numbers = [json.loads(record["value"]) for record in broker.records("t")]
    assert sorted(set(numbers)) == sorted(numbers)
    assert not set(acked) - set(numbers)
