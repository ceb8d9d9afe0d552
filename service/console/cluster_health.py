"""The route of the cluster's health: it collects the facts that `health_rules` judges.

It answers also while the store does not: it uses the state in memory. The results of commands of
maintenance, the times of sealed records and the check of readiness need the store. They have
timeouts, and their last known values stay.
"""

import asyncio
import contextlib

from fastapi import Request
from pydantic import BaseModel, Field

from tidelog.service.console.api import GoneBroker, gone_brokers
from tidelog.service.http.route import TIDELOG, Permission, Route, RouteDoc
from tidelog.service.operations.groups import GroupOperations
from tidelog.service.operations.rights import DESCRIBE_CLUSTER
from tidelog.service.operations.topics import TopicOperations
from tidelog.service.routes.dependencies import BrokerOperations, Rights, broker_of
from tidelog.service.security.caller import CallerRights
from tidelog.service.slices import sliced
from tidelog.service.telemetry.broker_health import BrokerSigns
from tidelog.service.telemetry.group_lags import group_ids
from tidelog.service.telemetry.health_rules import BrokerFacts, Facts, GroupFacts, TailFacts, judge
from tidelog.service.telemetry.log_metrics import tail_bytes, unsealed_since_ms
from tidelog.service.telemetry.metrics import Telemetry
from tidelog.service.telemetry.rates import BrokerRates, RateSampler, quantile_s
from tidelog.service.telemetry.store_costs import MONTH_S, costs
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import LogError
from tidelog.storage.state import idle_tails

READY_S = 2.0
RESULTS_S = 2.0
"""Timeouts of what asks the store."""
GROUPS_MAX = 500
"""Groups in an answer: those with the largest lag. All groups are judged."""
DAY_S = 86_400


class ProblemData(BaseModel):
    """A problem. `name` is one word for programs."""

    name: str = Field(examples=["seals-fail"])
    what: str
    runbook: str = Field(examples=["deploy/README.md#tails-are-not-sealed"])


class BrokerHealth(BaseModel):
    """A live broker.

    The fields from `version` on are the broker's own report, and null if it did not answer.
    """

    name: str
    address: str
    is_sequencer: bool
    age_s: float
    level: int = Field(description="the newest level of the format that the broker knows")
    version: str | None = None
    clock_offset_ms: int | None = Field(default=None, description="ahead of the store's clock")
    connections: int | None = Field(default=None, description="of HTTP clients")
    why_not_writing: str | None = None


class RequestCost(BaseModel):
    """The requests for one purpose, and their price."""

    purpose: str = Field(examples=["commits"])
    setting: str | None = Field(description="the setting or topic config that lowers it")
    requests_a_minute: dict[str, float] = Field(
        description="by verb: put, list, get, and delete, which is free",
        examples=[{"put": 240.0, "get": 1.5}],
    )
    usd_a_month: float


class StoreHealth(BaseModel):
    """Requests to the store in the last minute, of all brokers that answered.

    Latencies are null if there was none.
    """

    requests: int
    failures: int
    p50_ms: float | None
    p99_ms: float | None
    commits_per_minute: float
    cost_a_day_usd: float = Field(
        description="of the requests, at the pace of the last half hour, with the prices of "
        "S3 Standard; without storage"
    )
    costs: list[RequestCost] = Field(description="the parts of this cost, the largest first")


class TailsHealth(BaseModel):
    """Records that are not sealed yet. `oldest_s` is null if there is none."""

    records: int
    bytes: int
    oldest_s: float | None
    oldest_topic: str | None


class MaintenanceHealth(BaseModel):
    """The last run of a kind of maintenance, by a command or a broker.

    It is null if no run is known.
    """

    task: str
    since_success_s: float = Field(description="or since the cluster was created")
    last_ms: int | None
    is_ok: bool | None
    what: str | None = Field(description="the error of the last run")
    damage: int | None = Field(description="that a scrub found")


class GroupHealth(BaseModel):
    consumer_group_id: str
    members: int
    lag: int
    lag_seconds: float | None = Field(description="null if it is not known")


class ClusterHealth(BaseModel):
    """Whether the cluster is well, as this broker and its peers see it."""

    is_well: bool
    problems: list[ProblemData]
    cluster_id: str
    store_url: str
    level: int
    now_ms: int
    brokers: list[BrokerHealth]
    gone: list[GoneBroker]
    store: StoreHealth
    tails: TailsHealth
    maintenance: list[MaintenanceHealth]
    groups: list[GroupHealth] = Field(
        description=f"groups with a lag that the caller may describe, at most {GROUPS_MAX}"
    )
    holds: int = Field(description="backups that run: nothing is collected meanwhile")


async def get_health(
    request: Request, operations: BrokerOperations, rights: Rights
) -> ClusterHealth:
    """Whether the cluster is well, and if not, each problem with its runbook.

    The problems are those of brokers, store, sealing, maintenance and groups. This route answers
    while the store does not.
    """
    broker, state = broker_of(request), request.app.state
    telemetry: Telemetry = state.reports.telemetry
    sampler: RateSampler = state.reports.rates
    all_rates = await sampler.all()
    groups = await _groups(broker, telemetry, operations.groups, rights)
    tails, late = await _tails(broker, operations.topics, rights)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RESULTS_S):
            await telemetry.maintenance.stored(broker).refresh(age_max_s=0.0)
    signs = [broker_rates.signs for broker_rates in all_rates if broker_rates.signs is not None]
    maintenance = telemetry.maintenance.facts(
        broker, [broker_signs.maintenance for broker_signs in signs]
    )
    live = _brokers(broker, all_rates)
    problems = judge(
        Facts(
            why_not_ready=await _why_not_ready(broker),
            brokers=[
                BrokerFacts(health.name, health.version or "", health.level, broker_signs)
                for health, broker_signs in live
            ],
            sequencers=[broker_rates.sequencer for broker_rates in all_rates],
            gone=sorted(member.name for member in broker.stats().gone),
            tails=late,
            maintenance=maintenance,
            groups=groups,
        )
    )
    worst = sorted((group for group in groups if group.lag), key=lambda group: -group.lag)
    return ClusterHealth(
        is_well=not problems,
        problems=[ProblemData(**problem._asdict()) for problem in problems],
        cluster_id=broker.identity.cluster_id,
        store_url=broker.store_url,
        level=broker.state.level,
        now_ms=broker.clock.now_ms(),
        brokers=[health for health, _ in live],
        gone=gone_brokers(broker, sampler.absent(all_rates)),
        store=_store(signs),
        tails=tails,
        maintenance=[
            MaintenanceHealth(
                task=task_facts.kind,
                since_success_s=task_facts.since_s,
                last_ms=None if task_facts.last is None else task_facts.last.at_ms,
                is_ok=None if task_facts.last is None else task_facts.last.is_ok,
                what=None if task_facts.last is None else task_facts.last.what,
                damage=None if task_facts.last is None else task_facts.last.damage,
            )
            for task_facts in maintenance
        ],
        groups=[
            GroupHealth(
                consumer_group_id=group.group,
                members=group.members,
                lag=group.lag,
                lag_seconds=group.lag_s,
            )
            for group in worst[:GROUPS_MAX]
        ],
        holds=len(broker.state.holds),
    )


async def _why_not_ready(broker: Broker) -> str:
    try:
        async with asyncio.timeout(READY_S):
            await broker.check_ready()
    except LogError as error:
        return str(error)
    except TimeoutError:
        return f"no answer of the store within {READY_S:.0f} s"
    return ""


def _brokers(
    broker: Broker, all_rates: list[BrokerRates]
) -> list[tuple[BrokerHealth, BrokerSigns | None]]:
    """Return the live brokers, the sequencer first, with their signs."""
    me, _, sequencer, live_members = broker.cluster.members()
    by_id = {broker_rates.id: broker_rates for broker_rates in all_rates}
    brokers = []
    for member in [me, *live_members]:
        broker_rates = by_id.get(member.id)
        signs = None if broker_rates is None else broker_rates.signs
        shown = BrokerHealth(
            name=member.name,
            address=member.address,
            is_sequencer=member.id == sequencer.id,
            age_s=max(broker.clock.now_ms() - member.started_ms, 0) / 1000,
            level=member.level,
            version=None if broker_rates is None else broker_rates.version,
            clock_offset_ms=None if signs is None else signs.clock_ms,
            connections=None if signs is None else signs.connections,
            why_not_writing=None if signs is None else signs.why_not_writing or None,
        )
        brokers.append((shown, signs))
    return sorted(brokers, key=lambda pair: (not pair[0].is_sequencer, pair[0].name))


def _store(signs: list[BrokerSigns]) -> StoreHealth:
    latencies = [
        sum(counts)
        for counts in zip(*(broker_signs.store.latencies for broker_signs in signs), strict=True)
    ]
    terms = costs(
        (broker_signs.store.counts, broker_signs.store.counts_s) for broker_signs in signs
    )
    usd_a_month = sum(cost.usd_a_month for cost in terms)
    p50_s, p99_s = quantile_s(latencies, 0.5), quantile_s(latencies, 0.99)
    return StoreHealth(
        requests=sum(sum(broker_signs.store.requests.values()) for broker_signs in signs),
        failures=sum(broker_signs.store.failures for broker_signs in signs),
        p50_ms=None if p50_s is None else round(p50_s * 1000, 2),
        p99_ms=None if p99_s is None else round(p99_s * 1000, 2),
        commits_per_minute=round(
            sum(broker_signs.commits * 60 / broker_signs.seconds for broker_signs in signs), 1
        ),
        cost_a_day_usd=round(usd_a_month * DAY_S / MONTH_S, 4),
        costs=[
            RequestCost(
                purpose=cost.term.name,
                setting=cost.term.setting or None,
                requests_a_minute={
                    verb: round(pace, 3) for verb, pace in cost.requests_a_minute.items()
                },
                usd_a_month=round(cost.usd_a_month, 4),
            )
            for cost in terms
        ],
    )


async def _tails(
    broker: Broker, operations: TopicOperations, rights: CallerRights
) -> tuple[TailsHealth, list[TailFacts]]:
    """Return the sizes of all tails, and the tails of topics that the caller may describe."""
    records = size = 0
    now_ms = broker.clock.now_ms()
    oldest_ms, oldest_topic = now_ms, ""
    facts: list[TailFacts] = []
    async for topic in sliced(list(broker.state.topics.values())):
        size += tail_bytes(topic)
        records += sum(
            partition.high_watermark - max(partition.sealed_end, partition.log_start_offset)
            for partition in topic.partitions
        )
        since_ms = unsealed_since_ms(topic, now_ms)
        if not operations.is_shown(rights, topic.name):
            continue
        if since_ms < oldest_ms:
            oldest_ms, oldest_topic = since_ms, topic.name
        late_ms = now_ms - idle_tails.due_ms(topic, now_ms)
        facts.append(TailFacts(topic.name, late_ms / 1000))
    tails = TailsHealth(
        records=records,
        bytes=size,
        oldest_s=(now_ms - oldest_ms) / 1000 if oldest_topic else None,
        oldest_topic=oldest_topic or None,
    )
    return tails, facts


async def _groups(
    broker: Broker, telemetry: Telemetry, operations: GroupOperations, rights: CallerRights
) -> list[GroupFacts]:
    """Return the groups that the caller may describe, with their lag in all topics."""
    await telemetry.lags.refresh_and_look()
    groups: list[GroupFacts] = []
    async for group_id in sliced(group_ids(broker)):
        if operations.is_shown(rights, group_id):
            group = broker.state.members.get(group_id)
            lags = await operations.lags(rights, group_id, telemetry.lags.times)
            behind = await lags.summary()
            members = 0 if group is None else len(group.members)
            groups.append(GroupFacts(group_id, members, behind.total, behind.seconds))
    return groups


ROUTES = (
    Route(
        "GET",
        "/health",
        get_health,
        Permission(DESCRIBE_CLUSTER),
        "health",
        TIDELOG,
        RouteDoc(),
    ),
)
