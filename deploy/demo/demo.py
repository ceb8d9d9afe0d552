"""`make demo`: send a real data set through a broker that is killed half way, then verify it.

Each departure from New York's airports in 2013 becomes an event (key: tail number, value: JSON,
timestamp: scheduled departure). Several producers send the events over REST to six partitions.
Half way the broker gets SIGKILL and restarts on the same store. The demo then reads all events over
REST, from the table and from the tail, and, after the broker has stopped, with Spark. Each check
compares the result with the source file. If a check fails, the exit status is 1.
"""

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Raw
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deploy.demo import checks as demo_checks
from deploy.demo import flights as demo_flights
from deploy.demo.broker_process import BrokerFailed, BrokerProcess
from deploy.demo.checks import Carrier, CheckResult, Place, ReadRecord
from deploy.demo.flights import Event, SourceMissing
from tidelog.service.cli.errors import CommandError
from tidelog.service.cli.replay import spark_session
from tidelog.service.client.connection import Connection
from tidelog.service.client.errors import ClientError
from tidelog.service.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from tidelog.storage.core.errors import LogError
from tidelog.storage.read.log_snapshot import TopicSnapshot
from tidelog.storage.read.offline_log import open_snapshot
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.runtime.tasks import together
from tidelog.storage.store.blocking_store import OpenedStore

TOPIC = "flights"
PARTITIONS = 6
PRODUCERS = 4
BATCH_RECORDS = 1000
DEMO_FETCH_BYTES = 4 * 1024 * 1024
RETRY_S = 60.0
HOT_SHARE = 0.1
"""The share of events that is produced after the others are sealed, and stays in the tail."""
RECORDS_MIN = 1000
SEALED_WAIT_S = 60.0
JSON_RECORDS = "application/vnd.kafka.json.v2+json"

WHILE_PRODUCING = {"segment.ms": "1000", "segment.bytes": str(2 * 1024 * 1024)}
AFTER = {"segment.ms": "3600000", "segment.bytes": str(1024 * 1024 * 1024)}


class DemoFailed(Exception):
    """The demo cannot continue; the message is one line."""


class ThroughBroker(NamedTuple):
    """Results of the part of the demo that needs a broker."""

    acked: Mapping[int, Place]
    seen: Sequence[ReadRecord]
    high_watermarks: Mapping[int, int]
    topic: TopicSnapshot
    """The topic as read from the store, without the broker."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return 0 if each check passes."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo.demo", description=__doc__)
    parser.add_argument(
        "--records", type=int, metavar="N", help="number of departures (default: all)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the store and the broker's log")
    parser.add_argument("--master", default="local[2]", help="Spark master (default local[2])")
    options = parser.parse_args(arguments)
    if options.records is not None and options.records < RECORDS_MIN:
        parser.error(f"--records must be at least {RECORDS_MIN}: table and tail need some records")
    console = Console(highlight=False)
    started_s = time.perf_counter()
    try:
        with _folder(console, keep=options.keep) as folder:
            checks = Demo(console, folder, options.records, options.master).run()
    except (BrokerFailed, ClientError, CommandError, DemoFailed, LogError, SourceMissing) as error:
        sys.stderr.write(f"demo: {error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return report(console, checks, time.perf_counter() - started_s)


def report(console: Console, checks: Sequence[CheckResult], seconds: float) -> int:
    """Print the table of checks; return the exit status, 0 if each check passes."""
    table = Table(title="checked against the source file")
    for name in ("check", "expected", "seen", ""):
        table.add_column(name)
    for check in checks:
        verdict = "[green]ok[/green]" if check.is_ok else "[bold red]FAILED[/bold red]"
        table.add_row(check.name, check.expected, check.seen, verdict)
    console.print(table)
    failed = sum(not check.is_ok for check in checks)
    summary = f"{failed} of {len(checks)} checks failed" if failed else "every check passed"
    console.print(f"{summary} ({seconds:.0f} s)")
    return EXIT_FAILED if failed else EXIT_OK


@contextlib.contextmanager
def _folder(console: Console, *, keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tidelog-demo-"))
    try:
        yield folder
    finally:
        if keep:
            console.print(f"kept in {folder}: store/ and broker.log")
        else:
            shutil.rmtree(folder, ignore_errors=True)


class Demo:
    """One run of the demo, in one folder."""

    def __init__(self, console: Console, folder: Path, records: int | None, master: str) -> None:
        self._console = console
        self._folder = folder
        self._records = records
        self._master = master
        self._store = (folder / "store").as_uri()
        self._broker = BrokerProcess(self._store, folder / "broker.log")
        self._lap_s = time.perf_counter()
        self._killed_at = 0

    def run(self) -> list[CheckResult]:
        source = demo_flights.source_file()
        events = demo_flights.events(source, self._records)
        expected = demo_checks.carriers(demo_flights.rows(source, self._records))
        self._done(
            f"read {len(events):,} departures of {len(expected)} carriers from {source.name}"
        )
        with self._broker:
            self._done(f"started a broker: {self._broker.base_url} on {self._store}")
            result = asyncio.run(self._through_broker(events))
            self._broker.stop()
        checks = rest_checks(events, result)
        self._done("checked the events read over REST; the broker is stopped")
        checks += self._through_spark(events, expected)
        return checks

    @contextlib.contextmanager
    def _bar(self, total: int) -> Iterator[Callable[[int], None]]:
        """Show a progress bar below the lines of finished steps; remove it at the end."""
        columns = (TextColumn("producing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        is_off = not self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=is_off) as progress:
            task = progress.add_task("producing", total=total)
            yield lambda done: progress.update(task, completed=done)

    def _done(self, what: str) -> None:
        now_s = time.perf_counter()
        self._console.print(f"[dim]{now_s - self._lap_s:5.1f} s[/dim]  {what}", soft_wrap=True)
        self._lap_s = now_s

    # -- with the broker

    async def _through_broker(self, events: Sequence[Event]) -> ThroughBroker:
        hot = max(1, round(len(events) * HOT_SHARE))
        async with Connection(self._broker.base_url, retry_s=RETRY_S) as client:
            cluster = await client.cluster()
            configs = [{"name": name, "value": value} for name, value in WHILE_PRODUCING.items()]
            body = {"topic_name": TOPIC, "partitions_count": PARTITIONS, "configs": configs}
            await client.post(f"{cluster}/topics", json=body)
            with self._bar(len(events)) as show:
                production = Production(client, show)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._kill_at(production, len(events) // 2))
                    await production.produce(events[:-hot])
                self._done(
                    f"produced {len(production.acked):,} events with {PRODUCERS} producers, "
                    f"SIGKILL after {self._killed_at:,}, {client.retries} requests retried"
                )
                sealed = await self._wait_until_sealed(len(production.acked))
                self._done(f"waited until {sealed:,} events were sealed into the table")
                changes = [{"name": name, "value": value} for name, value in AFTER.items()]
                path = f"{cluster}/topics/{TOPIC}/configs:alter"
                await client.post(path, json={"data": changes})
                await production.produce(events[-hot:])
                self._done(f"produced the last {hot:,} events, which stay in the tail")
            high = await self._high_watermarks(client)
            seen = await together(*(read_partition(client, n, end) for n, end in high.items()))
            self._done("read all events over REST")
        topic = await asyncio.to_thread(self._topic_in_store)
        return ThroughBroker(production.acked, [r for part in seen for r in part], high, topic)

    async def _kill_at(self, production: "Production", count: int) -> None:
        await production.reached(count)
        await asyncio.to_thread(self._broker.kill)
        self._killed_at = len(production.acked)
        await asyncio.to_thread(self._broker.start)

    async def _wait_until_sealed(self, count: int) -> int:
        deadline_s = time.perf_counter() + SEALED_WAIT_S
        while time.perf_counter() < deadline_s:
            topic = await asyncio.to_thread(self._topic_in_store)
            sealed = sum(part.sealed_end for part in topic.partitions)
            if sealed == count:
                return sealed
            await asyncio.sleep(0.2)
        raise DemoFailed(f"the broker did not seal {count:,} events within {SEALED_WAIT_S:.0f} s")

    def _topic_in_store(self) -> TopicSnapshot:
        with OpenedStore(self._store) as opened:
            snapshot = opened.run(open_snapshot(opened.store, SystemClock(), [TOPIC]))
        return snapshot.topics[TOPIC]

    async def _high_watermarks(self, client: Connection) -> dict[int, int]:
        paths = [f"/topics/{TOPIC}/partitions/{number}/offsets" for number in range(PARTITIONS)]
        answers = await together(*(client.get(path) for path in paths))
        return {number: answer.json()["end_offset"] for number, answer in enumerate(answers)}

    # -- without the broker

    def _through_spark(
        self, events: Sequence[Event], expected: Mapping[str, Carrier]
    ) -> list[CheckResult]:
        from pyspark.sql import functions as F  # noqa: N812 - the usual name

        from tidelog.storage.spark.topic_frame import read_topic

        settings = {
            "spark.local.dir": str(self._folder / "spark"),
            "spark.sql.warehouse.dir": str(self._folder / "warehouse"),
            "spark.sql.shuffle.partitions": "2",
        }
        with spark_session("tidelog demo", self._master, settings) as spark:
            self._done("started Spark")
            event = F.from_json(
                F.col("value").cast("string"), "seq int, carrier string, dep_delay int"
            )
            flights = read_topic(spark, self._store, TOPIC).select(event.alias("event"))
            rows = (
                flights.groupBy("event.carrier")
                .agg(
                    F.count(F.lit(1)).alias("departures"),
                    F.count_distinct("event.seq").alias("distinct"),
                    F.avg("event.dep_delay").alias("mean_delay"),
                )
                .collect()
            )
        self._done("read the topic with Spark, from the store")
        seen = {row["carrier"]: Carrier(row["departures"], row["mean_delay"]) for row in rows}
        records = sum(row["departures"] for row in rows)
        distinct = sum(row["distinct"] for row in rows)  # an event has one carrier
        return [
            demo_checks.check_count("Spark: record count", len(events), records),
            demo_checks.check_count("Spark: distinct events", len(events), distinct),
            demo_checks.check_carrier_counts(expected, seen),
            demo_checks.check_carrier_means(expected, seen),
        ]


def rest_checks(events: Sequence[Event], result: ThroughBroker) -> list[CheckResult]:
    """Check the events that were acknowledged and read over REST."""
    seen, high = result.seen, result.high_watermarks
    sealed = {part.number: part.sealed_end for part in result.topic.partitions}
    return [
        demo_checks.check_count("records acknowledged", len(events), len(result.acked)),
        demo_checks.check_count("record count", len(events), len(seen)),
        demo_checks.check_dense(seen, high),
        demo_checks.check_once(events, seen),
        demo_checks.check_acked(result.acked, seen),
        demo_checks.check_values(events, seen),
        demo_checks.check_key_order(events, seen),
        demo_checks.check_tiers(sealed, high),
    ]


# -- producing


class Production:
    """Several producers, each with its share of the keys and one request in flight.

    So retries keep the order of the events of a key.
    """

    def __init__(self, client: Connection, show: Callable[[int], None]) -> None:
        self.acked: dict[int, Place] = {}
        self._client = client
        self._show = show
        self._run_id = SystemClock().new_id().hex()
        self._acks = asyncio.Condition()

    async def reached(self, count: int) -> None:
        """Wait until `count` events are acknowledged."""
        async with self._acks:
            await self._acks.wait_for(lambda: len(self.acked) >= count)

    async def produce(self, events: Sequence[Event]) -> None:
        """Produce the events; return when all are acknowledged."""
        shares: list[list[Event]] = [[] for _ in range(PRODUCERS)]
        for event in events:
            # Events without a key have no order: any producer may send them.
            owner = event.seq if event.key is None else zlib.crc32(event.key.encode())
            shares[owner % PRODUCERS].append(event)
        await together(*(self._produce_share(share) for share in shares))

    async def _produce_share(self, share: Sequence[Event]) -> None:
        for start in range(0, len(share), BATCH_RECORDS):
            batch = share[start : start + BATCH_RECORDS]
            answer = await self._client.post(
                f"/topics/{TOPIC}",
                content=b'{"records":[%b]}' % b",".join(map(_as_record, batch)),
                headers={
                    "content-type": JSON_RECORDS,
                    "idempotency-key": f'"{self._run_id}-{batch[0].seq}"',
                },
            )
            placed = _decode_placed(answer.content).offsets
            for event, place in zip(batch, placed, strict=True):
                self.acked[event.seq] = Place(place.partition, place.offset)
            async with self._acks:
                self._acks.notify_all()
            self._show(len(self.acked))


def _as_record(event: Event) -> bytes:
    key = msgspec.json.encode(event.key)
    return b'{"key":%b,"timestamp":%d,"value":%b}' % (key, event.timestamp_ms, event.value)


class _PlacedRecord(msgspec.Struct):
    partition: int
    offset: int


class _Placed(msgspec.Struct):
    offsets: list[_PlacedRecord]


_decode_placed = msgspec.json.Decoder(_Placed).decode


# -- reading back


class _Read(msgspec.Struct):
    key: str | None
    value: Raw
    partition: int
    offset: int
    timestamp: int


class _Numbered(msgspec.Struct):
    seq: int


_decode_read = msgspec.json.Decoder(list[_Read]).decode
_decode_numbered = msgspec.json.Decoder(_Numbered).decode


async def read_partition(client: Connection, number: int, end: int) -> list[ReadRecord]:
    """Read all records of a partition, as JSON, from the beginning to `end`."""
    seen: list[ReadRecord] = []
    offset = 0
    while offset < end:
        answer = await client.get(
            f"/topics/{TOPIC}/partitions/{number}/records",
            params={"offset": offset, "max_bytes": DEMO_FETCH_BYTES},
            headers={"accept": JSON_RECORDS},
        )
        for read in _decode_read(answer.content):
            value = bytes(read.value)
            seq = _decode_numbered(value).seq
            seen.append(
                ReadRecord(seq, read.partition, read.offset, read.key, read.timestamp, value)
            )
        offset = int(answer.headers["tidelog-next-offset"])
    return seen


if __name__ == "__main__":
    sys.exit(main())
