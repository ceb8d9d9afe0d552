"""Free TCP ports of 127.0.0.1."""

import random
import socket

_FIRST, _LAST = 10_240, 22_000  # with 10,000 more still below what outgoing connections take


def free_port() -> int:
    """One that was free a moment ago; who binds it must be ready to lose it."""
    with socket.socket() as tcp_socket:
        tcp_socket.bind(("127.0.0.1", 0))
        return int(tcp_socket.getsockname()[1])


def free_port_pairs(count: int) -> list[int]:
    """Ports p such that p and p + 10,000 were free: SeaweedFS speaks gRPC on the second."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(_FIRST, _LAST)
        if port not in ports and _is_free(port) and _is_free(port + 10_000):
            ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as tcp_socket:
        try:
            tcp_socket.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
