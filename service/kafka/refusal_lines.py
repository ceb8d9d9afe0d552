"""Log lines about what a client does not get: one for each client and text, at a bounded rate."""

import asyncio
import logging
from typing import Any

from tidelog.service.http.connection_admission import Admission
from tidelog.service.kafka.client import ApiClient

log = logging.getLogger("tidelog.kafka")

LOGGED_MAX = 1000
"""Bound of the clients and reasons that are kept (I10)."""


class RefusalLines:
    """The refusals that have a log line. One per listener."""

    def __init__(self, admission: "Admission[Any]") -> None:
        """`admission` has the rate of the listener's log lines."""
        self._admission = admission
        self._logged: set[tuple[str, str]] = set()

    def is_due(self, client: str, reason: str) -> bool:
        """Whether to log this refusal.

        The client must have no line with this reason yet, and the rate of lines must allow one.
        """
        key = client, reason
        if key in self._logged:
            return False
        if self._admission.line(asyncio.get_running_loop().time()) is None:
            return False
        if len(self._logged) >= LOGGED_MAX:
            self._logged.clear()
        self._logged.add(key)
        return True

    def warn(self, client: ApiClient, text: str, fields: dict[str, Any]) -> None:
        """Log once what a client does not get: its library shows less, or nothing."""
        if self.is_due(client.client_id or client.host, text):
            line = "Kafka client %r at %s: %s"
            log.warning(line, client.client_id, client.host, text, extra={"fields": fields})
