"""Host and Origin: the names under which a broker answers, and the sites whose pages may use it.

A browser also sends requests of pages of other sites. Three kinds of requests are refused, before
the route is served:

- Requests with effects, from a page of another site or of another port of this host: 403.
  `Sec-Fetch-Site` shows such a page. If the broker's URL is plain http with a name, a browser
  omits this header. Then the broker compares `Origin` with `Host`. Requests without effects need no
  rule, because no response permits such a page to read it (CORS).
- Requests from a page whose own name was bound to the broker's address (DNS rebinding): 421. For
  the browser, page and broker have the same origin, but `Host` has the page's name, which is not
  the broker's. With `security=keys`, such a page has no key and no cookie of the broker. So with
  `security=keys` and an empty `allowed_hosts`, the broker answers under every name.
- Requests with effects, from any page, that have a body without a Content-Type: 415. A browser
  sends them without a CORS preflight, and the broker would decode the body as JSON.

Names that only a private network can resolve are allowed, because a stranger cannot register them.
A request without `Origin` and `Sec-Fetch-Site`, under a name that was used before, costs four
lookups (in service.server.router).
"""

import socket
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from tidelog.service.http.errors import CrossSite
from tidelog.service.http.media_types import UnsupportedMediaType
from tidelog.service.http.request import Scope
from tidelog.service.http.urls import client_url, split_host
from tidelog.service.settings.security import ANY_HOST, SecuritySettings
from tidelog.storage.core.errors import LogError

KNOWN_MAX = 1_000
"""Maximum remembered values of `Host`. The next value clears them (I10)."""
PRIVATE_SUFFIXES = (".localhost", ".internal", ".svc", ".cluster.local", ".home.arpa")
OWN_SITES = (b"same-origin", b"none")
WEB_PORTS = (80, 443, None)


class WrongHost(LogError):
    """The request is for a name that is not this broker's."""

    status = 421
    code = 42101

    def __init__(self, host: str) -> None:
        super().__init__(
            f"this broker does not answer under the name {host!r}: if clients should use this "
            "name, add it to the setting allowed_hosts"
        )


class Sites:
    """The rules of one broker for `Host` and `Origin`. Owned by one event loop."""

    def __init__(self, settings: SecuritySettings) -> None:
        entries = settings.allowed_host_names
        self._is_any = ANY_HOST in entries or (settings.security == "keys" and not entries)
        self._authorities = frozenset(entries)
        names = [entry.partition(":")[0] for entry in entries]
        self._suffixes = (*PRIVATE_SUFFIXES, *(name[1:] for name in names if name[0] == "*"))
        self._names = frozenset([*names, *_own_names(settings)])
        self.known: set[bytes | None] = {None}
        """Values of `Host` that are allowed. None (no `Host`) is allowed, because a browser always
        sends `Host`."""

    def refusal(
        self, scope: Scope, headers: Mapping[bytes, bytes], *, has_effects: bool
    ) -> LogError | None:
        """Return the error of a request that is not served because of these headers, else None."""
        if has_effects and self._is_foreign(scope, headers):
            return CrossSite()
        host = headers.get(b"host")
        if host not in self.known:
            text = host.decode("latin-1") if host else ""
            if not self._answers_under(text):
                return WrongHost(text[:253])
            if len(self.known) >= KNOWN_MAX:
                self.known = {None}
            self.known.add(host)
        if has_effects and _is_of_page(headers) and _has_untyped_body(headers):
            return UnsupportedMediaType("HTTP 415 Unsupported Media Type: send a Content-Type")
        return None

    def _is_foreign(self, scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
        site = headers.get(b"sec-fetch-site")
        if site is not None:
            return site.strip().lower() not in OWN_SITES
        origin = headers.get(b"origin")
        return origin is not None and not self._is_own(scope, origin.decode("latin-1").lower())

    def _is_own(self, scope: Scope, origin: str) -> bool:
        """Whether the page has this broker's address as the client sees it.

        The scheme does not count, because a proxy may end TLS without a header that says so.
        """
        scheme, _, authority = origin.partition("://")
        host_and_port = split_host(authority)
        if scheme not in ("http", "https") or host_and_port is None:
            return False
        own = client_url(scope)
        if (host_and_port[0], _port(host_and_port[1])) == (own.host.lower(), _port(own.port)):
            return True
        return authority in self._authorities

    def _answers_under(self, host: str) -> bool:
        if self._is_any or not host:
            return True
        host_and_port = split_host(host)
        if host_and_port is None:
            return False
        name = host_and_port[0].lower().removesuffix(".")
        last_label = name.rpartition(".")[2]
        return (
            "." not in name  # an IPv6 address, or a name without a dot
            or name[0] == "["
            or last_label.isdigit()  # an IPv4 address, in any of its forms
            or name in self._names
            or name.endswith(self._suffixes)
        )


def _own_names(settings: SecuritySettings) -> Iterable[str]:
    machine = socket.gethostname().lower()
    advertised = (settings.peer_address, settings.advertised_url)
    return (
        machine,
        f"{machine}.local",
        settings.host.lower(),
        settings.peer_host.lower(),
        *(urlsplit(url).hostname or "" for url in advertised),
    )


def _is_of_page(headers: Mapping[bytes, bytes]) -> bool:
    return b"origin" in headers or b"sec-fetch-site" in headers


def _has_untyped_body(headers: Mapping[bytes, bytes]) -> bool:
    if headers.get(b"content-type"):
        return False
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _port(port: int | None) -> int | None:
    return None if port in WEB_PORTS else port
