"""The time for which the other brokers do not answer if one of three is killed under load.

SeaweedFS, three brokers, and the balancer where one is installed. Clients produce one record a
request with an Idempotency-Key each, and repeat what fails under the same key: some at the brokers
that live on, some behind the balancer. Afterwards the log is read: all that was acked is there, and
once. No peer publishes such a number.
"""

import asyncio
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from deploy.demo.broker_process import BrokerProcess
from deploy.local.balancer import balancer, installed_balancer
from deploy.local.cluster import Store, brokers, s3_store
from tests.tools.bench.broker import environment, metric
from tests.tools.bench.rates.latency import bare_put
from tests.tools.bench.report import Row

ROUNDS = 2
PARTITIONS = 3
BEFORE_S = 2.0
AFTER_S = 4.0
SLACK_MS = 100.0
PAUSE_S = 0.01
"""Of each client after an ack: two cores that have no time for anything are another number."""
SEQUENCER_GAP_MS = 2000.0
JSON = {"content-type": "application/vnd.kafka.json.v2+json"}


@dataclass
class Client:
    """One producer, its requests one after the other."""

    name: str
    base_url: str
    acks: list[tuple[float, float]] = field(default_factory=list)
    """When each request was first sent, and when it was acked, in s."""
    sent: list[str] = field(default_factory=list)
    repeated: int = 0

    async def run(self, until_s: float) -> None:
        async with httpx.AsyncClient(base_url=self.base_url, timeout=5.0) as http:
            for number in itertools.count():
                if time.monotonic() >= until_s:
                    return
                value = f"{self.name}-{number}"
                self.sent.append(value)
                started_s = time.monotonic()
                while not await self._post(http, value):
                    self.repeated += 1
                    await asyncio.sleep(0.01)
                self.acks.append((started_s, time.monotonic()))
                await asyncio.sleep(PAUSE_S)

    async def _post(self, http: httpx.AsyncClient, value: str) -> bool:
        body = json.dumps({"records": [{"key": value, "value": value}]}).encode()
        headers = {**JSON, "idempotency-key": f'"{value}"'}
        try:
            answer = await http.post("/topics/bench", content=body, headers=headers)
        except httpx.TransportError:
            return False
        if answer.status_code in (429, 500, 502, 503, 504):
            return False
        answer.raise_for_status()
        return True

    def longest_gap_ms(self, from_s: float) -> float:
        """Between two acks, or from the first sending to the first ack after `from_s`."""
        acked = [ack_s for _, ack_s in self.acks]
        pairs = itertools.pairwise(acked)
        return 1000 * max(last_s - first_s for first_s, last_s in pairs if last_s >= from_s)


def measure(folder: Path, *, is_quick: bool) -> list[Row]:
    rows = []
    with s3_store() as store, environment(store):
        put_ms = asyncio.run(bare_put(store, 100))
        for victim in ("an ordinary broker", "the sequencer"):
            trials = [
                _round(store, victim == "the sequencer", number)
                for number in range(1 if is_quick else ROUNDS)
            ]
            p99_ms = statistics.median(trial.p99_ms for trial in trials)
            target = SEQUENCER_GAP_MS if victim == "the sequencer" else put_ms + SLACK_MS
            for place, gaps in (
                ("at the others", [trial.others_ms for trial in trials]),
                ("behind the balancer", [trial.balanced_ms for trial in trials]),
            ):
                if gaps[0] is not None:
                    rows.append(
                        Row(
                            "failover",
                            f"{victim} killed: longest wait for an ack {place}",
                            max(gaps),
                            "ms",
                            target if place == "at the others" else None,
                            note=f"worst of {len(gaps)}; before that p99 {p99_ms:.0f} ms; "
                            f"one bare PUT {put_ms:.1f} ms; nothing lost, nothing twice",
                            is_smaller_better=True,
                        )
                    )
    return rows


@dataclass
class _Round:
    p99_ms: float
    others_ms: float
    balanced_ms: float | None


def _round(store: Store, is_sequencer: bool, number: int) -> _Round:
    kind = "sequencer" if is_sequencer else "ordinary"
    own = store._replace(url=f"{store.url}-{kind}-{number}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidelog-bench-")))
        running = stack.enter_context(brokers(3, own, folder))
        _wait_until_met(running)
        topic = {"topic_name": "bench", "partitions_count": PARTITIONS}
        httpx.post(f"{running[0].base_url}/admin/topics", json=topic).raise_for_status()
        running.sort(key=lambda broker: metric(broker, "tidelog_is_sequencer") != is_sequencer)
        victim, *other_brokers = running
        clients = [
            Client(f"other-{i}", broker.base_url) for i, broker in enumerate(other_brokers * 2)
        ]
        balanced: list[Client] = []
        if installed_balancer() is not None:
            port = stack.enter_context(balancer(folder, [broker.port for broker in running]))
            balanced = [Client(f"balanced-{i}", f"http://127.0.0.1:{port}") for i in range(4)]
        killed_s = asyncio.run(_load([*clients, *balanced], victim))
        _check([*clients, *balanced], other_brokers[0])
        took = sorted(
            ack - sent for client in clients for sent, ack in client.acks if ack < killed_s
        )
        return _Round(
            1000 * took[int(len(took) * 0.99)],
            max(client.longest_gap_ms(killed_s) for client in clients),
            max((client.longest_gap_ms(killed_s) for client in balanced), default=None),
        )


async def _load(clients: list[Client], victim: BrokerProcess) -> float:
    started_s = time.monotonic()
    running = [
        asyncio.create_task(client.run(started_s + BEFORE_S + AFTER_S)) for client in clients
    ]
    await asyncio.sleep(BEFORE_S)
    killed_s = time.monotonic()
    victim.kill()
    await asyncio.gather(*running)
    return killed_s


def _check(clients: list[Client], broker: BrokerProcess) -> None:
    """Everything was acked in the end: each value lies in the log, once."""
    value_counts = Counter(_values(broker))
    sent = {value for client in clients for value in client.sent}
    assert set(value_counts) == sent, f"lost or invented: {sorted(set(value_counts) ^ sent)[:5]}"
    assert set(value_counts.values()) == {1}, f"twice: {value_counts.most_common(3)}"


def _values(broker: BrokerProcess) -> Iterator[str]:
    for partition in range(PARTITIONS):
        offset = 0
        while True:
            path = f"/topics/bench/partitions/{partition}/records?offset={offset}"
            answer = httpx.get(f"{broker.base_url}{path}", headers={"accept": JSON["content-type"]})
            page = answer.raise_for_status().json()
            if not page:
                break
            offset = page[-1]["offset"] + 1
            yield from (record["value"] for record in page)


def _wait_until_met(running: list[BrokerProcess]) -> None:
    deadline_s = time.monotonic() + 60
    while any(metric(broker, "tidelog_live_brokers") < len(running) for broker in running):
        assert time.monotonic() < deadline_s, "the brokers do not see each other"
        time.sleep(0.1)
