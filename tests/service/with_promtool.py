"""Which alerts fire: the rules of deploy/monitoring on series, by `promtool test rules`.

`make test-alerts` runs these tests: pytest collects no file of this name by itself, because
promtool is not a Python package. Each rule has series with which it fires and series with which it
does not. Unless a case says otherwise, three brokers export the series, two clusters are in one
Prometheus, and the fault is in one cluster: an alert with the wrong label `cluster` fails the case.
"""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import yaml

from deploy.lint import ToolMissing, tool

ALERTS = Path(__file__).parents[2] / "deploy" / "monitoring" / "alerts.yml"
RULES: dict[str, dict[str, Any]] = {
    rule["alert"].removeprefix("Tidelog"): rule
    for group in yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]
}
BROKERS = ("a", "b", "c")
HOUR = "1h"


class Case(NamedTuple):
    """Series of the cluster `one`, by name with labels, and the alert at the time `at`.

    `fires` has the labels of the alert beside `severity` and `cluster`, or is None if it does not
    fire. `calm` are the series of the cluster `two`, where it never fires. Each broker exports the
    series; `@a ` before the name is the broker `a` alone, and `@a/JOB ` its target of another job.
    """

    alert: str
    about: str
    series: dict[str, str]
    fires: dict[str, str] | None
    at: str = HOUR
    calm: Mapping[str, str] = MappingProxyType({})


OF_A = {"instance": "a"}
FROM_A = OF_A | {"job": "tidelog"}
"""The labels of a series of the first broker."""
GROUP = {"group": "g"}
TOPIC = {"topic": "t"}
LAG = 'tidelog_group_lag{group="g",topic="t",partition="0"}'
LAGS = 'tidelog_group_lag_records{group="g"}'
AGE = 'tidelog_group_lag_seconds{group="g"}'
SIZE = 'tidelog_group_size{group="g"}'
ERRORS = 'tidelog_http_requests_total{route="produce",status="5xx"}'
FINE = 'tidelog_http_requests_total{route="produce",status="2xx"}'
FAILED = 'tidelog_store_request_failures_total{verb="get"}'
ASKED = 'tidelog_store_requests_total{verb="get"}'
KAFKA_FAILED = 'tidelog_kafka_errors_total{api="Produce",error="KAFKA_STORAGE_ERROR"}'
KAFKA_REFUSED = 'tidelog_kafka_errors_total{api="Produce",error="TOPIC_AUTHORIZATION_FAILED"}'
KAFKA_ASKED = 'tidelog_kafka_request_seconds_count{api="Produce"}'
KEYS = 'tidelog_auth_failures_total{kind="unknown"}'
RETAIN = 'tidelog_maintenance_age_seconds{task="retain"}'
COMPACT = 'tidelog_maintenance_age_seconds{task="compact"}'
SCRUB = 'tidelog_maintenance_age_seconds{task="scrub"}'
RETAIN_FAILED = 'tidelog_maintenance_failed{task="retain"}'
SHARE = 'tidelog_hottest_partition_share{topic="t"}'
SKEW = 'tidelog_hottest_partition_skew{topic="t"}'
PUTS, ENTRIES = "tidelog_wal_puts_total", "tidelog_wal_entries_committed_total"
SUM, FLUSHES = "tidelog_commit_latency_seconds_sum", "tidelog_flushes_total"
FLUSHES_FAILED, LIVE = "tidelog_flushes_failed_total", "tidelog_live_brokers"
UNSEALED = 'tidelog_unsealed_bytes{topic="t"}'
UNSEALED_S = 'tidelog_unsealed_age_seconds{topic="t"}'
UNKNOWN, THROTTLED = "tidelog_wal_unknown_total", "tidelog_append_throttled_total"
VIEW = "tidelog_wal_view_age_seconds"
SEALS, VOID = "tidelog_seal_failures_total", "tidelog_wal_void_total"
CASES = (
    Case(
        "BrokerDown",
        "a broker does not answer",
        {
            "@a up": "1x20 0x100",
            "@a " + LIVE: "3x20 _x100",
            "@b up": "1x120",
            "@b " + LIVE: "3x120",
        },
        FROM_A,
    ),
    Case(
        "BrokerDown",
        "a broker restarts within a minute",
        {"@a up": "1x20 0 1x100", "@a " + LIVE: "3x20 _ 3x100"},
        None,
        "22m",
    ),
    Case(
        "BrokerDown",
        "another service of the same Prometheus is down",
        {"@a/web up": "0x120", "@b up": "1x120", "@b " + LIVE: "3x120"},
        None,
    ),
    Case(
        "AllBrokersDown",
        "no broker of one cluster answers, with any job name",
        {"@a/kubernetes-pods " + LIVE: "3x20 _x100", "@b/kubernetes-pods " + LIVE: "3x20 _x100"},
        {},
        calm={LIVE: "3x120"},
    ),
    Case(
        "AllBrokersDown",
        "one broker answers, and the job has another name",
        {"@a/kubernetes-pods " + LIVE: "3x20 _x100", "@b/kubernetes-pods " + LIVE: "3x120"},
        None,
    ),
    Case(
        "ClustersNotLabelled",
        "brokers of two clusters have one label",
        {'@a tidelog_info{cluster_id="x"}': "1x120", '@b tidelog_info{cluster_id="y"}': "1x120"},
        {},
    ),
    Case(
        "ClustersNotLabelled",
        "three brokers of one cluster",
        {'tidelog_info{cluster_id="x"}': "1x120"},
        None,
        calm={'tidelog_info{cluster_id="y"}': "1x120"},
    ),
    Case("FlushesFail", "each minute", {"@a " + FLUSHES_FAILED: "0+1x120"}, FROM_A),
    Case("FlushesFail", "one flush, an hour ago", {FLUSHES_FAILED: "0x10 1x110"}, None),
    Case("FlushesFail", "a restart", {FLUSHES_FAILED: "5x55 0x60"}, None),
    Case("FlushesFail", "a counter that begins at 1", {FLUSHES_FAILED: "_x55 1x60"}, None),
    Case("OutcomesUnknown", "12 a minute", {"@a " + UNKNOWN: "0+12x120"}, FROM_A),
    Case("OutcomesUnknown", "2 a minute", {UNKNOWN: "1+2x120"}, None),
    Case("AcksSlow", "2 s a flush", {"@a " + SUM: "0+120x120", "@a " + FLUSHES: "0+60x120"}, OF_A),
    Case("AcksSlow", "0.5 s a flush", {SUM: "0+30x120", FLUSHES: "0+60x120"}, None),
    Case("AcksSlow", "no flush", {SUM: "7x120", FLUSHES: "60x120"}, None),
    Case("Throttled", "all the time", {"@a " + THROTTLED: "0+1x120"}, FROM_A),
    Case("Throttled", "one burst, then a restart", {THROTTLED: "0x20 90x20 0x80"}, None),
    Case(
        "BufferFilling",
        "80 %",
        {"@a tidelog_buffered_bytes": "80x120", "@a tidelog_buffered_bytes_max": "100x120"},
        FROM_A,
    ),
    Case(
        "BufferFilling",
        "a peak of a minute",
        {"tidelog_buffered_bytes": "1x59 99 1x60", "tidelog_buffered_bytes_max": "100x120"},
        None,
    ),
    Case("Errors", "a tenth", {"@a " + ERRORS: "0+10x120", "@a " + FINE: "0+90x120"}, OF_A),
    Case("Errors", "one in a thousand", {ERRORS: "0+1x120", FINE: "0+999x120"}, None),
    Case(
        "Errors",
        "a counter of errors that begins at 1",
        {ERRORS: "_x55 1x65", FINE: "0+90x120"},
        None,
    ),
    Case(
        "KafkaErrors",
        "a tenth",
        {"@a " + KAFKA_FAILED: "0+10x120", "@a " + KAFKA_ASKED: "0+100x120"},
        OF_A,
    ),
    Case(
        "KafkaErrors",
        "refusals of rights are not counted",
        {KAFKA_REFUSED: "0+50x120", KAFKA_ASKED: "0+100x120"},
        None,
    ),
    Case("LostRaces", "2 PUTs an entry", {PUTS: "0+20x120", ENTRIES: "0+10x120"}, {}),
    Case("LostRaces", "1.1 PUTs an entry", {PUTS: "0+11x120", ENTRIES: "0+10x120"}, None),
    Case(
        "LostRaces",
        "only the sequencer commits; the others restart",
        {"@a " + PUTS: "0+60x120", "@a " + ENTRIES: "0+60x120", "@b " + PUTS: "9x60 0x60"},
        None,
    ),
    Case("BrokersDisagree", "3 and 2", {"@a " + LIVE: "3x120", "@b " + LIVE: "2x120"}, {}),
    Case(
        "BrokersDisagree",
        "clusters of different sizes",
        {LIVE: "3x120"},
        None,
        calm={LIVE: "5x120"},
    ),
    Case(
        "BrokersDisagree",
        "a restart of a minute",
        {"@a " + LIVE: "3x58 2 3x60", "@b " + LIVE: "3x58 _ 3x60"},
        None,
    ),
    Case("NoSequencer", "none", {"tidelog_is_sequencer": "0x120"}, {}),
    Case(
        "NoSequencer",
        "two",
        {"@a tidelog_is_sequencer": "1x120", "@b tidelog_is_sequencer": "1x120"},
        {},
    ),
    Case(
        "NoSequencer",
        "one in each cluster",
        {"@a tidelog_is_sequencer": "1x120", "@b tidelog_is_sequencer": "0x120"},
        None,
        calm={"@a tidelog_is_sequencer": "1x120"},
    ),
    Case("TailGrows", "5 GB", {UNSEALED: "5e9x120"}, TOPIC),
    Case("TailGrows", "2 GB on each of three brokers", {UNSEALED: "2e9x120"}, None),
    Case("TableInDoubt", "one", {"@a tidelog_tables_in_doubt": "1x120"}, {}),
    Case("TableInDoubt", "none", {"tidelog_tables_in_doubt": "0x120"}, None),
    Case("TailDamaged", "one", {"@a tidelog_damaged_tails": "1x120"}, {}),
    Case("TailDamaged", "none", {"tidelog_damaged_tails": "0x120"}, None),
    Case("TailOld", "three hours", {UNSEALED_S: "10800x120"}, TOPIC),
    Case("TailOld", "an hour", {UNSEALED_S: "3600x120"}, None),
    Case("StoreFails", "a tenth", {"@a " + FAILED: "0+6x120", "@a " + ASKED: "0+60x120"}, OF_A),
    Case("StoreFails", "one request", {FAILED: "0x50 1x70", ASKED: "0+60x120"}, None),
    Case("ViewOld", "ten minutes", {"@a tidelog_wal_view_age_seconds": "600x120"}, OF_A),
    Case("ViewOld", "a second", {VIEW: "1x120"}, None),
    Case("SealsFail", "each minute", {"@a " + SEALS: "0+1x120"}, FROM_A),
    Case("SealsFail", "one seal, and a restart", {SEALS: "1x50 0x5 1x65"}, None),
    Case("KeysRefused", "2 a second", {"@a " + KEYS: "0+120x120"}, OF_A | {"kind": "unknown"}),
    Case("KeysRefused", "2 a minute, from 1 on", {KEYS: "_x50 1+2x70"}, None),
    Case("ViewsVoid", "each ten minutes", {"@a " + VOID: "0x9 1x9 2x9 3x9 4x80"}, FROM_A),
    Case("ViewsVoid", "once, and a restart", {VOID: "4x30 0x10 1x80"}, None),
    Case("MaintenanceLate", "retention", {RETAIN: "90000+60x120"}, {"task": "retain"}),
    Case(
        "MaintenanceLate",
        "one broker ran it",
        {"@a " + RETAIN: "90000+60x120", "@b " + RETAIN: "300x120"},
        None,
    ),
    Case("MaintenanceLate", "merging", {COMPACT: "605000x120"}, {"task": "compact"}),
    Case("MaintenanceLate", "merging, a day", {COMPACT: "90000x120"}, None),
    Case("MaintenanceLate", "scrub", {SCRUB: "2600000x120"}, {"task": "scrub"}),
    Case("MaintenanceLate", "scrub, a week", {SCRUB: "604800x120"}, None),
    Case("MaintenanceFails", "always", {RETAIN_FAILED: "1x300"}, {"task": "retain"}, "4h"),
    Case(
        "MaintenanceFails",
        "on one of two brokers",
        {"@a " + RETAIN_FAILED: "1x300", "@b " + RETAIN_FAILED: "0x300"},
        None,
        "4h",
    ),
    Case("ScrubFoundDamage", "two objects", {"tidelog_scrub_damage": "2x120"}, {}),
    Case("ScrubFoundDamage", "none", {"tidelog_scrub_damage": "0x120"}, None),
    Case("GroupFallsBehind", "it grows", {LAG: "150000+10x120"}, GROUP | TOPIC),
    Case("GroupFallsBehind", "three brokers export one lag", {LAG: "40000+10x120"}, None),
    Case("GroupFallsBehind", "it shrinks", {LAG: "900000-10x120"}, None),
    Case(
        "GroupFallsBehind",
        "a broker restarts while the lag grows",
        {"@a " + LAG: "150000+10x50 _x2 150520+10x70", "@b " + LAG: "150000+10x120"},
        GROUP | TOPIC,
    ),
    Case("GroupLate", "two hours", {AGE: "7200x120", SIZE: "3x120"}, GROUP),
    Case("GroupLate", "a minute", {AGE: "60x120", SIZE: "3x120"}, None),
    Case("GroupLate", "without members", {AGE: "7200x120", SIZE: "0x120"}, None),
    Case("GroupWithoutMembers", "never had any", {LAGS: "5x120"}, GROUP),
    Case("GroupWithoutMembers", "they ended", {LAGS: "5x120", SIZE: "0x120"}, GROUP),
    Case("GroupWithoutMembers", "one member", {LAGS: "5x120", SIZE: "1x120"}, None),
    Case("GroupWithoutMembers", "nothing to read", {LAGS: "0x120"}, None),
    Case("HotPartition", "most of eight", {SHARE: "0.9x120", SKEW: "7.2x120"}, TOPIC),
    Case("HotPartition", "half of two", {SHARE: "0.6x120", SKEW: "1.2x120"}, None),
)


@pytest.fixture(scope="session")
def promtool() -> str:
    try:
        return tool("promtool", "apt-get install prometheus, or make test-alerts PROMTOOL=PATH")
    except ToolMissing as error:
        pytest.skip(str(error))


def test_each_rule_has_cases_both_ways() -> None:
    fire = {case.alert for case in CASES if case.fires is not None}
    calm = {case.alert for case in CASES if case.fires is None}
    assert fire == calm == set(RULES)


@pytest.mark.parametrize("alert", RULES)
def test_rule_fires_when_it_should(promtool: str, alert: str, tmp_path: Path) -> None:
    tests = [_test(case) for case in CASES if case.alert == alert]
    # Without annotations: promtool would compare their texts, too. `check rules` parses them.
    rule = {key: value for key, value in RULES[alert].items() if key != "annotations"}
    rules = tmp_path / "rules.yml"
    rules.write_text(json.dumps({"groups": [{"name": "tidelog", "rules": [rule]}]}))
    suite = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps(suite))
    done = subprocess.run(
        [promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _test(case: Case) -> dict[str, Any]:
    series = _series("one", case.series) + _series("two", case.calm)
    expected: dict[str, Any] = {"eval_time": case.at, "alertname": f"Tidelog{case.alert}"}
    rule = RULES[case.alert]
    if case.fires is not None:
        labels = {"cluster": "one", **rule["labels"], **case.fires}
        expected["exp_alerts"] = [{"exp_labels": labels}]
    return {
        "name": f"{case.alert}: {case.about}",
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": [expected],
    }


def _series(cluster: str, values_by_key: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {"series": _named(cluster, broker, job, name), "values": values}
        for key, values in values_by_key.items()
        for name, broker, job in _exporters(key)
    ]


def _exporters(key: str) -> Sequence[tuple[str, str, str]]:
    """The name of a series, and the broker and the job of each target that exports it."""
    match = re.fullmatch(r"@(\w)(?:/(\S+))? (.*)", key)
    if match is None:
        return [(key, broker, "tidelog") for broker in BROKERS]
    return [(match[3], match[1], match[2] or "tidelog")]


def _named(cluster: str, broker: str, job: str, name: str) -> str:
    metric, _, labels = name.partition("{")
    place = f'cluster="{cluster}",job="{job}",instance="{broker}"'
    own = labels.removesuffix("}")
    return f"{metric}{{{own + ',' if own else ''}{place}}}"
