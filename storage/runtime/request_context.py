"""Context variables of the current request: its trace context, its client, and its duty."""

from contextvars import ContextVar

TRACE: ContextVar[object] = ContextVar("tidelog-trace", default=None)
"""The current request's trace context; None without tracing."""
PRINCIPAL: ContextVar[str] = ContextVar("tidelog-principal", default="")
"""The authenticated client of the current request; empty without authentication, and in tasks of
the broker. A task that acts for several requests must set or clear this variable."""
REQUEST = "request"
DUTY: ContextVar[str] = ContextVar("tidelog-duty", default=REQUEST)
"""The duty of the broker for which the current task asks the store; REQUEST in requests of clients.
Requests to the store are counted by it."""
