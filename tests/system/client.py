"""A client that classifies answers: acked, certainly refused, or unknown.

Nothing but a 200 is an ack, and nothing but an answer that says so (4xx, 429, 503) or a connection
that never came about is a refusal (I6). All else may have been written.
"""

import enum
import http.client
import json
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast
from urllib.parse import urlsplit

import pyarrow as pa

from tests.support.history import Log, Place, Read, Request, Written

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/vnd.kafka.json.v2+json"
ANSWER_S = 120.0
WAIT_S_MAX = 240.0
"""A wait fails here if the event does not occur: no expectation of speed, as a busy machine may be
ten times slower than an idle one."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.005, 0.05


class Form(enum.Enum):
    """How records are sent: media types of the body."""

    JSON = JSON
    ARROW = ARROW


class Answer(NamedTuple):
    """A response; the names of headers are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class NotSent(Exception):
    """No process listens at the address."""


class AnswerLost(Exception):
    """The request was sent, in part at least, and no whole answer came."""


class NotServed(Exception):
    """Not now, says the answer: 503 or 504."""


class Client:
    """One connection, opened again when it breaks; for one thread."""

    def __init__(self, base_url: str, answer_s: float = ANSWER_S) -> None:
        address = urlsplit(base_url)
        assert address.hostname is not None
        self._connection = http.client.HTTPConnection(address.hostname, address.port, answer_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    @property
    def address(self) -> tuple[str, int]:
        """Of the broker that the next request goes to."""
        return self._connection.host, self._connection.port

    def call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Raises NotSent or AnswerLost; never repeats a request."""
        connection = self._connection
        if connection.sock is None:
            try:
                connection.connect()
            except OSError as error:
                connection.close()
                raise NotSent(str(error)) from error
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection.request(method, path, body, dict(headers or {}))
            # An answer with `Connection: close` has the socket, also if the rest of it is lost.
            with connection.getresponse() as response:
                names = {name.lower(): value for name, value in response.getheaders()}
                return Answer(response.status, names, response.read())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            # A broken connection leaves its socket to a response, a local of a frame of the error.
            traceback.clear_frames(error.__traceback__)
            raise AnswerLost(repr(error)) from error

    # -- what tests ask for

    def create_topic(self, name: str, partitions: int, **configs: object) -> None:
        body = {
            "topic_name": name,
            "partitions_count": partitions,
            "configs": {key.replace("_", "."): value for key, value in configs.items()},
        }
        headers = {"Content-Type": "application/json"}
        answer = self.call("POST", "/admin/topics", json.dumps(body).encode(), headers)
        assert answer.status == 201, answer

    def committed(self, group: str) -> dict[int, int]:
        """Return the committed offsets of a group of one topic, by partition. Raises NotServed."""
        (cluster,) = self.call("GET", "/v3/clusters").json()["data"]
        path = f"/v3/clusters/{cluster['cluster_id']}/consumer-groups/{group}/offsets"
        answer = self.call("GET", path)
        if answer.status in (503, 504):
            raise NotServed(answer.body.decode())
        return {entry["partition_id"]: entry["offset"] for entry in answer.json()["data"]}

    def post(
        self,
        topic: str,
        records: Sequence[Written],
        *,
        acks: str = "all",
        key: str | None = None,
        form: Form = Form.JSON,
    ) -> Answer:
        """One produce request as it is; see `send` for one with a history."""
        headers = {"Content-Type": form.value}
        if key is not None:
            headers["Idempotency-Key"] = f'"{key}"'
        body = _arrow(records) if form is Form.ARROW else _json(records)
        return self.call("POST", f"/topics/{topic}?acks={acks}", body, headers)

    def send(
        self,
        topic: str,
        request: Request,
        *,
        acks: str = "all",
        key: str | None = None,
        form: Form = Form.JSON,
    ) -> int:
        """One attempt, written down in `request`; the status, 0 when there was none."""
        assert request.is_keyed == (key is not None)
        try:
            answer = self.post(topic, request.records, acks=acks, key=key, form=form)
        except NotSent:
            request.refusals += 1
            return 0
        except AnswerLost:
            request.unknown += 1
            return 0
        if answer.status == 200:
            places = _places(answer, form, request.records)
            if places is None:
                assert acks == "1", answer
                request.acks_without_offsets += 1
            else:
                request.acks.append(places)
        elif 400 <= answer.status < 500 or answer.status == 503:
            request.refusals += 1
        else:
            request.unknown += 1
        return answer.status

    def read(self, topic: str, partition: int, offset: int = 0) -> list[Read]:
        """Every record from an offset on, until a fetch at the end finds nothing.

        Only that fetch has asked the store.
        """
        records: list[Read] = []
        while True:
            page, offset = self.read_page(topic, partition, offset)
            if not page:
                return records
            records += page

    def read_page(
        self, topic: str, partition: int, offset: int, bytes_max: int = 2**26
    ) -> tuple[list[Read], int]:
        """One fetch: its records, and the offset to go on from. Raises NotServed."""
        table, (next_offset, _, _) = self.fetch(topic, partition, offset, bytes_max)
        columns = (table.column(name).to_pylist() for name in ("offset", "value", "key"))
        return list(map(Read, *columns)), next_offset

    def rows(self, topic: str, partition: int) -> list[dict[str, Any]]:
        """Every record, with all that readers get of it."""
        rows: list[dict[str, Any]] = []
        while page := self.fetch(topic, partition, len(rows), 2**26)[0].to_pylist():
            rows += page
        return rows

    def fetch(
        self, topic: str, partition: int, offset: int, bytes_max: int
    ) -> tuple[pa.Table, tuple[int, int, int]]:
        """One fetch: its records; the offset to go on from, the log start, the high watermark."""
        path = f"/topics/{topic}/partitions/{partition}/records"
        query = f"offset={offset}&max_bytes={bytes_max}"
        answer = self.call("GET", f"{path}?{query}", headers={"Accept": ARROW})
        if answer.status in {503, 504}:
            raise NotServed(answer.body.decode())
        assert answer.status == 200, answer
        table = pa.ipc.open_stream(answer.body).read_all()
        names = ("next-offset", "log-start-offset", "high-watermark")
        ends = tuple(int(answer.headers[f"tidelog-{name}"]) for name in names)
        return table, cast("tuple[int, int, int]", ends)

    def read_all(self, topic: str, partitions: int) -> Log:
        return {number: self.read(topic, number) for number in range(partitions)}

    def metrics(self) -> dict[str, float]:
        """Series by name with labels, as Prometheus' text has them."""
        lines = self.call("GET", "/metrics").body.decode().splitlines()
        series = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in series}


class Balanced(Client):
    """As behind a balancer: an attempt that comes to nothing is followed by one at the next broker.

    Requests are never repeated here either.
    """

    def __init__(self, base_urls: Sequence[str], answer_s: float = ANSWER_S) -> None:
        self._clients = deque(Client(url, answer_s) for url in base_urls)
        self._connection = self._clients[0]._connection

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client._connection.close()

    def call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        try:
            answer = super().call(method, path, body, headers)
        except (NotSent, AnswerLost):
            self.turn()
            raise
        if answer.status in (503, 504):
            self.turn()
        return answer

    def turn(self) -> None:
        """To the next broker."""
        self._clients.rotate(-1)
        self._connection = self._clients[0]._connection


def wait_until(is_so: Callable[[], bool], event: str, wait_s_max: float = WAIT_S_MAX) -> None:
    """Check until the condition holds; fail after `wait_s_max`.

    The pauses grow, because a check may cost a broker a page of metrics.
    """
    deadline, pause_s = time.monotonic() + wait_s_max, PAUSE_S_MIN
    while not is_so():
        assert time.monotonic() < deadline, f"{event} did not happen within {wait_s_max:.0f} s"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


def _json(records: Sequence[Written]) -> bytes:
    """Values and keys of JSON text, sent to the byte."""
    texts = []
    for value, key, partition in records:
        text = b'{"value":' + value
        if key is not None:
            text += b',"key":' + key
        if partition is not None:
            text += b',"partition":%d' % partition
        texts.append(text + b"}")
    return b'{"records":[' + b",".join(texts) + b"]}"


def _arrow(records: Sequence[Written]) -> bytes:
    """With a partition for every record: only then the answer's ranges say which is which."""
    columns = {
        "value": pa.array([record.value for record in records], pa.binary()),
        "key": pa.array([record.key for record in records], pa.binary()),
        "partition": pa.array([record.partition for record in records], pa.int32()),
    }
    batch = pa.record_batch(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _places(answer: Answer, form: Form, records: Sequence[Written]) -> list[Place] | None:
    """One a record, None when the answer has no offsets."""
    if form is Form.JSON:
        offset_pairs = [(it["partition"], it["offset"]) for it in answer.json()["offsets"]]
        if all(offset is None for _, offset in offset_pairs):
            return None
        return [Place(partition, offset) for partition, offset in offset_pairs]
    ranges = {it["partition"]: it["base_offset"] for it in answer.json()["partitions"]}
    if all(base is None for base in ranges.values()):
        return None
    places = []
    for record in records:
        assert record.partition is not None
        places.append(Place(record.partition, ranges[record.partition]))
        ranges[record.partition] += 1
    return places
