"""The quota `request_percentage`: CPU time of a principal's requests."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.service.conftest import JSON, Broker
from tests.service.keyed import MALLORY, OPEN_TO_MALLORY, RECORDS, allow, key_of, refill_nothing
from tidelog.service import codec_threads
from tidelog.service.routes.produce import DECODE_INLINE_BYTES
from tidelog.service.security import request_cpu_time
from tidelog.service.security.caller import ALL_RIGHTS
from tidelog.storage.core.actions import SetQuotas
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.state.access import REQUEST_PERCENTAGE

STEP_S = 0.25
LARGE = [b'{"value":"%b"}' % (b"x" * (1 << 16))] * (DECODE_INLINE_BYTES >> 16)
"""Records of a body that a thread decodes."""


class Clock:
    """A thread's CPU clock, which moves by STEP_S at each reading."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def thread_time(self) -> float:
        self.now_s += STEP_S
        return self.now_s


class Rights:
    """A caller with the quota. It keeps what is charged."""

    def __init__(self) -> None:
        self.charged: list[float] = []

    def has_quota(self, quota: str) -> bool:
        return quota == REQUEST_PERCENTAGE

    def record(self, quota: str, size: float) -> None:
        assert quota == REQUEST_PERCENTAGE
        self.charged.append(size)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time stands still for token buckets: nothing is refilled."""
    clock = Clock()
    for module in (request_cpu_time, codec_threads):
        monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=clock.thread_time))
    refill_nothing(monkeypatch)
    return clock


pytestmark = OPEN_TO_MALLORY


async def set_percentage(broker: Broker, percentage: int | None) -> None:
    await broker.log.access.change(SetQuotas(MALLORY, {REQUEST_PERCENTAGE: percentage}))


async def test_requests_above_percentage_are_refused(broker: Broker, clock: Clock) -> None:
    mallory = await key_of(broker.log, MALLORY)
    await set_percentage(broker, 10)

    async def get(headers: dict[str, str]) -> Any:
        return await broker.http.get("/topics/m.t", headers=headers)

    assert (await get(mallory)).status_code == 200
    refused = await get(mallory)
    assert refused.status_code == 429
    assert refused.json()["message"] == (
        "User:mallory has used up its request_percentage on this broker: "
        "10 % of the CPU time of a thread"
    )
    assert int(refused.headers["retry-after"]) >= 1
    assert broker.app.counters.throttled[REQUEST_PERCENTAGE] == 1
    alice = await key_of(broker.log, "User:alice")
    await allow(broker.log, "User:alice", "DESCRIBE", "TOPIC", "m.", "PREFIXED")
    for _ in range(3):
        assert (await get(alice)).status_code == 200
    await set_percentage(broker, None)
    for _ in range(3):
        assert (await get(mallory)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v3/clusters/{cluster}/topics/m.t/records", b'{"value":{"type":"JSON","data":1}}'),
        ("/topics/m.t", b'{"records":[%b]}' % b",".join(LARGE)),
    ],
    ids=["a task for each record", "a thread that decodes"],
)
async def test_tasks_and_threads_of_request_are_charged(
    broker: Broker, clock: Clock, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes
) -> None:
    """The time of the request's own task does not count here."""
    monkeypatch.setattr(type(broker.app), "_measured", lambda _, __, work: work)
    mallory = await key_of(broker.log, MALLORY)
    await set_percentage(broker, 10)
    headers = mallory | {"content-type": JSON if path.startswith("/topics") else "application/json"}
    url = path.format(cluster=broker.log.identity.cluster_id)
    assert (await broker.http.post(url, content=body, headers=headers)).status_code == 200
    assert (await broker.http.get("/topics/m.t", headers=mallory)).status_code == 429


async def test_produce_request_is_charged(broker: Broker, clock: Clock) -> None:
    mallory = await key_of(broker.log, MALLORY)
    await set_percentage(broker, 100)
    headers = mallory | {"content-type": JSON}
    answers = [
        await broker.http.post("/topics/m.t", content=RECORDS, headers=headers) for _ in range(6)
    ]
    statuses = [answer.status_code for answer in answers]
    assert statuses[0] == 200
    assert statuses[-1] == 429
    assert broker.log.state.partition("m.t", 0).high_watermark == statuses.count(200)


@pytest.mark.parametrize("percentage", [0, 101, -1])
async def test_percentage_is_1_to_100(broker: Broker, percentage: int) -> None:
    with pytest.raises(InvalidRequest, match="request_percentage is 1 to 100"):
        await set_percentage(broker, percentage)


async def test_waits_are_not_charged(clock: Clock) -> None:
    rights: Any = Rights()

    async def work() -> str:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return "done"

    async def others() -> None:
        for _ in range(10):
            clock.thread_time()
            await asyncio.sleep(0)

    result, _ = await asyncio.gather(request_cpu_time.measured(rights, work()), others())
    assert result == "done"
    assert rights.charged == [STEP_S * 100] * 3


async def test_errors_and_cancellations_reach_work(clock: Clock) -> None:
    rights: Any = Rights()
    seen = []

    async def fails() -> None:
        raise ValueError("wrong")

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def awaits() -> None:
        await request_cpu_time.measured(rights, waits())

    with pytest.raises(ValueError, match="wrong"):
        await request_cpu_time.measured(rights, fails())
    for work in (request_cpu_time.measured(rights, waits()), awaits()):
        task = asyncio.create_task(work)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert seen == ["cancelled"] * 2
    never = asyncio.create_task(request_cpu_time.measured(rights, waits()))
    never.cancel()  # before its first step
    with pytest.raises(asyncio.CancelledError):
        await never


async def test_nothing_is_measured_without_quota() -> None:
    async def work() -> None:
        return

    coroutine = work()
    assert request_cpu_time.measured(ALL_RIGHTS, coroutine) is coroutine
    await coroutine
