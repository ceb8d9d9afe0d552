"""Machines of our own on one: network namespaces on a bridge, with cables that can be pulled.

Nothing of the machine's own network changes but for one interface more while it lasts. For root on
Linux with iproute2; `why_not` says what is missing elsewhere.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.broker import Broker

PORT = 8080
PEER_PORT = 8081


def why_not() -> str:
    """Why there can be no hosts here; empty when there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces are for root on Linux"
    if shutil.which("ip") is None or shutil.which("bridge") is None:
        return "apt-get install iproute2"
    name = f"tl{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this machine does not allow network namespaces"
    _ip("netns", "del", name)
    return ""


class Host(NamedTuple):
    """A machine: its namespace, its address, and the bridge's end of its cable."""

    name: str
    address: str
    hub: str
    cable: str

    def cut(self) -> None:
        """Pull the cable: packets are lost without an error."""
        _ip("-n", self.hub, "link", "set", self.cable, "down")

    def mend(self) -> None:
        _ip("-n", self.hub, "link", "set", self.cable, "up")

    def isolate(self, is_isolated: bool) -> None:
        """From all others that are isolated too; not from the machine that the tests run on."""
        flag = "on" if is_isolated else "off"
        _run("ip", "netns", "exec", self.hub, *_BRIDGE, self.cable, "isolated", flag)


_BRIDGE = ("bridge", "link", "set", "dev")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[tuple[str, list[Host]]]:
    """The address at which they find the machine that the tests run on, and so many of them."""
    word = secrets.token_hex(3)
    net = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(256)}"
    hub, ours = f"tl{word}-hub", f"tl{word}"
    with contextlib.ExitStack() as stack:

        def space(name: str) -> None:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)  # and all that is in it

        space(hub)
        _ip("-n", hub, "link", "add", "name", "hub0", "type", "bridge")
        _ip("-n", hub, "link", "set", "dev", "hub0", "up")
        # The other end of a cable goes with the namespace in which one end is.
        _ip("link", "add", "name", ours, "type", "veth", "peer", "name", "c0", "netns", hub)
        _ip("-n", hub, "link", "set", "c0", "master", "hub0", "up")
        _ip("address", "add", f"{net}.1/24", "dev", ours)
        _ip("link", "set", ours, "up")
        all_hosts = []
        for number in range(1, count + 1):
            name, cable = f"tl{word}-{number}", f"c{number}"
            space(name)
            _ip(
                "-n",
                hub,
                "link",
                "add",
                "name",
                cable,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            _ip("-n", hub, "link", "set", cable, "master", "hub0", "up")
            address = f"{net}.{number + 1}"
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "dev", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            all_hosts.append(Host(name, address, hub, cable))
        yield f"{net}.1", all_hosts


class HostBroker(Broker):
    """A broker on a machine of its own."""

    def __init__(self, host: Host, folder: Path, store: str, **settings: object) -> None:
        self.host = host
        address = f"http://{host.address}:{PEER_PORT}"
        peers = {"peer_port": PEER_PORT, "peer_address": address}
        super().__init__(folder, store, tuning=None, is_fresh=True, **settings, **peers)

    @property
    def place(self) -> Sequence[str]:
        return ("ip", "netns", "exec", self.host.name)

    @property
    def address(self) -> str:
        return self.host.address

    def _hold_port(self) -> int:
        return PORT  # the machine is ours alone


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{' '.join(words)}: {process.stderr}"
