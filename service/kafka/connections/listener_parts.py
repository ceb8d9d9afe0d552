"""The parts of a listener that its connections share."""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from tidelog.service.http.connection_admission import Admission
from tidelog.service.http.loop_turns import Turns
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.connections.outbox import UnsentAnswers
from tidelog.service.kafka.connections.request_memory import RequestMemory
from tidelog.service.security.authenticator import Security


class ListenerParts(NamedTuple):
    """The parts that all connections of a listener share."""

    loop: asyncio.AbstractEventLoop
    context: Context
    apis: Mapping[int, Api]
    admission: "Admission[Any]"
    memory: RequestMemory
    security: Security | None
    unsent: UnsentAnswers
    turns: Turns
    """Those of the event loop."""
