"""The limits of a broker: ever more partitions, members of groups, connections. `make limits`.

They grow until the cluster refuses more, or a stated bound does not hold.

    python -m tests.tools.bench.limits [--quick] [--json FILE] [--only partitions,groups,...]

One broker, its store on /dev/shm if that has the memory. A stall is the slowest answer of GET
/healthy, asked every 10 ms, while the broker writes a checkpoint of the whole state.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.tools.bench import bodies, publish
from tests.tools.bench.broker import Broker, metric, store_folder
from tests.tools.bench.groups import commit, create, owned, subscribe
from tests.tools.bench.load import Caller, Measured, head_of, paced, request
from tests.tools.bench.processes import Watch, resident_bytes
from tests.tools.bench.report import Table, number

START_S_MAX = 10.0
STALL_S_MAX = 0.5
ACK_P99_MS_MAX = 500.0
MIB = 2**20
JSON = "application/vnd.kafka.json.v2+json"
COMMITTING = 5_000
"""Members whose commits are sent; those of their groups only."""
COLUMNS = ("what grows", "to", "seen there", "why no more")
TOPIC_PARTITIONS = 10_000
CALLERS = 100
ADDRESS_CONNECTIONS = 2_000
"""Of one source address: a broker takes 2,500."""


class Sizes(NamedTuple):
    """How far each part goes; the defaults are beyond what the cluster accepts."""

    partitions: Sequence[int] = (10_000, 100_000, 200_000, 210_000)
    topic_partitions: int = TOPIC_PARTITIONS
    groups: int = 10_000
    group_members: int = 100
    groups_s: float = 150.0
    connections: int = 12_000
    load_s: float = 14.0
    """Longer than the least time between two checkpoints, at LOAD_PER_S entries."""


LOAD_PER_S = 150.0
QUICK = Sizes((1_000, 10_000), 1_000, 20, 100, 30.0, 2_000)


def partitions(folder: Path, sizes: Sizes) -> list[list[str]]:
    rows = []
    with _broker(folder) as (broker, store):
        partition_count, refusal = 0, ""
        for goal in sizes.partitions:
            while partition_count < goal and not refusal:
                refusal = _filled(broker, partition_count, sizes.topic_partitions)
                partition_count += 0 if refusal else sizes.topic_partitions
            if refusal and rows and rows[-1][1] == number(partition_count):
                rows[-1][3] = refusal
                break
            resident = resident_bytes(broker.pid)
            stall_s, load = _stalled(broker, "/topics/bench", sizes.load_s)
            checkpoint = max(_checkpoint_sizes(store), default=0)
            start_s = _restarted(broker)
            note = (
                f"start {start_s:.1f} s, stall {1000 * stall_s:.0f} ms, "
                f"checkpoint {checkpoint / MIB:.1f} MiB, RSS {resident / MIB:.0f} MiB, "
                f"ack p99 {number(load.p99_ms)} ms"
            )
            failed = _failed(start_s, stall_s, load.p99_ms)
            rows.append(
                ["partitions with records", number(partition_count), note, refusal or failed]
            )
            if refusal or failed:
                break
    return rows


def groups(folder: Path, sizes: Sizes) -> list[list[str]]:
    with _broker(folder) as (broker, _):
        _ask(broker, "/admin/topics", {"topic_name": "bench", "partitions_count": 100})
        old_bytes = resident_bytes(broker.pid)
        began_s = time.monotonic()
        joined, refusal = asyncio.run(_joined(broker.port, sizes))
        took_s = time.monotonic() - began_s
        resident = resident_bytes(broker.pid)
        commits = asyncio.run(_commits(broker.port, min(joined, COMMITTING), sizes))
        with Watch(broker.pid) as watch:
            load = asyncio.run(_paced(broker.port, commits, min(sizes.load_s, 5.0), 1_000.0))
        stall_s, _ = _stalled(broker, "/topics/bench", sizes.load_s)
        start_s = _restarted(broker)
    note = (
        f"{(resident - old_bytes) / max(joined, 1) / 1024:.1f} KiB of RSS a member, "
        f"{joined / took_s:,.0f} joins/s, 1,000 commits/s: p99 {number(load.p99_ms)} ms, "
        f"{100 * watch.cpu.total_s / load.seconds:.0f} % of a core; "
        f"stall {1000 * stall_s:.0f} ms, start {start_s:.1f} s"
    )
    why = refusal or _failed(start_s, stall_s, load.p99_ms)
    title = f"members, in groups of {sizes.group_members}"
    return [[title, number(joined), note, why or f"the end, after {took_s:.0f} s"]]


def connections(folder: Path, sizes: Sizes) -> list[list[str]]:
    with _broker(folder) as (broker, _), contextlib.ExitStack() as stack:
        old_bytes = resident_bytes(broker.pid)
        count = 0
        while count < sizes.connections:
            address = f"127.0.0.{2 + count // ADDRESS_CONNECTIONS}"
            if not _is_served(stack, broker.port, address):
                break
            count += 1
        connection_bytes = (resident_bytes(broker.pid) - old_bytes) / max(count, 1)
        durations_s = []
        for _ in range(50):
            began_s = time.perf_counter()
            _ask(broker, "/healthy")
            durations_s.append(time.perf_counter() - began_s)
        open_now = metric(broker, "tidelog_connections") if count == sizes.connections else count
    note = f"{connection_bytes / 1024:.1f} KiB of RSS each, "
    note += f"GET /healthy on a new one takes {1000 * max(durations_s):.1f} ms"
    why = "closed by the broker" if count < sizes.connections else ""
    return [["idle connections, of several addresses", number(open_now), note, why]]


def start(folder: Path, sizes: Sizes) -> list[list[str]]:
    """Starts after a kill, with nothing, and behind a WAL that no checkpoint covers."""
    rows = []
    for load_s in (0.0, min(sizes.load_s, 8.0)):
        with _broker(folder) as (broker, store):
            _ask(broker, "/admin/topics", {"topic_name": "bench", "partitions_count": 6})
            if load_s:
                asyncio.run(_produce(broker.port, "/topics/bench", load_s, 800.0))
            covered = max((int(path.name) for path in store.glob("checkpoints/*")), default=0)
            entries = metric(broker, "tidelog_wal_seq") - covered
            rows.append(
                [
                    "entries after the checkpoint",
                    number(entries),
                    f"start {_restarted(broker):.1f} s",
                    "",
                ]
            )
    return rows


PARTS: dict[str, Callable[[Path, Sizes], list[list[str]]]] = {
    "partitions": partitions,
    "groups": groups,
    "connections": connections,
    "start": start,
}


def table(folder: Path, sizes: Sizes, names: Sequence[str] = tuple(PARTS)) -> Table:
    rows = [row for name in names for row in PARTS[name](folder, sizes)]
    how = (
        f"Bounds: start {START_S_MAX:.0f} s, stall {1000 * STALL_S_MAX:.0f} ms, "
        f"p99 {ACK_P99_MS_MAX:.0f} ms"
    )
    return Table(COLUMNS, rows, how)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.bench.limits", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small numbers, for a first look")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--json", type=Path, help="write the table there, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-") as folder:
        sizes = QUICK if arguments.quick else Sizes()
        limits_table = table(Path(folder), sizes, arguments.only.split(","))
    limits_table.show("limits")
    if arguments.json:
        publish.add(arguments.json, "limits", limits_table)
    return 0


@contextlib.contextmanager
def _broker(folder: Path) -> Iterator[tuple[Broker, Path]]:
    with store_folder(folder) as (store, _), Broker(f"file://{store}") as broker:
        yield broker, store


def _ask(
    broker: Broker, path: str, body: object = None, media_type: str = "application/json"
) -> tuple[int, bytes]:
    """One request on a connection of its own: POST with a body, else GET."""
    connection = http.client.HTTPConnection(broker.address, broker.port, timeout=120)
    try:
        sent = None if body is None else json.dumps(body)
        headers = {} if body is None else {"content-type": media_type}
        connection.request("GET" if body is None else "POST", path, sent, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _message(answer: tuple[int, bytes]) -> str:
    return f"{answer[0]}: {json.loads(answer[1]).get('message', '')}"


def _filled(broker: Broker, partition_count: int, count: int) -> str:
    """Create the next topic, with a record in each partition; return why it was refused."""
    name = f"t{partition_count // count}" if partition_count else "bench"
    answer = _ask(broker, "/admin/topics", {"topic_name": name, "partitions_count": count})
    if answer[0] not in {200, 201}:
        return _message(answer)
    records = [{"value": number, "partition": number} for number in range(count)]
    answer = _ask(broker, f"/topics/{name}", {"records": records}, JSON)
    return "" if answer[0] == 200 else _message(answer)


def _checkpoint_sizes(store: Path) -> list[int]:
    return [path.stat().st_size for path in store.glob("checkpoints/*")]


def _failed(start_s: float, stall_s: float, p99_ms: float) -> str:
    """The stated bound that does not hold; empty if all do."""
    if start_s > START_S_MAX:
        return "the start takes too long"
    if stall_s > STALL_S_MAX:
        return "the stall is too long"
    return "acks take too long" if p99_ms > ACK_P99_MS_MAX else ""


def _restarted(broker: Broker) -> float:
    """Kill and start the broker; the seconds until it is ready."""
    broker.kill()
    began_s = time.monotonic()
    broker.start()
    return time.monotonic() - began_s


def _stalled(broker: Broker, path: str, seconds: float) -> tuple[float, Measured]:
    """The slowest answer of /healthy in s, during a load for which checkpoints are written."""
    slowest, end = [0.0], threading.Event()

    def probe() -> None:
        connection = http.client.HTTPConnection(broker.address, broker.port, timeout=120)
        while not end.wait(0.01):
            began_s = time.perf_counter()
            connection.request("GET", "/healthy")
            connection.getresponse().read()
            slowest[0] = max(slowest[0], time.perf_counter() - began_s)
        connection.close()

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        load = asyncio.run(_produce(broker.port, path, seconds, LOAD_PER_S))
    finally:
        end.set()
        thread.join()
    return slowest[0], load


async def _produce(port: int, path: str, seconds: float, per_second: float) -> Measured:
    body_pool = bodies.pool("json", 1, 20_000)
    requests = bodies.Requests(head_of(path, body_pool), body_pool)
    return await _paced(port, requests, seconds, per_second)


async def _paced(
    port: int, requests: Sequence[bytes], seconds: float, per_second: float
) -> Measured:
    return await paced(
        "127.0.0.1", port, requests, connections=50, seconds=seconds, per_second=per_second
    )


async def _joined(port: int, sizes: Sizes) -> tuple[int, str]:
    """Members that joined, group after group, and the refusal of the next one."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + sizes.groups_s
    members = iter(range(sizes.groups * sizes.group_members))
    joined, refusals = 0, list[str]()

    async def join() -> None:
        nonlocal joined
        call = Caller(port)
        for member in members:
            if refusals or loop.time() > end_s:
                break
            identity = _member(member, sizes)
            for sent in (create(*identity), subscribe(*identity)):
                answer = await call(sent)
                if answer.status not in {200, 204}:
                    refusals.append(_message((answer.status, answer.body)))
                    break
            else:
                joined += 1
        call.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CALLERS):
            tasks.create_task(join())
    return joined, refusals[0] if refusals else ""


async def _commits(port: int, count: int, sizes: Sizes) -> list[bytes]:
    """A commit of each of the first `count` members, of a partition that the member has."""
    members = [_member(member, sizes) for member in range(count)]
    places = await owned(port, members)
    return [commit(*member, places[member]) for member in members]


def _member(member: int, sizes: Sizes) -> tuple[str, int]:
    return f"g{member // sizes.group_members}", member % sizes.group_members


def _is_served(stack: contextlib.ExitStack, port: int, address: str) -> bool:
    """Open one more connection from `address`; whether the broker answers on it."""
    connection = socket.create_connection(("127.0.0.1", port), 10, (address, 0))
    stack.callback(connection.close)
    try:
        connection.sendall(request("GET", "/topics", headers={}))
        return connection.recv(65536).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
