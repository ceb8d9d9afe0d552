"""deltalake's requests, as the rules count them and as a server sees them."""

from collections import Counter
from collections.abc import Sequence

import pytest

from tests.support.broker_log import open_log
from tests.support.counting_s3 import RunningServer
from tests.support.logs import append, closing
from tests.support.seaweed import REGION
from tidelog.storage.core import object_keys
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.runtime.tasks import begin_duty
from tidelog.storage.store.metered import DELTALAKE, OWN, CountedRequest, MeteredStore
from tidelog.storage.store.s3 import S3Store
from tidelog.storage.store.s3_options import S3Options
from tidelog.storage.tables.delta import open_table
from tidelog.storage.tables.delta_requests import CHECKPOINT_INTERVAL
from tidelog.storage.tables.manifest import Table

PREFIX = "topics/t-1"
TABLE_KINDS = {"table log", "segment"}
SEALS = 110


class Meters:
    """The store's own meter and the server's, of one client."""

    def __init__(self, store: MeteredStore, server: RunningServer) -> None:
        self.store = store
        self._server = server

    def reset(self) -> None:
        self.store.counters.requests.clear()
        self._server.reset()

    def by_rule(self, client: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        for request, count in self.store.counters.requests.items():
            if request.client == client:
                verb = {"create": "PUT", "put": "PUT", "get": "GET"}.get(request.verb, "LIST")
                counts[verb] += count
        return counts

    def of_tables(self) -> Counter[str]:
        """Count the requests that the server saw for objects of tables, of any client."""
        counts: Counter[str] = Counter()
        for request, count in self._server.counts().requests.items():
            if request.kind in TABLE_KINDS:
                counts["GET" if request.verb == "HEAD" else request.verb] += count
        return counts

    def by_server(self, client: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        for request, count in self._server.counts().requests.items():
            if request.client == client:
                counts["GET" if request.verb == "HEAD" else request.verb] += count
        return counts


async def meters_of(server: RunningServer, prefix: str) -> Meters:
    options = S3Options(endpoint_url=server.endpoint_url, region=REGION)
    store = await S3Store.open(server.bucket, prefix, options)
    meters = Meters(MeteredStore(store, SystemClock()), server)
    meters.reset()
    return meters


async def commit(table: Table, numbers: Sequence[int]) -> None:
    for number in numbers:
        first, end = number * 10, number * 10 + 10
        path = object_keys.segment(0, first, end, f"{number:08x}")
        await table.add([SegmentFile(path, 0, first, end, 1000, 10, 1, 2)], {"seal-0": end})


async def test_rules_of_single_operations_are_exact(counting_s3: RunningServer) -> None:
    meters = await meters_of(counting_s3, "exact")
    table = open_table(meters.store, PREFIX, "t")
    await table.refresh()
    assert meters.by_rule(DELTALAKE) == meters.by_server(DELTALAKE), "there is no table"
    meters.reset()
    await commit(table, range(3))
    assert meters.by_rule(DELTALAKE) == meters.by_server(DELTALAKE), "the table is created"
    for name, operation in {
        "nothing new": table.refresh,
        "opened": open_table(meters.store, PREFIX, "t").refresh,
    }.items():
        meters.reset()
        await operation()
        assert meters.by_rule(DELTALAKE) == meters.by_server(DELTALAKE), name
    other = open_table(meters.store, PREFIX, "t")
    await other.refresh()
    meters.reset()
    await other.transaction_version("seal-0")
    assert meters.by_rule(DELTALAKE) == meters.by_server(DELTALAKE), "search of a transaction"
    meters.reset()
    await commit(table, [3])
    assert meters.by_rule(DELTALAKE) == meters.by_server(DELTALAKE), "a commit"
    meters.reset()
    await other.refresh()
    assert meters.by_rule(DELTALAKE) == meters.by_server(DELTALAKE), "a new commit is followed"
    await meters.store.close()


async def test_a_seal_costs_two_puts(counting_s3: RunningServer) -> None:
    """A file and a commit; checkpoints and the opening of the table are spread over many seals."""
    meters = await meters_of(counting_s3, "seals-of-a-log")
    async with closing(await open_log(meters.store)) as log:
        await log.topics.create("t", 1, {})
        await append(log, "first")
        await log.records.seal("t")
        meters.reset()
        for number in range(SEALS):
            await append(log, str(number))
            assert await log.records.seal("t") == 1
        counts = meters.of_tables()
    assert counts["PUT"] + counts["LIST"] <= 2.1 * SEALS, counts
    assert counts["GET"] <= 0.1 * SEALS, counts
    checkpoints = 2 * SEALS // CHECKPOINT_INTERVAL
    assert counts["PUT"] == pytest.approx(2 * SEALS + checkpoints, abs=2)
    await meters.store.close()


async def test_own_requests_are_counted_by_kind_and_duty(counting_s3: RunningServer) -> None:
    meters = await meters_of(counting_s3, "duties")
    await meters.store.put(object_keys.broker("b"), [b"x"])
    await begin_duty("poll", meters.store.get(object_keys.broker("b")))
    requests = meters.store.counters.requests
    assert requests == {
        CountedRequest(OWN, "put", "brokers", "request"): 1,
        CountedRequest(OWN, "get", "brokers", "poll"): 1,
    }
    assert meters.by_rule(OWN) == meters.by_server(OWN)
    await meters.store.close()
