"""Read-only routes with data that only the console needs. They are documented like all routes.

For everything else, the console uses the same routes as any other client.
"""

from collections.abc import Iterable
from itertools import islice
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

from fastapi import Query, Request
from pydantic import BaseModel, Field

from tidelog.service.console.topic_layout import LayoutTotals, PartitionLayout, TopicLayouts
from tidelog.service.console.wal_entries import Checkpoint, WalEntry, WalPage
from tidelog.service.http.paging import WantedPage, answer_page
from tidelog.service.http.route import TIDELOG, Permission, Route, RouteAccess, RouteDoc
from tidelog.service.operations.rights import DESCRIBE_CLUSTER, DESCRIBE_TOPIC
from tidelog.service.routes.dependencies import (
    ERRORS,
    BrokerOperations,
    EmptyListing,
    FreshBroker,
    Listing,
    Rights,
    TopicName,
    broker_of,
)
from tidelog.service.slices import in_order, sliced
from tidelog.service.telemetry.group_lags import group_ids
from tidelog.service.telemetry.log_metrics import tail_bytes, unsealed_since_ms
from tidelog.service.telemetry.rates import (
    NAMES,
    STEP_S,
    AbsentBroker,
    BrokerRates,
    RateSampler,
    Step,
    quantile_s,
    summed,
)
from tidelog.storage.broker import Broker
from tidelog.storage.core.topic_configs import BROKER_NAMES, DEFAULTS
from tidelog.storage.state.topic import Topic

LAYOUT_PARTITIONS_MAX = 100
"""Bound of the partitions in one response with a topic's layout."""
DAMAGE_SHOWN_MAX = 1_000
"""Bound of the tables in doubt, and of the damaged tails, in the overview."""


class _Sizes(NamedTuple):
    """Sums over all topics. `unsealed_since_ms` is None if all records are sealed."""

    partitions: int
    tail_runs: int
    unsealed_bytes: int
    unsealed_since_ms: int | None


async def _sizes(broker: Broker) -> _Sizes:
    partitions = tail_runs = unsealed_bytes = 0
    oldest_ms = now_ms = broker.clock.now_ms()
    async for topic in sliced(list(broker.state.topics.values())):
        partitions += len(topic.partitions)
        tail_runs += sum(len(partition.tail) for partition in topic.partitions)
        unsealed_bytes += tail_bytes(topic)
        oldest_ms = min(oldest_ms, unsealed_since_ms(topic, now_ms))
    return _Sizes(partitions, tail_runs, unsealed_bytes, oldest_ms if oldest_ms < now_ms else None)


# -- overview


class RatesNow(BaseModel):
    """Rates per second, as averages over the last 15 to 20 s.

    The fields `ack_*` are quantiles of the time from a produce request to its answer.
    """

    records_in: float
    bytes_in: float
    records_out: float
    bytes_out: float
    requests: float
    flushes: float
    commits: float
    puts: float = Field(description="all PUTs, conditional or not")
    gets: float
    lists: float
    deletes: float
    cold_reads: float
    ack_p50_ms: float | None
    ack_p99_ms: float | None


class BrokerNow(BaseModel):
    """A live broker. `rates` is null if that broker did not answer the request for its rates."""

    name: str
    number: int
    address: str
    port: int
    started_ms: int
    is_me: bool
    is_sequencer: bool
    version: str = ""
    worker: int = 0
    wal_seq: int = 0
    wal_view_age_s: float = 0.0
    buffered_bytes: int = 0
    buffered_bytes_max: int = 0
    rates: RatesNow | None = None


class GoneBroker(BaseModel):
    """A broker that was live within the last hour, and is not live now."""

    name: str
    address: str
    since_ms: int = Field(description="time of its last answer to this broker")


class History(BaseModel):
    """Rates of all brokers together, with one value for each step, oldest first.

    Brokers that are gone count as long as they were live.
    """

    step_ms: int
    at_ms: list[int] = Field(description="the end of each step")
    series: dict[str, list[float | None]] = Field(
        description="values by the name of a field of RatesNow"
    )


class Overview(BaseModel):
    """A summary of the cluster."""

    cluster_id: str
    store: str
    created_ms: int
    now_ms: int
    wal_seq: int
    topics: int
    partitions: int
    groups: int
    members: int
    unsealed_bytes: int
    unsealed_since_ms: int | None
    tables_in_doubt: dict[str, str] = Field(
        description=f"reason for each topic, as this broker found it; at most {DAMAGE_SHOWN_MAX}"
    )
    damaged_tails: dict[str, str] = Field(
        description="reason for each TOPIC-PARTITION whose tail cannot be sealed, as this broker "
        f"found it; at most {DAMAGE_SHOWN_MAX} partitions"
    )
    brokers: list[BrokerNow]
    gone: list[GoneBroker]
    rates: RatesNow
    history: History | None = None


async def get_overview(
    request: Request,
    operations: BrokerOperations,
    rights: Rights,
    history: Annotated[bool, Query(description="add the rates of the last half hour")] = False,
) -> Overview:
    """Return the brokers, their rates per second, and the size of the cluster."""
    broker = broker_of(request)
    rates: RateSampler = request.app.state.reports.rates
    all_rates, sizes, state = await rates.all(), await _sizes(broker), broker.state
    absent = rates.absent(all_rates)
    return Overview(
        cluster_id=broker.identity.cluster_id,
        store=broker.store_url,
        created_ms=broker.identity.created_ms,
        now_ms=broker.clock.now_ms(),
        wal_seq=state.seq,
        topics=len(state.topics),
        partitions=sizes.partitions,
        groups=len(group_ids(broker)),
        members=state.members.count,
        unsealed_bytes=sizes.unsealed_bytes,
        unsealed_since_ms=sizes.unsealed_since_ms,
        tables_in_doubt={
            name: why
            for name, why in islice(broker.stored.doubts().items(), DAMAGE_SHOWN_MAX)
            if operations.topics.is_shown(rights, name)
        },
        damaged_tails={
            f"{partition.topic}-{partition.partition}": why
            for partition, why in islice(broker.stored.damaged_tails().items(), DAMAGE_SHOWN_MAX)
            if operations.topics.is_shown(rights, partition.topic)
        },
        brokers=_brokers(broker, all_rates),
        gone=gone_brokers(broker, absent),
        rates=_total(
            [_rates(broker_rates.recent, broker_rates.seconds) for broker_rates in all_rates],
            all_rates,
        ),
        history=_history(summed([*all_rates, *(absent_broker.rates for absent_broker in absent)]))
        if history
        else None,
    )


def _brokers(broker: Broker, all_rates: list[BrokerRates]) -> list[BrokerNow]:
    me, peers, sequencer, _ = broker.cluster.members()
    by_id = {broker_rates.id: broker_rates for broker_rates in all_rates}
    members = [me, *peers]
    brokers = []
    for member in members:
        broker_rates = by_id.get(member.id)
        shown = BrokerNow(
            name=member.name,
            number=member.number,
            address=member.address,
            port=member.port,
            started_ms=member.started_ms,
            is_me=member.id == me.id,
            is_sequencer=member.id == sequencer.id,
        )
        if broker_rates is not None:
            shown.version, shown.worker = broker_rates.version, broker_rates.worker
            shown.wal_seq, shown.wal_view_age_s = broker_rates.wal_seq, broker_rates.view_age_s
            shown.buffered_bytes = broker_rates.buffered_bytes
            shown.buffered_bytes_max = broker_rates.buffered_bytes_max
            shown.rates = _rates(broker_rates.recent, broker_rates.seconds)
        brokers.append(shown)
    return sorted(brokers, key=lambda shown: (not shown.is_sequencer, shown.name))


def gone_brokers(broker: Broker, absent: Iterable[AbsentBroker]) -> list[GoneBroker]:
    """Return the absent brokers that are not live. A broker that was started again is not gone."""
    me, peers, _, live_members = broker.cluster.members()
    live = {member.name for member in (me, *peers, *live_members)}
    age_ms = broker.clock.now_ms() - broker.clock.boot_s() * 1000
    broker_by_name = {
        absent_broker.rates.name: GoneBroker(
            name=absent_broker.rates.name,
            address=absent_broker.rates.address,
            since_ms=int(age_ms + absent_broker.answered_s * 1000),
        )
        for absent_broker in absent
        if absent_broker.rates.name not in live
    }
    return sorted(broker_by_name.values(), key=attrgetter("name"))


def _rates(step: Step, seconds: float) -> RatesNow:
    added = zip(NAMES, step.added, strict=True)
    return _rates_of({name: count / max(seconds, 0.001) for name, count in added}, step.acks)


def _total(rates: list[RatesNow], all_rates: list[BrokerRates]) -> RatesNow:
    sums = {name: sum(float(getattr(rates_now, name)) for rates_now in rates) for name in NAMES}
    acks = [
        sum(counts)
        for counts in zip(*(broker_rates.recent.acks for broker_rates in all_rates), strict=True)
    ]
    return _rates_of(sums, acks)


def _rates_of(per_second: dict[str, float], acks: list[int]) -> RatesNow:
    p50_s, p99_s = quantile_s(acks, 0.5), quantile_s(acks, 0.99)
    return RatesNow(ack_p50_ms=_ms(p50_s), ack_p99_ms=_ms(p99_s), **per_second)


def _history(steps: list[Step]) -> History:
    """Return the steps as a history. The values of a step that no broker has are None."""
    series: dict[str, list[float | None]] = {name: [] for name in RatesNow.model_fields}
    by_number = {step.number: step for step in steps}
    numbers = range(steps[0].number, steps[-1].number + 1) if steps else range(0)
    for number in numbers:
        step = by_number.get(number)
        shown: dict[str, Any] = {} if step is None else _rates(step, STEP_S).model_dump()
        for name, past in series.items():
            past.append(shown.get(name))
    step_ms = STEP_S * 1000
    return History(step_ms=step_ms, at_ms=[n * step_ms for n in numbers], series=series)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)


# -- topics


class TopicSummary(BaseModel):
    topic_name: str
    created_ms: int
    partitions_count: int
    records: int = Field(description="number of offsets from log start to high watermark")
    unsealed_records: int
    unsealed_bytes: int
    unsealed_since_ms: int | None
    cleanup_policy: str
    retention_ms: int
    configs: dict[str, str] = Field(description="configs that are set for the topic")


class TopicLayout(BaseModel):
    topic_name: str
    topic_id: str
    table_uri: str | None = Field(
        description="Delta table of the sealed records; null: in memory only"
    )
    created_ms: int
    partitions_count: int
    totals: LayoutTotals
    first_partition: int = Field(description="first partition in this answer")
    partitions: list[PartitionLayout]


class ConfigDoc(BaseModel):
    name: str
    default: str = Field(description="the built-in default")
    doc: str
    default_name: str = Field(description="the name of the cluster's default")


async def list_topic_summaries(
    broker: FreshBroker,
    operations: BrokerOperations,
    rights: Rights,
    empty: EmptyListing,
    page: WantedPage,
) -> Listing[TopicSummary]:
    """List the topics that the caller may describe, with the sizes that are in the cluster's state.

    The state does not have the size of a topic's table.
    """
    now_ms = broker.clock.now_ms()

    def summary(name: str) -> TopicSummary | None:
        topic = operations.topics.shown(rights, name)
        return None if topic is None else _summary(topic, now_ms)

    names = await in_order(broker.state.topics, page.key(str))
    listing: Listing[TopicSummary] = await answer_page(page, empty, names, summary)
    return listing


def _summary(topic: Topic, now_ms: int) -> TopicSummary:
    config = topic.config
    since_ms = unsealed_since_ms(topic, now_ms)
    partitions = topic.partitions
    return TopicSummary(
        topic_name=topic.name,
        created_ms=topic.created_ms,
        partitions_count=len(partitions),
        records=sum(
            partition.high_watermark - partition.log_start_offset for partition in partitions
        ),
        unsealed_records=sum(
            partition.high_watermark - max(partition.sealed_end, partition.log_start_offset)
            for partition in partitions
        ),
        unsealed_bytes=tail_bytes(topic),
        unsealed_since_ms=since_ms if since_ms < now_ms else None,
        cleanup_policy=",".join(sorted(config.cleanup_policy)),
        retention_ms=config.retention_ms,
        configs=topic.configs,
    )


async def get_topic_layout(
    request: Request,
    topic_name: TopicName,
    broker: FreshBroker,
    first: Annotated[int, Query(ge=0, description="the first partition to show")] = 0,
    count: Annotated[int, Query(ge=1, le=LAYOUT_PARTITIONS_MAX)] = LAYOUT_PARTITIONS_MAX,
) -> TopicLayout:
    """Show where the records of each partition lie, and in which segments.

    The layout reaches from the log start to the high watermark.
    """
    topic = broker.state.topic(topic_name)
    pictures: TopicLayouts = request.app.state.layouts
    numbers = range(first, min(first + count, len(topic.partitions)))
    return TopicLayout(
        topic_name=topic.name,
        topic_id=topic.topic_id,
        table_uri=broker.topics.table_uri(topic),
        created_ms=topic.created_ms,
        partitions_count=len(topic.partitions),
        totals=await pictures.totals(topic),
        first_partition=first,
        partitions=await pictures.of(topic, numbers),
    )


async def list_topic_configs() -> list[ConfigDoc]:
    """List every config that a topic takes, with its built-in default and its meaning.

    Then list the defaults of the cluster that are for new topics alone.
    """
    names = {default: name for name, default in BROKER_NAMES.items()}
    return [
        ConfigDoc(
            name=names.get(default_name, default_name),
            default=key.default,
            doc=key.doc,
            default_name=default_name,
        )
        for default_name, key in sorted(DEFAULTS.items(), key=lambda item: item[0] not in names)
    ]


# -- metadata


class Counts(BaseModel):
    """Counts of the objects in the cluster's state."""

    topics: int
    partitions: int
    tail_runs: int
    groups: int
    group_offsets: int
    group_members: int
    producer_partitions: int
    hot_logs: int
    deleted_topics: int


class MetadataPage(BaseModel):
    """The cluster's metadata as it lies in the store."""

    cluster_id: str
    created_ms: int
    store: str
    wal_seq: int
    state_time_ms: int
    counts: Counts
    entries: list[WalEntry] = Field(description="the newest entries of the WAL, newest first")
    checkpoints: list[Checkpoint] = Field(description="newest first")


async def get_metadata(request: Request, broker: FreshBroker) -> MetadataPage:
    """Return the newest WAL entries, the checkpoints, and counts of the objects in the state."""
    view: WalPage = request.app.state.wal_page
    entries, checkpoints = await view.entries(), await view.checkpoints()
    sizes, state = await _sizes(broker), broker.state
    counts = Counts(
        topics=len(state.topics),
        partitions=sizes.partitions,
        tail_runs=sizes.tail_runs,
        groups=len(group_ids(broker)),
        group_offsets=state.committed_offsets.count,
        group_members=state.members.count,
        producer_partitions=state.producers.count,
        hot_logs=len(state.hot_logs),
        deleted_topics=len(state.deleted),
    )
    return MetadataPage(
        cluster_id=broker.identity.cluster_id,
        created_ms=broker.identity.created_ms,
        store=broker.store_url,
        wal_seq=state.seq,
        state_time_ms=state.time_ms,
        counts=counts,
        entries=entries,
        checkpoints=checkpoints,
    )


_DESCRIBE_CLUSTER = Permission(DESCRIBE_CLUSTER)
_DESCRIBE_TOPIC = Permission(DESCRIBE_TOPIC, "topic_name")
_CHECKED = RouteAccess.CHECKED_BY_HANDLER
_LABEL = "console"
_TOPIC = "/topics/{topic_name}"
_DOC = RouteDoc({503: ERRORS[503]})
_LIST_DOC = RouteDoc({400: ERRORS[400], 503: ERRORS[503]})
_TOPIC_DOC = RouteDoc({404: ERRORS[404], 503: ERRORS[503]})

ROUTES = (
    Route("GET", "/overview", get_overview, _DESCRIBE_CLUSTER, _LABEL, TIDELOG, _DOC),
    Route("GET", "/topics", list_topic_summaries, _CHECKED, _LABEL, TIDELOG, _LIST_DOC),
    Route("GET", _TOPIC, get_topic_layout, _DESCRIBE_TOPIC, _LABEL, TIDELOG, _TOPIC_DOC),
    Route("GET", "/topic-configs", list_topic_configs, RouteAccess.ANY_KEY, _LABEL, TIDELOG, _DOC),
    Route("GET", "/metadata", get_metadata, _DESCRIBE_CLUSTER, _LABEL, TIDELOG, _DOC),
)
