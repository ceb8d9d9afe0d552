"""The dashboard and the alerts of deploy/monitoring: every expression parses.

Brokers export every metric and label in them, and their links are valid.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import Metric

from deploy.monitoring import dashboard
from tests.service.conftest import QUIET
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.service.telemetry.metrics import Telemetry
from tidelog.storage.broker import Broker
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.metered import MeteredStore

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "monitoring" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
BY_SCRAPE = {"up"}
LABELS_OF_SCRAPE = {"cluster", "instance", "job", "le"}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    for panel in dashboard.dashboard()["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
            yield panel["title"], re.sub(r"\$\{\w+\}", "5", expr)


EXPRESSIONS = [*dashboard_expressions(), *((rule["alert"], rule["expr"]) for rule in RULES)]


def selectors(expr: str) -> list[promql_parser.VectorSelector]:
    nodes: list[promql_parser.VectorSelector] = []

    def look(node: object) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            nodes.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expr), look)
    return nodes


@pytest.fixture
async def exported() -> dict[str, set[str]]:
    """Names of samples, and the labels of each."""
    http, clock = HttpCounters(), SystemClock()
    http.observe("produce", 200, 0.1)
    log = await Broker.open(MeteredStore(MemoryStore(), clock), QUIET, clock=clock, name="broker-1")
    labels_by_name: dict[str, set[str]] = {}
    for family in Telemetry(log, http, "1")._registry.collect():
        for suffix in SUFFIXES.get(family.type, ("",)):
            labels_by_name[family.name + suffix] = labels_of(family)
    await log.close()
    return labels_by_name


def labels_of(family: Metric) -> set[str]:
    return {*getattr(family, "_labelnames", ()), *(n for s in family.samples for n in s.labels)}


def test_dashboard_in_tree_is_one_that_is_written_down() -> None:
    text = (DEPLOY / "monitoring" / "dashboard.json").read_text()
    assert text == dashboard.text(), "python -m deploy.monitoring.dashboard writes it"
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 30
    places = [panel["gridPos"] for panel in panels]
    cells = [(p["x"] + x, p["y"] + y) for p in places for x in range(p["w"]) for y in range(p["h"])]
    assert len(cells) == len(set(cells)), "panels lie on each other"
    assert all(place["x"] + place["w"] <= dashboard.WIDTH for place in places)


async def test_every_metric_that_is_looked_at_is_exported(exported: dict[str, set[str]]) -> None:
    labels_by_name = exported
    assert "tidelog_http_request_seconds_bucket" in labels_by_name
    for source, expr in EXPRESSIONS:
        for selector in selectors(expr):
            if selector.name in BY_SCRAPE:
                continue
            assert selector.name in labels_by_name, f"{source}: no broker exports {selector.name}"
            labels = {matcher.name for matcher in selector.matchers.matchers}
            assert labels <= labels_by_name[selector.name] | LABELS_OF_SCRAPE, f"{source}: {labels}"


async def test_what_is_summed_by_is_label_of_it(exported: dict[str, set[str]]) -> None:
    labels_by_name = exported
    grouped = 0
    for source, expr in EXPRESSIONS:
        for by in re.findall(r"\bby \(([^)]*)\)", expr):
            labels = {name.strip() for name in by.split(",")} - LABELS_OF_SCRAPE
            names = {selector.name for selector in selectors(expr)} - BY_SCRAPE
            assert all(labels <= labels_by_name[name] for name in names), f"{source}: {labels}"
            grouped += 1
    assert grouped > 20


def anchors() -> set[str]:
    """The anchors of deploy/README.md, as the links of alerts and of `tidelog status` have them."""
    titles = re.findall(r"^#+ (.+)$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"page", "ticket"}
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert page == "https://example.com/tidelog/deploy/README.md"
    assert anchor in anchors(), f"deploy/README.md has no part {anchor}"
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]


async def test_example_of_autoscaling_reads_metric(exported: dict[str, set[str]]) -> None:
    path = DEPLOY / "kubernetes" / "autoscaling" / "consumer.yaml"
    scaled = yaml.safe_load(path.read_text())
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = scaled["spec"]
    assert spec["scaleTargetRef"]["name"]
    assert 0 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
    (trigger,) = spec["triggers"]
    # KEDA reads the values of a trigger as text.
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert float(trigger["metadata"]["threshold"]) > 0
    (selector,) = selectors(trigger["metadata"]["query"])
    assert selector.name == "tidelog_group_lag"
    labels = {matcher.name for matcher in selector.matchers.matchers}
    assert labels <= exported["tidelog_group_lag"] | LABELS_OF_SCRAPE
