"""How many connections a process may hold, by its limit of open files (RLIMIT_NOFILE)."""

import logging
import resource
from typing import NamedTuple

from tidelog.service.peers.listener import CONNECTIONS_MAX
from tidelog.service.settings.settings import Settings

log = logging.getLogger("tidelog")

KEPT_FILES = 512
"""Descriptors for the store, the hot log, peers that this broker calls, and for connections that
are accepted only to be closed. If the limit is below twice this number, half of the limit is
kept."""
BACKLOG = 2048


class ConnectionLimits(NamedTuple):
    """Descriptors by use."""

    clients: int
    peers: int
    backlog: int
    """Maximum connections that wait in the kernel until the broker accepts them: at most a quarter
    of the descriptors that are for neither clients nor peers."""


def connection_limits(files: int, clients_max: int, peers_max: int) -> ConnectionLimits:
    """Divide `files` descriptors among peers, clients and the rest of the broker.

    The rest gets KEPT_FILES. Peers get up to a quarter of the others, and clients get what then
    remains.
    """
    kept_files = min(KEPT_FILES, files // 2)
    peers = max(min(peers_max, (files - kept_files) // 4), 1)
    clients = max(min(clients_max, files - kept_files - peers), 1)
    return ConnectionLimits(clients, peers, max(min(BACKLOG, (files - peers - clients) // 4), 1))


def raised(files: int) -> int:
    """Raise this process's limit of open files to `files`, if the system allows it.

    Return the new limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        soft = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return files if soft == resource.RLIM_INFINITY else soft


def client_limits(settings: Settings) -> ConnectionLimits:
    """Raise the limit of open files to the number that all connections need, and divide it.

    A listener for Kafka clients may have as many connections as the one for HTTP.
    """
    clients, peers = settings.connections_max, CONNECTIONS_MAX
    listeners = 2 if settings.kafka_port else 1
    limit = raised(listeners * clients + peers + KEPT_FILES)
    divided = connection_limits(limit, listeners * clients, peers)
    divided = divided._replace(clients=max(divided.clients // listeners, 1))
    if divided.clients < clients:
        log.warning(
            "open files are limited to %d (ulimit -n): at most %d connections",
            limit,
            divided.clients,
        )
    return divided
