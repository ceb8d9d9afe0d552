"""deploy/examples/: each example as processes against a broker, with its exact outcome."""

import contextlib
import datetime as dt
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.broker import Broker, environment, until
from tests.system.lossy import LossyProxy
from tidelog.client import Admin, Consumer, NotFound, Producer, Record

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"


@contextmanager
def started(name: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """An example as a process, killed at the end."""
    program = [sys.executable, EXAMPLES / f"{name}.py"]
    if not program[1].is_file():
        program = ["node", EXAMPLES / f"{name}.mjs"]
    with subprocess.Popen(
        [*program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ran(name: str, *arguments: object, stdin: str = "") -> tuple[str, str]:
    """Run an example to its end, without an error; return stdout and stderr."""
    with started(name, *arguments) as process:
        out, err = process.communicate(stdin, timeout=240)
        assert process.returncode == 0, err
        return out, err


def count_of(broker: Broker, topic: str) -> int:
    """The number of records of a topic. Partitions are asked one after the other."""
    with Admin(broker.base_url) as admin:
        return sum(end for _, end in admin.offsets(topic).values())


def records_of(broker: Broker, topic: str) -> list[Record]:
    """All records of a topic to which no program produces."""
    total = count_of(broker, topic)
    records: list[Record] = []
    with Consumer(broker.base_url, topic) as consumer:
        until(lambda: len(records) >= total or bool(records.extend(consumer.poll(1.0))))
    assert len(records) == total
    return records


def is_read(broker: Broker, group: str, records: int) -> bool:
    """Whether the sum of the committed offsets of a group is this number."""
    with Admin(broker.base_url) as admin:
        try:
            return sum(row["offset"] for row in admin.group_offsets(group)) == records
        except NotFound:  # no member has joined yet
            return False


def test_site_activity_counts_views_in_each_minute(broker: Broker) -> None:
    broker.create_topic("page-views", 3)
    start = dt.datetime.now(dt.UTC).replace(second=0, microsecond=0) - dt.timedelta(minutes=10)
    views = [(0, "ann", "/"), (59, "bob", "/?a=b"), (59, "ann", "/"), (59, "-", "/cart")]
    views += [(60, "bob", "/"), (200, "ann", "/cart")]
    lines = [
        f"10.0.0.1 - {user} [{start + dt.timedelta(seconds=second):%d/%b/%Y:%H:%M:%S %z}] "
        f'"GET {page} HTTP/1.1" 200 5\n'
        for second, user, page in views
    ]
    lines.insert(1, "no request\n")
    _, err = ran("site_activity", "produce", "--server", broker.base_url, stdin="".join(lines))
    assert err == "line 2 is left out: not in the common log format\n"
    partitions = {}
    for record in records_of(broker, "page-views"):
        partitions.setdefault(record.key, set()).add(record.partition)
    assert {key: len(key_partitions) for key, key_partitions in partitions.items()} == {
        b"ann": 1,
        b"bob": 1,
        b"10.0.0.1": 1,
    }
    broker.cli("seal", "page-views")
    out, _ = ran("site_activity", "count", "--store", broker.folder / "store")
    assert out.splitlines() == [
        f"{start + dt.timedelta(minutes=minute):%Y-%m-%d %H:%M}\t{counts}"
        for minute, counts in [
            (0, "/\t3\t2"),
            (0, "/cart\t1\t1"),
            (1, "/\t1\t1"),
            (3, "/cart\t1\t1"),
        ]
    ]


def test_web_shop_sends_and_bills_each_order_once(broker: Broker, tmp_path: Path) -> None:
    broker.create_topic("orders", 3)
    broker.create_topic("invoices", 3)
    path = tmp_path / "shop.db"
    shop = ["--shop", path, "--server", broker.base_url]
    for customer, pieces in [("ann", 1), ("bob", 2)]:
        ran("web_shop", *shop, "order", customer, pieces, "tea")
    with contextlib.closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as other:

        def outbox(condition: str) -> int:
            (number,) = other.execute(f"SELECT count(*) FROM outbox WHERE {condition}").fetchone()
            return number

        # The relay is killed between the acknowledgment and the deletion of its batch: the broker
        # is suspended until we have locked the database.
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            with started("web_shop", *shop, "relay") as relay:
                until(lambda: outbox("batch IS NOT NULL") == 2)
                other.execute("BEGIN IMMEDIATE")
                os.kill(broker.pid, signal.SIGCONT)
                until(lambda: count_of(broker, "orders") == 2)
                relay.kill()
                assert relay.wait(60) == -signal.SIGKILL
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        other.execute("ROLLBACK")
        assert outbox("batch IS NOT NULL") == 2
        ran("web_shop", *shop, "order", "bob", 3, "tea")
        ran("web_shop", *shop, "relay")
        assert outbox("true") == 0
        orders = other.execute("SELECT customer, id, pieces FROM orders ORDER BY rowid").fetchall()
    expected = sorted(
        (name.encode(), f"{order_id}: {n} x tea".encode()) for name, order_id, n in orders
    )
    assert len(records_of(broker, "orders")) == len(expected) == 3
    with started("web_shop", *shop, "invoice"), started("web_shop", *shop, "invoice"):
        until(lambda: is_read(broker, "invoices", 3))
    assert (
        sorted((record.key, record.value) for record in records_of(broker, "invoices")) == expected
    )


def test_job_queue_retries_and_sets_aside(broker: Broker, tmp_path: Path) -> None:
    for topic in ("jobs", "jobs.retry-1", "jobs.done", "jobs.dead"):
        broker.create_topic(topic, 2)
    paths = [tmp_path / f"file{number}" for number in range(8)]
    for number, path in enumerate(paths):
        path.write_text("line\n" * number)
    late, never = tmp_path / "late", tmp_path / "never"
    with Producer(broker.base_url) as producer:
        for path in [*paths[:4], late, never, *paths[4:]]:
            producer.send("jobs", str(path), key=path.name)
    server = ["--server", broker.base_url]

    def attempts(topic: str) -> list[tuple[str, list[str]]]:
        return sorted(
            (
                record.value.decode(),
                [header.value.decode() for header in record.headers if header.key == "attempts"],
            )
            for record in records_of(broker, topic)
        )

    with started("job_queue", "jobs", *server), started("job_queue", "jobs", *server):
        until(lambda: is_read(broker, "jobs-workers", 10))
    assert attempts("jobs.retry-1") == [(str(late), ["1"]), (str(never), ["1"])]
    late.write_text("at\nlast\n")
    with started("job_queue", "jobs.retry-1", "--delay-s", "0.1", *server):
        until(lambda: is_read(broker, "jobs.retry-1-workers", 3))
    assert attempts("jobs.retry-1") == [
        (str(late), ["1"]),
        (str(never), ["1"]),
        (str(never), ["2"]),
    ]
    assert attempts("jobs.dead") == [(str(never), ["3"])]
    assert attempts("jobs.done") == sorted(
        (f"{path}: {lines} lines", []) for lines, path in [*enumerate(paths), (2, late)]
    )


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.parametrize("lost", [0.0, 0.1])
def test_javascript_produces_and_consumes(broker: Broker, lost: float) -> None:
    """Also while requests and answers are lost: each record is in the topic once, in order."""
    topic = f"readings{lost}"
    broker.create_topic(topic, 3)
    with (
        LossyProxy(broker.base_url, seed=7) as proxy,
        proxy.losing(answers=lost, requests=lost),
    ):
        out, _ = ran("produce_consume", proxy.url, topic, 1000)
    assert out == "1000 records\n"
    records = records_of(broker, topic)
    assert sorted(int(record.value) for record in records) == [*range(1000)]
    for number in range(7):
        own = [int(record.value) for record in records if record.key == b'"sensor-%d"' % number]
        assert own == [*range(number, 1000, 7)]
    with Admin(broker.base_url) as admin:
        assert admin.group(f"of-{topic}")["consumers"] == []
        assert sum(partition["lag"] for partition in admin.lag(f"of-{topic}")) == 0
