"""Sockets that a server listens on, and the reason if it cannot listen."""

import errno
import socket

from tidelog.storage.core.errors import LogError

_PASSIVE = socket.AI_PASSIVE
_REASONS = {
    errno.EADDRINUSE: "another process uses the port: stop it, or give another port",
    errno.EADDRNOTAVAIL: "this machine does not have the address: give another host",
    errno.EACCES: "this user may not use the port: give a port above 1023",
}


def bound_sockets(
    host: str, port: int, *, role: str = "", is_shared: bool = False
) -> list[socket.socket]:
    """Return a bound socket for each address of the host. The sockets do not listen yet. With
    `is_shared`, several processes may bind the port, and the kernel distributes the connections
    (SO_REUSEPORT). Raises LogError."""
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            bound.append(socket.socket(family, kind, protocol))
            bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:  # an address of IPv4 has a socket of its own
                bound[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound[-1].bind(address)
    except OSError as error:
        for each in bound:
            each.close()
        raise cannot_listen(host, port, role, error) from error
    return bound


def cannot_listen(host: str, port: int, role: str, error: OSError) -> LogError:
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    return LogError(f"cannot listen {role}on {host}:{port}: {reason}")
