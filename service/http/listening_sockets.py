"""The sockets that a server listens on, and the reason if it cannot.

A listening socket that is closed resets the connections that wait in its queue: clients that have
sent requests would lose them without an answer. So before the end, a socket filter drops the
packets that begin new connections, while the queue is served. The kernels of the clients send these
packets again, after a second, and the closed port refuses them.
"""

import ctypes
import errno
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterable

from tidelog.storage.core.errors import LogError

log = logging.getLogger("tidelog.http")

QUEUE_S = 0.05
"""Time for which the queue of a socket is served that takes no new connections: a round trip for
the last packet of a handshake, and turns of the event loop."""

_PASSIVE = socket.AI_PASSIVE
_REASONS = {
    errno.EADDRINUSE: "another process uses the port: stop it, or give another port",
    errno.EADDRNOTAVAIL: "this machine does not have the address: give another host",
    errno.EACCES: "this user may not use the port: give a port above 1023",
}
_SO_ATTACH_FILTER = 26
_NO_SYN = (  # classic BPF on a TCP header: drop a packet with SYN, take all others
    (0x30, 0, 0, 13),  # load the byte with the flags
    (0x45, 0, 1, 0x02),  # SYN is set: next instruction, else the one after it
    (0x06, 0, 0, 0),
    (0x06, 0, 0, 0xFFFF_FFFF),
)


def bound_sockets(
    host: str, port: int, *, role: str = "", is_shared: bool = False
) -> list[socket.socket]:
    """Return a bound socket for each address of the host.

    The sockets do not listen yet. With `is_shared`, several processes may bind the port, and the
    kernel distributes the connections (SO_REUSEPORT). Raises LogError.
    """
    bound: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            bound.append(socket.socket(family, kind, protocol))
            bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:  # an address of IPv4 has a socket of its own
                bound[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound[-1].bind(address)
    except OSError as error:
        for sock in bound:
            sock.close()
        raise cannot_listen(host, port, role, error) from error
    return bound


def cannot_listen(host: str, port: int, role: str, error: OSError) -> LogError:
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    return LogError(f"cannot listen {role}on {host}:{port}: {reason}")


def begin_no_connections(sockets: Iterable[socket.socket]) -> None:
    """Let the sockets begin no new connections.

    Connections in their queues are not affected. On other systems than Linux, do nothing.
    """
    if sys.platform != "linux":
        return
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in _NO_SYN)
    program = ctypes.create_string_buffer(code)
    option = struct.pack("HP", len(_NO_SYN), ctypes.addressof(program))
    for sock in sockets:
        try:
            with socket.socket(fileno=os.dup(sock.fileno())) as same:  # uvloop's has no options
                same.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
        except OSError as error:
            log.warning("connections that begin at this moment may be reset: %s", error)
