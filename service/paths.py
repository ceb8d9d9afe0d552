"""What a request's URL means: its path in one spelling, and our address as the client sees it.

Links in answers must lead back through whatever stands between us and the client, so they are
built from what proxies say (`Forwarded`, `X-Forwarded-*`) and else from `Host`. Anybody can send
those headers; all they change is the links in the sender's own answer. Values that cannot be part
of a URL are ignored.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

_HOST = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?")
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)*")
_SLASHES = re.compile(r"/{2,}")
_PORTS = {"http": 80, "https": 443}


class Origin(NamedTuple):
    """Where the client found us; `prefix` is empty or begins with a slash."""

    proto: str
    host: str
    port: int | None
    prefix: str

    @property
    def url(self) -> str:
        """Everything that goes before one of our own paths, without a slash at the end."""
        port = "" if self.port is None else f":{self.port}"
        return f"{self.proto}://{self.host}{port}{self.prefix}"


def clean_path(path: str) -> str:
    """One spelling of a path: `//` collapsed, no slash at the end. `kafka-bridge-client` sends the
    one, half the world the other, and a redirect would lose the body of a POST."""
    if "//" in path:
        path = _SLASHES.sub("/", path)
    return path if path == "/" else path.removesuffix("/")


def origin(headers: Mapping[str, str], path: str, *, proto: str, server: str) -> Origin:
    """Our address for the client of a request: `path` is what arrived here, `proto` and `server`
    (host and port) how. Header names are lower case, as in starlette's `Headers`.

    `X-Forwarded-Path` is the client's whole path (Strimzi, Kong) or, as some proxies send it, what
    goes before ours, which is `X-Forwarded-Prefix` with all others.
    """
    forwarded = _forwarded(headers.get("forwarded", ""))
    for said in (forwarded.get("proto"), _first(headers.get("x-forwarded-proto"))):
        if said is not None and said.lower() in _PORTS:
            proto = said.lower()
            break
    host, port = _split_host(server) or ("localhost", None)
    for said in (
        forwarded.get("host"),
        _first(headers.get("x-forwarded-host")),
        headers.get("host"),
    ):
        split = _split_host(said or "")
        if split is not None:
            host, port = split
            break
    said_port = _first(headers.get("x-forwarded-port")) or ""
    if port is None and said_port.isascii() and said_port.isdigit() and len(said_port) <= 5:
        port = int(said_port)
    if port == _PORTS.get(proto):
        port = None
    return Origin(proto, host, port, _prefix(headers, path))


def _prefix(headers: Mapping[str, str], path: str) -> str:
    said = _first(headers.get("x-forwarded-prefix"))
    if said is None:
        said = _first(headers.get("x-forwarded-path")) or ""
        said = said.removesuffix("/").removesuffix(path)
    said = said.removesuffix("/")
    return said if _PREFIX.fullmatch(said) else ""


def _split_host(text: str) -> tuple[str, int | None] | None:
    match = _HOST.fullmatch(text)
    if match is None:
        return None
    return match[1], None if match[2] is None else int(match[2])


def _first(header: str | None) -> str | None:
    """Proxies append: the client's own side is the first."""
    return None if header is None else header.partition(",")[0].strip()


def _forwarded(header: str) -> dict[str, str]:
    """The parameters of the first element of RFC 7239's header."""
    pairs = (part.partition("=") for part in header.partition(",")[0].split(";"))
    return {name.strip().lower(): value.strip().strip('"') for name, _, value in pairs}
