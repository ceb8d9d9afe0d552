"""The brokers of a compose file as processes on this machine: what Docker would run, without it.

Commands and environment are taken as they stand in the file. What differs is what Docker itself
would add: a service's name is no host name here, so each `name:port` of another service becomes
127.0.0.1 and a port of its own; a volume is a folder; a port inside of a container is a free one.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from service.broker_process import BrokerProcess
from tests.support.ports import free_port_pairs

COMPOSE_FILE = Path(__file__).parents[1] / "docker-compose.yml"
IMAGE = "tidelog"
PREFIX = "TIDELOG_"
PEER_PORT = f"{PREFIX}PEER_PORT"

_VARIABLE = re.compile(r"\$(?:\$|\{(\w+):-([^}]*)\})")
_ADDRESS = re.compile(r"(?<![\w.-])([a-z][a-z0-9-]*):(\d+)(?!\d)")

Service = Mapping[str, Any]


class Translation:
    """From names, ports and folders inside of containers to those of this machine.

    `known` has the addresses of services that run elsewhere, as `s3:9000`.
    """

    def __init__(self, folder: Path, known: Mapping[str, str]) -> None:
        self._folder = folder
        self._addresses = dict(known)

    def address(self, name: str, port: str) -> str:
        """host:port of a service; the first question decides on a free port."""
        if f"{name}:{port}" not in self._addresses:
            self._addresses[f"{name}:{port}"] = f"127.0.0.1:{free_port_pairs(1)[0]}"
        return self._addresses[f"{name}:{port}"]

    def volume(self, name: str) -> Path:
        """The folder that stands for a volume."""
        path = self._folder / name
        path.mkdir(exist_ok=True)
        return path

    def environment(self, name: str, service: Service) -> dict[str, str]:
        """What the service's process is given, beside what any process has."""
        volumes = dict(reversed(text.split(":")[:2]) for text in service.get("volumes", ()))
        given: dict[str, str] = {}
        for key, value in service.get("environment", {}).items():
            text = _ADDRESS.sub(lambda found: self.address(found[1], found[2]), str(value))
            given[key] = str(self.volume(volumes[text])) if text in volumes else text
        if PEER_PORT in given:
            given[PEER_PORT] = self.address(name, given[PEER_PORT]).rpartition(":")[2]
        return given


def services(path: Path = COMPOSE_FILE) -> dict[str, Service]:
    """The services of a compose file, with the defaults of its variables."""
    loaded = yaml.safe_load(_with_defaults(path.read_text(encoding="utf-8")))
    found: dict[str, Service] = loaded["services"]
    return found


def brokers(found: Mapping[str, Service]) -> dict[str, Service]:
    """Those of our image that serve."""
    return {
        name: service
        for name, service in found.items()
        if service["image"] == IMAGE and service.get("command") == ["serve"]
    }


def broker_process(
    name: str, service: Service, translation: Translation, folder: Path
) -> BrokerProcess:
    """The broker, not started: the file's variables, on a port of this machine."""
    given = translation.environment(name, service)
    flags = {flag: given.pop(PREFIX + flag.upper()) for flag in ("store", "host", "port")}
    assert flags["host"] == "0.0.0.0", f"{name} would not be reached from other containers"
    given[f"{PREFIX}PEER_HOST"] = "127.0.0.1"
    return BrokerProcess(flags["store"], folder / f"{name}.log", {}, {**_clean(), **given})


def command(service: Service, *, source: Path = COMPOSE_FILE) -> list[str]:
    """Entry point and command of a job, with mounted files where they lie in the repository."""
    entry = list(service.get("entrypoint", ["tidelog"]))
    mounts = dict(reversed(text.split(":")[:2]) for text in service.get("volumes", ()))
    words = [str(word).replace("$$", "$") for word in [*entry, *service.get("command", ())]]
    programs = {"tidelog": [sys.executable, "-m", "service.cli"], "python": [sys.executable]}
    return [
        *programs.get(words[0], [words[0]]),
        *(str(source.parent / mounts[word]) if word in mounts else word for word in words[1:]),
    ]


def job_environment(name: str, service: Service, translation: Translation) -> dict[str, str]:
    """What a job's process is given."""
    return {**_clean(), **translation.environment(name, service)}


def _with_defaults(text: str) -> str:
    return _VARIABLE.sub(lambda match: match[2] if match[1] else match[0], text)


def _clean() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
