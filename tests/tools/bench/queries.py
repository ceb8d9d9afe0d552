"""SQL and searches over a real data set: 336,776 flights, of which 10,000 are a tail.

Each figure is what a command does after its imports: open the store, take a snapshot, run.
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.demo import flights
from tests.support.broker_log import open_log
from tests.tools.bench.report import Row, Table, table
from tidelog.service.cli import query
from tidelog.service.settings.settings import Settings
from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.read.offline_log import open_snapshot
from tidelog.storage.read.search import Needle, Search
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.blocking_store import OpenedStore
from tidelog.storage.store.folder import FolderStore

RUNS = 5
PARTITIONS = 4
SEALS = 6
TAIL = 10_000
APPEND = 20_000
COUNT = "SELECT count(*) FROM flights"
RANGE = (
    'SELECT count(*), sum(octet_length(value)) FROM flights WHERE partition = 1 AND "offset" '
    "BETWEEN 20000 AND 20099"
)
CARRIERS = "SELECT decode(value)::JSON->>'carrier', count(*) FROM flights GROUP BY ALL"


def measure(folder: Path, *, is_quick: bool) -> Table:
    events = flights.events(flights.source_file(), 50_000 if is_quick else None)
    asyncio.run(_fill(folder, events))
    settings = Settings(store=folder.as_uri())
    rows = [
        _row("SQL: count of all records", _cpu_s(lambda: _query(settings, COUNT)), 0.1),
        _row("SQL: the values of 100 offsets", _cpu_s(lambda: _query(settings, RANGE)), 0.05),
        _row("SQL: a field of each JSON value", _cpu_s(lambda: _query(settings, CARRIERS))),
    ]
    newest = max(events, key=lambda event: event.timestamp_ms)
    newest_text = newest.value.decode()
    with OpenedStore(settings.store) as opened_store:
        first_s = _cpu_s(lambda: _search(opened_store, Needle(newest_text), 1))
        whole_s = _cpu_s(lambda: _search(opened_store, Needle("in no record"), 1))
    rows += [
        _row("search: the first hit of the newest record", first_s, 0.3),
        _row("search: a million records", whole_s / len(events) * 1e6, 1.0),
    ]
    how = (
        f"{len(events):,} flights of 2013 as JSON on {PARTITIONS} partitions in a folder, {SEALS} "
        f"seals, {TAIL:,} records not sealed; CPU seconds of the process after its imports, the "
        f"median of {RUNS} runs"
    )
    return table(rows)._replace(how=how)


async def _fill(folder: Path, events: Sequence[flights.Event]) -> None:
    log = await open_log(FolderStore(folder))
    await log.topics.create("flights", PARTITIONS, {"retention.ms": "-1"})
    sealed = len(events) - TAIL
    for number in range(SEALS):
        part = events[sealed * number // SEALS : sealed * (number + 1) // SEALS]
        await _append(log, part)
        await log.records.seal("flights")
    await _append(log, events[sealed:])
    await log.close()


async def _append(log: Broker, events: Sequence[flights.Event]) -> None:
    topic = log.state.topic("flights")
    for first in range(0, len(events), APPEND):
        some = events[first : first + APPEND]
        parts = []
        for number in range(PARTITIONS):
            mine = [event for event in some if event.seq % PARTITIONS == number]
            stamps = [event.timestamp_ms for event in mine]
            keys = [event.key.encode() if event.key else None for event in mine]
            parts.append((number, Rows(stamps, keys, [event.value for event in mine])))
        size = sum(len(event.value) for event in some)
        await log.records.append(topic, parts, size=size, is_json=True)


def _query(settings: Settings, sql: str) -> None:
    stdout = sys.stdout
    with open(os.devnull, "w", encoding="utf-8") as sys.stdout:
        try:
            query.run(settings, sql, "csv", None, query.MEMORY_BYTES)
        finally:
            sys.stdout = stdout


def _search(opened_store: OpenedStore, needle: Needle, count_max: int) -> None:
    snapshot = opened_store.run(open_snapshot(opened_store.store, SystemClock(), ["flights"]))
    for _ in Search(needle, count_max).run(opened_store, snapshot.topics["flights"]):
        return


def _cpu_s(work: Callable[[], None]) -> float:
    seconds = []
    for number in range(RUNS + 1):
        began_s = time.process_time()
        work()
        if number:  # the first run imports
            seconds.append(time.process_time() - began_s)
    return statistics.median(seconds)


def _row(what: str, seen: float, target: float | None = None) -> Row:
    return Row("queries", what, seen, "CPU s", target, is_smaller_better=True)
