"""The routes of consumer instances, one declaration each.

The handlers are in service.routes.consumers_v2.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from tidelog.service.formats.read_parameters import (
    MAX_BYTES_PARAMETER,
    MAX_RECORDS_PARAMETER,
    ON_ERROR_HEADERS,
    ON_ERROR_PARAMETER,
    records_answer,
)
from tidelog.service.formats.record_pages import ON_ERROR
from tidelog.service.http.body_limit import SMALL_BODY, BodyLimit
from tidelog.service.http.media_types import JSON_V2
from tidelog.service.http.request import HttpResponse
from tidelog.service.http.route import (
    V2,
    V2_INSTANCES,
    Answer,
    Body,
    Content,
    Parameter,
    Permission,
    Route,
    RouteDoc,
)
from tidelog.service.operations.rights import JOIN_GROUP
from tidelog.service.routes.consumers_v2 import ConsumerHandlers
from tidelog.storage.codec.chunk import RECORDS_MAX
from tidelog.storage.state.group_members import GROUP_PARTITIONS_MAX, GROUP_TOPICS_MAX

_GROUP = "/consumers/{consumer_group_id}"
_INSTANCE = f"{_GROUP}/instances/{{instance}}"
_PARTITION = {"topic": "flights", "partition": 0}
_OFFSET = {**_PARTITION, "offset": 42, "metadata": ""}
_ERRORS = {
    400: "a name with control characters, a body that is not JSON, a parameter out of range",
    413: "the body is over its limit",
    422: "an invalid body",
    429: "too many groups or members, or this client creates and ends members too often: retry "
    "after `Retry-After` seconds",
    503: "the store, or the group's coordinator, does not answer: retry",
    504: "the outcome is unknown: retry",
}
_NOT_FOUND = {404: "40403: the instance was deleted, has expired, or never existed"}
_CHANGE_ERRORS = {
    **_NOT_FOUND,
    409: "40903: the instance would have more than one of: topics, a pattern, an assignment",
}
_SEEK_ERRORS = {**_NOT_FOUND, 409: "40903: the partition is not assigned to the instance"}
_TOPICS_BODY = SMALL_BODY.with_items(GROUP_TOPICS_MAX, 256, 1)
_PARTITIONS_BODY = SMALL_BODY.with_items(GROUP_PARTITIONS_MAX, 128, 3)
_OFFSETS_BODY = SMALL_BODY.with_items(GROUP_PARTITIONS_MAX, 128, 5)
_JSON = (Content((JSON_V2,)),)
_OK = {200: Answer("successful", _JSON)}


def _route(
    method: str,
    path: str,
    handler: Callable[..., Coroutine[Any, Any, HttpResponse | None]],
    errors: Mapping[int, str],
    *,
    example: Mapping[str, Any] | None = None,
    description: str = "",
    label: str = "consumers",
    body: BodyLimit = SMALL_BODY,
    **doc: Any,
) -> Route:
    """Declare a route.

    Every route needs the permission to read the group; the handlers check the permissions on
    topics. `example` is a body; `description` is that of a response without a body.
    """
    if example is not None:
        doc["body"] = Body(JSON_V2, example, is_required=False)
    if description:
        doc["answers"] = {204: Answer(description)}
    access = Permission(JOIN_GROUP, "consumer_group_id")
    documentation = RouteDoc({**_ERRORS, **errors}, tag="consumers", **doc)
    dialect = V2_INSTANCES if method == "POST" else V2
    return Route(method, path, handler, access, label, dialect, documentation, body=body)


ROUTES = (
    _route(
        "POST",
        _GROUP,
        ConsumerHandlers.create,
        {
            409: "40902: the group has an instance with this name",
            422: "an invalid value (its code is 42204, 40001 or 422)",
        },
        summary="Create a consumer instance",
        text="The body may be empty, because every field has a default. Fields that "
        "Tidelog adds: `session.timeout.ms`, `max.poll.interval.ms`, `max.poll.records` (default "
        f"and maximum: {RECORDS_MAX}), `group.instance.id` (a static member: a new instance "
        "with the same id takes its place), "
        "`partition.assignment.strategy` (range, roundrobin, sticky or "
        "cooperative-sticky; the first member of the "
        "group chooses), `on.error` (stop, skip or raw, for records that do not decode). "
        "`base_uri` has the service's address as the client sees it. It names no broker, because "
        "any broker serves the instance. With `enable.auto.commit` or `isolation.level`, the "
        "instance follows Strimzi's dialect: a client commits the offset of the next record, and "
        "the response to a commit is 204.",
        example={"name": "c1", "format": "json", "auto.offset.reset": "earliest"},
        answers={200: Answer("`instance_id` and `base_uri`", _JSON)},
    ),
    _route(
        "DELETE",
        _INSTANCE,
        ConsumerHandlers.delete,
        _NOT_FOUND,
        summary="Delete the instance",
        description="deleted",
    ),
    _route(
        "POST",
        f"{_INSTANCE}/subscription",
        ConsumerHandlers.subscribe,
        _CHANGE_ERRORS,
        summary="Subscribe to topics, together with the group's other members",
        text="`topics`, or `topic_pattern` (RE2, for the whole name; the pattern also "
        "matches topics that are created later). The instance has its assignment when the response "
        "arrives.",
        example={"topics": ["flights"]},
        description="subscribed",
        body=_TOPICS_BODY,
    ),
    _route(
        "GET",
        f"{_INSTANCE}/subscription",
        ConsumerHandlers.subscription,
        _NOT_FOUND,
        summary="The subscription of the instance",
        answers=_OK,
    ),
    _route(
        "DELETE",
        f"{_INSTANCE}/subscription",
        ConsumerHandlers.unsubscribe,
        _NOT_FOUND,
        summary="Remove subscription and assignment",
        description="the instance reads nothing",
    ),
    _route(
        "POST",
        f"{_INSTANCE}/assignments",
        ConsumerHandlers.assign,
        _CHANGE_ERRORS,
        summary="Assign partitions, without regard to other members",
        example={"partitions": [_PARTITION]},
        description="assigned",
        body=_PARTITIONS_BODY,
    ),
    _route(
        "GET",
        f"{_INSTANCE}/assignments",
        ConsumerHandlers.assignments,
        _NOT_FOUND,
        summary="The partitions that the instance reads",
        answers=_OK,
    ),
    _route(
        "GET",
        f"{_INSTANCE}/records",
        ConsumerHandlers.records,
        {
            **_NOT_FOUND,
            406: "40601: Accept has another format than the instance",
            409: "40903: the instance has no subscription and no assignment",
            422: "the first record of a partition does not decode, and no other partition has "
            "records; the next read gets the same error",
        },
        summary="Read records",
        text="Responds as soon as there is a record. The first record is returned even if it "
        "exceeds `max_bytes`. Records count as read when the response has arrived, and the next "
        "read commits them (`auto.commit.enable`). If the response was lost, as far as the broker "
        "can see, the next read returns its records again. The header `Tidelog-Read` of a response "
        "with records is the id of the read. If a read sends the last one that the client has "
        "(`0`: none), only this decides whether records are returned again. The header "
        "`Tidelog-Generation` has the `generation` that a transaction needs. "
        "`Accept: application/vnd.apache.arrow.stream` returns columns, for an instance of any "
        "format.",
        parameters=(
            Parameter("timeout", "ms; default: the instance's timeout", {"type": "integer"}),
            MAX_BYTES_PARAMETER,
            MAX_RECORDS_PARAMETER._replace(
                description="maximum records; default and bound: the instance's `max.poll.records`",
                schema={"type": "integer"},
            ),
            ON_ERROR_PARAMETER._replace(
                description=ON_ERROR_PARAMETER.description + "; default: the instance's `on.error`",
                schema={"type": "string", "enum": list(ON_ERROR)},
            ),
        ),
        answers={
            200: records_answer(
                f"Records in the instance's format, or in the format of Accept. {ON_ERROR_HEADERS}"
            )
        },
        label="consume",
    ),
    _route(
        "POST",
        f"{_INSTANCE}/offsets",
        ConsumerHandlers.commit,
        {**_NOT_FOUND, 409: "40903: another member owns the partition"},
        summary="Commit offsets",
        text="`offsets` are the offsets of the last records read or, for an instance in Strimzi's "
        "dialect, of the next records. `partitions` (Redpanda) has the offsets of the next "
        "records. An empty body commits all returned records.",
        example={"offsets": [_OFFSET]},
        answers={
            200: Answer("committed", _JSON),
            204: Answer("committed, in Strimzi's and Redpanda's dialects"),
        },
        label="commit",
        body=_OFFSETS_BODY,
    ),
    _route(
        "GET",
        f"{_INSTANCE}/offsets",
        ConsumerHandlers.committed,
        _NOT_FOUND,
        summary="The committed offsets of the group",
        text="Returns the committed offsets of the partitions in the body `{partitions}` or in "
        "`?topic=&partition=` (repeatable). Without either, returns those of all "
        "partitions that the instance reads. -1 means that the partition has no committed offset.",
        answers=_OK,
        body=_PARTITIONS_BODY,
    ),
    _route(
        "POST",
        f"{_INSTANCE}/positions",
        ConsumerHandlers.seek,
        _SEEK_ERRORS,
        summary="Seek to offsets, or to times",
        example={
            "offsets": [_OFFSET],
            "timestamps": [{**_PARTITION, "timestamp": "2021-02-05T19:14:42Z"}],
        },
        description="the positions are stored: every broker uses them, also after a crash",
        body=_OFFSETS_BODY,
    ),
    _route(
        "POST",
        f"{_INSTANCE}/positions/beginning",
        ConsumerHandlers.seek_to_beginning,
        _SEEK_ERRORS,
        summary="Seek to the log start",
        example={"partitions": [_PARTITION]},
        description="the positions are stored",
        body=_PARTITIONS_BODY,
    ),
    _route(
        "POST",
        f"{_INSTANCE}/positions/end",
        ConsumerHandlers.seek_to_end,
        _SEEK_ERRORS,
        summary="Seek to the end",
        example={"partitions": [_PARTITION]},
        description="the positions are stored",
        body=_PARTITIONS_BODY,
    ),
)

PEER_ROUTES = (
    Route(
        "GET",
        f"{_GROUP}/held-members",
        ConsumerHandlers.held,
        Permission(JOIN_GROUP, "consumer_group_id"),
        "consumers",
        V2,
        RouteDoc({}),
    ),
)
"""Routes that only other brokers call. The calling broker checks the client's permissions."""
