"""The Helm chart: Helm's library renders it with each example, and what the manifests say is so."""

import tomllib
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.repo.test_house_rules import ROOT
from tidelog.service.server.serve import STOP_S_MAX
from tidelog.service.settings.settings import PREFIX, load

helm = pytest.importorskip("helm_python", reason="no wheel of helm-python-sdk for this system")

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "tidelog"
EXAMPLES = {path.stem: path for path in sorted((DEPLOY / "helm" / "examples").iterdir())}
KUBERNETES = "1.33"
MARGIN_S = 5.0
OPERATOR = "monitoring.coreos.com/v1"
"""Kubernetes' schemas do not have the resources of the Prometheus operator."""

Manifest = dict[str, Any]


def rendered(values: dict[str, Any], release: str = "log") -> list[Manifest]:
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name=release, namespace="tidelog")
    return [
        manifest
        for name, text in sorted(texts.items())
        if name.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]


def values_of(example: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(EXAMPLES[example].read_text())
    return values


@pytest.fixture(scope="module", params=sorted(EXAMPLES))
def example(request: pytest.FixtureRequest) -> tuple[str, list[Manifest]]:
    return request.param, rendered(values_of(request.param))


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {
        manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind
    }


def pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    """The templates of all pods."""
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            yield manifest["spec"]["template"]
        if manifest["kind"] == "CronJob":
            yield manifest["spec"]["jobTemplate"]["spec"]["template"]


def test_the_examples_are_these() -> None:
    assert sorted(EXAMPLES) == ["eks", "keys", "minio", "s3", "seaweedfs"]


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_helm_has_no_complaint(name: str) -> None:
    report = helm.lint(str(CHART), values_of(name), strict=True)
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


def test_kubernetes_knows_every_field(example: tuple[str, list[Manifest]]) -> None:
    _, manifests = example
    for manifest in manifests:
        if manifest["apiVersion"] != OPERATOR:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(set(names)) == len(names)


def test_pods_have_no_variables_of_services(example: tuple[str, list[Manifest]]) -> None:
    """A Service `tidelog` would set TIDELOG_PORT to a URL in each pod."""
    _, manifests = example
    templates = list(pods(manifests))
    assert templates
    for template in templates:
        assert template["spec"]["enableServiceLinks"] is False


def test_selectors_find_the_brokers(example: tuple[str, list[Manifest]]) -> None:
    _, manifests = example
    (deployment,) = of_kind(manifests, "Deployment").values()
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    ports = deployment["spec"]["template"]["spec"]["containers"][0]["ports"]
    kinds = set()
    for manifest in manifests:
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Service":
                assert spec["selector"].items() <= labels.items()
                assert {port["targetPort"] for port in spec["ports"]} <= {p["name"] for p in ports}
            case "PodDisruptionBudget" | "Deployment" | "PodMonitor":
                assert spec["selector"]["matchLabels"].items() <= labels.items()
            case "HorizontalPodAutoscaler":
                assert spec["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
            case "Ingress":
                (rule,) = spec["rules"]
                service = rule["http"]["paths"][0]["backend"]["service"]["name"]
                assert service in of_kind(manifests, "Service")
            case _:
                continue
        kinds.add(manifest["kind"])
    assert kinds >= {"Service", "PodDisruptionBudget", "Deployment"}
    jobs = [pod["metadata"]["labels"] for pod in pods(manifests)][1:]
    assert jobs
    for job in jobs:
        assert not labels.items() <= job.items(), "the Service would send requests to jobs"


def test_pods_are_fit_for_the_restricted_standard(example: tuple[str, list[Manifest]]) -> None:
    _, manifests = example
    for pod in (template["spec"] for template in pods(manifests)):
        assert pod["serviceAccountName"] in of_kind(manifests, "ServiceAccount")
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_an_autoscaler_alone_sets_the_number_of_brokers(
    example: tuple[str, list[Manifest]],
) -> None:
    name, manifests = example
    (deployment,) = of_kind(manifests, "Deployment").values()
    has_autoscaler = bool(of_kind(manifests, "HorizontalPodAutoscaler"))
    assert ("replicas" in deployment["spec"]) is not has_autoscaler
    assert has_autoscaler is (name == "eks")


def test_every_pod_gets_the_settings_and_the_secret(example: tuple[str, list[Manifest]]) -> None:
    name, manifests = example
    secrets = {"s3": ["tidelog-secrets"], "keys": ["tidelog-secrets"], "eks": []}
    secret_names = secrets.get(name, ["log"])
    assert list(of_kind(manifests, "Secret")) == (["log"] if secret_names == ["log"] else [])
    for pod in pods(manifests):
        sources = pod["spec"]["containers"][0]["envFrom"]
        named = [source["configMapRef"]["name"] for source in sources if "configMapRef" in source]
        assert named == ["log"]
        assert [s["secretRef"]["name"] for s in sources if "secretRef" in s] == secret_names


def test_settings_are_settings(example: tuple[str, list[Manifest]]) -> None:
    name, manifests = example
    values = dict(of_kind(manifests, "ConfigMap")["log"]["data"])
    values |= of_kind(manifests, "Secret").get("log", {}).get("stringData", {})
    (deployment,) = of_kind(manifests, "Deployment").values()
    broker = deployment["spec"]["template"]["spec"]["containers"][0]
    for variable in broker["env"]:
        if variable["name"].startswith(PREFIX):
            values[variable["name"]] = variable.get("value", "broker").replace(
                "$(POD_IP)", "10.0.0.1"
            )
    settings = load({}, {key: value for key, value in values.items() if key.startswith(PREFIX)})
    ports = {port["name"]: port["containerPort"] for port in broker["ports"]}
    assert (ports["http"], ports["peers"]) == (settings.port, settings.peer_port)
    assert ports.get("kafka", 0) == settings.kafka_port
    assert settings.security == ("keys" if name == "keys" else "off")
    for ingress in of_kind(manifests, "Ingress").values():
        assert settings.allowed_hosts == ingress["spec"]["rules"][0]["host"]


def outgoing(policy: Manifest) -> set[int]:
    return {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}


def test_policies_let_out_what_the_store_needs(example: tuple[str, list[Manifest]]) -> None:
    name, manifests = example
    policies = of_kind(manifests, "NetworkPolicy")
    store = {"minio": {9000}, "seaweedfs": {8333}, "eks": {443, 80}}.get(name, {443})
    assert outgoing(policies["log-broker"]) == {53, 8083} | store
    assert outgoing(policies["log-maintain"]) == {53} | store
    components = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods(manifests)
    }
    chosen = {
        policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for policy in policies.values()
    }
    assert chosen == components, "a pod without a policy"


def test_the_grace_period_is_longer_than_a_shutdown(example: tuple[str, list[Manifest]]) -> None:
    _, manifests = example
    (deployment,) = of_kind(manifests, "Deployment").values()
    pod = deployment["spec"]["template"]["spec"]
    drain_s = load({}, {}).drain_ms / 1000
    sleep_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] - sleep_s > drain_s + STOP_S_MAX + MARGIN_S


def test_rules_and_monitor_fit_the_alerts() -> None:
    manifests = rendered(values_of("keys"))
    (rules,) = of_kind(manifests, "PrometheusRule").values()
    alerts = yaml.safe_load((DEPLOY / "monitoring" / "alerts.yml").read_text())
    assert rules["spec"] == alerts
    (monitor,) = of_kind(manifests, "PodMonitor").values()
    (deployment,) = of_kind(manifests, "Deployment").values()
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels[monitor["spec"]["jobLabel"]] == "tidelog", "the alerts' job"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"]["name"]
    dashboard = of_kind(manifests, "ConfigMap")["log-dashboard"]["data"]["tidelog.json"]
    assert dashboard == (DEPLOY / "monitoring" / "dashboard.json").read_text()
    for manifest in (rules, monitor):
        assert manifest["metadata"]["labels"]["release"] == "prometheus"


def checked(values: dict[str, Any]) -> None:
    """As `helm install`: the values fit the schema, and the chart renders."""
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(chart.merge_values(values))
    rendered(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "store.url is missing"),
        ({"store": {"url": "s3//bucket"}}, "does not match pattern"),
        ({"store": {"url": "s3://b", "prot": 9000}}, "'prot' not allowed"),
        ({"store": {"url": "s3://b"}, "settings": {"TIDELOG_PORT": "1"}}, "TIDELOG_PORT"),
        ({"store": {"url": "s3://b"}, "ingress": {"enabled": True}}, "ingress.host is missing"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        checked(values)
    assert words in str(refused.value)


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    with open(ROOT / "pyproject.toml", "rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)
