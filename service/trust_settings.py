"""Settings that decide which clients a broker trusts, and what it writes down about them."""

import re

from tidelog.service.setting_fields import setting

AUDIT_AUTO, AUDIT_OFF, AUDIT_STDERR = "auto", "off", "stderr"
ANY_HOST = "*"
_ENTRY = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*(:[0-9]{1,5})?")

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


def hosts_of(allowed_hosts: str) -> list[str]:
    """Return the entries of `allowed_hosts`, in lower case."""
    return [entry.strip().lower() for entry in allowed_hosts.split(";") if entry.strip()]


def why_not(allowed_hosts: str, security_off_with_keys: bool, security: str) -> str | None:
    """Return why these values cannot be used. If they can, return None."""
    for entry in hosts_of(allowed_hosts):
        if entry != ANY_HOST and not _ENTRY.fullmatch(entry):
            return f"allowed_hosts: {entry!r} is neither a host name nor *.DOMAIN"
    if security_off_with_keys and security != "off":
        return "security_off_with_keys is for security=off: remove it"
    return None
