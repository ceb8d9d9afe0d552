"""A broker counts each request that its store gets: its own, and those of Delta's client."""

import re
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.support.broker import Broker, until
from tests.support.counting_s3 import RunningServer
from tests.support.seaweed import REGION

SEALS = 5
SHARE = 0.15
"""By so much the counts of Delta's client may be wrong: tests/contract/test_delta_requests.py has
its rules."""
ROUND_MS = 6000
"""Of retention: half of it and more is quiet."""
QUIET_S = 1.0
Key = tuple[str, str]
SAMPLE = re.compile(r"^tidelog_store_requests_total\{(.*?)\} (\S+)$", re.MULTILINE)
VERBS = {"create": "PUT", "put": "PUT", "get": "GET", "list": "LIST", "delete": "DELETE"}
AS_GET = {"HEAD": "GET"}


def counted_by(broker: Broker) -> Counter[Key]:
    """By client and verb of S3."""
    counts: Counter[Key] = Counter()
    for labels, count in SAMPLE.findall(httpx.get(f"{broker.base_url}/metrics").text):
        values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        counts[values["client"], VERBS[values["verb"]]] += int(float(count))
    return counts


def duties_of(broker: Broker) -> set[str]:
    text = httpx.get(f"{broker.base_url}/metrics").text
    return set(re.findall(r'tidelog_store_requests_total\{[^}]*duty="(\w+)"', text))


def seen_by(server: RunningServer) -> Counter[Key]:
    counts: Counter[Key] = Counter()
    for request, count in server.counts().requests.items():
        counts[request.client, AS_GET.get(request.verb, request.verb)] += count
    return counts


def read_both(broker: Broker, server: RunningServer) -> tuple[Counter[Key], Counter[Key]]:
    """Return the counts of broker and server at a moment without a request."""
    pairs: list[tuple[Counter[Key], Counter[Key]]] = []

    def is_quiet() -> bool:
        pairs.append((counted_by(broker), seen_by(server)))
        time.sleep(QUIET_S)
        return pairs[-1] == (counted_by(broker), seen_by(server))

    until(is_quiet)
    return pairs[-1]


def test_no_request_goes_past_the_meter(counting_s3: RunningServer, tmp_path: Path) -> None:
    settings = {
        "s3_endpoint": counting_s3.endpoint_url,
        "s3_region": REGION,
        "retention_check_interval_ms": ROUND_MS,
        "poll_interval_ms": 60_000,
    }
    store = f"s3://{counting_s3.bucket}/past-the-meter"
    with Broker(tmp_path, store, **settings) as broker:
        # The probe of the store at the start is not the cluster's.
        old_counts, old_seen = read_both(broker, counting_s3)
        broker.create_topic("t")
        for number in range(SEALS):
            records = {"records": [{"value": str(number)}]}
            json = {"content-type": "application/vnd.kafka.json.v2+json"}
            httpx.post(f"{broker.base_url}/topics/t", json=records, headers=json).raise_for_status()
            httpx.post(f"{broker.base_url}/admin/topics/t/seal").raise_for_status()
        assert len(broker.records("t", "--from", "beginning")) == SEALS
        until(lambda: {"retention", "collection"} <= duties_of(broker))
        counts, seen = read_both(broker, counting_s3)
    counts, seen = counts - old_counts, seen - old_seen
    assert seen["tidelog", "LIST"] > 0
    assert seen["deltalake", "LIST"] > 0, "it opens the table"
    for key in {*counts, *seen}:
        share = SHARE if key[0] == "deltalake" else 0
        unmetered = 1 if key == ("tidelog", "LIST") else 0  # collection opens a store
        assert counts[key] + unmetered == pytest.approx(seen[key], rel=share), key
