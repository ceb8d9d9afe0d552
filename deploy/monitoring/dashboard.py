"""The Grafana dashboard: writes its 1,700 lines of JSON from a table of rows and panels.

    python -m deploy.monitoring.dashboard > deploy/monitoring/dashboard.json

Tests compare the file with the output, and each metric in it with those that brokers export.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

WIDTH = 24
HEIGHT = 8
STAT_HEIGHT = 4
SHARES = (0.5, 0.95, 0.99)
BROKER = '{instance=~"$instance"}'


class Query(NamedTuple):
    """An expression of PromQL, and the legend of its lines."""

    expr: str
    legend: str = "{{instance}}"


class Panel(NamedTuple):
    """A plot, or a number if `is_stat`."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    about: str = ""
    is_stat: bool = False


def rate(name: str, by: str = "instance", labels: str = "") -> str:
    return (
        f'sum by ({by}) (rate(tidelog_{name}{{instance=~"$instance"{labels}}}[$__rate_interval]))'
    )


def quantile(share: float, route: str) -> str:
    name = "tidelog_http_request_seconds_bucket"
    selector = f'instance=~"$instance",route="{route}"'
    return (
        f"histogram_quantile({share}, sum by (le) (rate({name}{{{selector}}}[$__rate_interval])))"
    )


def latency(title: str, route: str) -> Panel:
    queries = [Query(quantile(share, route), f"p{share * 100:g}") for share in SHARES]
    return Panel(title, queries, "s")


def spread(title: str, name: str, unit: str = "short", about: str = "") -> Panel:
    """Return a panel with the quantiles of a histogram over all brokers."""
    buckets = f"sum by (le) (rate(tidelog_{name}_bucket{BROKER}[$__rate_interval]))"
    queries = [
        Query(f"histogram_quantile({share}, {buckets})", f"p{share * 100:g}") for share in SHARES
    ]
    return Panel(title, queries, unit, about)


def gauge(name: str) -> str:
    return f"tidelog_{name}{BROKER}"


PUTS = 'sum(rate(tidelog_store_requests_total{instance=~"$instance",verb=~"create|put|list"}[1h]))'
GETS = 'sum(rate(tidelog_store_requests_total{instance=~"$instance",verb="get"}[1h]))'
DAY_S = 86_400
HITS = rate("cache_hits_total", "cache")
TOPIC_IN = rate("topic_records_total", "topic", ',direction="in"')
STORE_SECONDS = rate("store_request_seconds_bucket", "le, verb")
KAFKA_SECONDS = rate("kafka_request_seconds_bucket", "le, api")
LAG = "sum by (group, topic, instance) (tidelog_group_lag)"

ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    (
        "At a glance",
        (
            Panel("Brokers", [Query('count(up{job="tidelog"} == 1)')], is_stat=True),
            Panel(
                "Records in",
                [Query(rate("records_total", "job", ',direction="in"'))],
                "rps",
                is_stat=True,
            ),
            Panel(
                "Records out",
                [Query(rate("records_total", "job", ',direction="out"'))],
                "rps",
                is_stat=True,
            ),
            Panel("Commits", [Query(rate("commits_total", "job"))], "ops", is_stat=True),
            Panel(
                "PUTs an entry",
                [
                    Query(
                        "sum(rate(tidelog_wal_puts_total[15m])) "
                        "/ sum(rate(tidelog_wal_entries_committed_total[15m]))"
                    )
                ],
                about="1 is ideal; lost races and unknown outcomes take more",
                is_stat=True,
            ),
            Panel(
                "Requests, cost a day",
                [Query(f"{DAY_S} * ({PUTS} * ${{put_price}} + {GETS} * ${{get_price}}) / 1e6")],
                "currencyUSD",
                "rate of the last hour, at the prices above; without storage and Delta's requests",
                is_stat=True,
            ),
        ),
    ),
    (
        "Traffic",
        (
            Panel("Records", [Query(rate("records_total", "direction"), "{{direction}}")], "rps"),
            Panel("Bytes", [Query(rate("bytes_total", "direction"), "{{direction}}")], "Bps"),
            Panel(
                "Requests by route",
                [Query(rate("http_requests_total", "route"), "{{route}}")],
                "reqps",
            ),
            Panel(
                "Answers by status",
                [Query(rate("http_requests_total", "status"), "{{status}}")],
                "reqps",
            ),
            Panel("Records in by topic", [Query(TOPIC_IN, "{{topic}}")], "rps"),
            Panel("Errors by kind", [Query(rate("errors_total", "kind"), "{{kind}}")], "ops"),
            latency("Produce, latency", "produce"),
            latency("Fetch, latency", "fetch"),
        ),
    ),
    (
        "Kafka clients",
        (
            Panel(
                "Kafka requests by API",
                [Query(rate("kafka_request_seconds_count", "api"), "{{api}}")],
                "reqps",
            ),
            Panel(
                "Errors in answers to Kafka requests",
                [Query(rate("kafka_errors_total", "api, error"), "{{api}} {{error}}")],
                "ops",
                "many are part of the protocol, such as MEMBER_ID_REQUIRED",
            ),
            Panel("Connections of Kafka clients", [Query(gauge("kafka_connections"))]),
            Panel(
                "Kafka requests, p99 by API",
                [
                    Query(
                        f"histogram_quantile(0.99, {KAFKA_SECONDS})",
                        "{{api}}",
                    )
                ],
                "s",
                "with waits for records (Fetch) and for members (JoinGroup, SyncGroup)",
            ),
            Panel(
                "Bytes of Kafka requests",
                [Query(rate("kafka_bytes_total", "direction"), "{{direction}}")],
                "Bps",
            ),
            Panel(
                "Kafka connections closed by brokers",
                [Query(rate("kafka_connections_closed_total", "reason"), "{{reason}}")],
                "ops",
            ),
        ),
    ),
    (
        "Commits",
        (
            spread(
                "Commit, latency",
                "commit_latency_seconds",
                "s",
                "from the encoded chunks of a flush to their commit",
            ),
            spread("Queue, wait", "queue_wait_seconds", "s", "time of a flush's oldest request"),
            Panel(
                "Flushes",
                [
                    Query(rate("flushes_total"), "{{instance}}"),
                    Query(rate("flushes_failed_total"), "{{instance}} failed"),
                ],
                "ops",
            ),
            spread("Bytes of a flush", "batch_bytes", "bytes"),
            spread("Requests of a flush", "batch_requests", about="requests that share a flush"),
            Panel(
                "Buffer",
                [
                    Query(gauge("buffered_bytes")),
                    Query(f"max({gauge('buffered_bytes_max')})", "limit: 429"),
                ],
                "bytes",
            ),
            Panel("Refused with 429", [Query(rate("append_throttled_total"))], "reqps"),
            Panel(
                "Lost races, unknown outcomes, expired views",
                [
                    Query(rate("wal_lost_total", "job"), "lost"),
                    Query(rate("wal_unknown_total", "job"), "unknown"),
                    Query(rate("wal_void_total", "job"), "expired"),
                ],
                "ops",
            ),
            Panel(
                "Forwards to the sequencer",
                [
                    Query(rate("handovers_total", "job"), "forwarded"),
                    Query(rate("handovers_refused_total", "job"), "refused"),
                    Query(rate("handovers_unanswered_total", "job"), "unanswered"),
                    Query(rate("own_commits_total", "job"), "committed by the broker"),
                ],
                "ops",
            ),
            Panel("Sequencer", [Query(gauge("is_sequencer"))], about="1: commits for all brokers"),
        ),
    ),
    (
        "Store",
        (
            Panel("Requests", [Query(rate("store_requests_total", "verb"), "{{verb}}")], "ops"),
            Panel(
                "Failures", [Query(rate("store_request_failures_total", "verb"), "{{verb}}")], "ops"
            ),
            Panel(
                "Latency, p99",
                [
                    Query(
                        f"histogram_quantile(0.99, {STORE_SECONDS})",
                        "{{verb}}",
                    )
                ],
                "s",
            ),
            Panel("Bytes", [Query(rate("store_bytes_total", "direction"), "{{direction}}")], "Bps"),
            Panel(
                "Age of the view",
                [Query(gauge("wal_view_age_seconds"))],
                "s",
                "time since the broker last read the end of the WAL",
            ),
            Panel("Collected", [Query(rate("garbage_objects_total", "job"), "objects")], "ops"),
            Panel(
                "CPU of merges", [Query(rate("merge_cpu_seconds_total", "job"), "cores")], "none"
            ),
        ),
    ),
    (
        "Tables",
        (
            Panel(
                "Unsealed",
                [Query("max by (topic) (tidelog_unsealed_bytes)", "{{topic}}")],
                "bytes",
                "bytes of committed records that are not yet in a table; watch them "
                "instead of Kafka's under-replicated partitions",
            ),
            Panel(
                "Age of the oldest unsealed record",
                [Query("max by (topic) (tidelog_unsealed_age_seconds)", "{{topic}}")],
                "s",
            ),
            Panel(
                "Segments sealed",
                [
                    Query(rate("sealed_segments_total")),
                    Query(rate("seal_failures_total"), "{{instance}} failed"),
                ],
                "ops",
            ),
            Panel("Bytes sealed", [Query(rate("sealed_bytes_total"))], "Bps"),
            Panel(
                "Since the last maintenance",
                [Query(f"min by (task) ({gauge('maintenance_age_seconds')})", "{{task}}")],
                "s",
                "time since the last complete retention, merge, collection and scrub",
            ),
        ),
    ),
    (
        "Reading",
        (
            Panel(
                "Cache hits",
                [
                    Query(
                        f"{HITS} / ({HITS} + {rate('cache_misses_total', 'cache')})",
                        "{{cache}}",
                    )
                ],
                "percentunit",
            ),
            Panel(
                "Bytes in caches",
                [Query(f"sum by (cache) ({gauge('cache_bytes')})", "{{cache}}")],
                "bytes",
            ),
            Panel(
                "Cold reads",
                [Query(rate("cold_reads_total"))],
                "ops",
                "row groups read from the store",
            ),
        ),
    ),
    (
        "Groups",
        (
            Panel(
                "Lag",
                [
                    Query(
                        f"max by (group, topic) ({LAG})",
                        "{{group}} {{topic}}",
                    )
                ],
                about="records after the committed offset",
            ),
            Panel(
                "Oldest unread record",
                [Query(f"max by (group) ({gauge('group_lag_seconds')})", "{{group}}")],
                "s",
                "age of the oldest record that the group has not read",
            ),
            Panel("Members", [Query(f"max({gauge('group_members')})", "members")]),
            Panel(
                "Rebalances",
                [Query(rate("group_rebalances_total", "group, reason"), "{{group}} {{reason}}")],
                "ops",
                "by the reason of each",
            ),
            Panel(
                "Until all members read again",
                [Query(f"max by (group) ({gauge('group_rebalance_seconds')})", "{{group}}")],
                "s",
                "time from the last rebalance; it grows while a member has not read",
            ),
        ),
    ),
    (
        "Processes",
        (
            Panel(
                "CPU",
                [
                    Query(
                        'rate(process_cpu_seconds_total{job="tidelog",instance=~"$instance"}'
                        "[$__rate_interval])"
                    )
                ],
                "percentunit",
            ),
            Panel(
                "Memory",
                [Query('process_resident_memory_bytes{job="tidelog",instance=~"$instance"}')],
                "bytes",
            ),
            Panel("Live brokers, by broker", [Query(gauge("live_brokers"))]),
        ),
    ),
)


def _panel(number: int, panel: Panel, x: int, y: int, width: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": number,
        "type": "stat" if panel.is_stat else "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": x, "y": y, "w": width, "h": STAT_HEIGHT if panel.is_stat else HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query.expr, "legendFormat": query.legend}
            for index, query in enumerate(panel.queries)
        ],
    }
    if not panel.is_stat:
        made["options"] = {"tooltip": {"mode": "multi", "sort": "desc"}}
    return made


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS:
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        made.append({"id": len(made) + 1, "type": "row", "title": title, "gridPos": place})
        y += 1
        width = 4 if panels[0].is_stat else 8
        for index, panel in enumerate(panels):
            x = index * width % WIDTH
            if index and not x:
                y += HEIGHT
            made.append(_panel(len(made) + 1, panel, x, y, width))
        y += STAT_HEIGHT if panels[0].is_stat else HEIGHT
    return made


def _textbox(name: str, label: str, value: str) -> dict[str, Any]:
    return {"type": "textbox", "name": name, "label": label, "query": value}


def dashboard() -> dict[str, Any]:
    """Return the dashboard in the form that Grafana imports."""
    source = {"type": "datasource", "name": "datasource", "query": "prometheus"}
    instance = {
        "type": "query",
        "name": "instance",
        "label": "Broker",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": 'label_values(up{job="tidelog"}, instance)',
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
    prices = [
        _textbox("put_price", "$ a million PUTs", "5"),
        _textbox("get_price", "$ a million GETs", "0.4"),
    ]
    return {
        "uid": "tidelog",
        "title": "tidelog",
        "tags": ["tidelog"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, instance, *prices]},
        "panels": _panels(),
    }


def text() -> str:
    """Return the content of the file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
