"""Three brokers behind a balancer that asks a random one: an instance's whole life.

Any broker may be killed in the middle of it.
"""

import asyncio
import contextlib
import gc
import itertools
import json
import random
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from tests.service.conftest import FIRST_MS, QUIET, V2, append, assert_refused, until
from tests.support.instances import RunningGroups
from tidelog.service.http.request import ClientGone, HttpRequest, HttpResponse
from tidelog.service.peers import forwarding
from tidelog.service.peers.client import Room
from tidelog.service.peers.forwarding import (
    Forwarded,
    ForwardedCall,
    Forwarder,
    Unreached,
    _Request,
)
from tidelog.service.peers.members_in_backoff import HeldMembers
from tidelog.service.server.app import build_app
from tidelog.service.server.router import Router
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.groups.coordinator_choice import Rendezvous
from tidelog.storage.groups.join_backoff import SHORT_LIVES_MAX
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore

AS_V2 = {"content-type": V2}
POLLING = QUIET._replace(poll_interval_s=0.02, is_coordinating=False)


class Network:
    """Brokers by id; a killed one is not reached.

    A forwarding broker that waits no more for an answer closes its connection. `is_lossy`: the
    broker in between crashes after its client was served.
    """

    def __init__(self) -> None:
        self.apps: dict[str, Router] = {}
        self.handed_over = 0
        self.is_lossy = False
        self.lost_messages = 0
        self._tickets = itertools.count()

    async def request(self, coordinator: str, message: bytes, room: Room | None) -> bytes:
        if coordinator not in self.apps:
            raise Unreached(coordinator)
        self.handed_over += 1
        ticket = b"%d" % next(self._tickets)
        is_gone = asyncio.Event()

        async def until_gone() -> None:
            await is_gone.wait()

        forwarded = self.apps[coordinator].forwarded
        taking = asyncio.create_task(forwarded.take(message, ticket, until_gone=until_gone))
        try:
            return await asyncio.shield(taking)
        finally:
            is_gone.set()

    async def settle(self, coordinator: str, ticket: bytes, *, has_arrived: bool) -> None:
        if self.is_lossy:
            self.lost_messages += 1
            raise Unavailable("lost")
        if coordinator in self.apps:
            self.apps[coordinator].forwarded.settle(ticket, has_arrived=has_arrived)


def lose_answer(call: HttpRequest) -> None:
    """As `HttpRequest.watch` of a client that has left. The coordinator does not see the client."""
    if not isinstance(call, ForwardedCall):
        raise ClientGone


class Cluster:
    """Brokers of one store; `call` asks a random one."""

    def __init__(self, seed: int) -> None:
        self.network = Network()
        self.logs: dict[str, Broker] = {}
        self.leaving: set[str] = set()
        self.draw = random.Random(seed)
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._consumers: dict[str, RunningGroups] = {}

    @asynccontextmanager
    async def broker(self, store: MemoryStore, name: str) -> AsyncIterator[None]:
        log = await Broker.open(store, POLLING, clock=SystemClock(), name=name)
        others = Rendezvous(name, lambda: self.network.apps, lambda: name in self.leaving)
        consumers = RunningGroups(log, others)
        counters = HttpCounters()
        held_members = HeldMembers(consumers, Forwarder(self.network))
        app = Router(
            build_app(log, http=counters, held_members=held_members),
            log,
            Settings(store="memory://"),
            counters,
        )
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        client = httpx.AsyncClient(transport=transport, base_url="http://tide:8082")
        self.network.apps[name], self.logs[name] = app, log
        self._clients[name], self._consumers[name] = client, consumers
        try:
            yield
        finally:
            await self._consumers.pop(name).close() if name in self._consumers else None
            await client.aclose()
            await log.close()

    def kill(self, name: str) -> None:
        """Requests do not reach it any more, and its soft state is lost."""
        del self.network.apps[name], self._clients[name], self.logs[name]
        task = self._consumers.pop(name).task
        assert task is not None
        task.cancel()

    async def release(self, name: str) -> None:
        """The broker stops, and releases its groups. Its peers do not know it yet."""
        consumers = self._consumers[name]
        consumers.requests.begin_release()
        await consumers.requests.finish(consumers.commit_delivered)
        consumers.release()
        self.leaving.add(name)
        consumers.requests.end_release()

    async def call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """As a client that tries again does."""
        content = None if body is None else json.dumps(body)
        headers = {} if body is None else AS_V2
        for _ in range(50):
            client = self._clients[self.draw.choice(sorted(self._clients))]
            answer = await client.request(method, path, content=content, headers=headers)
            if answer.status_code != 503:
                return answer
            await asyncio.sleep(0.05)
        return answer

    async def ok(self, method: str, path: str, body: Any = None) -> Any:
        answer = await self.call(method, path, body)
        assert answer.status_code in (200, 204), answer.text
        return answer.json() if answer.content else None

    async def created(self, **more: Any) -> str:
        said = {"format": "json", "auto.offset.reset": "earliest"} | more
        made = await self.ok("POST", "/consumers/g", said)
        return f"/consumers/g/instances/{made['instance_id']}"


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    store = MemoryStore()
    cluster = Cluster(7)
    async with AsyncExitStack() as stack:
        for name in "abc":
            await stack.enter_async_context(cluster.broker(store, name))
        await cluster.logs["a"].topics.create("t", 2, {})
        await asyncio.sleep(0.1)
        yield cluster
    await store.close()


async def test_an_instances_whole_life_on_whichever_broker(cluster: Cluster) -> None:
    path = await cluster.created(**{"auto.commit.enable": False})
    await cluster.ok("POST", f"{path}/subscription", {"topics": ["t"]})
    for n in range(20):
        await append(cluster.logs["b"], b"%d" % n, timestamp_ms=FIRST_MS + n)
    for n in range(10):
        (record,) = await cluster.ok("GET", f"{path}/records?max_bytes=1&timeout=2000")
        assert record["value"] == n
    await cluster.ok("POST", f"{path}/offsets", {})
    said = await cluster.ok("GET", f"{path}/offsets?topic=t&partition=0")
    assert said["offsets"][0]["offset"] == 10
    partition = {"topic": "t", "partition": 0}
    await cluster.ok("POST", f"{path}/positions", {"offsets": [partition | {"offset": 3}]})
    (record,) = await cluster.ok("GET", f"{path}/records?max_bytes=1")
    assert record["value"] == 3
    await cluster.ok("POST", f"{path}/positions/end", {"partitions": [partition]})
    assert await cluster.ok("GET", f"{path}/records?timeout=10") == []
    assert_refused(await cluster.call("GET", f"{path}/records?timeout=x"), 400, 40002)
    assert_refused(await cluster.call("POST", f"{path}/offsets", []), 422, 422)
    assert len((await cluster.ok("GET", f"{path}/assignments"))["partitions"]) == 2
    await cluster.ok("DELETE", path)
    assert_refused(await cluster.call("GET", f"{path}/records"), 404, 40403)
    assert cluster.network.handed_over > 5
    group = cluster.logs["a"].state.members.get("g")
    assert group is not None
    assert group.term == 1  # no broker took it from another


async def test_a_forwarded_body_has_the_limit_of_its_route(cluster: Cluster) -> None:
    path = await cluster.created()
    partition = {"topic": "t", "partition": 0}
    before = cluster.network.handed_over
    while cluster.network.handed_over == before:
        await cluster.ok("POST", f"{path}/assignments", {"partitions": [partition] * 2_000})
    many = {"partitions": [partition] * 40_000}
    assert_refused(await cluster.call("POST", f"{path}/assignments", many), 413, 413)


async def test_an_answer_that_did_not_arrive_is_returned_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await cluster.created()
    await cluster.ok("POST", f"{path}/subscription", {"topics": ["t"]})
    await append(cluster.logs["a"], b"1", b"2")
    holder = cluster.logs["a"].state.members.get("g").coordinator  # type: ignore[union-attr]
    other = next(name for name in "abc" if name != holder)
    there = cluster._clients[other]
    cluster.network.is_lossy = True
    with monkeypatch.context() as impatient:
        impatient.setattr("tidelog.service.peers.forwarding.SETTLED_S", 0.1)
        for _ in range(3):
            answer = await there.get(f"{path}/records?max_bytes=1&timeout=3000")
            assert [record["value"] for record in answer.json()] == [1]
    await until(lambda: cluster.network.lost_messages == 3)
    cluster.network.is_lossy = False
    for value in (1, 2):
        answer = await there.get(f"{path}/records?max_bytes=1&timeout=3000")
        assert [record["value"] for record in answer.json()] == [value]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that waits for what never comes fails its test."""
    monkeypatch.setattr("tidelog.service.peers.forwarding.SETTLED_S", 600.0)
    monkeypatch.setattr("tidelog.storage.groups.delivery_outcome.SENDING_S", 600.0)


async def subscribed(cluster: Cluster) -> tuple[str, str, str]:
    """The path of an instance, its coordinator and another broker."""
    path = await cluster.created()
    await cluster.ok("POST", f"{path}/subscription", {"topics": ["t"]})
    coordinator = cluster.logs["a"].state.members.get("g").coordinator  # type: ignore[union-attr]
    return path, coordinator, next(name for name in "abc" if name != coordinator)


@pytest.mark.usefixtures("patient")
async def test_a_client_that_leaves_another_broker_ends_its_read_at_the_coordinator(
    cluster: Cluster,
) -> None:
    path, coordinator, other = await subscribed(cluster)
    (instance,) = cluster._consumers[coordinator].members.group("g").instances.values()
    reading = asyncio.create_task(cluster._clients[other].get(f"{path}/records?timeout=60000"))
    await until(instance.lock.locked, 20)
    reading.cancel()
    await until(lambda: not instance.under_way, 20)
    await append(cluster.logs["a"], b"1")
    assert len(await cluster.ok("GET", f"{path}/records")) == 1


@pytest.mark.usefixtures("patient")
async def test_an_answer_that_is_lost_at_another_broker_delays_no_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, other = await subscribed(cluster)
    await append(cluster.logs["a"], b"1", b"2")
    async with asyncio.timeout(20):
        with monkeypatch.context() as patch:
            patch.setattr(HttpRequest, "watch", lose_answer)
            for _ in range(3):
                with contextlib.suppress(AssertionError):  # of httpx: there is no answer
                    await cluster._clients[other].get(f"{path}/records?max_bytes=1&timeout=3000")
        for value in (1, 2):
            answer = await cluster._clients[other].get(f"{path}/records?max_bytes=1&timeout=3000")
            assert [record["value"] for record in answer.json()] == [value]


@pytest.mark.usefixtures("patient")
async def test_an_answer_without_records_delays_no_read(cluster: Cluster) -> None:
    path, _, other = await subscribed(cluster)
    cluster.network.is_lossy = True
    async with asyncio.timeout(20):
        for _ in range(3):
            answer = await cluster._clients[other].get(f"{path}/records?timeout=10")
            assert answer.json() == []


@pytest.mark.usefixtures("patient")
async def test_a_forwarded_answer_has_its_memory_until_it_has_arrived(cluster: Cluster) -> None:
    path, coordinator, other = await subscribed(cluster)
    await append(cluster.logs["a"], b'"%s"' % (b"x" * 10_000))
    answers = cluster.network.apps[coordinator].admission.answers
    settle, used = cluster.network.settle, []

    async def look(coordinator: str, ticket: bytes, *, has_arrived: bool) -> None:
        used.append(answers.used)
        await settle(coordinator, ticket, has_arrived=has_arrived)

    cluster.network.settle = look  # type: ignore[method-assign]
    answer = await cluster._clients[other].get(f"{path}/records?timeout=20000")
    await until(lambda: bool(used) and not answers.used)
    assert used[0] >= len(answer.content) > 10_000


async def test_too_many_forwarded_requests_are_refused_and_the_group_stays(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, coordinator, other = await subscribed(cluster)
    (instance,) = cluster._consumers[coordinator].members.group("g").instances.values()
    client = cluster._clients[other]
    requests_pool = cluster.network.apps[coordinator].forwarded._under_way
    for bounded, name in ((forwarding, "FORWARDED_MAX"), (requests_pool, "limit")):
        with monkeypatch.context() as few:
            few.setattr(bounded, name, 1)
            reading = asyncio.create_task(client.get(f"{path}/records?timeout=60000"))
            await until(instance.lock.locked)
            answer = await client.get(f"{path}/records")
            assert_refused(answer, 503, 50302, V2)
            reading.cancel()
            await until(lambda: not instance.under_way)
    assert (await client.get(f"{path}/records?timeout=0")).json() == []
    group = cluster.logs[other].state.members.get("g")
    assert group is not None
    assert (group.coordinator, group.term) == (coordinator, 1)


async def test_a_principal_of_many_brokers_leaves_requests_for_others_at_the_coordinator() -> None:
    ended = asyncio.Event()

    async def serve(_: ForwardedCall) -> None:
        await ended.wait()

    coordinator = Forwarded(serve)

    def message(principal: str) -> bytes:
        caller = principal, "192.0.2.1"
        return msgspec.msgpack.encode(
            _Request("GET", "/", b"", [], "http", ("b", 1), b"", caller=caller)
        )

    greedy = message("User:greedy")
    taking = [
        asyncio.create_task(coordinator.take(greedy, b"%d" % n))
        for n in range(forwarding.TAKEN_MAX // 2)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match=r"1000 requests .* principals share 2000"):
        await asyncio.wait_for(coordinator.take(greedy, b"refused"), 5)
    taking.append(asyncio.create_task(coordinator.take(message("User:other"), b"other")))
    await asyncio.sleep(0)
    ended.set()
    await asyncio.gather(*taking)
    assert coordinator._under_way.used == 0


async def test_an_answered_call_is_freed_without_a_garbage_collection() -> None:
    futures: list[weakref.ref[asyncio.Future[bool]]] = []

    async def serve(call: ForwardedCall) -> None:
        futures.append(weakref.ref(call.has_arrived))
        await call.answer(HttpResponse(200, b"x"))

    request = _Request("GET", "/", b"", [], "http", ("b", 1), b"")
    gc.disable()
    try:
        await Forwarded(serve).take(msgspec.msgpack.encode(request), b"ticket")
        await until(lambda: futures[0]() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize("victim", ["holder", "other"])
async def test_clients_do_not_notice_a_crashed_broker(cluster: Cluster, victim: str) -> None:
    path = await cluster.created()
    await cluster.ok("POST", f"{path}/subscription", {"topics": ["t"]})
    for n in range(30):
        await append(cluster.logs["a"], b"%d" % n, partition=n % 2, timestamp_ms=FIRST_MS + n)
    seen: set[int] = set()
    for turn in range(60):
        for record in await cluster.ok("GET", f"{path}/records?max_bytes=1&timeout=100"):
            seen.add(record["value"])
        if turn == 8:
            await cluster.ok("POST", f"{path}/offsets", {})
        if turn == 12:
            holder = cluster.logs["a"].state.members.get("g").coordinator  # type: ignore[union-attr]
            dies = holder if victim == "holder" else next(n for n in "abc" if n != holder)
            cluster.kill(dies)
    assert seen == set(range(30))


async def test_every_broker_names_the_held_members_of_a_group(cluster: Cluster) -> None:
    steady = await cluster.created(name="steady")
    await cluster.ok("POST", f"{steady}/subscription", {"topics": ["t"]})
    for number in range(SHORT_LIVES_MAX):
        loop = await cluster.created(**{"name": f"m{number}", "client.id": "etl"})
        await cluster.ok("POST", f"{loop}/subscription", {"topics": ["t"]})
        await cluster.ok("DELETE", loop)
    answer = await cluster.call("POST", "/consumers/g", {"name": "m9", "client.id": "etl"})
    assert_refused(answer, 429, 42901, V2)
    cluster_id = cluster.logs["a"].identity.cluster_id
    path = f"/v3/clusters/{cluster_id}/consumer-groups/g"
    for client in cluster._clients.values():
        (member,) = (await client.get(path)).json()["held_members"]
        # The address is the client's, also if another broker forwarded the join.
        assert (member["consumer_id"], member["client_id"], member["host"]) == (
            "m9",
            "etl",
            "127.0.0.1",
        )
        answer = await client.get("/consumers/g/held-members")
        assert answer.status_code == 404
    coordinator = cluster.logs["a"].state.members.get("g").coordinator  # type: ignore[union-attr]
    del cluster.network.apps[coordinator]
    other = next(client for name, client in cluster._clients.items() if name != coordinator)
    assert (await other.get(path)).status_code == 200


async def test_peers_do_not_fail_at_a_coordinator_that_has_released_its_groups(
    cluster: Cluster,
) -> None:
    path = await cluster.created()
    await cluster.ok("POST", f"{path}/subscription", {"topics": ["t"]})
    await append(cluster.logs["a"], b"1")
    holder = cluster.logs["a"].state.members.get("g").coordinator  # type: ignore[union-attr]
    await cluster.release(holder)
    for name in sorted(set("abc") - {holder}):
        answer = await cluster._clients[name].get(f"{path}/records?timeout=5000")
        assert answer.status_code == 200, answer.text
    group = cluster.logs[name].state.members.get("g")
    assert group is not None
    assert group.coordinator != holder


async def test_a_broker_that_stops_asks_again_if_the_next_coordinator_cannot_be_reached(
    cluster: Cluster,
) -> None:
    path = await cluster.created()
    holder = cluster.logs["a"].state.members.get("g").coordinator  # type: ignore[union-attr]
    stopping = cluster._clients[holder]
    await cluster.release(holder)
    requests = cluster.network.request
    missed: list[str] = []

    async def late(coordinator: str, message: bytes, room: Room | None) -> bytes:
        if len(missed) < 3:
            missed.append(coordinator)
            raise Unreached(coordinator)
        return await requests(coordinator, message, room)

    cluster.network.request = late  # type: ignore[method-assign]
    del cluster.network.apps[holder]  # the others know that it stops
    answer = await stopping.post(f"{path}/subscription", json={"topics": ["t"]}, headers=AS_V2)
    assert answer.status_code == 204, answer.text
    assert len(missed) == 3
