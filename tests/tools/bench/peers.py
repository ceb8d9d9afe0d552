"""Apache Kafka on the same machine, beside tidelog: `make bench-peers`. It downloads Kafka's jars.

    python -m tests.tools.bench.peers [--quick] [--json FILE] [--folder FOLDER]

Maven fetches Kafka into FOLDER (by default one that is removed at the end). One node is broker and
controller (KRaft), with its default settings but for replication. Kafka's ProducerPerformance and
ConsumerPerformance, and tests/tools/bench/kafka_load.py with requests that are made beforehand,
send to both in Kafka's protocol. wrk, or tests/tools/bench/load.py, sends JSON over REST to
tidelog. All write records of the same size with acks=all to six partitions on the same kind of
store. CPU is that of the server process alone, after a warm-up. Kafka does not fsync before an ack,
and makes no tables for analytics; tidelog's CPU includes its seals.
"""

import argparse
import asyncio
import base64
import contextlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.support.ports import free_port
from tests.tools.bench import bodies, kafka_load, publish
from tests.tools.bench.broker import Broker, store_folder
from tests.tools.bench.kafka_load import KafkaConnection
from tests.tools.bench.load import Measured, has_wrk, paced, run, sustained
from tests.tools.bench.processes import Watch, resident_bytes
from tests.tools.bench.rates.sustained import CASES, Case
from tests.tools.bench.report import Table, number

VERSION = "4.1.0"
RECORDS = 5_000_000
WARM_UP_S = 5.0
PARTITIONS = 6
RECORD_BYTES = bodies.VALUE_BYTES + 12
RECORDS_ONE = 300_000
"""Fewer, where each record is a request."""
START_S = 60.0
MIB = 2**20
COLUMNS = (
    "server",
    "load",
    "records/s",
    "server CPU s a million records",
    "ack p50 / p99 ms",
    "RSS",
)
POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion>
<groupId>tidelog</groupId><artifactId>peers</artifactId><version>1</version>
<packaging>pom</packaging>
<dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId>
<version>{VERSION}</version></dependency>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId>
<version>{VERSION}</version></dependency>
</dependencies></project>
"""
PROPERTIES = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""
LARGE_BATCHES = ("batch.size=131072", "linger.ms=20")
LOADS = (
    ("default producer, 16 KiB batches", (), 1, RECORD_BYTES),
    ("batches of 128 KiB, linger.ms=20", LARGE_BATCHES, 1, RECORD_BYTES),
    ("the same, records of 1 KiB", LARGE_BATCHES, 10, 1024),
    ("batch.size=0, one producer", ("batch.size=0",), 50, RECORD_BYTES),
)
"""Name, properties of the producer, by what to divide the number of records, bytes of a record."""
RAW = ((1, 64), (100, 64), (1_000, 8))
"""Records of a request, and connections: each sends its next request when it has the answer."""
RAW_S = 8.0
REST_S = 10.0
"""Before each load of RAW that tidelog gets, with a broker and a store of its own: a broker that
never seals collects a tail that no real broker has. All loads of Kafka are for one process, because
Java compiles its code for a minute. A store in memory is cheaper to write where the pages of an
earlier one were just freed."""
SEALS = "tidelog, Kafka's protocol"
NO_SEALS = f"{SEALS}, no seals"
PACED, BUSY, IDLE = 1_000, 100, 1_000
"""Requests a second of one record, evenly, over few or BUSY connections, beside IDLE others."""
HOT, COLD = "hot", "bench"
SEALED_S = 20.0
"""The topic COLD is sealed each five seconds; before it is read, the broker has this time."""
PROXY = (
    "REST proxy before Kafka",
    "not measured: pip finds no karapace, and Maven no io.strimzi:kafka-bridge",
)
_SENT = re.compile(r"^(\d+) records sent, ([\d.]+) records/sec", re.MULTILINE)


def table(
    folder: Path,
    jars: Path | str,
    records: int,
    cases: Sequence[Case] = CASES,
    *,
    warm_up_s: float = WARM_UP_S,
    distinct: int = bodies.EVENTS,
) -> Table:
    """If `jars` is the reason why there are none, a row says it."""
    rows: list[list[str]] = []
    store_place = ""
    if isinstance(jars, str):
        rows.append(["Apache Kafka", f"skipped: {jars}", "", "", "", ""])
    else:
        with store_folder(folder) as (store, place):
            rows += kafka(store, jars, records)
            store_place = place
        with store_folder(folder) as (store, place):
            rows += tidelog_by_kafka(store, jars, records)
        rows += [tidelog_acks(folder, load, is_sealing=True) for load in RAW[-1:]]
        rows += [tidelog_acks(folder, load) for load in RAW]
        with store_folder(folder) as (store, place):
            rows += tidelog_paced(store)
    rows.append([*PROXY, "", "", "", ""])
    for case in cases:
        pool = bodies.pool(case.kind, case.records, distinct)
        with store_folder(folder) as (store, place):
            rows.append(tidelog(store, case, pool, records, warm_up_s))
            store_place = place
    return Table(
        COLUMNS, rows, f"{number(records)} records of {RECORD_BYTES} bytes, on {store_place}"
    )


def jars_of(folder: Path) -> Path | str:
    """Fetch Kafka and what it needs into `folder`, unless it is there.

    Returns why not, if Maven or Java is missing, or if Maven fails.
    """
    jars = folder / f"kafka-{VERSION}"
    if shutil.which("mvn") is None or shutil.which("java") is None:
        return "Maven and Java are needed"
    if not jars.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pom.xml").write_text(POM)
        folder_of_jars = folder / "made"
        fetch = [
            "mvn",
            "-B",
            "-q",
            "dependency:copy-dependencies",
            f"-DoutputDirectory={folder_of_jars}",
        ]
        process = subprocess.run(fetch, cwd=folder, check=False, stdout=subprocess.PIPE, text=True)
        if process.returncode:
            sys.stderr.write(process.stdout)
            return "Maven did not fetch it"
        folder_of_jars.rename(jars)
    return jars


def kafka(store: Path, jars: Path, records: int) -> list[list[str]]:
    server = f"Apache Kafka {VERSION}"
    with _kafka(store, jars) as (port, pid):
        rows = _by_kafkas_tools(server, jars, port, pid, records)
        rows += [_by_requests(server, port, pid, load) for load in RAW]
        return rows + _paced(server, port, pid)


def tidelog_by_kafka(store: Path, jars: Path, records: int) -> list[list[str]]:
    port = free_port()
    with Broker(f"file://{store}", kafka_port=port) as broker:
        broker.create_topic(COLD, PARTITIONS, segment_ms=5_000)
        broker.create_topic(HOT, PARTITIONS)
        return _by_kafkas_tools(SEALS, jars, port, broker.pid, records)


def tidelog_acks(folder: Path, load: tuple[int, int], *, is_sealing: bool = False) -> list[str]:
    """Without seals, it is the path to the ack alone."""
    server, port = SEALS if is_sealing else NO_SEALS, free_port()
    time.sleep(REST_S)
    with (
        store_folder(folder) as (store, _),
        Broker(f"file://{store}", kafka_port=port, seal_enabled=is_sealing) as broker,
    ):
        broker.create_topic(HOT, PARTITIONS, segment_ms=5_000)
        return _by_requests(server, port, broker.pid, load)


def tidelog_paced(store: Path) -> list[list[str]]:
    port = free_port()
    with Broker(f"file://{store}", kafka_port=port, seal_enabled=False) as broker:
        broker.create_topic(HOT, PARTITIONS)
        return _paced(NO_SEALS, port, broker.pid)


def _by_kafkas_tools(server: str, jars: Path, port: int, pid: int, records: int) -> list[list[str]]:
    """A row for each load of the producer, and one for a consumer."""
    rows = []
    for name, properties, divisor, size in LOADS:
        count = max(records // divisor, 1000)
        _produced(jars, port, COLD, max(count // 5, 1000), properties, size)
        with Watch(pid) as watch:
            rate = _produced(jars, port, COLD, count, properties, size)
        rows.append(_cells(server, name, rate, watch, count, pid))
    few = records // 5
    _produced(jars, port, HOT, few, LARGE_BATCHES)
    for name, topic, count in (("new records", HOT, few), ("old records", COLD, records)):
        if topic == COLD:
            time.sleep(SEALED_S)
        with Watch(pid) as watch:
            rate = _consumed(jars, port, topic, count)
        rows.append(_cells(server, f"consumer, {name}", rate, watch, count, pid))
    return rows


def _by_requests(server: str, port: int, pid: int, load: tuple[int, int]) -> list[str]:
    """The row of a number of records in a Produce request, and of connections.

    The requests are made beforehand.
    """
    records, connections = load
    requests = kafka_load.requests(HOT, PARTITIONS, records, RECORD_BYTES)
    closed = partial(
        run, "127.0.0.1", port, requests, connections=connections, kind=KafkaConnection
    )
    name = f"{number(records)} a request, {connections} connections"
    return _measured(server, name, pid, records, closed)


def _paced(server: str, port: int, pid: int) -> list[list[str]]:
    """A row for each number of connections on which PACED requests a second arrive evenly."""
    rows = []
    requests = kafka_load.requests(HOT, PARTITIONS, 1, RECORD_BYTES)
    for connections, idle in ((5, 0), (BUSY, 0), (BUSY, IDLE)):
        name = f"{number(PACED)} requests a second of 1 record, {connections} connections"
        if idle:
            name += f", and {number(idle)} idle ones"
        even = partial(
            paced,
            "127.0.0.1",
            port,
            requests,
            connections=connections,
            per_second=PACED,
            kind=KafkaConnection,
        )
        with contextlib.ExitStack() as stack:
            for _ in range(idle):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            rows.append(_measured(server, name, pid, 1, even))
    return rows


def _measured(
    server: str, name: str, pid: int, records: int, load: Callable[..., Awaitable[Measured]]
) -> list[str]:
    """The row of a load of requests with `records` records each.

    The warm-up takes half of its time.
    """
    asyncio.run(_awaited(load(seconds=RAW_S / 2)))
    with Watch(pid) as watch:
        measurement = asyncio.run(_awaited(load(seconds=RAW_S)))
    rate, sent = measurement.per_second * records, measurement.requests * records
    times = f"{measurement.p50_ms:.2f} / {measurement.p99_ms:.2f}"
    return _cells(server, name, rate, watch, sent, pid, times)


async def _awaited(load: Awaitable[Measured]) -> Measured:
    return await load


def tidelog(
    store: Path, case: Case, pool: bodies.Pool, records: int, warm_up_s: float
) -> list[str]:
    def load(seconds: float) -> Measured:
        path, clients = "/topics/bench", case.connections
        return sustained(broker.port, path, pool, connections=clients, seconds=seconds)

    with Broker(f"file://{store}") as broker:
        broker.create_topic("bench", PARTITIONS)
        warm = load(warm_up_s)
        record_count = min(records, RECORDS_ONE) if case.records == 1 else records
        with Watch(broker.pid) as watch:
            measurement = load(record_count / (warm.per_second * case.records))
        rate, sent = measurement.per_second * case.records, measurement.requests * case.records
        name = f"REST, {case.kind}, {number(case.records)} a request"
        times = f"{measurement.p50_ms:.2f} / {measurement.p99_ms:.2f}"
        return _cells("tidelog", name, rate, watch, sent, broker.pid, times)


def _cells(
    server: str, load: str, rate: float, watch: Watch, records: int, pid: int, times: str = ""
) -> list[str]:
    cpu_s = watch.cpu.total_s / records * 1e6
    resident = f"{resident_bytes(pid) / MIB:,.0f} MiB"
    return [server, load, number(rate), number(cpu_s), times, resident]


@contextlib.contextmanager
def _kafka(store: Path, jars: Path) -> Iterator[tuple[int, int]]:
    """A node with the topic; its port and process id."""
    port, controller = free_port(), free_port()
    properties = store / "server.properties"
    values = {"port": port, "controller": controller, "data": store / "data"}
    properties.write_text(PROPERTIES.format(**values))
    _java(jars, "kafka.tools.StorageTool", "format", f"-t={_cluster_id()}", "-c", str(properties))
    command = _command(jars, "kafka.Kafka", str(properties))
    with (store / "kafka.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=store)
    try:
        deadline_s = time.monotonic() + START_S
        for topic in (COLD, HOT):
            create = ["--create", "--topic", topic, "--partitions", str(PARTITIONS)]
            while not _is_done(jars, "--bootstrap-server", f"127.0.0.1:{port}", *create):
                log_end = (store / "kafka.log").read_text()[-2000:]
                assert process.poll() is None, log_end
                assert time.monotonic() < deadline_s, log_end
                time.sleep(1)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


def _cluster_id() -> str:
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def _produced(
    jars: Path,
    port: int,
    topic: str,
    records: int,
    properties: Sequence[str],
    size: int = RECORD_BYTES,
) -> float:
    """Records a second of Kafka's own load generator, one producer."""
    to = [f"bootstrap.servers=127.0.0.1:{port}", "acks=all", *properties]
    count = ["--num-records", str(records), "--record-size", str(size)]
    output = _java(
        jars,
        "org.apache.kafka.tools.ProducerPerformance",
        *("--topic", topic, "--throughput", "-1", *count, "--producer-props", *to),
    )
    sent = [fields for fields in _SENT.findall(output) if int(fields[0]) == records]
    return float(sent[-1][1])


def _consumed(jars: Path, port: int, topic: str, records: int) -> float:
    """Records a second of Kafka's own consumer of one group, without its rebalance."""
    output = _java(
        jars,
        "org.apache.kafka.tools.ConsumerPerformance",
        *("--bootstrap-server", f"127.0.0.1:{port}", "--topic", topic),
        *("--messages", str(records), "--timeout", "60000"),
    )
    return float(output.strip().splitlines()[-1].split(",")[-1])


def _is_done(jars: Path, *arguments: str) -> bool:
    command = _command(jars, "org.apache.kafka.tools.TopicCommand", *arguments)
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _java(jars: Path, *arguments: str) -> str:
    process = subprocess.run(_command(jars, *arguments), check=True, capture_output=True, text=True)
    return process.stdout


def _command(jars: Path, *arguments: str) -> list[str]:
    return ["java", "-Xms1g", "-Xmx1g", "-cp", f"{jars}/*", *arguments]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.bench.peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the records")
    parser.add_argument("--json", type=Path, help="write the table there, too")
    parser.add_argument("--folder", type=Path, help="keeps the jars for the next run")
    arguments = parser.parse_args()
    records = RECORDS // 10 if arguments.quick else RECORDS
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-") as folder:
        jars = jars_of((arguments.folder or Path(folder) / "jars").resolve())
        tool = "wrk" if has_wrk() else "tests/tools/bench/load.py"
        peers_table = table(Path(folder), jars, records)
    peers_table = peers_table._replace(
        how=f"{peers_table.how}; REST by {tool}, Kafka by ProducerPerformance"
    )
    peers_table.show("peers")
    if arguments.json:
        publish.add(arguments.json, "peers", peers_table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
