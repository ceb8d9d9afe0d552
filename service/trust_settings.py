"""Settings that decide which clients a broker trusts, and what it writes down about them."""

import re
from typing import Protocol

from tidelog.service.setting_fields import setting

AUDIT_AUTO, AUDIT_OFF, AUDIT_STDERR = "auto", "off", "stderr"
ANY_HOST = "*"
_ENTRY = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*(:[0-9]{1,5})?")
_ORIGIN = re.compile(r"https?://[A-Za-z0-9._-]+(:[0-9]{1,5})?")
_URL = re.compile(rf"{_ORIGIN.pattern}(/[A-Za-z0-9._~/-]*)?")

ALLOWED_HOSTS = setting(
    "",
    "host names under which clients reach this broker, separated by `;`: `log.example.com;*.corp.example`, or `*` for all. Always allowed: addresses, `localhost`, this machine's name, names without a dot, and names of private networks (`.internal`, `.svc`, `.cluster.local`, `.home.arpa`). If it is empty and `security` is `keys`, all names are allowed",
)
SECURITY_OFF_WITH_KEYS = setting(
    False,
    "serve a cluster that has keys or ACLs even if `security` is `off`: each client then has all permissions",
)
AUDIT_LOG = setting(
    AUDIT_AUTO,
    "file for denials, logins and changes, as JSON lines; `stderr` for the broker's log; `off`; `auto`: `stderr` with `security=keys`, else `off`",
)

TLS_CERT_FILE = setting(
    "",
    "PEM file with the certificate of the port for clients, and the chain after it; with it, this port serves only https. It is read again when it changes",
)
TLS_KEY_FILE = setting(
    "", "PEM file with the key of `tls_cert_file`, without a password; other users may not read it"
)
PEER_TLS = setting(
    False,
    "TLS between brokers, which check each other's certificates by `tls_ca_file`; set it for all brokers or for none",
)
TLS_CA_FILE = setting(
    "", "PEM file with the CAs that sign the certificates of brokers; needs `peer_tls`"
)
PEER_TLS_CERT_FILE = setting(
    "",
    "PEM file with the certificate between brokers, for servers and clients, valid for the host of `peer_address`; empty: `tls_cert_file`",
)
PEER_TLS_KEY_FILE = setting("", "PEM file with the key of `peer_tls_cert_file`")


def hosts_of(allowed_hosts: str) -> list[str]:
    """Return the entries of `allowed_hosts`, in lower case."""
    return [entry.strip().lower() for entry in allowed_hosts.split(";") if entry.strip()]


class TrustFields(Protocol):
    """The settings that `why_not` checks."""

    @property
    def allowed_hosts(self) -> str: ...
    @property
    def security_off_with_keys(self) -> bool: ...
    @property
    def security(self) -> str: ...
    @property
    def cors_origin_names(self) -> list[str]: ...
    @property
    def advertised_url(self) -> str: ...
    @property
    def peer_address(self) -> str: ...
    @property
    def tls_cert_file(self) -> str: ...
    @property
    def tls_key_file(self) -> str: ...
    @property
    def peer_tls(self) -> bool: ...
    @property
    def tls_ca_file(self) -> str: ...
    @property
    def peer_tls_cert_file(self) -> str: ...
    @property
    def peer_tls_key_file(self) -> str: ...


def why_not(settings: TrustFields) -> str | None:
    """Return why these values cannot be used. If they can, return None."""
    for entry in hosts_of(settings.allowed_hosts):
        if entry != ANY_HOST and not _ENTRY.fullmatch(entry):
            return f"allowed_hosts: {entry!r} is neither a host name nor *.DOMAIN"
    if settings.security_off_with_keys and settings.security != "off":
        return "security_off_with_keys is for security=off: remove it"
    for name in settings.cors_origin_names:
        if name != "*" and not _ORIGIN.fullmatch(name):
            return f"cors_origins: {name!r} is no origin: use https://HOST:PORT"
    if settings.advertised_url and not _URL.fullmatch(settings.advertised_url):
        return f"advertised_url: {settings.advertised_url!r} is no URL: use https://HOST:PORT/PATH"
    return _why_no_tls(settings)


def _why_no_tls(settings: TrustFields) -> str | None:
    for name in ("tls", "peer_tls"):
        cert, key = getattr(settings, f"{name}_cert_file"), getattr(settings, f"{name}_key_file")
        if bool(cert) != bool(key):
            return f"{name}_cert_file and {name}_key_file: give both or neither"
    if not settings.peer_tls:
        if settings.tls_ca_file or settings.peer_tls_cert_file:
            return "tls_ca_file and peer_tls_cert_file are for peer_tls: set it, or remove them"
        return None
    if not settings.tls_ca_file:
        return "peer_tls needs tls_ca_file, by which brokers check each other"
    if not (settings.peer_tls_cert_file or settings.tls_cert_file):
        return "peer_tls needs peer_tls_cert_file or tls_cert_file"
    if settings.peer_address and not settings.peer_address.startswith("https://"):
        return f"peer_address: {settings.peer_address!r} is not https://, but peer_tls is on"
    return None
