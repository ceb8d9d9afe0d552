"""A request's URL: its path in one spelling, and this broker's URL as the client sees it.

Links in responses must lead back through the proxies between client and broker. So they are built
from the headers that proxies send (`Forwarded`, `X-Forwarded-*`) or, without these, from `Host`.
Every client can send these headers, but they change only the links in the response to that client.
Values that cannot be part of a URL are ignored.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from tidelog.service.http.request import Scope

_HOST = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?")
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)*")
_SLASHES = re.compile(r"/{2,}")
_PORTS = {"http": 80, "https": 443}


class ClientUrl(NamedTuple):
    """This broker's address for a client. `prefix` is empty or begins with a slash."""

    proto: str
    host: str
    port: int | None
    prefix: str

    @property
    def url(self) -> str:
        """Return the URL to which a path of the API is appended. It does not end with a slash."""
        port = "" if self.port is None else f":{self.port}"
        return f"{self.proto}://{self.host}{port}{self.prefix}"


def clean_path(path: str) -> str:
    """Return a path with single slashes and no slash at its end.

    `kafka-bridge-client` sends `//`, and many clients send a slash at the end. A redirect would
    lose the body of a POST.
    """
    if "//" in path:
        path = _SLASHES.sub("/", path)
    return path if path == "/" else path.removesuffix("/")


def host_of_url(host: str) -> str:
    """Return a host name or an address as a URL has it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def client_url(scope: Scope, advertised: str = "") -> ClientUrl:
    """Return this broker's address for the client of a request.

    If `advertised` is set, return it.
    """
    if advertised:
        split = urlsplit(advertised)
        host = host_of_url(split.hostname or "")
        return ClientUrl(split.scheme, host, split.port, split.path.rstrip("/"))
    headers = {
        name.decode("latin-1").lower(): text.decode("latin-1") for name, text in scope["headers"]
    }
    server = scope.get("server") or ("localhost", None)
    host = host_of_url(server[0])
    return origin(
        headers,
        clean_path(scope["path"]),
        proto=scope.get("scheme", "http"),
        server=host if server[1] is None else f"{host}:{server[1]}",
    )


def origin(headers: Mapping[str, str], path: str, *, proto: str, server: str) -> ClientUrl:
    """Return this broker's address for the client of a request.

    `path`, `proto` and `server` (host and port) come from the connection. Names of headers are in
    lower case.

    `X-Forwarded-Path` is the client's whole path (Strimzi, Kong), but some proxies send only the
    part before the broker's path. `X-Forwarded-Prefix` is always this part, so it takes precedence.
    """
    forwarded = _forwarded(headers.get("forwarded", ""))
    for scheme in (forwarded.get("proto"), _first(headers.get("x-forwarded-proto"))):
        if scheme is not None and scheme.lower() in _PORTS:
            proto = scheme.lower()
            break
    host, port = split_host(server) or ("localhost", None)
    for authority in (
        forwarded.get("host"),
        _first(headers.get("x-forwarded-host")),
        headers.get("host"),
    ):
        split = split_host(authority or "")
        if split is not None:
            host, port = split
            break
    digits = _first(headers.get("x-forwarded-port")) or ""
    if port is None and digits.isascii() and digits.isdigit() and len(digits) <= 5:
        port = int(digits)
    if port == _PORTS.get(proto):
        port = None
    return ClientUrl(proto, host, port, _prefix(headers, path))


def _prefix(headers: Mapping[str, str], path: str) -> str:
    prefix = _first(headers.get("x-forwarded-prefix"))
    if prefix is None:
        prefix = _first(headers.get("x-forwarded-path")) or ""
        prefix = prefix.removesuffix("/").removesuffix(path)
    prefix = prefix.removesuffix("/")
    return prefix if _PREFIX.fullmatch(prefix) else ""


def split_host(text: str) -> tuple[str, int | None] | None:
    """Return the host and the port of a URL's authority, or None if `text` is not valid."""
    match = _HOST.fullmatch(text)
    if match is None:
        return None
    return match[1], None if match[2] is None else int(match[2])


def _first(header: str | None) -> str | None:
    """Return the first element of a header.

    Each proxy appends its element at the end, so the first element describes the client's side.
    """
    return None if header is None else header.partition(",")[0].strip()


def _forwarded(header: str) -> dict[str, str]:
    """Return the parameters of the first element of RFC 7239's header."""
    pairs = (part.partition("=") for part in header.partition(",")[0].split(";"))
    return {name.strip().lower(): value.strip().strip('"') for name, _, value in pairs}
