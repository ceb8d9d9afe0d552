"""Members of a REST group that commit, and that lose answers.

Their connections close before an answer, in the middle of one, or when their own timeout ends.
"""

import base64
import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from tests.support.threads import Threads
from tests.system.client import Answer, AnswerLost, Balanced, NotSent, NotServed
from tests.system.rest import BINARY, V2

__all__ = ["RestGroup"]

LOST_SHARE = 0.15
"""Of reads whose answer a member gives up by itself."""
LEAVE_SHARE = 0.01
PATIENCE_S = 2.0
"""Less than brokers stand still at times."""
SESSION_MS = 20_000
"""A restore brings members back that have left since the backup, and they keep their partitions."""
HEAD = b"GET {} HTTP/1.1\r\nHost: localhost\r\nAccept: {}\r\nTidelog-Read: {}\r\n\r\n".decode()


class RestGroup(Threads):
    """Two members in threads, from `with` to the end of the block.

    Each names the last answer that it has (`Tidelog-Read`). The first commits by its next read, the
    second by requests.
    """

    def __init__(self, base_urls: Sequence[str], topic: str, group: str, seed: int) -> None:
        self._urls = list(base_urls)
        self._topic = topic
        self._group = group
        self._lock = threading.Lock()
        self.read: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        """Offsets and values by partition, in the order in which the members got them."""
        self.counts: Counter[str] = Counter()
        self.failures: list[object] = []
        draws = [random.Random(f"{seed}/{group}/{number}") for number in range(2)]
        super().__init__(
            partial(self._run, draws[0], is_automatic=True),
            partial(self._run, draws[1], is_automatic=False),
        )

    def _run(self, draw: random.Random, *, is_automatic: bool) -> None:
        with Balanced(self._urls, PATIENCE_S) as client:
            member = _Member(client, self._group, self._topic, draw, is_automatic=is_automatic)
            while not self._stop.is_set():
                try:
                    self._step(member)
                except (NotSent, AnswerLost, NotServed):
                    self._count("answers lost by faults")
                    self._stop.wait(0.05)
                except BaseException as error:  # noqa: BLE001 - the test asserts that there is none
                    self.failures.append(error)
                    return
            with contextlib.suppress(NotSent, AnswerLost, NotServed):
                member.leave()

    def _step(self, member: "_Member") -> None:
        if not member.path:
            member.join()
            self._count("joined")
            return
        if member.draw.random() < LOST_SHARE:
            member.give_up()
            self._count("answers given up")
        records = member.read()
        newest: dict[int, int] = {}
        with self._lock:
            for record in records:
                partition, offset = record["partition"], record["offset"]
                if offset <= newest.get(partition, -1):
                    self.failures.append(f"one answer has {offset} after {newest[partition]}")
                newest[partition] = offset
                self.read[partition].append((offset, base64.b64decode(record["value"])))
        if not member.is_automatic:
            member.commit(newest)
        if member.draw.random() < LEAVE_SHARE:
            member.leave()

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1


class _Member:
    """An instance of the group, and a new one whenever brokers have forgotten it."""

    def __init__(
        self, client: Balanced, group: str, topic: str, draw: random.Random, *, is_automatic: bool
    ) -> None:
        self._client = client
        self._group = f"/consumers/{group}"
        self._topic = topic
        self.draw = draw
        self.is_automatic = is_automatic
        self.path = ""
        self._last_read = "0"
        self._read_to: dict[int, int] = {}

    def join(self) -> None:
        name = f"m{time.monotonic_ns()}-{self.draw.randrange(1000)}"
        settings = {
            "name": name,
            "format": "binary",
            "auto.offset.reset": "earliest",
            "auto.commit.enable": str(self.is_automatic).lower(),
            "session.timeout.ms": SESSION_MS,
        }
        self._ask("POST", self._group, settings)
        path = f"{self._group}/instances/{name}"
        if self._ask("POST", f"{path}/subscription", {"topics": [self._topic]}).status == 204:
            self.path, self._last_read = path, "0"
            self._read_to.clear()

    def leave(self) -> None:
        if self.path:
            self._ask("DELETE", self.path)
            self.path = ""

    def read(self) -> list[dict[str, Any]]:
        """The records of the next answer; none if there is no instance any more."""
        headers = {"Accept": BINARY, "Tidelog-Read": self._last_read}
        answer = self._ask("GET", self._records(), headers=headers)
        if answer.status != 200:
            return []
        self._last_read = answer.headers.get("tidelog-read", self._last_read)
        records: list[dict[str, Any]] = answer.json()
        return records

    def give_up(self) -> None:
        """Send a read, and close before its answer, or in the middle of it."""
        connection = self._client.address
        head = HEAD.format(self._records(), BINARY, self._last_read)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(connection, PATIENCE_S) as reading,
        ):
            reading.sendall(head.encode())
            if self.draw.random() < 0.3:
                reading.recv(self.draw.randrange(1, 300))
            else:
                time.sleep(self.draw.choice((0.0, 0.003, 0.03, 0.3)))

    def commit(self, newest: dict[int, int]) -> None:
        """Of the last records read; again with the next ones if the answer is lost.

        Each partition by itself: the broker refuses a commit with a partition that has moved as a
        whole.
        """
        self._read_to |= newest
        for partition, offset in [*self._read_to.items()]:
            if not self.path:
                return
            place = {"topic": self._topic, "partition": partition, "offset": offset}
            self._ask("POST", f"{self.path}/offsets", {"offsets": [place]})
            del self._read_to[partition]

    def _records(self) -> str:
        return f"{self.path}/records?timeout=500&max_bytes=300000"

    def _ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Raises NotSent, AnswerLost, NotServed."""
        content = b"" if body is None else json.dumps(body).encode()
        answer = self._client.call(method, path, content, headers or {"Content-Type": V2})
        if answer.status in (429, 503, 504):  # 429: members come and go too often
            raise NotServed(answer.body.decode())
        if answer.status in (404, 409):  # brokers forgot it, or a partition has moved
            self.path = "" if answer.status == 404 else self.path
            return answer
        assert answer.status in (200, 204), (method, path, answer)
        return answer
