"""Consume, transform, produce: each result with how far its group has read, in one request (I4)."""

import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.support.threads import Threads
from tests.system.client import WAIT_S_MAX, Answer, AnswerLost, Balanced, Client, NotSent

RETRY_S = 0.01


class Names(NamedTuple):
    """Names of the source topic, of the results, of the batches, and of the group."""

    source: str
    made: str
    audit: str
    group: str


class Found(NamedTuple):
    """Content of a store: the group's offset in each partition, and the results."""

    offsets: dict[int, int]
    made: list[str]
    audit: list[str]


def check(result: Found) -> None:
    """Results are those of exactly what was read, once each; so are the lines of the batches."""
    read = [f"{number}/{n}" for number, end in result.offsets.items() for n in range(end)]
    assert sorted(result.made) == sorted(read)
    for number, end in result.offsets.items():
        batches = [line.split(" ") for line in result.audit if line.startswith(f"{number} ")]
        assert [int(first) for _, first, _ in batches] == [0, *(int(b[2]) for b in batches[:-1])]
        assert int(batches[-1][2]) == end


class _Stopped(Exception):
    """In the middle of a request: its outcome is unknown."""


class Worker(Threads):
    """Reads a partition and commits its results, in a thread.

    Whatever happens, it goes on from what is committed.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        names: Names,
        partition: int,
        *,
        end: int | None,
        seed: int,
        pause_s: float = 0.0,
    ) -> None:
        """End at an offset, or with the block. Several URLs are brokers behind a balancer.

        `pause_s` is after each commit.
        """
        super().__init__(self._run)
        with Client(base_urls[0]) as client:
            cluster = cluster_of(client)
        self._end = end
        self._pause_s = pause_s
        self._path = f"/v3/clusters/{cluster}"
        self._names = names
        self._partition = partition
        self._draw = random.Random(seed)
        self._client = Balanced(base_urls, answer_s=10.0)
        self.commits = self.unknown = 0
        self.failure: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return not self._threads[0].is_alive()

    def _run(self) -> None:
        try:
            with self._client:
                while not self._stop.is_set() and (start := self._where()) != self._end:
                    self._transform(start)
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the test asserts that there is none
            self.failure = error

    def _transform(self, start: int) -> None:
        if count := self._read(start):
            self._commit(start, count)
            self._stop.wait(self._pause_s)
        else:
            time.sleep(RETRY_S)

    def _where(self) -> int:
        path = f"{self._path}/consumer-groups/{self._names.group}/offsets"
        answer = self._ask("GET", path, accepted=(200, 404))
        listed = answer.json()["data"] if answer.status == 200 else []
        return sum(row["offset"] for row in listed if row["partition_id"] == self._partition)

    def _read(self, start: int) -> int:
        path = f"/topics/{self._names.source}/partitions/{self._partition}/records"
        query = f"offset={start}&max_bytes={self._draw.randrange(1, 60)}"
        accept = {"Accept": "application/vnd.kafka.json.v2+json"}
        records = self._ask("GET", f"{path}?{query}", headers=accept).json()
        assert [record["offset"] for record in records] == list(range(start, start + len(records)))
        return len(records)

    def _commit(self, start: int, count: int) -> None:
        end = start + count
        values = [f"{self._partition}/{offset}" for offset in range(start, end)]
        records = [
            {"key": {"type": "STRING", "data": value}, "value": {"type": "STRING", "data": value}}
            for value in values
        ]
        line = {"value": {"type": "STRING", "data": f"{self._partition} {start} {end}"}}
        offset = {
            "topic_name": self._names.source,
            "partition_id": self._partition,
            "offset": end,
        }
        body = {
            "topics": [
                {"topic_name": self._names.made, "records": records},
                {"topic_name": self._names.audit, "records": [line]},
            ],
            "consumer_groups": [{"consumer_group_id": self._names.group, "offsets": [offset]}],
        }
        key = {"Idempotency-Key": f'"{self._names.group}-{self._partition}-{start}"'}
        self._ask("POST", f"{self._path}/transactions", json.dumps(body).encode(), headers=key)
        self.commits += 1

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        accepted: tuple[int, ...] = (200,),
    ) -> Answer:
        """The same again until it is answered."""
        deadline = time.monotonic() + WAIT_S_MAX
        while not self._stop.is_set():
            try:
                answer = self._client.call(method, path, body, headers)
                if answer.status in accepted:
                    return answer
                assert answer.status in {503, 504}, answer
            except NotSent:
                pass
            except AnswerLost:
                self.unknown += method == "POST"
            assert time.monotonic() < deadline, f"{method} {path}: no broker answers"
            time.sleep(RETRY_S)
        raise _Stopped


def cluster_of(client: Client) -> str:
    answer: Any = client.call("GET", "/v3/clusters").json()
    return str(answer["data"][0]["cluster_id"])
