"""deploy/: every file goes through a parser of those who will read it, and what it says is so.

Tools that a machine may lack are asked in `make lint-deploy`.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from tidelog.service.exit_status import EXIT_USAGE
from tidelog.service.server.router import KEEP_ALIVE_S, limits_of
from tidelog.service.server.serve import STOP_S_MAX
from tidelog.service.settings.settings import PREFIX, load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "docker-compose.yml"
BIN = Path(sys.executable).parent
YAML_FILES = sorted(
    path
    for path in [*DEPLOY.rglob("*.yml"), *DEPLOY.rglob("*.yaml")]
    if path.parent.name != "templates" and not path.is_symlink()
)
UNITS = sorted((DEPLOY / "systemd").glob("tidelog-*"))
MARGIN_S = 5.0
STOP_NEEDS_S = load({}, {}).drain_ms / 1000 + STOP_S_MAX + MARGIN_S
NGINX_IDLE_S = "60"
"""nginx's default for idle connections to servers."""


def ran(*command: object, **options: Any) -> str:
    """Run a command and assert that it succeeds; return its output."""
    words = [str(word) for word in command]
    process = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def relative(path: Path) -> str:
    return path.relative_to(DEPLOY).as_posix()


@pytest.mark.parametrize("path", YAML_FILES, ids=relative)
def test_yaml_is_clean(path: Path) -> None:
    config = YamlLintConfig(file=str(ROOT / ".yamllint.yml"))
    assert [str(problem) for problem in linter.run(path.read_text(), config, str(path))] == []


def test_the_image_is_built_as_one_should() -> None:
    ran(BIN / "hadolint", DEPLOY / "Dockerfile")
    text = (DEPLOY / "Dockerfile").read_text()
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    assert copied == {"storage", "service", "compaction"}, "the packages of pyproject.toml"
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied | {"pyproject.toml", "README.md", "LICENSE"}} < {*ignored}
    last = text.rpartition("\nFROM ")[2]
    assert "AS broker" in last
    assert "USER 65532:65532" in last


# -- compose


def composed(profile: str | None = None) -> dict[str, Any]:
    """The file as compose itself reads it, with the profile of deploy/.env or another."""
    profiles = {} if profile is None else {"COMPOSE_PROFILES": profile}
    output = ran(
        BIN / "docker-compose",
        *("-f", COMPOSE, "config", "--format", "json"),
        env={**profiles, "PATH": "/usr/bin:/bin"},
    )
    services: dict[str, Any] = json.loads(output)["services"]
    return services


def s3_server(services: dict[str, Any]) -> str:
    """The name of the one service that the others reach as `s3`."""
    (name,) = (
        name
        for name, service in services.items()
        if "s3" in ((service["networks"]["default"] or {}).get("aliases", ()))
    )
    assert len(services) == 10
    return str(name)


@pytest.mark.parametrize("profile", ["seaweedfs", "minio", "rustfs"])
def test_a_profile_of_compose_is_a_store(profile: str) -> None:
    assert s3_server(composed(profile)) == profile


def test_the_default_store_is_seaweedfs_with_atomic_creates_and_without_reports() -> None:
    services = composed()
    server = services[s3_server(services)]
    image, _, version = server["image"].rpartition(":")
    assert image == "chrislusf/seaweedfs"
    assert tuple(map(int, version.split("."))) >= (4, 18)
    assert "-master.telemetry=false" in server["command"]
    (port,) = server["ports"]
    assert f"-s3.port={port['target']}" in server["command"]
    endpoint = services["broker-1"]["environment"]["TIDELOG_S3_ENDPOINT"]
    assert endpoint == f"http://s3:{port['target']}"


def test_containers_may_do_little() -> None:
    ours = {"broker-1", "broker-2", "broker-3", "balancer", "bucket", "maintain"}
    services = composed()
    for name in ours | {"prometheus", "alertmanager", "grafana"}:
        service = services[name]
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
    for name, service in services.items():
        assert not service.get("privileged"), name
        ports = service.get("ports", ())
        assert all(port["host_ip"] == "127.0.0.1" for port in ports), f"{name}: for all the world"
        for volume in service.get("volumes", ()):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), f"{name}: {volume['source']} is not there"


def test_prometheus_sends_alerts_to_the_alertmanager_of_compose() -> None:
    config = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yml").read_text())
    ((target,),) = (
        static_config["targets"]
        for manager in config["alerting"]["alertmanagers"]
        for static_config in manager["static_configs"]
    )
    name, _, port = target.partition(":")
    (published,) = composed()[name]["ports"]
    assert published["target"] == int(port)
    routes = yaml.safe_load((DEPLOY / "compose" / "alertmanager.yml").read_text())
    named = {
        routes["route"]["receiver"],
        *(route["receiver"] for route in routes["route"]["routes"]),
    }
    assert named == {receiver["name"] for receiver in routes["receivers"]}
    alerts = yaml.safe_load((DEPLOY / "monitoring" / "alerts.yml").read_text())
    rules = (rule for group in alerts["groups"] for rule in group["rules"])
    severities = {rule["labels"]["severity"] for rule in rules if "alert" in rule}
    assert severities <= {"page", "ticket"}, "the routes are for these"


def grace_periods() -> Iterator[tuple[str, float]]:
    yield (
        "compose",
        float(re.findall(r"^  stop_grace_period: (\d+)s", COMPOSE.read_text(), re.MULTILINE)[0]),
    )
    unit = (DEPLOY / "systemd" / "tidelog-broker.service").read_text()
    yield "systemd", float(re.findall(r"^TimeoutStopSec=(\d+)", unit, re.MULTILINE)[0])


def test_the_grace_period_is_longer_than_a_shutdown() -> None:
    for source, seconds in grace_periods():
        assert seconds > STOP_NEEDS_S, source


def test_brokers_keep_idle_connections_longer_than_balancers() -> None:
    """Else a balancer may send a request on a connection that the broker closes at this moment."""
    alb = (DEPLOY / "helm" / "examples" / "eks.yaml").read_text()
    terraform = (ROOT / "terraform" / "balancer.tf").read_text()
    idle = re.findall(r"idle_timeout.timeout_seconds=(\d+)", alb)
    idle += re.findall(r"idle_timeout +=\s*(\d+)", terraform)
    haproxy = (DEPLOY / "local" / "haproxy.conf").read_text()
    idle += re.findall(r"timeout server (\d+)s", haproxy)
    assert len(idle) == 3
    for name in ("local", "compose"):
        nginx = (DEPLOY / name / "nginx.conf").read_text()
        own = re.findall(r"keepalive_timeout (\d+)s", nginx)
        idle += own or [NGINX_IDLE_S]
    assert max(map(int, idle)) < KEEP_ALIVE_S == limits_of(load({}, {})).idle_s


# -- systemd


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        text = unit.read_text().replace("/opt/tidelog/bin/tidelog", "/bin/true")
        (tmp_path / unit.name).write_text(text)
    ran("systemd-analyze", "verify", "--man=no", *(tmp_path / unit.name for unit in UNITS))
    assert [unit.name for unit in UNITS] == [
        "tidelog-broker.service",
        "tidelog-maintain.service",
        "tidelog-maintain.timer",
    ]


def directives(unit: Path) -> dict[str, str]:
    lines = (line.partition("=") for line in unit.read_text().splitlines())
    return {name: value for name, equals, value in lines if equals and name[0].isupper()}


@pytest.mark.parametrize("service", [unit for unit in UNITS if unit.suffix == ".service"])
def test_a_service_may_write_the_log_of_this_machine(service: Path) -> None:
    """Its file system is read-only, but for the folder that all services share."""
    unit_directives = directives(service)
    assert unit_directives["ProtectSystem"] == "strict"
    assert (unit_directives["StateDirectory"], unit_directives["StateDirectoryMode"]) == (
        "tidelog",
        "0700",
    )
    assert unit_directives["User"] == "tidelog"


def test_systemd_starts_no_broker_again_whose_setting_is_wrong() -> None:
    unit_directives = directives(DEPLOY / "systemd" / "tidelog-broker.service")
    assert unit_directives["RestartPreventExitStatus"] == str(EXIT_USAGE)
    assert unit_directives["Restart"] == "always"
    process = subprocess.run(
        [BIN / "tidelog", "serve", "s3:///no-bucket"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert process.returncode == EXIT_USAGE, process.stderr


def test_the_folder_of_the_lines_of_cron_is_made() -> None:
    lines = (DEPLOY / "jobs" / "tidelog.cron").read_text().splitlines()
    (folder,) = (line.removeprefix("LOG=") for line in lines if line.startswith("LOG="))
    users = {line.split()[5] for line in lines if re.match(r"\d", line)}
    (user,) = users
    page = (DEPLOY / "README.md").read_text()
    assert f"sudo install -d -o {user} -g {user} {folder}" in page


# -- what all of them say to tidelog


def variables() -> Iterator[tuple[str, dict[str, str]]]:
    for name, service in composed().items():
        yield name, service.get("environment", {})
    lines = (DEPLOY / "systemd" / "broker.env").read_text().splitlines()
    yield "systemd", dict(line.split("=", 1) for line in lines if line and line[0] != "#")


def test_settings_are_settings() -> None:
    setting_count = 0
    for source, values in variables():
        ours = {key: value for key, value in values.items() if key.startswith(PREFIX)}
        load({}, ours)  # raises where one is unknown or out of bounds
        setting_count += len(ours)
        assert source
    assert setting_count > 25
