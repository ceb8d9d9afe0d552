"""The services of a compose file as processes on this machine, without Docker.

Commands and environment are those of the file. Only what Docker provides is replaced: `name:port`
of a service becomes 127.0.0.1 with a free port, and a volume becomes a folder.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy.demo.broker_process import BrokerProcess
from tests.support.ports import free_port_pairs
from tidelog.service.settings.settings import PREFIX

COMPOSE_FILE = Path(__file__).parents[1] / "docker-compose.yml"
IMAGE = "tidelog"
PEER_PORT = f"{PREFIX}PEER_PORT"

_VARIABLE = re.compile(r"\$(?:\$|\{(\w+):-([^}]*)\})")
_ADDRESS = re.compile(r"(?<![\w.-])([a-z][a-z0-9-]*):(\d+)(?!\d)")

Service = Mapping[str, Any]


class Translation:
    """Translates names, ports and folders inside of containers to those of this machine.

    `addresses` maps an address in the file, such as `s3:9000`, to that of a running service.
    """

    def __init__(self, folder: Path, addresses: Mapping[str, str]) -> None:
        self._folder = folder
        self._addresses = dict(addresses)

    def address(self, name: str, port: str) -> str:
        """Return host:port of a service; the first call for it reserves a free port."""
        if f"{name}:{port}" not in self._addresses:
            self._addresses[f"{name}:{port}"] = f"127.0.0.1:{free_port_pairs(1)[0]}"
        return self._addresses[f"{name}:{port}"]

    def volume(self, name: str) -> Path:
        """Return the folder that replaces a volume."""
        path = self._folder / name
        path.mkdir(exist_ok=True)
        return path

    def environment(self, name: str, service: Service) -> dict[str, str]:
        """Return the variables that the file sets for a service, with addresses translated."""
        volumes = dict(reversed(text.split(":")[:2]) for text in service.get("volumes", ()))
        variables: dict[str, str] = {}
        for key, value in service.get("environment", {}).items():
            text = _ADDRESS.sub(lambda match: self.address(match[1], match[2]), str(value))
            variables[key] = str(self.volume(volumes[text])) if text in volumes else text
        if PEER_PORT in variables:
            variables[PEER_PORT] = self.address(name, variables[PEER_PORT]).rpartition(":")[2]
        return variables


def services(path: Path = COMPOSE_FILE) -> dict[str, Service]:
    """Return the services of a compose file, with the defaults of its variables."""
    loaded = yaml.safe_load(_with_defaults(path.read_text(encoding="utf-8")))
    service_by_name: dict[str, Service] = loaded["services"]
    return service_by_name


def brokers(service_by_name: Mapping[str, Service]) -> dict[str, Service]:
    """Return the services that run our image with the command `serve`."""
    return {
        name: service
        for name, service in service_by_name.items()
        if service["image"] == IMAGE and service.get("command") == ["serve"]
    }


def broker_process(
    name: str, service: Service, translation: Translation, folder: Path
) -> BrokerProcess:
    """Return a broker that is not started, with the file's variables and a port of this machine."""
    variables = translation.environment(name, service)
    flags = {flag: variables.pop(PREFIX + flag.upper()) for flag in ("store", "host", "port")}
    assert flags["host"] == "0.0.0.0", f"other containers cannot reach {name}"
    variables[f"{PREFIX}PEER_HOST"] = "127.0.0.1"
    return BrokerProcess(flags["store"], folder / f"{name}.log", {}, {**_clean(), **variables})


def command(service: Service, *, source: Path = COMPOSE_FILE) -> list[str]:
    """Return entry point and command of a job, with the repository's paths of mounted files."""
    entry = list(service.get("entrypoint", ["tidelog"]))
    mounts = dict(reversed(text.split(":")[:2]) for text in service.get("volumes", ()))
    words = [str(word).replace("$$", "$") for word in [*entry, *service.get("command", ())]]
    command = [sys.executable, "-m", "tidelog.service.cli"]
    programs = {"tidelog": command, "python": [sys.executable]}
    return [
        *programs.get(words[0], [words[0]]),
        *(str(source.parent / mounts[word]) if word in mounts else word for word in words[1:]),
    ]


def job_environment(name: str, service: Service, translation: Translation) -> dict[str, str]:
    """Return the environment of a job's process."""
    return {**_clean(), **translation.environment(name, service)}


def _with_defaults(text: str) -> str:
    return _VARIABLE.sub(lambda match: match[2] if match[1] else match[0], text)


def _clean() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
