"""Consumer groups: the cost of commits, and the disturbance if a member joins or crashes.

1,000 groups x 10 members commit every 5 s. tests.tools.bench.rebalance measures how long a group is
disturbed.

Commits come in an open loop, as they would from ten thousand members: 2,000 a second, evenly. Next
to it the same requests to a handler that does nothing, on the same server: what is left is ours.
"""

import asyncio
import json
from pathlib import Path

from tests.tools.bench import rebalance
from tests.tools.bench.bare import bare_server
from tests.tools.bench.broker import Broker, metric
from tests.tools.bench.load import Answered, Caller, Measured, paced, request
from tests.tools.bench.processes import cpu_s
from tests.tools.bench.report import Row

GROUPS = 1000
MEMBERS = 10
COMMITS_PER_S = GROUPS * MEMBERS / 5
CONNECTIONS = 200
CPU_SHARE = 0.25
P99_MS = 50.0
HEADERS = {"content-type": "application/vnd.kafka.v2+json"}


def measure(folder: Path, *, is_quick: bool) -> list[Row]:
    return [
        *_commits(folder, is_quick=is_quick),
        *rebalance.measure(folder / "rebalance", is_quick=is_quick),
    ]


def _commits(folder: Path, *, is_quick: bool) -> list[Row]:
    seconds = 3.0 if is_quick else 10.0
    with bare_server() as (port, pid):
        commits = [commit("g0", member) for member in range(MEMBERS)]
        bare, floor = _loaded(port, pid, commits, seconds)
    with Broker(f"file://{folder}") as broker:
        broker.create_topic("bench", MEMBERS)
        members = [(f"g{g}", m) for m in range(MEMBERS) for g in range(GROUPS)]
        _all(broker, [create(group, member) for group, member in members])
        _all(broker, [subscribe(group, member) for group, member in members], status=204)
        places = asyncio.run(owned(broker.port, members))
        commits = [commit(*member, places[member]) for member in members]
        flushes = metric(broker, "tidelog_flushes_total")
        measured, share = _loaded(broker.port, broker.pid, commits, seconds)
        flushes = metric(broker, "tidelog_flushes_total") - flushes
    title = f"{COMMITS_PER_S:,.0f} commits a second, {GROUPS} groups x {MEMBERS}"
    return [
        Row(
            "groups",
            f"CPU of {title}",
            100 * share,
            "% of a core",
            100 * CPU_SHARE,
            measured.p50_ms,
            measured.p99_ms,
            note=f"{flushes / measured.seconds:.0f} flushes a second",
            is_smaller_better=True,
        ),
        Row(
            "groups",
            "the same requests to a handler that does nothing",
            100 * floor,
            "% of a core",
            None,
            bare.p50_ms,
            bare.p99_ms,
        ),
        Row("groups", "p99 of a commit", measured.p99_ms, "ms", P99_MS, is_smaller_better=True),
    ]


def _loaded(port: int, pid: int, requests: list[bytes], seconds: float) -> tuple[Measured, float]:
    """The load for so long, and the share of a core that it takes the process.

    The share is by its seconds for each request, so that a stall makes it no smaller.
    """
    old_cpu_s = cpu_s(pid)
    load = paced(
        "127.0.0.1",
        port,
        requests,
        connections=CONNECTIONS,
        seconds=seconds,
        per_second=COMMITS_PER_S,
    )
    measured = asyncio.run(load)
    return measured, (cpu_s(pid) - old_cpu_s) / measured.requests * COMMITS_PER_S


def create(group: str, member: int) -> bytes:
    """Create member `member` of a group."""
    body = json.dumps({"name": f"m{member}", "format": "json"}).encode()
    return request("POST", f"/consumers/{group}", body=body, headers=HEADERS)


def subscribe(group: str, member: int) -> bytes:
    path = f"/consumers/{group}/instances/m{member}/subscription"
    return request("POST", path, body=b'{"topics": ["bench"]}', headers=HEADERS)


def commit(group: str, member: int, partition: int = 0) -> bytes:
    offset = {"topic": "bench", "partition": partition, "offset": 7}
    path = f"/consumers/{group}/instances/m{member}/offsets"
    body = json.dumps({"offsets": [offset]}).encode()
    return request("POST", path, body=body, headers=HEADERS)


async def owned(port: int, members: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """The one partition that each member has."""
    requests = [
        request("GET", f"/consumers/{group}/instances/m{member}/assignments", headers=HEADERS)
        for group, member in members
    ]
    answers = await _each(port, requests, 200)
    return {
        member: json.loads(answer.body)["partitions"][0]["partition"]
        for member, answer in zip(members, answers, strict=True)
    }


def _all(broker: Broker, requests: list[bytes], *, status: int = 200) -> None:
    """Each once."""
    asyncio.run(_each(broker.port, requests, status))


async def _each(port: int, requests: list[bytes], status: int) -> list[Answered]:
    numbered_requests = iter(enumerate(requests))
    answers: dict[int, Answered] = {}

    async def work() -> None:
        call = Caller(port)
        for number, message in numbered_requests:
            answers[number] = await call(message)
            assert answers[number].status == status, answers[number]
        call.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(work())
    return [answers[number] for number in range(len(requests))]
