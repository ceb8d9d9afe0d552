"""Requests to the store have a purpose and a price; the largest is named with its setting."""

import dataclasses

import pytest

from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry import store_costs
from tidelog.service.telemetry.store_costs import (
    MONTH_S,
    RequestCount,
    Term,
    costs,
    counts_between,
    term_of,
)
from tidelog.storage.core import topic_configs
from tidelog.storage.store.metered import DELTALAKE, OWN, CountedRequest

TERMS = [term for term in vars(store_costs).values() if isinstance(term, Term)]


@pytest.mark.parametrize(
    ("verb", "kind", "duty", "term"),
    [
        ("create", "wal", "commit", store_costs.COMMITS),
        ("create", "wal", "request", store_costs.COMMITS),
        ("create", "data", "commit", store_costs.UPLOADS),
        ("put", "checkpoints", "checkpoint", store_costs.CHECKPOINTS),
        ("get", "wal", "poll", store_costs.POLLS),
        ("get", "wal", "request", store_costs.ENDS),
        ("get", "data", "request", store_costs.TAILS),
        ("put", "brokers", "liveness", store_costs.LIVENESS),
        ("list", "brokers", "liveness", store_costs.LIVENESS),
        ("list", "table log", "seal", store_costs.SEALS),
        ("put", "segment", "seal", store_costs.SEALS),
        ("get", "table log", "retention", store_costs.RETENTION),
        ("get", "table log", "request", store_costs.READS),
        ("create", "iceberg", "request", store_costs.ICEBERG),
        ("create", "segment", "merging", store_costs.MERGES),
        ("list", "data", "collection", store_costs.COLLECTION),
        ("get", "cluster", "request", store_costs.OTHER),
    ],
)
def test_request_has_purpose(verb: str, kind: str, duty: str, term: Term) -> None:
    assert term_of(CountedRequest(OWN, verb, kind, duty)) == term


def test_what_lowers_a_price_is_a_setting_or_a_topic_config() -> None:
    settings = {term.setting for term in TERMS if term.setting}
    assert len(settings) > 3
    names = {field.name for field in dataclasses.fields(Settings)}
    assert settings <= names | topic_configs.CONFIGS.keys()


def test_costs_are_added_over_brokers_and_the_largest_is_first() -> None:
    commits = RequestCount(OWN, "create", "wal", "commit", 10)
    lists = RequestCount(DELTALAKE, "list", "table log", "seal", 40)
    deletes = RequestCount(OWN, "delete", "data", "collection", 1000)
    first, second = costs([([commits, deletes], 10.0), ([commits, lists], 20.0)])
    assert (first.term, second.term) == (store_costs.SEALS, store_costs.COMMITS)
    assert first.usd_a_month == pytest.approx(2 * 5e-6 * MONTH_S)
    assert second.usd_a_month == pytest.approx(1.5 * 5e-6 * MONTH_S)
    assert first.requests_a_minute == {"list": pytest.approx(120)}
    assert second.requests_a_minute == {"put": pytest.approx(90)}
    assert costs([]) == []


def test_counts_are_those_of_the_period() -> None:
    old = {CountedRequest(OWN, "get", "wal", "poll"): 3, CountedRequest(OWN, "put", "x", "y"): 1}
    new = {**old, CountedRequest(OWN, "get", "wal", "poll"): 5}
    assert counts_between(old, new) == [RequestCount(OWN, "get", "wal", "poll", 2)]
