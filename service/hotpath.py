"""The hot routes as plain ASGI in front of the application: produce, fetch and consumer instances
at a third of its cost.

FastAPI costs ~3 times what the same work costs here (NUMBERS 1), and these routes are the service.
Everything else, and every path that does not look exactly like a hot one, goes on to the
application.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeAlias

from service.consumers import ConsumerRoutes
from service.errors import (
    INTERNAL_ERROR,
    CrossSite,
    ErrorAnswer,
    error_body,
    error_response,
    json_type,
)
from service.fetch import Fetch
from service.group_forwarding import Forwarder
from service.http import JSON, JSON_V2, Answer, Call, Receive, Scope, Send
from service.produce import Produce
from service.produce_v3 import ProduceV3
from service.rights import READ_GROUP, READ_TOPIC, WRITE_TOPIC, Need
from service.security import READING, Security
from service.settings import Settings
from service.telemetry import HttpCounters
from service.transactions import Transactions
from storage.consumers import Consumers
from storage.errors import LogError
from storage.log import Log

log = logging.getLogger("tidelog.http")

AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler: TypeAlias = Callable[[Call], Awaitable[Answer | None]]
Found: TypeAlias = tuple[str, Handler, Need | None, str]
"""A route's word, who serves it, and what it needs of the resource of that name; None: the handler
asks (service.rights has the same as Open.INSIDE)."""

V3 = (["v3"], ["kafka", "v3"])
"""Where the v3 dialect is mounted, as parts of a path."""


class HotPath:
    """The broker's ASGI application: `app` behind the hot routes. One per process."""

    def __init__(
        self,
        app: AsgiApp,
        broker: Log,
        settings: Settings,
        counters: HttpCounters,
        consumers: Consumers,
        forwarder: Forwarder | None = None,
        security: Security | None = None,
    ) -> None:
        self._app = app
        self._security = security
        self._counters = counters
        self._produce = Produce(broker, settings, counters)
        self._fetch = Fetch(broker, settings, counters)
        self.consumers = ConsumerRoutes(
            broker, settings, consumers, self._fetch, forwarder, security
        )
        self._produce_v3 = ProduceV3(broker, settings, self._produce, counters)
        self._transactions = Transactions(broker, settings, self._produce, counters)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = self._route(scope["method"], scope["path"])
            if scope["method"] not in READING and _is_cross_site(scope["headers"]):
                found = _refusing("other", CrossSite())
            elif self._security is not None:
                found = await self._let_in(self._security, scope, found)
            if found is not None:
                await self._serve(found[0], found[1], Call(scope, receive, send))
                return
        await self._app(scope, receive, send)

    async def _let_in(self, security: Security, scope: Scope, found: Found | None) -> Found | None:
        """What is to be done with a request where security is on."""
        route, _, need, name = found or ("other", None, None, "")
        refusal = await security.admit(scope, need, name)
        return found if refusal is None else _refusing(route, refusal)

    def _route(self, method: str, path: str) -> Found | None:
        if method not in {"POST", "GET", "DELETE"}:
            return None
        parts = path.split("/")
        if "" in parts[1:]:
            # Clients send `//topics/x` and `/topics/x/`: both mean what they seem to.
            parts = ["", *filter(None, parts)]
        match method, parts[1:]:
            case "POST", ["topics", topic]:
                serve = self._produce.serve
                return "produce", lambda call: serve(call, topic, None), WRITE_TOPIC, topic
            case "POST", ["topics", topic, "partitions", number]:
                serve = self._produce.serve
                return "produce", lambda call: serve(call, topic, number), WRITE_TOPIC, topic
            case "GET", ["topics", topic, "partitions", number, "records"]:
                fetch = self._fetch.serve
                return "fetch", lambda call: fetch(call, topic, number), READ_TOPIC, topic
            case _, ["consumers", *rest]:
                of_group = self.consumers.route(method, rest)
                return None if of_group is None else (*of_group, READ_GROUP, rest[0])
            case "POST", [*base, "clusters", cluster, "transactions"] if base in V3:
                return (
                    "transactions",
                    lambda call: self._transactions.serve(call, cluster),
                    None,
                    "",
                )
            case "POST", [*base, "clusters", cluster, "topics", topic, last] if base in V3:
                v3 = {"records": self._produce_v3.stream, "records:batch": self._produce_v3.batch}
                if last in v3:
                    produce = v3[last]
                    return "records", lambda call: produce(call, cluster, topic), WRITE_TOPIC, topic
        return None

    async def _serve(self, route: str, handler: Handler, call: Call) -> None:
        started = time.perf_counter()
        try:
            answer = await handler(call)
            if answer is not None:
                await call.answer(answer)
        except LogError as error:
            self._counters.refused(error)
            refusal = error_response(error)
            if refusal.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                log.error("%s %s: %s", call.scope["method"], call.scope["path"], error)
            await self._refuse(route, call, refusal)
        except Exception as error:
            self._counters.refused(error)
            log.exception("bug in %s %s", call.scope["method"], call.scope["path"])
            await self._refuse(route, call, ErrorAnswer(*INTERNAL_ERROR, {}))
        took = time.perf_counter() - started - call.waited_s
        self._counters.observe(route, call.status, max(took, 0.0))

    async def _refuse(self, route: str, call: Call, refusal: ErrorAnswer) -> None:
        if call.status:
            return  # half an answer is out: nothing better can be said
        pairs = ((name.lower().encode(), text.encode()) for name, text in refusal.headers.items())
        body = error_body(refusal.code, refusal.message)
        media_type = JSON if route in {"records", "transactions"} else JSON_V2
        if route == "other":
            media_type = json_type(call.scope["path"]).encode()
        await call.answer(Answer(refusal.status, body, media_type, tuple(pairs)))


def _is_cross_site(headers: list[tuple[bytes, bytes]]) -> bool:
    """As every browser of today says; other clients say nothing. There is no login that a page
    could lack, and what looks like a form needs no permission (CORS) to be sent."""
    return (b"sec-fetch-site", b"cross-site") in headers


def _refusing(route: str, refusal: LogError) -> Found:
    """Serves the refusal in place of what was asked for."""

    async def refuse(_: Call) -> Answer:
        raise refusal

    return route, refuse, None, ""
