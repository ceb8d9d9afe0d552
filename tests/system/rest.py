"""A broker's REST dialects by a plain HTTP client: what is asked, and what must come back."""

import http.client
import itertools
import json
from typing import Any, NamedTuple

from tests.support.broker import Broker

V2 = "application/vnd.kafka.v2+json"
EMBEDDED = "application/vnd.kafka.{}.v2+json"
JSON = EMBEDDED.format("json")
BINARY = EMBEDDED.format("binary")
TEXT = EMBEDDED.format("text")
PLAIN = "application/json"
ARROW = "application/vnd.apache.arrow.stream"

TOPIC = "orders"
RECORD = {"topic", "key", "value", "partition", "offset", "timestamp"}
CREATED = {"instance_id", "base_uri"}
OFFSET = {"topic", "partition", "offset", "metadata"}
ONE = {"partitions": [{"topic": TOPIC, "partition": 0}]}
NOWHERE = {"partitions": [{"topic": "nope", "partition": 0}]}
BEYOND = {"partitions": [{"topic": TOPIC, "partition": 99}]}

CONFLUENT = {"format": "json", "auto.offset.reset": "earliest", "auto.commit.enable": "false"}
KARAPACE = CONFLUENT | {"topic.metadata.refresh.interval.ms": "5000", "fetch.min.bytes": "1"}
STRIMZI = {
    "format": "json",
    "auto.offset.reset": "earliest",
    "enable.auto.commit": False,
    "fetch.min.bytes": 512,
    "consumer.request.timeout.ms": 100,
    "isolation.level": "read_committed",
}
REDPANDA = {"format": "json", "auto.offset.reset": "earliest", "auto.commit.enable": "false"}


class Said(NamedTuple):
    status: int
    media_type: str
    body: Any
    headers: dict[str, str]


class World:
    """A broker with a topic of three partitions, each with a record, and instances by name."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._names = itertools.count()
        broker.create_topic(TOPIC, 3)
        broker.create_topic("raw", 1)
        records = [{"key": f"k{n}", "value": {"n": n}, "partition": n} for n in range(3)]
        assert self("POST", f"/topics/{TOPIC}", {"records": records}, JSON).status == 200
        assert self("POST", "/topics/raw", {"records": [{"value": "/w=="}]}, BINARY).status == 200
        listed = self("GET", "/v3/clusters", None).body
        self.v3 = f"/v3/clusters/{listed['data'][0]['cluster_id']}"
        self.groups = f"{self.v3}/consumer-groups"

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str | None = V2,
        accept: str | None = None,
        **headers: str,
    ) -> Said:
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        raw = body.encode() if isinstance(body, str) else None
        if body is not None and raw is None:
            raw = json.dumps(body, separators=(",", ":")).encode()
        if content_type is not None and body is not None:
            sent["Content-Type"] = content_type
        if accept is not None:
            sent["Accept"] = accept
        connection = http.client.HTTPConnection("127.0.0.1", self.broker.port, timeout=120)
        connection.request(method, path, raw, sent)
        with connection.getresponse() as answer:
            content = answer.read()
        connection.close()
        media_type = answer.headers.get("Content-Type", "")
        told = json.loads(content) if content and "json" in media_type else content
        return Said(answer.status, media_type, told, dict(answer.headers))

    def instance(
        self, settings: Any = None, topics: Any = (TOPIC,), partitions: Any = (), group: str = ""
    ) -> str:
        """The path of a new one in a group of its own."""
        group = group or f"g{next(self._names)}"
        answer = self("POST", f"/consumers/{group}", CONFLUENT if settings is None else settings)
        assert answer.status == 200, answer
        path = f"/consumers/{group}/instances/{answer.body['instance_id']}"
        if topics:
            assert self("POST", f"{path}/subscription", {"topics": topics}).status == 204
        elif partitions:
            assert self("POST", f"{path}/assignments", {"partitions": partitions}).status == 204
        return path


def refused(answer: Said, status: int, code: int, media_type: str = V2) -> str:
    assert (answer.status, answer.body.get("error_code")) == (status, code), answer
    assert answer.body.keys() == {"error_code", "message"}
    assert answer.media_type == media_type
    return str(answer.body["message"])


def empty(answer: Said) -> None:
    assert (answer.status, answer.body, answer.media_type) == (204, b"", ""), answer
