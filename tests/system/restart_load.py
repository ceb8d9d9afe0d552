"""Plain HTTP clients that repeat nothing: each request that fails is counted as a failure."""

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.support.broker import until
from tests.support.threads import Threads

JSON = "application/vnd.kafka.json.v2+json"
V2 = "application/vnd.kafka.v2+json"
READ = "/topics/t/partitions/0/records?timeout=0&max_records=20&format=json"
POLL = "/topics/empty/partitions/0/records?offset=0&timeout=3000"
PAUSE_S = 0.01
MEMBERS = 2
"""Of the shared group."""
OK_MAX = 299


class Plain:
    """A client with one connection, which it closes when an answer says so, as http.client does."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, method: str, path: str, body: Any = None, kind: str = V2) -> tuple[int, Any]:
        content = None if body is None else json.dumps(body)
        headers = {} if body is None else {"content-type": kind}
        self._connection.request(method, path, content, headers)
        with self._connection.getresponse() as answer:
            text = answer.read()
        if answer.status > OK_MAX:  # a balancer's own answer is no JSON
            return answer.status, text
        return answer.status, json.loads(text) if text.strip() else None

    def close(self) -> None:
        self._connection.close()


class Failed(Exception):
    """A request failed; the load has counted it."""


class RestartLoad(Threads):
    """Threads that send requests of every kind.

    `asked` counts the requests by kind, `failures` are all that failed, `acked` the values that
    brokers acknowledged.
    """

    def __init__(self, port: int) -> None:
        self.asked: Counter[str] = Counter()
        self.failures: list[str] = []
        self.acked: list[str] = []
        self._port = port
        self._lock = threading.Lock()
        self._subscribed: set[str] = set()
        works = [self._produce] * 2 + [self._fetch, self._topics] + [self._poll] * 2
        works += [self._member] * MEMBERS + [self._come_and_go]
        super().__init__(*(partial(self._run, work, n) for n, work in enumerate(works)))

    def wait_for(self, count: int) -> None:
        goal = self.asked.total() + count
        until(lambda: self.asked.total() >= goal)

    def _run(self, work: Callable[[Plain, int], None], number: int) -> None:
        client = Plain(self._port)
        while not self._stop.is_set():
            try:
                work(client, number)
            except Failed:
                client.close()
        client.close()

    def _ask(
        self, client: Plain, name: str, method: str, path: str, body: Any = None, kind: str = V2
    ) -> Any:
        began_s = time.monotonic()
        try:
            status, answer = client.ask(method, path, body, kind)
            why = "" if status <= OK_MAX else f"{status} {answer}"
        except (OSError, http.client.HTTPException) as error:
            answer, why = None, repr(error)
        took_s = time.monotonic() - began_s
        with self._lock:
            self.asked[name] += 1
            if why:
                self.failures.append(f"{name} after {took_s:.2f} s: {why}")
        if why:
            raise Failed
        time.sleep(PAUSE_S)
        return answer

    def _produce(self, client: Plain, number: int) -> None:
        value = f"{number}-{time.monotonic_ns()}"
        body = {"records": [{"value": value}]}
        answer = self._ask(client, "produce", "POST", "/topics/t", body, JSON)
        assert answer["offsets"][0]["offset"] >= 0, answer
        with self._lock:
            self.acked.append(value)

    def _fetch(self, client: Plain, _: int) -> None:
        self._ask(client, "fetch", "GET", READ)

    def _poll(self, client: Plain, _: int) -> None:
        assert not self._ask(client, "long poll", "GET", POLL)

    def _topics(self, client: Plain, _: int) -> None:
        assert "t" in self._ask(client, "topics", "GET", "/topics")

    def _member(self, client: Plain, number: int) -> None:
        """A member of a group that others share: it reads and commits until the end.

        It begins when all have subscribed: the commit of a partition that has just moved would be
        refused.
        """
        name = f"m{number}-{time.monotonic_ns()}"

        def is_over() -> bool:
            self._subscribed.add(name)
            until(lambda: len(self._subscribed) >= MEMBERS or self._stop.is_set())
            return self._stop.is_set()

        self._life(client, "shared", name, is_over)

    def _come_and_go(self, client: Plain, _: int) -> None:
        """A member that leaves after two reads, each time in a new group."""
        reads = iter((False, False, True))
        self._life(client, f"g{time.monotonic_ns()}", "m", lambda: next(reads))

    def _life(self, client: Plain, group: str, name: str, is_over: Callable[[], bool]) -> None:
        config = {"name": name, "format": "json", "auto.offset.reset": "latest"}
        self._ask(client, "join", "POST", f"/consumers/{group}", config)
        path = f"/consumers/{group}/instances/{name}"
        self._ask(client, "subscribe", "POST", f"{path}/subscription", {"topics": ["t"]})
        while not is_over():
            self._ask(client, "read", "GET", f"{path}/records?timeout=1000&max_records=100")
            self._ask(client, "commit", "POST", f"{path}/offsets")
        self._ask(client, "leave", "DELETE", path)
