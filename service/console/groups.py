"""The list of groups with their lag, and the history of a group's lag."""

from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import Request
from pydantic import BaseModel, Field

from tidelog.service.http.paging import WantedPage, answer_page
from tidelog.service.http.route import TIDELOG, Permission, Route, RouteAccess, RouteDoc
from tidelog.service.operations.rights import DESCRIBE_GROUP
from tidelog.service.routes.dependencies import (
    ERRORS,
    BrokerOperations,
    EmptyListing,
    FreshBroker,
    Listing,
    Rights,
)
from tidelog.service.routes.group_resources_v3 import GroupState, assignor_of, state_of
from tidelog.service.slices import in_order
from tidelog.service.telemetry.group_lags import GroupLags, LagTotals, group_ids
from tidelog.service.telemetry.rates import RateSampler
from tidelog.storage.broker import Broker


class GroupSummary(BaseModel):
    consumer_group_id: str
    state: GroupState
    partition_assignor: str
    generation: int
    members: int
    topics: list[str]
    partitions: int = Field(description="partitions with a committed offset or a reader")
    total_lag: int
    max_lag: int
    lag_seconds: float | None = Field(description="age of the oldest unread record, or null")


class GroupLagHistory(BaseModel):
    """Lag of a group by topic.

    A value is null if, at that time, the group had no committed offset and no reader in the topic,
    or this broker did not measure the lag.
    """

    step_ms: int
    at_ms: list[int]
    topics: dict[str, list[int | None]]


async def list_group_summaries(
    request: Request,
    broker: FreshBroker,
    operations: BrokerOperations,
    rights: Rights,
    empty: EmptyListing,
    page: WantedPage,
) -> Listing[GroupSummary]:
    """List every group that the caller may describe, with its members and its lag."""
    totals: LagTotals = request.app.state.reports.telemetry.lags
    await totals.refresh_and_look()
    lags_of = partial(operations.groups.lags, rights, times=totals.times)

    def summary(group_id: str) -> Awaitable[GroupSummary] | None:
        if not operations.groups.is_shown(rights, group_id):
            return None
        return _group(broker, group_id, lags_of)

    ids = await in_order(group_ids(broker), page.key(str))
    listing: Listing[GroupSummary] = await answer_page(page, empty, ids, summary)
    return listing


async def _group(
    broker: Broker, group_id: str, lags_of: Callable[[str], Awaitable[GroupLags]]
) -> GroupSummary:
    group = broker.state.members.get(group_id)
    lags = await lags_of(group_id)
    behind = await lags.summary()
    return GroupSummary(
        consumer_group_id=group_id,
        state=state_of(group),
        partition_assignor=assignor_of(group),
        generation=0 if group is None else group.generation,
        members=0 if group is None else len(group.members),
        topics=sorted(behind.topics),
        partitions=behind.partitions,
        total_lag=behind.total,
        max_lag=0 if behind.largest is None else behind.largest.lag,
        lag_seconds=behind.seconds,
    )


async def get_lag_history(
    request: Request, consumer_group_id: str, operations: BrokerOperations, rights: Rights
) -> GroupLagHistory:
    """Return the group's lag in each topic over the last half hour.

    This broker has measured the lag since its start.
    """
    rates: RateSampler = request.app.state.reports.rates
    past = rates.lag_history(consumer_group_id)
    count = max((len(values) for values in past.topics.values()), default=0)
    first_ms = past.end_ms - (count - 1) * past.step_ms
    at_ms = [first_ms + number * past.step_ms for number in range(count)]
    shown = {
        topic: lags
        for topic, lags in past.topics.items()
        if operations.topics.is_shown(rights, topic)
    }
    return GroupLagHistory(step_ms=past.step_ms, at_ms=at_ms, topics=shown)


_DESCRIBE_GROUP = Permission(DESCRIBE_GROUP, "consumer_group_id")
_LABEL = "console"
_LAG_HISTORY = "/groups/{consumer_group_id}/lag-history"
_DOC = RouteDoc({503: ERRORS[503]})
_LIST_DOC = RouteDoc({400: ERRORS[400], 503: ERRORS[503]})

ROUTES = (
    Route(
        "GET",
        "/groups",
        list_group_summaries,
        RouteAccess.CHECKED_BY_HANDLER,
        _LABEL,
        TIDELOG,
        _LIST_DOC,
    ),
    Route("GET", _LAG_HISTORY, get_lag_history, _DESCRIBE_GROUP, _LABEL, TIDELOG, _DOC),
)
