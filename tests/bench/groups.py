"""Consumer groups: what 1,000 groups x 10 members that commit every 5 s cost a broker.

Commits are driven as fast as they go, from few connections, so that a commit's CPU is seen with
the batching of such a load; the share of a core at 2,000 commits a second follows. Members are
assigned by hand, each its own partition: which partition a member commits does not matter.
"""

import asyncio
import json
from pathlib import Path

import psutil

from tests.bench.broker import Broker
from tests.bench.load import request, run
from tests.bench.report import Row

GROUPS = 1000
MEMBERS = 10
COMMITS_PER_S = GROUPS * MEMBERS / 5
CONNECTIONS = 16
CPU_SHARE = 0.25
P99_MS = 50.0
HEADERS = {"content-type": "application/vnd.kafka.v2+json"}


def measure(folder: Path, *, is_quick: bool) -> list[Row]:
    groups = GROUPS // 10 if is_quick else GROUPS
    with Broker(f"file://{folder}") as broker:
        broker.create_topic("bench", MEMBERS)
        members = [(f"g{g}", m) for g in range(groups) for m in range(MEMBERS)]
        _all(broker, [_create(group, member) for group, member in members])
        _all(broker, [_assign(group, member) for group, member in members], status=204)
        commits = [_commit(group, member) for group, member in members]
        process = psutil.Process(broker.pid)
        before = _cpu_s(process)
        measured = asyncio.run(
            run(
                "127.0.0.1",
                broker.port,
                commits,
                connections=CONNECTIONS,
                seconds=2 if is_quick else 10,
            )
        )
        cpu_s = (_cpu_s(process) - before) / measured.requests
    note = f"{measured.per_second:,.0f} commits/s when driven as fast as they go"
    return [
        Row(
            "groups",
            f"CPU of {COMMITS_PER_S:,.0f} commits a second, {groups} groups x {MEMBERS}",
            100 * cpu_s * COMMITS_PER_S,
            "% of a core",
            100 * CPU_SHARE,
            note=note,
            is_smaller_better=True,
        ),
        Row(
            "groups",
            "p99 of a commit",
            measured.p99_ms,
            "ms",
            P99_MS,
            measured.p50_ms,
            measured.p99_ms,
            is_smaller_better=True,
        ),
    ]


def _create(group: str, member: int) -> bytes:
    body = json.dumps({"name": f"m{member}", "format": "json"}).encode()
    return request("POST", f"/consumers/{group}", body=body, headers=HEADERS)


def _assign(group: str, member: int) -> bytes:
    body = json.dumps({"partitions": [{"topic": "bench", "partition": member}]}).encode()
    path = f"/consumers/{group}/instances/m{member}/assignments"
    return request("POST", path, body=body, headers=HEADERS)


def _commit(group: str, member: int) -> bytes:
    offset = {"topic": "bench", "partition": member, "offset": 7}
    path = f"/consumers/{group}/instances/m{member}/offsets"
    body = json.dumps({"offsets": [offset]}).encode()
    return request("POST", path, body=body, headers=HEADERS)


def _all(broker: Broker, requests: list[bytes], *, status: int = 200) -> None:
    """Each once."""
    asyncio.run(_each(broker.port, requests, b"HTTP/1.1 %d" % status))


async def _each(port: int, requests: list[bytes], expected: bytes) -> None:
    left = iter(requests)

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for one in left:
            writer.write(one)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(expected), head
            at = head.lower().find(b"content-length: ")
            if at >= 0:
                await reader.readexactly(int(head[at + 16 : head.find(b"\r\n", at)]))
        writer.close()
        await writer.wait_closed()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS * 4):
            group.create_task(work())


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
