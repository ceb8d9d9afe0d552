"""Health, as load balancers and orchestrators ask for it."""

from fastapi import Request
from pydantic import BaseModel, Field

from tidelog.service.http.route import HIDDEN, PLAIN, Route, RouteAccess, RouteDoc
from tidelog.service.routes.dependencies import broker_of


class Status(BaseModel):
    status: str = Field(examples=["ready"])


class Readiness(Status):
    """The answer of a ready broker, with four counts; a count of 0 is absent.

    `set_aside` counts the requests acknowledged with acks=1 that the store refuses.
    `tables_in_doubt` counts the topics whose table is in doubt. `damaged_tails` counts the
    partitions whose tail is damaged, and which are sealed only up to the damage. `holds` counts the
    backups that stop collection. GET /tidelog/v1/overview names these topics and partitions.
    """

    set_aside: int | None = Field(default=None, examples=[None])
    tables_in_doubt: int | None = Field(default=None, examples=[None])
    damaged_tails: int | None = Field(default=None, examples=[None])
    holds: int | None = Field(default=None, examples=[None])


async def get_healthy() -> Status:
    """The process runs. Restart the process if this route does not answer."""
    return Status(status="healthy")


async def get_startup() -> Status:
    """The start is complete.

    The broker has probed the store, loaded the log and committed the hot log of a crashed process.
    Before that, the port is closed.
    """
    return Status(status="started")


async def get_ready(request: Request) -> Readiness:
    """This broker can read and write the log.

    Send it no requests while this route answers 503. `set_aside` counts requests acknowledged with
    acks=1 that the store refuses. Only this broker's disk has these requests. A table in doubt or a
    damaged tail does not make a broker unready, because its topic still accepts records, and other
    topics are not affected.
    """
    broker = broker_of(request)
    await broker.check_ready()
    return Readiness(
        status="ready",
        set_aside=broker.set_aside or None,
        tables_in_doubt=len(broker.stored.doubts()) or None,
        damaged_tails=len(broker.stored.damaged_tails()) or None,
        holds=len(broker.state.holds) or None,
    )


_LABEL = "health"
_PUBLIC = RouteAccess.PUBLIC
_DOC = RouteDoc()
_READY_DOC = RouteDoc({503: "the message has the reason"}, omit="none")

ROUTES = (
    Route("GET", "/healthy", get_healthy, _PUBLIC, _LABEL, PLAIN, _DOC),
    Route("GET", "/startup", get_startup, _PUBLIC, _LABEL, PLAIN, _DOC),
    Route("GET", "/ready", get_ready, _PUBLIC, _LABEL, PLAIN, _READY_DOC),
    Route("GET", "/status/ready", get_ready, _PUBLIC, _LABEL, PLAIN, HIDDEN._replace(omit="none")),
)
