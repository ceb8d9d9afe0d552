"""The price of a broker's requests to the store, by what they are for. Pure.

A term is a reason to ask the store. Each has the setting or the topic config that lowers it, if
there is one.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from tidelog.storage.store.metered import CountedRequest

PUT_USD, GET_USD = 5e-6, 0.4e-6
"""Prices of S3 Standard in us-east-1. A PUT (`create`, `put`) and a LIST have the same price."""
PRICES = {"create": PUT_USD, "put": PUT_USD, "list": PUT_USD, "get": GET_USD}
"""By verb; a `delete` is free."""
MINUTE_S, MONTH_S = 60, 2_628_000


class Term(NamedTuple):
    """A reason to ask the store, and the setting or topic config that lowers its price."""

    name: str
    setting: str = ""


COMMITS = Term("commits", "commits_per_minute")
UPLOADS = Term("uploads of large flushes", "sequencer_upload_bytes")
CHECKPOINTS = Term("checkpoints")
POLLS = Term("polls of the log's end", "poll_interval_ms")
ENDS = Term("reads and probes at the log's end", "read_freshness_ms")
TAILS = Term("tails of other brokers")
LIVENESS = Term("liveness of brokers", "broker_heartbeat_interval_ms")
SEALS = Term("seals", "segment.ms")
RETENTION = Term("retention of tables", "retention_check_interval_ms")
COLLECTION = Term("collection of garbage", "retention_check_interval_ms")
COMPACTION = Term("compaction")
MERGES = Term("merges of small segments", "merge_after_ms")
READS = Term("reads of tables")
ICEBERG = Term("loads of Iceberg tables", "iceberg_refresh_ms")
RESULTS = Term("results of maintenance")
OTHER = Term("other")

_BY_DUTY = {
    "seal": SEALS,
    "retention": RETENTION,
    "tables": RETENTION,
    "collection": COLLECTION,
    "compaction": COMPACTION,
    "merging": MERGES,
    "checkpoint": CHECKPOINTS,
    "liveness": LIVENESS,
}
_BY_WRITTEN_KIND = {
    "wal": COMMITS,
    "data": UPLOADS,
    "checkpoints": CHECKPOINTS,
    "brokers": LIVENESS,
    "iceberg": ICEBERG,
}
_BY_READ_KIND = {
    "wal": ENDS,
    "data": TAILS,
    "brokers": LIVENESS,
    "segment": READS,
    "table log": READS,
    "maintenance": RESULTS,
    "iceberg": ICEBERG,
}


class RequestCount(msgspec.Struct, array_like=True):
    """Requests of one kind in a period."""

    client: str
    verb: str
    kind: str
    duty: str
    count: int


class TermCost(NamedTuple):
    """The pace of a term's requests by verb, and their price at S3 Standard in dollars a month.

    A `create` is a PUT.
    """

    term: Term
    requests_a_minute: Mapping[str, float]
    usd_a_month: float


def term_of(request: RequestCount | CountedRequest) -> Term:
    """Return the reason of a request."""
    if (term := _BY_DUTY.get(request.duty)) is not None:
        return term
    if request.verb in {"create", "put"}:
        return _BY_WRITTEN_KIND.get(request.kind, OTHER)
    if request.duty == "poll" and request.kind == "wal":
        return POLLS
    return _BY_READ_KIND.get(request.kind, OTHER)


def counts_between(
    old: Mapping[CountedRequest, int], new: Mapping[CountedRequest, int]
) -> list[RequestCount]:
    """Return the requests that were counted since `old`."""
    return [
        RequestCount(*request, count=count - old.get(request, 0))
        for request, count in new.items()
        if count > old.get(request, 0)
    ]


def costs(brokers: Iterable[tuple[Iterable[RequestCount], float]]) -> list[TermCost]:
    """Return the pace and the price of each term that is not free, the largest price first.

    Each broker has its counts, and the seconds in which they were counted.
    """
    paces: dict[Term, dict[str, float]] = {}
    for counts, seconds in brokers:
        for request in counts:
            pace = paces.setdefault(term_of(request), {})
            verb = "put" if request.verb == "create" else request.verb
            pace[verb] = pace.get(verb, 0.0) + request.count * MINUTE_S / seconds
    terms = [TermCost(term, pace, _usd_a_month(pace)) for term, pace in paces.items()]
    return sorted((cost for cost in terms if cost.usd_a_month), key=lambda cost: -cost.usd_a_month)


def _usd_a_month(requests_a_minute: Mapping[str, float]) -> float:
    usd_a_minute = sum(PRICES.get(verb, 0.0) * pace for verb, pace in requests_a_minute.items())
    return usd_a_minute * MONTH_S / MINUTE_S
