"""Whether a cluster is well: each fault is named, with its runbook; and the facts of a broker."""

import httpx
import msgspec
import pytest

from tests.service.conftest import QUIET, http_client, routed
from tests.service.conftest import Broker as Served
from tests.service.test_health import DarkStore, MovedClock
from tests.service.test_monitoring import anchors
from tidelog.service.server.app import build_app
from tidelog.service.telemetry import health_rules
from tidelog.service.telemetry.broker_health import BrokerSigns, StoreSigns
from tidelog.service.telemetry.health_rules import (
    BrokerFacts,
    Facts,
    GroupFacts,
    MaintenanceFacts,
    TailFacts,
    judge,
)
from tidelog.service.telemetry.maintenance_results import (
    KINDS,
    MaintenanceResult,
    StoredResults,
    result,
    store_result,
)
from tidelog.storage.broker import Broker, MembershipSettings
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.metered import VERBS, MeteredStore

HOUR_S, DAY_S = 3600.0, 86_400.0
REQUESTS = dict.fromkeys(VERBS, 20)
SIGNS = BrokerSigns(seconds=60.0, commits=240.0, store=StoreSigns(REQUESTS, 0, [100]))
FINE = MaintenanceResult("retain", 1_000, 1_000, True)


def facts_of(name: str = "a", level: int = 4, **signs: object) -> BrokerFacts:
    return BrokerFacts(name, "0.2.0", level, msgspec.structs.replace(SIGNS, **signs))


def kept(kind: str, since_s: float = 60.0, **last: object) -> MaintenanceFacts:
    return MaintenanceFacts(kind, since_s, msgspec.structs.replace(FINE, kind=kind, **last))


WELL = Facts(
    why_not_ready="",
    brokers=[facts_of("a"), facts_of("b")],
    sequencers=["a", "a"],
    gone=[],
    tails=[TailFacts("t", -100.0)],
    maintenance=[kept(kind) for kind in KINDS],
    groups=[GroupFacts("g", 2, 50, 3.0), GroupFacts("done", 0, 0, 0.0)],
)
FAILING = StoreSigns(REQUESTS, 30, [100])
FAULTS = {
    "not-ready": {"why_not_ready": "the WAL cannot be read: the store is dark"},
    "store-fails": {"brokers": [facts_of(store=FAILING)]},
    "view-old": {"brokers": [facts_of(view_age_s=200.0)]},
    "set-aside": {"brokers": [facts_of(set_aside=2)]},
    "broker-gone": {"gone": ["c"]},
    "broker-silent": {"brokers": [facts_of("a"), BrokerFacts("b", "", 4, None)]},
    "sequencers-differ": {"sequencers": ["a", "b"]},
    "levels-differ": {"brokers": [facts_of("a", 4), facts_of("b", 3)]},
    "clock": {"brokers": [facts_of(clock_ms=-40_000)]},
    "seals-fail": {"brokers": [facts_of(seals_failing=7, seals_failing_names=["t-0", "t-1"])]},
    "table-in-doubt": {"brokers": [facts_of(doubts=1, doubts_names=["t"])]},
    "tail-damaged": {"brokers": [facts_of(damaged_tails=1, damaged_tails_names=["t-0"])]},
    "tails-late": {"tails": [TailFacts("t", HOUR_S), TailFacts("u", -1.0)]},
    "damage": {"maintenance": [kept("scrub", is_ok=False, damage=2, what="wal/1: is corrupt")]},
    "compact-failed": {"maintenance": [kept("compact", is_ok=False, what="no disk space")]},
    "retain-late": {"maintenance": [kept("retain", 7 * HOUR_S)]},
    "collect-late": {"maintenance": [kept("collect", 2 * DAY_S)]},
    "compact-late": {"maintenance": [kept("compact", 8 * DAY_S)]},
    "scrub-late": {"maintenance": [MaintenanceFacts("scrub", 31 * DAY_S, None)]},
    "group-without-members": {"groups": [GroupFacts("g", 0, 5, 3_000.0)]},
    "group-behind": {"groups": [GroupFacts("g", 3, 5_000, 2 * HOUR_S)]},
    "groups-behind": {"groups": [GroupFacts(f"g{n}", 0, 5, None) for n in range(30)]},
}


def test_cluster_without_fault_is_well() -> None:
    assert judge(WELL) == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_with_runbook_that_is_there(name: str) -> None:
    problems = judge(WELL._replace(**FAULTS[name]))
    assert name in {problem.name for problem in problems}
    assert {problem.name for problem in problems} <= {name, "group-without-members"}
    for problem in problems:
        page, _, anchor = problem.runbook.partition("#")
        assert page == "deploy/README.md"
        assert anchor in anchors()
        assert problem.what
        assert "\n" not in problem.what


def test_fault_names_its_place() -> None:
    for name, words in (
        ("seals-fail", "t-0, t-1 and 5 more"),
        ("broker-gone", "broker c "),
        ("levels-differ", "a knows 4, b knows 3"),
        ("damage", "wal/1: is corrupt"),
        (
            "group-without-members",
            "group g has no members and 5 unread records, the oldest is 50 min old",
        ),
    ):
        (problem,) = judge(WELL._replace(**FAULTS[name]))
        assert words in problem.what


@pytest.mark.parametrize(
    "facts",
    [
        {"brokers": [facts_of(store=StoreSigns(REQUESTS, 2, [100]))]},
        {"brokers": [facts_of(clock_ms=4_000)]},
        {"tails": [TailFacts("t", 60.0)]},
        {"groups": [GroupFacts("g", 0, 5, 30.0), GroupFacts("h", 3, 10**9, None)]},
        {"brokers": [], "sequencers": []},
    ],
)
def test_what_is_no_fault(facts: dict[str, object]) -> None:
    assert judge(WELL._replace(**facts)) == []


# -- results of maintenance


async def test_failed_run_keeps_time_of_last_complete_one(store: MemoryStore, log: Broker) -> None:
    results = StoredResults(log)
    await results.refresh()
    assert results.found == {}
    await store_result(store, result("scrub", 1_000))
    await store_result(store, result("scrub", 5_000, "wal/1: is\ncorrupt", damage=1))
    await results.refresh()
    assert results.found == {}, "they were read a moment ago"
    await results.refresh(0.0)
    run = results.found["scrub"]
    assert (run.at_ms, run.success_ms, run.is_ok) == (5_000, 1_000, False)
    assert (run.what, run.damage) == ("wal/1: is corrupt", 1)
    await store.put("maintenance/scrub.json", [b"{"])
    await results.refresh(0.0)
    assert results.found == {}, "an object that cannot be decoded is no result"


async def test_store_that_is_dark_leaves_last_results() -> None:
    store = DarkStore()
    log = await Broker.open(store, QUIET, clock=SystemClock(), name="one")
    await store_result(store, result("scrub", 1_000))
    results = StoredResults(log)
    await results.refresh(0.0)
    store.is_dark = True
    await results.refresh(0.0)
    assert results.found["scrub"].at_ms == 1_000
    store.is_dark = False
    await log.close()


# -- the route


async def names_of(http: httpx.AsyncClient) -> set[str]:
    answer = (await http.get("/tidelog/v1/health")).json()
    return {problem["name"] for problem in answer["problems"]}


@pytest.mark.broker(topics={"t": 2}, records=[b"a", b"b"])
async def test_route_has_facts_of_broker(broker: Served) -> None:
    answer = (await broker.http.get("/tidelog/v1/health")).json()
    assert answer["is_well"], answer["problems"]
    assert answer["problems"] == []
    (own,) = answer["brokers"]
    assert (own["name"], own["is_sequencer"], own["why_not_writing"]) == ("broker-1", True, None)
    assert answer["tails"]["records"] == 2
    assert answer["tails"]["oldest_topic"] == "t"
    assert answer["store"]["failures"] == 0
    assert answer["store"]["cost_a_day_usd"] > 0
    assert [task["task"] for task in answer["maintenance"]] == list(KINDS)
    broker.log.drain()
    answer = (await broker.http.get("/tidelog/v1/health")).json()
    assert not answer["is_well"]
    assert await names_of(broker.http) == {"not-ready", "store-fails"}


async def test_faults_of_running_broker_are_named() -> None:
    store, clock = DarkStore(), MovedClock()
    settings = QUIET._replace(membership=MembershipSettings(5.0, 15.0, 3600.0))
    log = await Broker.open(MeteredStore(store, clock), settings, clock=clock, name="one")
    await log.join("http://127.0.0.1:1")
    async with http_client(routed(build_app(log))) as http:
        assert await names_of(http) == set()
        older = msgspec.structs.replace(
            log.cluster.members().me, id="ab" * 8, name="old", address="http://old", level=3
        )
        await store.put("brokers/" + "ab" * 8 + ".json", [msgspec.json.encode(older)])
        await log._membership.look()
        assert await names_of(http) == {"levels-differ", "broker-silent"}
        await log._membership.look()
        for _ in range(3):
            clock.skipped_s += 6.0
            await log._membership.beat()
            await log._membership.look()
        assert await names_of(http) == {"broker-gone"}
        store.is_dark = True
        clock.skipped_s += 200.0
        for _ in range(5):  # requests that fail
            names = await names_of(http)
        assert {"not-ready", "store-fails", "view-old"} <= names
        store.is_dark = False
        clock.skipped_s += 40 * DAY_S
        await log.refresh()
        late = {"retain-late", "collect-late", "compact-late", "scrub-late"}
        assert late <= await names_of(http)
    await log.close()


def test_module_that_judges_uses_no_clock() -> None:
    assert not {"time", "datetime", "asyncio", "random"} & set(vars(health_rules))
