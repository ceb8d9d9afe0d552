"""Settings of a broker's processes, and of their ports for HTTP clients and for other brokers."""

import dataclasses
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from tidelog.service.settings.fields import Section, setting

PORTS = (0, 65535)
ORIGIN = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
_URL = re.compile(rf"{ORIGIN.pattern}(/[A-Za-z0-9._~/-]*)?")


def is_url(text: str, form: re.Pattern[str] = _URL) -> bool:
    """Whether this is a URL of the form, with an address and a port that can be."""
    try:
        return form.fullmatch(text) is not None and urlsplit(text).port != 0
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListenerSettings(Section):
    """The ports of a broker, and the addresses at which others reach it."""

    host: str = setting("address to listen on", default="127.0.0.1")
    port: int = setting(
        "port to listen on; the default is the port of Confluent's REST proxy",
        default=8082,
        limits=PORTS,
    )
    workers: int = setting(
        "broker processes on this machine that share the port", default=1, limits=(1, 256)
    )
    peer_host: str = setting(
        "address to listen on for other brokers; if empty, the value of `host`"
    )
    peer_port: int = setting(
        "port to listen on for other brokers; 0 for any free port", default=0, limits=PORTS
    )
    peer_address: str = setting(
        "URL at which other brokers reach this broker; if empty, the broker builds it from `peer_host` and `peer_port`"
    )
    advertised_url: str = setting(
        "URL at which clients reach the service, for links in answers. If it is empty, the broker takes the URL from the headers of a proxy, or, if there are none, from `Host`"
    )
    broker_id: str = setting(
        "name of this broker in log lines and WAL entries; if empty, a random name"
    )
    drain_ms: int = setting(
        "time for which a broker serves all requests after SIGTERM or SIGINT, before it closes its port. In this time `/ready` answers 503 and each answer ends its connection, so that balancers and clients go to other brokers. Without connections, the time ends early; a second signal ends it",
        default=5000,
        limits=(0, 600_000),
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.workers > 1 and (self.peer_port or self.peer_address or self.broker_id):
            yield "workers above 1: remove peer_port, peer_address and broker_id"
        if self.workers > 1 and self.port == 0:
            yield "workers above 1 share one port: set a port above 0"
        if self.advertised_url and not is_url(self.advertised_url):
            yield f"advertised_url: {self.advertised_url!r} is no URL: use https://HOST:PORT/PATH"
