"""Settings that decide which clients a broker trusts, and where it writes its audit log."""

import dataclasses
import ipaddress
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from tidelog.service.settings.fields import names_in, setting
from tidelog.service.settings.listeners import ORIGIN, is_url
from tidelog.service.settings.tls import TlsSettings

AUDIT_AUTO, AUDIT_OFF, AUDIT_STDERR = "auto", "off", "stderr"
ANY_HOST = "*"
ADMIN_KEY_CHARS_MIN = 22
"""The length of 128 random bits in base64."""
_HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*(:[0-9]{1,5})?")
_PREFIX_CHARS_MAX = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecuritySettings(TlsSettings):
    """Keys, tokens, host names and origins that a broker accepts."""

    security: str = setting(
        "`keys`: each request needs a key, and ACLs grant permissions; `off`: each client that reaches the port has all permissions",
        default="off",
        words="off keys",
    )
    admin_key: str = setting(
        "secret of `User:admin`, which has all permissions, or `@FILE` for a file with the secret; the flag accepts only `@FILE`",
        is_secret=True,
    )
    super_users: str = setting(
        "principals with all permissions, separated by `;`: `User:alice;User:bob`"
    )
    allowed_hosts: str = setting(
        "host names under which clients reach this broker, separated by `;`: `log.example.com;*.corp.example`, or `*` for all. Always allowed: IP addresses, `localhost`, this machine's name, names without a dot, and names of private networks (`.internal`, `.svc`, `.cluster.local`, `.home.arpa`). If it is empty and `security` is `keys`, all names are allowed"
    )
    security_off_with_keys: bool = setting(
        "serve a cluster that has keys or ACLs even if `security` is `off`; each client then has all permissions",
        default=False,
    )
    audit_log: str = setting(
        "where the broker writes refusals, logins and changes as JSON lines: the path of a file, `stderr` (among the log lines), `off` (nowhere), or `auto`, which means `stderr` if `security` is `keys`, else `off`",
        default=AUDIT_AUTO,
    )
    oidc_issuer: str = setting(
        "URL of the OIDC issuer whose tokens prove a principal; it must equal `iss` in the tokens. If it is empty, only keys prove a principal. Needs the package `tidelog[oidc]`"
    )
    oidc_audience: str = setting(
        "audience that a token must have in `aud`; required with `oidc_issuer`"
    )
    oidc_jwks_url: str = setting(
        "URL of the issuer's public keys. If it is empty, the broker takes `jwks_uri` from `<issuer>/.well-known/openid-configuration`"
    )
    oidc_principal_claim: str = setting(
        "claim of a token from which the broker takes the name of the principal", default="sub"
    )
    oidc_principal_prefix: str = setting(
        "text that precedes the name in the principal: with `oidc-`, the name `alice` gives `User:oidc-alice`. If it is empty, tokens prove the same principals as keys, so leave it empty only if users cannot choose their names at the issuer",
        default="oidc-",
    )
    cors_origins: str = setting(
        "origins whose pages may use the API from a browser, separated by `;`, for example `https://app.example.com`, or `*` for every origin. If it is empty, pages of other origins may not use the API"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.security == "off" and (self.admin_key or self.super_users):
            yield "admin_key and super_users need security=keys, but security is off"
        if self.admin_key and len(self.admin_key) < ADMIN_KEY_CHARS_MIN:
            yield f"admin_key has {len(self.admin_key)} characters: use {ADMIN_KEY_CHARS_MIN} or more random characters (openssl rand -base64 32)"
        for name in self.allowed_host_names:
            if name != ANY_HOST and not _HOST.fullmatch(name):
                yield f"allowed_hosts: {name!r} is neither a host name nor *.DOMAIN"
        if self.security_off_with_keys and self.security != "off":
            yield "security_off_with_keys is for security=off: remove it"
        for name in self.cors_origin_names:
            if name != "*" and not is_url(name, ORIGIN):
                yield f"cors_origins: {name!r} is no origin: use https://HOST:PORT"
        if self.oidc_issuer:
            yield from self._problems_of_oidc()
        elif self.oidc_audience or self.oidc_jwks_url:
            yield "oidc_audience and oidc_jwks_url need oidc_issuer"
        for name in self.super_user_names:
            if not name.startswith("User:") or name in ("User:", "User:*"):
                yield f"super_users: {name!r} does not have the form User:NAME"

    def _problems_of_oidc(self) -> Iterator[str]:
        if self.security != "keys":
            yield "oidc_issuer needs security=keys, but security is off"
        if not self.oidc_audience:
            yield "oidc_issuer needs oidc_audience: without it, a token for another service is valid"
        for name, url in (("oidc_issuer", self.oidc_issuer), ("oidc_jwks_url", self.oidc_jwks_url)):
            if url and not is_protected(url):
                yield f"{name}: {url!r} is not an https URL (http is allowed only to this machine)"
        if not self.oidc_principal_claim:
            yield "oidc_principal_claim is empty: use sub"
        prefix = self.oidc_principal_prefix
        if len(prefix) > _PREFIX_CHARS_MAX or not prefix.isprintable():
            yield f"oidc_principal_prefix: {prefix!r} is not printable, or longer than {_PREFIX_CHARS_MAX} characters"

    @property
    def super_user_names(self) -> list[str]:
        return names_in(self.super_users)

    @property
    def cors_origin_names(self) -> list[str]:
        return names_in(self.cors_origins)

    @property
    def allowed_host_names(self) -> list[str]:
        return names_in(self.allowed_hosts.lower())


def is_protected(url: str) -> bool:
    """Whether the URL has the scheme https, or the scheme http and this machine's host."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError:
        return False
    if parts.scheme == "https":
        return bool(host)
    return parts.scheme == "http" and _is_loopback(host)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
