"""Consumer instances as the API's documentation shows them. They are served by `hotpath`, before
the application is asked: no handler below is ever called."""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from fastapi.openapi.constants import METHODS_WITH_BODY

from service.errors import ErrorBody, documented
from service.hotdocs import records_answer
from service.topics import V2Response

_NAME = {
    "in": "path",
    "name": "consumer_group_id",
    "required": True,
    "schema": {"type": "string"},
    "example": "enrich",
}
_INSTANCE = {
    "in": "path",
    "name": "instance",
    "required": True,
    "schema": {"type": "string"},
    "example": "c1",
}
_WHERE = {"topic": "flights", "partition": 0}
_OFFSET = {**_WHERE, "offset": 42, "metadata": ""}
_NOT_FOUND = {"description": "40403: deleted, expired, or never there"}
_ILLEGAL = {"description": "40903: subscribed and assigned by hand, or not assigned"}
_ANSWERS: dict[int, dict[str, Any]] = {404: _NOT_FOUND}
_ERRORS = documented(
    {
        400: "a name with control characters, a body that is not JSON, a parameter out of range",
        413: "the body is over its bound",
        422: "a wrong body",
        429: "a bound of groups or members is reached: come back after `Retry-After` seconds",
        503: "the store, or the group's coordinator, does not answer: try again",
        504: "not known whether it was done: try again",
    }
)
_OF_INSTANCE = "/consumers/{consumer_group_id}/instances/{instance}"


def _query(name: str, why: str) -> dict[str, Any]:
    return {"in": "query", "name": name, "schema": {"type": "integer"}, "description": why}


_ROUTES: list[tuple[str, str, str, str, Any, dict[int, dict[str, Any]]]] = [
    (
        "POST",
        "/consumers/{consumer_group_id}",
        "Create a consumer instance",
        "Everything has a default, the body may be empty. Beside the dialects' fields: "
        "`session.timeout.ms`, `max.poll.interval.ms`, `group.instance.id` (a static member: "
        "whoever comes with the same takes its place), `partition.assignment.strategy` (range, "
        "roundrobin, sticky; of the group's first member). `base_uri` is ours as the client sees "
        "it, and names no broker: any serves the instance. With `enable.auto.commit` or "
        "`isolation.level` it is a Strimzi instance: offsets are committed as sent, answered 204.",
        {"name": "c1", "format": "json", "auto.offset.reset": "earliest"},
        {
            200: {"description": "`instance_id` and `base_uri`"},
            409: {"description": "40902: the group has an instance of that name"},
            422: {"description": "42204, 40001, 422: a value that cannot be"},
        },
    ),
    ("DELETE", _OF_INSTANCE, "Remove the instance", "", None, {204: {"description": "gone"}}),
    (
        "POST",
        f"{_OF_INSTANCE}/subscription",
        "Share topics with the group's other members",
        "`topics`, or `topic_pattern` (RE2, of the whole name; topics that come later too). The "
        "assignment is there with the answer.",
        {"topics": ["flights"]},
        {204: {"description": "subscribed"}, 409: _ILLEGAL},
    ),
    ("GET", f"{_OF_INSTANCE}/subscription", "What it subscribed to", "", None, {}),
    (
        "DELETE",
        f"{_OF_INSTANCE}/subscription",
        "Read nothing",
        "",
        None,
        {204: {"description": "it reads nothing"}},
    ),
    (
        "POST",
        f"{_OF_INSTANCE}/assignments",
        "Read these partitions, whoever else does",
        "",
        {"partitions": [_WHERE]},
        {204: {"description": "assigned"}, 409: _ILLEGAL},
    ),
    ("GET", f"{_OF_INSTANCE}/assignments", "The partitions that it reads", "", None, {}),
    (
        "GET",
        f"{_OF_INSTANCE}/records",
        "Read on",
        "Returns as soon as there is a record, one at least, however large. What was returned "
        "counts as read when the answer was sent, and is committed (`auto.commit.enable`) after "
        "the next read has come. `Tidelog-Generation` goes with a transaction. `Accept: "
        "application/vnd.apache.arrow.stream` takes columns from an instance of any format.",
        None,
        {
            200: records_answer("In the instance's format, or what Accept asks for."),
            406: {"description": "40601: an Accept of another format than the instance's"},
            409: {"description": "40903: it was told nothing to read"},
            422: {"description": "a record that does not decode; it is not passed over"},
        },
    ),
    (
        "POST",
        f"{_OF_INSTANCE}/offsets",
        "Commit",
        "`offsets` of the last records read (of the next, for a Strimzi instance), or "
        "`partitions` of the next (Redpanda); nothing: all that was returned.",
        {"offsets": [_OFFSET]},
        {
            200: {"description": "committed"},
            204: {"description": "committed, in Strimzi's and Redpanda's dialects"},
            409: {"description": "40903: the partition is another member's now"},
        },
    ),
    (
        "GET",
        f"{_OF_INSTANCE}/offsets",
        "What the group has committed",
        "With a body `{partitions}`, or `?topic=&partition=` repeated; without, of all that it "
        "reads. -1: nothing is.",
        None,
        {},
    ),
    (
        "POST",
        f"{_OF_INSTANCE}/positions",
        "Go on at offsets, or times",
        "",
        {"offsets": [_OFFSET], "timestamps": [{**_WHERE, "timestamp": "2021-02-05T19:14:42Z"}]},
        {204: {"description": "on any broker, whatever dies"}, 409: _ILLEGAL},
    ),
    (
        "POST",
        f"{_OF_INSTANCE}/positions/beginning",
        "Go on at the first records that are kept",
        "",
        {"partitions": [_WHERE]},
        {204: {"description": "done"}, 409: _ILLEGAL},
    ),
    (
        "POST",
        f"{_OF_INSTANCE}/positions/end",
        "Go on after the last records",
        "",
        {"partitions": [_WHERE]},
        {204: {"description": "done"}, 409: _ILLEGAL},
    ),
]


def documented_consumers() -> APIRouter:
    """For the API's documentation, and for 405 on methods that no route has."""
    router = APIRouter(tags=["consumers"], default_response_class=V2Response)
    for method, path, summary, description, body, answers in _ROUTES:
        parameters = [_NAME] if path.endswith("id}") else [_NAME, _INSTANCE]
        if path.endswith("/records"):
            parameters.append(_query("timeout", "ms; the instance's own when not given"))
            parameters.append(_query("max_bytes", "of keys and values, about; one at least"))
        extra: dict[str, Any] = {"parameters": parameters}
        if body is not None:
            assert method in METHODS_WITH_BODY
            content = {"application/vnd.kafka.v2+json": {"example": body}}
            extra["requestBody"] = {"content": content}
        said = _ERRORS | _as_error(answers if path.endswith("id}") else _ANSWERS | answers)
        router.add_api_route(
            path,
            _served_elsewhere,
            methods=[method],
            summary=summary,
            description=description or None,
            status_code=min((code for code in answers if code < 300), default=200),
            responses=said,
            openapi_extra=extra,
        )
    return router


def _as_error(answers: dict[int, dict[str, Any]]) -> dict[int | str, dict[str, Any]]:
    """With the body that every error has."""
    return {
        status: {"model": ErrorBody, **said} if status >= HTTPStatus.BAD_REQUEST else said
        for status, said in answers.items()
    }


async def _served_elsewhere() -> None:
    raise AssertionError("served by hotpath")
