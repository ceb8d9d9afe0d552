"""The client of a request, as handlers see it."""

from contextvars import ContextVar
from typing import NamedTuple

from tidelog.service.security.caller import CallerRights


class ApiClient(NamedTuple):
    """The sender of a request. Handlers get it with each request."""

    version: int
    """The version of the request's API, for handlers whose answer depends on it."""
    client_id: str
    """The first 255 characters of the name that the client gives itself; "" if it
    gives none."""
    host: str
    """The client's address."""
    software: str
    """Name and version of the client's library, for example "librdkafka 2.16.0"; "" if unknown."""
    rights: CallerRights


REQUEST: ContextVar[tuple[str, int, ApiClient] | None] = ContextVar("kafka-request", default=None)
"""The API, the correlation id and the client of the current request, for its log lines."""


def fields_of(api: str, correlation_id: int, client: ApiClient) -> dict[str, str | int]:
    """Return the fields of a log line about a request."""
    return {
        "api": api,
        "correlation_id": correlation_id,
        "client_id": client.client_id,
        "host": client.host,
    }
