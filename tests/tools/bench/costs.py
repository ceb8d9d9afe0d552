"""Requests of a cluster to its store, and their price on S3 Standard.

Brokers are real processes. Their store is the counting server, which sees all requests, those of
Delta's own client too; a PUT takes 60 ms and a GET 30 ms there. Rates do not depend on how fast
this machine is, as long as it keeps up.

Retention looks at each table once a week if nothing is due in it. So what the first rounds of
retention ask of the tables is counted apart, as the requests of a week. An idle cluster lists each
five minutes, so it is measured for so long. It writes each ten: $0.02 a month for each broker,
which the measurement may miss.
"""

import asyncio
import contextlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
from aiokafka import AIOKafkaConsumer, TopicPartition

from deploy.demo.broker_process import BrokerProcess
from deploy.local.cluster import Store, brokers
from tests.support.broker import until
from tests.support.counting_s3 import (
    NO_LATENCY,
    Counts,
    Latency,
    Request,
    RunningServer,
    running_counting_s3,
)
from tests.support.ports import free_port
from tests.support.seaweed import ACCESS_KEY, REGION, SECRET_KEY
from tests.tools.bench.report import Table, number
from tidelog.service.server.retention_looks import LOOK_S
from tidelog.service.telemetry.store_costs import GET_USD, MONTH_S, PUT_USD

DOLLARS = {"PUT": PUT_USD, "POST": PUT_USD, "LIST": PUT_USD, "DELETE": 0.0}
"""Of a request by its verb; any other has the price of a GET."""
S3_STANDARD = Latency(write_s=0.06, read_s=0.03, bytes_per_s=80e6)
ROUND_S = 60.0
"""Mean time between two rounds of retention here. There is no second collection while an idle
cluster is measured."""
BUSY_S, IDLE_S = 60.0, 300.0
"""How long a cluster is measured: with producers, and without."""
QUICK_S = 20.0
"""Both times, and that of a round, in the short form."""
LOG_KINDS = {"wal", "data"}
TABLE_KINDS = {"table log", "segment"}
PROBE_S = 2.0
RECORD_BYTES = 100
PARTITIONS = 6
JSON = {"content-type": "application/vnd.kafka.json.v2+json"}
COLUMNS = ("cluster", "PUT/s", "LIST/s", "GET/s", "of Delta's client", "a month", "the most of it")


class Case(NamedTuple):
    """A cluster and what clients do to it.

    `topics` have `seals` segments each before the measurement. `records_s` are produced a second,
    to the brokers in turn, over `partitions`. `readers` wait at the end by REST. If `is_zoned`,
    each broker has a zone of its own, and a Kafka consumer in the last one reads all partitions.
    """

    title: str
    brokers: int = 1
    topics: int = 0
    seals: int = 0
    records_s: float = 0.0
    flush_interval_ms: int | None = None
    commits_burst: int | None = None
    record_bytes: int = RECORD_BYTES
    partitions: int = PARTITIONS
    readers: int = 0
    is_probed: bool = False
    is_zoned: bool = False
    round_s: float = ROUND_S

    @property
    def settings(self) -> dict[str, object]:
        pace = {
            "flush_interval_ms": self.flush_interval_ms,
            "commits_burst": self.commits_burst,
        }
        return {
            "retention_check_interval_ms": int(self.round_s * 1000) if self.topics else 0,
            **{name: value for name, value in pace.items() if value is not None},
        }


CASES: Sequence[Case] = (
    Case("1 broker, idle"),
    Case("3 brokers, idle", 3),
    Case("the same, 30 REST readers at the end, `/ready` each 2 s", 3, readers=30, is_probed=True),
    Case("3 brokers, idle, 10 topics with 26 segments", 3, topics=10, seals=26),
    Case("3 brokers, idle, 100 topics with 3 segments", 3, topics=100, seals=3),
    Case(
        "3 brokers, idle, 1,000 topics with a segment, 30 REST readers, `/ready` each 2 s",
        3,
        topics=1000,
        seals=1,
        readers=30,
        is_probed=True,
    ),
    Case("1 broker, 50 records/s, the budget's saved commits", 1, records_s=50),
    Case("1 broker, 50 records/s, the budget is spent", 1, records_s=50, commits_burst=1),
    Case("3 brokers, the same", 3, records_s=50, commits_burst=1),
    Case("1 broker, 50 records/s, `flush_interval_ms=250`", 1, records_s=50, flush_interval_ms=250),
    Case("3 brokers, the same", 3, records_s=50, flush_interval_ms=250),
    Case(
        "2 zones, 100 partitions, read in the other zone",
        2,
        records_s=400,
        flush_interval_ms=250,
        partitions=100,
        is_zoned=True,
    ),
    Case(
        "the same, 300 partitions, 1.2 MB/s",
        2,
        records_s=1200,
        flush_interval_ms=250,
        record_bytes=1000,
        partitions=300,
        is_zoned=True,
    ),
    Case(
        "the same, 1,000 partitions, 0.8 MB/s",
        2,
        records_s=800,
        flush_interval_ms=250,
        record_bytes=1000,
        partitions=1000,
        is_zoned=True,
    ),
)
SEALS = 20
"""Of the row that counts the requests of one seal."""
SEAL_S = 600.0
"""`segment.ms` by default."""
SETTLED_S = 2.0
"""Before a measurement: requests of the start are none of a month's."""


NO_LOOKS: Mapping[Request, int] = {}


class Cost(NamedTuple):
    """Requests a second by what they have in common."""

    rates: dict[Request, float]

    def of(self, *verbs: str) -> float:
        return sum(rate for request, rate in self.rates.items() if request.verb in verbs)

    def of_kinds(self, verb: str, kinds: Container[str]) -> float:
        return sum(
            rate
            for request, rate in self.rates.items()
            if request.verb == verb and request.kind in kinds and request.status < 300
        )

    @property
    def of_deltalake(self) -> float:
        """The share of Delta's client in the price."""
        total = self.dollars
        rates = {key: rate for key, rate in self.rates.items() if key.client == "deltalake"}
        return Cost(rates).dollars / total if total else 0.0

    @property
    def dollars(self) -> float:
        """A month."""
        return sum(_dollars(request, rate) for request, rate in self.rates.items())

    @property
    def largest(self) -> str:
        """The requests that cost most: verb and kind of object."""
        sums: Counter[str] = Counter()
        for request, rate in self.rates.items():
            sums[f"{request.verb} {request.kind}"] += _dollars(request, rate)  # type: ignore[assignment]
        if not sums:
            return ""
        ((name, dollars),) = sums.most_common(1)
        return f"{name}: ${dollars:,.2f}"

    def row(self, title: str) -> tuple[str, ...]:
        return (
            title,
            number(self.of("PUT", "POST")),
            number(self.of("LIST")),
            number(self.of("GET", "HEAD")),
            f"{100 * self.of_deltalake:.0f} %",
            f"${self.dollars:,.2f}",
            self.largest,
        )


def _dollars(request: Request, rate: float) -> float:
    return MONTH_S * rate * DOLLARS.get(request.verb, GET_USD)


def cost_of(counts: Counts, seconds: float, looks: Mapping[Request, int] = NO_LOOKS) -> Cost:
    """Return the rates of a measurement, and of looks that come once in LOOK_S seconds."""
    requests = {*counts.requests, *looks}
    return Cost(
        {
            request: counts.requests[request] / seconds + looks.get(request, 0) / LOOK_S
            for request in requests
        }
    )


# -- a cluster and its clients


@contextlib.contextmanager
def cluster_of(
    case: Case, server: RunningServer, folder: Path
) -> Iterator[Sequence[BrokerProcess]]:
    """Run the brokers of a case on a new store of the server."""
    store = Store(
        f"s3://{server.bucket}/{folder.name}",
        {"s3_endpoint": server.endpoint_url, "s3_region": REGION},
        {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY},
    )
    folder.mkdir(parents=True)
    own_settings = [
        {"zone": f"zone-{place}", "kafka_port": free_port()}
        for place in range(case.brokers if case.is_zoned else 0)
    ]
    with brokers(case.brokers, store, folder, own_settings, **case.settings) as cluster:
        yield cluster


class Clients:
    """The clients of a cluster."""

    def __init__(self, case: Case, cluster: Sequence[BrokerProcess]) -> None:
        self._case = case
        self._urls = [broker.base_url for broker in cluster]
        self._cluster = cluster
        self.produced = 0
        self.consumed = 0
        self.lags_s: list[float] = []
        """Of consumed records, from the time at which a broker took them. Without the records that
        were there when the consumer began."""

    def works(self) -> list[Callable[[httpx.AsyncClient], Awaitable[None]]]:
        works: list[Callable[[httpx.AsyncClient], Awaitable[None]]] = []
        if self._case.records_s:
            works.append(self._produce)
        if self._case.is_probed:
            works.append(self._probe)
        if self._case.is_zoned:
            works.append(self._consume)
        return works + [self._read_end] * self._case.readers

    async def run(self, seconds: float) -> None:
        """Do all of it for some time."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as http:
            tasks = [asyncio.create_task(_forever(work, http)) for work in self.works()]
            await asyncio.sleep(seconds)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if isinstance(result, Exception)]
        if errors:
            raise errors[0]

    async def _produce(self, http: httpx.AsyncClient) -> None:
        """Send the records of one request to each partition in turn, at the case's pace."""
        case = self._case
        urls = self._urls[:1] if case.is_zoned else self._urls
        a_request = max(1, round(case.records_s / 50))
        numbers, next_s = itertools.count(), time.monotonic()
        partitions = itertools.cycle(range(case.partitions))
        while True:
            records = [
                {"value": "x" * case.record_bytes, "partition": next(partitions)}
                for _ in range(a_request)
            ]
            url = f"{urls[next(numbers) % len(urls)]}/topics/t?acks=0"
            answer = await http.post(url, json={"records": records}, headers=JSON)
            answer.raise_for_status()
            self.produced += a_request
            next_s += a_request / case.records_s
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def _probe(self, http: httpx.AsyncClient) -> None:
        for url in self._urls:
            await http.get(f"{url}/ready")
        await asyncio.sleep(PROBE_S)

    async def _read_end(self, http: httpx.AsyncClient) -> None:
        """Wait for a second at the end of a partition."""
        url = f"{self._urls[0]}/topics/t/partitions/0"
        end = (await http.get(f"{url}/offsets")).raise_for_status().json()["end_offset"]
        while True:
            options = {"offset": end, "timeout": 1000}
            (await http.get(f"{url}/records", params=options)).raise_for_status()

    async def _consume(self, _: httpx.AsyncClient) -> None:
        port = self._cluster[-1].settings["kafka_port"]
        consumer = AIOKafkaConsumer(
            bootstrap_servers=f"127.0.0.1:{port}",
            enable_auto_commit=False,
            auto_offset_reset="latest",
        )
        await consumer.start()
        try:
            places = [TopicPartition("t", part) for part in range(self._case.partitions)]
            consumer.assign(places)
            await consumer.seek_to_beginning(*places)
            settled_s = time.time() + SETTLED_S
            while True:
                for records in (await consumer.getmany(timeout_ms=500)).values():
                    self.consumed += len(records)
                    now_s = time.time()
                    taken_s = (record.timestamp / 1000 for record in records)
                    self.lags_s += [now_s - at_s for at_s in taken_s if at_s > settled_s]
        finally:
            await consumer.stop()


async def _forever(
    work: Callable[[httpx.AsyncClient], Awaitable[None]], http: httpx.AsyncClient
) -> None:
    while True:
        await work(http)


def _create_topic(broker: BrokerProcess, name: str, partitions: int) -> None:
    body = {"topic_name": name, "partitions_count": partitions}
    httpx.post(f"{broker.base_url}/admin/topics", json=body, timeout=60).raise_for_status()


def _seal(broker: BrokerProcess, topic: str, seals: int) -> None:
    """Give a topic so many segments."""
    for _ in range(seals):
        body = {"records": [{"value": "x" * RECORD_BYTES}]}
        url = f"{broker.base_url}/topics/{topic}"
        httpx.post(url, json=body, headers=JSON, timeout=60).raise_for_status()
        sealing_url = f"{broker.base_url}/admin/topics/{topic}/seal"
        httpx.post(sealing_url, timeout=60).raise_for_status()


def _meet(cluster: Sequence[BrokerProcess]) -> None:
    line = f"tidelog_live_brokers {len(cluster)}.0"
    until(lambda: all(line in httpx.get(f"{broker.base_url}/metrics").text for broker in cluster))


# -- the part of `make bench`


class Measurement(NamedTuple):
    """The cost of a case, and the records that clients produced and consumed in it."""

    cost: Cost
    produced: int
    consumed: int
    lags_s: Sequence[float] = ()

    @property
    def reading(self) -> str:
        """The share and the lag of the reader in the other zone, and its requests by object."""
        share = self.consumed / max(1, self.produced)
        gets = self.cost.of_kinds("GET", LOG_KINDS) / self.cost.of_kinds("PUT", LOG_KINDS)
        lag_s = statistics.quantiles(self.lags_s, n=100)[98]
        return (
            f"read to {100 * share:.0f} % in the other zone, p99 {lag_s:.1f} s after the broker "
            f"took a record, {gets:.2f} GETs an object"
        )


def measured(case: Case, server: RunningServer, folder: Path, seconds: float) -> Measurement:
    """Run a case for some time; return its cost."""
    server.set_latency(NO_LATENCY)
    with cluster_of(case, server, folder) as cluster:
        _meet(cluster)
        _create_topic(cluster[0], "t", case.partitions)
        names = [f"sealed-{number_of_topic}" for number_of_topic in range(case.topics)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: _create_topic(cluster[0], name, 1), names))
            list(pool.map(lambda name: _seal(cluster[0], name, case.seals), names))
        server.set_latency(S3_STANDARD)
        clients = Clients(case, cluster)
        asyncio.run(clients.run(SETTLED_S))
        server.reset()
        looks = _first_looks(server, clients, case.round_s) if case.topics else NO_LOOKS
        server.reset()
        produced, consumed, began_s = clients.produced, clients.consumed, time.monotonic()
        clients.lags_s.clear()
        asyncio.run(clients.run(seconds))
        counts, took_s = server.counts(), time.monotonic() - began_s
    cost = cost_of(counts, took_s, looks)
    produced, consumed = clients.produced - produced, clients.consumed - consumed
    return Measurement(cost, produced, consumed, clients.lags_s)


def _first_looks(server: RunningServer, clients: Clients, round_s: float) -> Mapping[Request, int]:
    """Return what the first rounds of retention ask of the tables: until a round asks nothing."""
    looks: Counter[Request] = Counter()
    while True:
        asyncio.run(clients.run(1.5 * round_s))
        requests = server.counts().requests
        server.reset()
        new_looks = {key: count for key, count in requests.items() if key.kind in TABLE_KINDS}
        looks.update(new_looks)
        if not new_looks:
            return looks


def seal_cost(server: RunningServer, folder: Path, seals: int) -> Cost:
    """Return the cost of a topic that is sealed each SEAL_S seconds."""
    server.set_latency(NO_LATENCY)
    case = Case("seals")
    with cluster_of(case, server, folder) as (broker,):
        _create_topic(broker, "t", 1)
        _seal(broker, "t", 1)
        server.reset()
        _seal(broker, "t", seals)
        counts = server.counts()
    of_seals = Counter(
        {
            request: count
            for request, count in counts.requests.items()
            if request.kind in TABLE_KINDS or request.client == "deltalake"
        }
    )
    # Each record is an entry, and each seal is one.
    entries = counts.of(verb="PUT", kind="wal", status=200) - seals
    of_seals[Request("tidelog", "PUT", "wal", 200)] = entries
    return cost_of(counts._replace(requests=of_seals), seals * SEAL_S)


def measure(folder: Path, *, is_quick: bool) -> Table:
    rows = []
    with running_counting_s3() as server:
        cost = seal_cost(server, folder / "seals", SEALS)
        rows.append(cost.row("a topic that is sealed each 10 minutes"))
        for place, case in enumerate(CASES):
            seconds = BUSY_S if case.records_s else IDLE_S
            if is_quick:
                seconds, case = QUICK_S, case._replace(round_s=QUICK_S)
            measurement = measured(case, server, folder / str(place), seconds)
            title = case.title
            if case.is_zoned:
                title = f"{title} ({measurement.reading})"
            rows.append(measurement.cost.row(title))
    how = (
        "requests as the store counts them; PUT 60 ms, GET 30 ms; S3 Standard's prices: PUT, LIST "
        f"$5 a million, GET $0.40; {BUSY_S:.0f} s a row, {IDLE_S:.0f} s without producers"
    )
    return Table(COLUMNS, rows, how)
