"""A follower of a topic, as an EventSource is one, while its brokers are killed."""

import json
import threading
import time
from pathlib import Path

import httpx

from tests.support.broker import Broker
from tests.system.checks import new_topic
from tests.system.client import wait_until

PARTITIONS = 6
RECORDS = 1000
BATCH = 20
KILLS = (240, 500, 760)
"""Records before each kill."""
END_S = 300.0


class EventSource(threading.Thread):
    """Reads all events, and connects again with the last id, to the broker's new address."""

    def __init__(self, broker: Broker, topic: str) -> None:
        super().__init__(daemon=True)
        self._broker = broker
        self._path = f"/topics/{topic}/records?offset=latest&max_bytes=200"
        self.found: list[tuple[int, int]] = []
        self.last_id = ""
        self.opened = 0
        self.refused: list[int] = []
        self.is_ended = False

    def run(self) -> None:
        until_s = time.monotonic() + END_S
        while not self.is_ended and time.monotonic() < until_s:
            try:
                self._read()
            except httpx.HTTPError:
                time.sleep(0.05)

    def _read(self) -> None:
        headers = {"accept": "text/event-stream"}
        if self.last_id:
            headers["last-event-id"] = self.last_id
        url = self._broker.base_url + self._path
        with httpx.stream("GET", url, headers=headers, timeout=5.0) as answer:
            if answer.status_code != 200:
                self.refused.append(answer.status_code)
                time.sleep(0.05)
                return
            self.opened += 1
            event_id, kind, data = self.last_id, "message", ""
            for line in answer.iter_lines():
                name, _, text = line.partition(": ")
                if name == "id":
                    event_id = text
                elif name == "event":
                    kind = text
                elif name == "data":
                    data = text
                elif not line:
                    self.last_id = event_id
                    if data and kind == "message":
                        record = json.loads(data)
                        self.found.append((record["partition"], record["offset"]))
                    kind, data = "message", ""
                if self.is_ended:
                    return


def test_a_follower_of_a_topic_loses_and_repeats_nothing_over_kills(tmp_path: Path) -> None:
    topic = new_topic()
    with Broker(tmp_path, hot_dir=tmp_path / "hot") as broker:
        broker.create_topic(topic, PARTITIONS)
        source = EventSource(broker, topic)
        source.start()
        wait_until(lambda: source.last_id != "", "the first id")
        for first in range(0, RECORDS, BATCH):
            if first in KILLS:
                broker.restart()  # with SIGKILL
            records = [
                {"value": number, "partition": number * number % PARTITIONS}
                for number in range(first, first + BATCH)
            ]
            httpx.post(
                f"{broker.base_url}/topics/{topic}",
                content=json.dumps({"records": records}),
                headers={"content-type": "application/vnd.kafka.json.v2+json"},
                timeout=60.0,
            ).raise_for_status()
        wait_until(lambda: len(source.found) >= RECORDS, "all records", END_S)
        source.is_ended = True
        ends = [broker.high_watermark(topic, partition) for partition in range(PARTITIONS)]
    source.join(END_S)
    assert sum(ends) == RECORDS == len(source.found)
    for partition, end in enumerate(ends):
        offsets = [offset for number, offset in source.found if number == partition]
        assert offsets == list(range(end)), f"partition {partition}"
    assert source.opened == len(KILLS) + 1
    assert set(source.refused) <= {503}
