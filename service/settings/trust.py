"""Settings that decide which clients a broker trusts, and where it writes its audit log."""

import ipaddress
import re
from typing import Any
from urllib.parse import urlsplit

from tidelog.service.settings.fields import setting

AUDIT_AUTO, AUDIT_OFF, AUDIT_STDERR = "auto", "off", "stderr"
ANY_HOST = "*"
_ENTRY = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*(:[0-9]{1,5})?")
_ORIGIN = re.compile(r"https?://[A-Za-z0-9._-]+(:[0-9]{1,5})?")
_URL = re.compile(rf"{_ORIGIN.pattern}(/[A-Za-z0-9._~/-]*)?")

ALLOWED_HOSTS = setting(
    "",
    "host names under which clients reach this broker, separated by `;`: `log.example.com;*.corp.example`, or `*` for all. Always allowed: IP addresses, `localhost`, this machine's name, names without a dot, and names of private networks (`.internal`, `.svc`, `.cluster.local`, `.home.arpa`). If it is empty and `security` is `keys`, all names are allowed",
)
SECURITY_OFF_WITH_KEYS = setting(
    False,
    "serve a cluster that has keys or ACLs even if `security` is `off`; each client then has all permissions",
)
AUDIT_LOG = setting(
    AUDIT_AUTO,
    "where the broker writes refusals, logins and changes as JSON lines: the path of a file, `stderr` (among the log lines), `off` (nowhere), or `auto`, which means `stderr` if `security` is `keys`, else `off`",
)
OIDC_ISSUER = setting(
    "",
    "URL of the OIDC issuer whose tokens prove a principal; it must equal `iss` in the tokens. If it is empty, only keys prove a principal. Needs the package `tidelog[oidc]`",
)
OIDC_AUDIENCE = setting("", "audience that a token must have in `aud`; required with `oidc_issuer`")
OIDC_JWKS_URL = setting(
    "",
    "URL of the issuer's public keys. If it is empty, the broker takes `jwks_uri` from `<issuer>/.well-known/openid-configuration`",
)
OIDC_PRINCIPAL_CLAIM = setting(
    "sub", "claim of a token from which the broker takes the name of the principal"
)
OIDC_PRINCIPAL_PREFIX = setting(
    "oidc-",
    "text that precedes the name in the principal: with `oidc-`, the name `alice` gives `User:oidc-alice`. If it is empty, tokens prove the same principals as keys, so leave it empty only if users cannot choose their names at the issuer",
)
_PREFIX_CHARS_MAX = 64

TLS_CERT_FILE = setting(
    "",
    "PEM file with the certificate of the port for clients, followed by the certificates of its chain. If it is set, the port serves only https. A broker loads a changed file without a restart",
)
TLS_KEY_FILE = setting(
    "",
    "PEM file with the key of `tls_cert_file`, without a password; other users must not be able to read the file",
)
PEER_TLS = setting(
    False,
    "use TLS between brokers, which verify each other's certificates with `tls_ca_file`. Set `peer_tls` for all brokers or for none",
)
TLS_CA_FILE = setting(
    "", "PEM file with the CAs that sign the certificates of brokers; needs `peer_tls`"
)
PEER_TLS_CERT_FILE = setting(
    "",
    "PEM file with the certificate that this broker presents to other brokers, as a server and as a client; it must be valid for the host of `peer_address`. If it is empty, the broker presents `tls_cert_file`",
)
PEER_TLS_KEY_FILE = setting("", "PEM file with the key of `peer_tls_cert_file`")
CORS_ORIGINS = setting(
    "",
    "origins whose pages may use the API from a browser, separated by `;`, for example `https://app.example.com`, or `*` for every origin. If it is empty, pages of other origins may not use the API",
)
ADVERTISED_URL = setting(
    "",
    "URL at which clients reach the service, for links in answers. If it is empty, the broker takes the URL from the headers of a proxy, or, if there are none, from `Host`",
)


def hosts_of(allowed_hosts: str) -> list[str]:
    """Return the entries of `allowed_hosts`, in lower case."""
    return [entry.strip().lower() for entry in allowed_hosts.split(";") if entry.strip()]


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


def why_not(settings: Any) -> str | None:
    """Return why these settings of trust cannot be used. If they can, return None."""
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
    return _why_not_oidc(settings) or _why_not_tls(settings)


def _why_not_oidc(settings: Any) -> str | None:
    if not settings.oidc_issuer:
        if settings.oidc_audience or settings.oidc_jwks_url:
            return "oidc_audience and oidc_jwks_url need oidc_issuer"
        return None
    if settings.security != "keys":
        return "oidc_issuer needs security=keys, but security is off"
    if not settings.oidc_audience:
        return "oidc_issuer needs oidc_audience: without it, a token for another service is valid"
    for name in ("oidc_issuer", "oidc_jwks_url"):
        url = getattr(settings, name)
        if url and not is_protected(url):
            return f"{name}: {url!r} is not an https URL (http is allowed only to this machine)"
    if not settings.oidc_principal_claim:
        return "oidc_principal_claim is empty: use sub"
    prefix = settings.oidc_principal_prefix
    if len(prefix) > _PREFIX_CHARS_MAX or not prefix.isprintable():
        return (
            f"oidc_principal_prefix: {prefix!r} is not printable, or longer than "
            f"{_PREFIX_CHARS_MAX} characters"
        )
    return None


def _why_not_tls(settings: Any) -> str | None:
    for name in ("tls", "peer_tls"):
        cert, key = getattr(settings, f"{name}_cert_file"), getattr(settings, f"{name}_key_file")
        if bool(cert) != bool(key):
            return f"{name}_cert_file and {name}_key_file: give both or neither"
    if not settings.peer_tls:
        if settings.tls_ca_file or settings.peer_tls_cert_file:
            return "tls_ca_file and peer_tls_cert_file need peer_tls: set peer_tls, or remove both"
        return None
    if not settings.tls_ca_file:
        return "peer_tls needs tls_ca_file, with which brokers verify each other"
    if not (settings.peer_tls_cert_file or settings.tls_cert_file):
        return "peer_tls needs peer_tls_cert_file or tls_cert_file"
    if settings.peer_address and not settings.peer_address.startswith("https://"):
        return f"peer_address: {settings.peer_address!r} is not https://, but peer_tls is on"
    return None
