"""The banner of a broker that listens: addresses, store, and the command to type next.

As text, the banner is one log line with indented lines below it. As JSON, each of its facts is an
event. Programs that start a broker read its port from the words `listening on`.
"""

import logging
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from tidelog.service.settings.settings import console_server

if TYPE_CHECKING:
    # `tidelog dev` prints a banner without the modules of a broker.
    from tidelog.storage.broker import Broker
    from tidelog.storage.cluster.liveness import KafkaListener

log = logging.getLogger("tidelog")

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""Where a client on this machine reaches a broker that listens on all addresses."""


class Fact(NamedTuple):
    """A line of the banner.

    `sentence` is the message of its JSON event; if it is empty, there is no event.
    """

    name: str
    value: str
    sentence: str = ""


def facts(
    url: str, broker: "Broker", kafka: Iterable["KafkaListener"], *, has_peers: bool
) -> Iterator[Fact]:
    """Yield the facts of a broker that listens at `url`."""
    yield console_of(url)
    yield Fact("store", broker.store_url)
    for listener in kafka:
        address = f"{listener.host}:{listener.port}"
        yield Fact("Kafka", address, f"Kafka clients reach this broker at {address}")
    if has_peers:
        address = broker.cluster.members().me.address
        yield Fact("peers", address, f"peers reach this broker at {address}")
    identity = f"{broker.name} of cluster {broker.identity.cluster_id}"
    yield Fact("broker", identity, f"broker {identity} on {broker.store_url}")
    words = "topics list" if broker.state.topics else "topics create events"
    yield Fact("next", f"{command(words, url)}    (in another terminal)")


def announce(url: str, banner_facts: Iterable[Fact], log_format: str) -> None:
    """Log the banner of a broker that listens at `url`."""
    if log_format == "json":
        log.info("listening on %s", url)
        for fact in banner_facts:
            if fact.sentence:
                log.info("%s", fact.sentence)
    else:
        log.info("%s", banner(f"listening on {url}", [*banner_facts]))


def banner(title: str, banner_facts: Sequence[Fact]) -> str:
    """Return the title and one indented line for each fact."""
    width = max(len(fact.name) for fact in banner_facts)
    return "\n".join([title, *(f"    {fact.name:<{width}}  {fact.value}" for fact in banner_facts)])


def console_of(url: str) -> Fact:
    """Return the address of the console."""
    address = f"{local(url)}/ui/"
    return Fact("console", address, f"the console is at {address}")


def local(url: str) -> str:
    """Return the URL for clients on this machine.

    A broker's own URL names the address on which it listens.
    """
    parts = urlsplit(url)
    host = ANY_ADDRESS.get(parts.hostname or "")
    return url if host is None else f"{parts.scheme}://{host}:{parts.port}"


def command(words: str, url: str) -> str:
    """Return a client command as a user types it here.

    It has the path of this program if the PATH does not have it, and `--server` if the command
    would go to another broker without it.
    """
    typed = Path(sys.argv[0])
    program = "tidelog"
    if typed.name == program and shutil.which(program) is None:
        program = sys.argv[0]
    server = local(url)
    return f"{program} {words}{'' if server == console_server() else f' --server {server}'}"
