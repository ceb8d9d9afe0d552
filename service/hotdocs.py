"""The hot routes as the API's documentation shows them. They are served by `hotpath`, before the
application is asked: no handler below is ever called."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Path, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from service.errors import documented
from service.topics import V2Response

JSON_TYPES = tuple(f"application/vnd.kafka.{kind}.v2+json" for kind in ("json", "binary", "text"))


class OffsetReport(BaseModel):
    """Where a record lies. `offset` is null with acks=1 and 0."""

    partition: int
    offset: int | None
    error_code: int | None
    error: str | None


class ProduceReport(BaseModel):
    """One entry a record, in the request's order."""

    offsets: list[OffsetReport]
    key_schema_id: int | None
    value_schema_id: int | None


class RangeReport(BaseModel):
    """Where the records of a partition begin."""

    partition: int
    base_offset: int | None
    count: int


class ArrowReport(BaseModel):
    """The answer to a request of columns: one range a partition."""

    partitions: list[RangeReport]


class BatchReport(BaseModel):
    """An answer for each entry, by its id."""

    successes: list[dict[str, Any]]
    failures: list[dict[str, Any]]


class TransactionReport(BaseModel):
    """Where each record lies, in the request's order, and what is committed of each group."""

    cluster_id: str
    topics: list[dict[str, Any]]
    consumer_groups: list[dict[str, Any]]


class FetchedRecord(BaseModel):
    """One record. `key` and `value` are JSON, or strings in base64 or of text."""

    topic: str
    key: Any
    value: Any
    partition: int
    offset: int
    timestamp: int
    headers: list[dict[str, str | None]] = []


def records_answer(description: str) -> dict[str, Any]:
    """Records in every form that a read may have."""
    schema = {"type": "array", "items": FetchedRecord.model_json_schema()}
    example = {
        "topic": "flights",
        "key": "N14228",
        "value": {"delay": 2},
        "partition": 0,
        "offset": 42,
        "timestamp": 1357034400000,
    }
    others = ("application/vnd.apache.arrow.stream", "application/x-ndjson", "text/event-stream")
    return {
        "description": description,
        "content": {
            **{name: {"schema": schema, "example": [example]} for name in JSON_TYPES},
            **{name: {} for name in others},
        },
    }


_RETRY = {
    429: "The buffer is full: come back after `Retry-After` seconds.",
    503: "Definitely not written. Try again.",
    504: "Not known whether it was written: retry with the same Idempotency-Key.",
}
_PRODUCE_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One entry a record, in the request's order. `offset` is null with acks=1 "
        "and 0. An Arrow request is answered with one range a partition.",
        "model": ProduceReport | ArrowReport,
        "content": {
            "application/vnd.kafka.v2+json": {
                "example": {
                    "offsets": [{"partition": 0, "offset": 42, "error_code": None, "error": None}],
                    "key_schema_id": None,
                    "value_schema_id": None,
                }
            },
        },
    },
    204: {"description": "With `async=true`: taken, not answered for."},
    **documented(
        {
            400: "Not JSON, bad base64, a wrong type; a parameter or Idempotency-Key that is none.",
            404: "40401 unknown topic, 40402 unknown partition.",
            408: "40801: a body with a schema, and there is no schema registry.",
            413: "The body, or a record, is over its bound.",
            415: "A Content-Type that is none of ours.",
            422: "No records; or the Idempotency-Key was used for another body.",
            **_RETRY,
        }
    ),
}
_FETCH_ANSWER: dict[int | str, dict[str, Any]] = {
    200: records_answer(
        "Records in offset order. Headers `Tidelog-Next-Offset`, `Tidelog-High-Watermark` and "
        "`Tidelog-Log-Start-Offset` say where to go on."
    ),
    **documented(
        {
            400: "40002 offset out of range (the message has the range), bad parameter.",
            404: "40401 unknown topic, 40402 unknown partition.",
            406: "An Accept that is none of ours.",
            422: "A record that does not decode in the format asked for.",
            500: "A corrupt object, named: this partition's reads fail, others go on.",
            503: "The store does not answer, or too many fetches at once.",
        }
    ),
}
_V3_ERRORS = documented(
    {
        400: "A bad Idempotency-Key, or a body that is not JSON.",
        404: "404 another cluster, 40403 unknown topic.",
        413: "The body is over its bound.",
        422: "No records, or too many for a batch.",
        503: "The store does not answer. Try again.",
    }
)
_RECORDS_EXAMPLE = {"records": [{"key": "N14228", "value": {"delay": 2}}]}

_TRANSACTION_EXAMPLE = {
    "topics": [
        {
            "topic_name": "delays",
            "records": [
                {
                    "key": {"type": "STRING", "data": "N14228"},
                    "value": {"type": "JSON", "data": {"delay_minutes": 2}},
                }
            ],
        },
        {"topic_name": "audit", "records": [{"value": {"type": "STRING", "data": "0-41"}}]},
    ],
    "consumer_groups": [
        {
            "consumer_group_id": "enrich",
            "offsets": [{"topic_name": "flights", "partition_id": 0, "offset": 42}],
        }
    ],
}
_TRANSACTION_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "All of it is committed. Where each record lies, in the request's order, "
        "and what is committed of each group.",
        "model": TransactionReport,
        "content": {
            "application/json": {
                "example": {
                    "cluster_id": "c0ffee",
                    "topics": [
                        {
                            "topic_name": "delays",
                            "records": [{"partition_id": 2, "offset": 1017}],
                        },
                        {"topic_name": "audit", "records": [{"partition_id": 0, "offset": 9}]},
                    ],
                    "consumer_groups": [
                        {
                            "consumer_group_id": "enrich",
                            "offsets": [
                                {
                                    "topic_name": "flights",
                                    "partition_id": 0,
                                    "offset": 42,
                                    "metadata": "",
                                }
                            ],
                        }
                    ],
                }
            }
        },
    },
    **documented(
        {
            400: "A bad Idempotency-Key, or half a body.",
            404: "404 another cluster, 40401 unknown topic, 40402 unknown partition.",
            408: "40801: a record with a schema, and there is no schema registry.",
            409: "40903: the generation is not the group's. Nothing was done.",
            413: "The body, or a record, is over its bound.",
            422: "The body is no transaction, the message says where; or the Idempotency-Key was "
            "used for another body.",
            429: _RETRY[429],
            503: "Definitely not done, nothing of it. Try again.",
            504: "Not known whether it was done: retry with the same Idempotency-Key.",
        }
    ),
}

TopicName = Annotated[str, Path(description="name of the topic")]
PartitionNumber = Annotated[int, Path(description="number of the partition", ge=0)]
ProduceBody = Annotated[
    dict[str, Any],
    Body(media_type="application/vnd.kafka.json.v2+json", examples=[_RECORDS_EXAMPLE]),
]
AcksParameter = Annotated[
    str,
    Query(description="`all`: in object storage, with offsets; `1`: on this broker's disk; `0`"),
]
KeyHeader = Annotated[
    str | None,
    Header(description="a retry with the same key and body gets the first answer, on any broker"),
]


def documented_routes() -> APIRouter:
    """Declarations for OpenAPI."""
    router = APIRouter(tags=["records"], default_response_class=V2Response)

    @router.post("/topics/{topic_name}", responses=_PRODUCE_ANSWER)
    async def produce(
        topic_name: TopicName,
        body: ProduceBody,
        acks: AcksParameter = "all",
        idempotency_key: KeyHeader = None,
    ) -> None:
        """Produce records; partitions by `partition`, else by key (murmur2), else sticky."""
        raise AssertionError("served by hotpath")

    @router.post("/topics/{topic_name}/partitions/{partition_id}", responses=_PRODUCE_ANSWER)
    async def produce_to_partition(
        topic_name: TopicName,
        partition_id: PartitionNumber,
        body: ProduceBody,
        acks: AcksParameter = "all",
        idempotency_key: KeyHeader = None,
    ) -> None:
        """Produce records to one partition; a record's own `partition` wins."""
        raise AssertionError("served by hotpath")

    @router.get("/topics/{topic_name}/partitions/{partition_id}/records", responses=_FETCH_ANSWER)
    async def fetch(
        topic_name: TopicName,
        partition_id: PartitionNumber,
        offset: Annotated[str, Query(description="an offset, `earliest` or `latest`")] = "earliest",
        timestamp: Annotated[
            int | None, Query(description="ms: from the first at or after")
        ] = None,
        timeout: Annotated[int, Query(description="ms to wait at the end")] = 0,  # noqa: ASYNC109
        max_bytes: Annotated[
            int | None, Query(description="of keys and values; one at least")
        ] = None,
        follow: Annotated[bool, Query(description="with NDJSON: do not end")] = False,
        format: Annotated[str, Query(description="json, binary or text inside lines")] = "json",
    ) -> None:
        """Fetch records of both tiers from an offset on; no consumer instance needed."""
        raise AssertionError("served by hotpath")

    for base in ("/v3", "/kafka/v3"):
        router.add_api_route(
            base + "/clusters/{cluster_id}/topics/{topic_name}/records",
            _produce_v3,
            methods=["POST"],
            summary="Produce a stream of concatenated JSON records",
            response_class=JSONResponse,
            responses=_V3_ERRORS,
            include_in_schema=base == "/v3",
        )
        router.add_api_route(
            base + "/clusters/{cluster_id}/topics/{topic_name}/records:batch",
            _produce_v3_batch,
            methods=["POST"],
            status_code=207,
            summary="Produce up to ten records, with an answer each",
            response_class=JSONResponse,
            responses=_V3_ERRORS | {207: {"model": BatchReport}},
            include_in_schema=base == "/v3",
        )
        router.add_api_route(
            base + "/clusters/{cluster_id}/transactions",
            _transact,
            methods=["POST"],
            tags=["v3 consumer groups"],
            summary="Produce to several topics and commit offsets, all or nothing",
            response_class=JSONResponse,
            responses=_TRANSACTION_ANSWER,
            include_in_schema=base == "/v3",
        )
    return router


_V3_RECORD = {"value": {"type": "JSON", "data": {"delay": 2}}}


async def _produce_v3(
    cluster_id: str,
    topic_name: TopicName,
    body: Annotated[dict[str, Any], Body(examples=[_V3_RECORD])],
    idempotency_key: KeyHeader = None,
) -> None:
    """Reports are sent in the records' order while records still come."""
    raise AssertionError("served by hotpath")


async def _produce_v3_batch(
    cluster_id: str,
    topic_name: TopicName,
    body: Annotated[dict[str, Any], Body(examples=[{"entries": [{"id": "1", **_V3_RECORD}]}])],
    idempotency_key: KeyHeader = None,
) -> None:
    """207 with `successes` and `failures` by entry id."""
    raise AssertionError("served by hotpath")


async def _transact(
    cluster_id: str,
    body: Annotated[
        dict[str, Any], Body(media_type="application/json", examples=[_TRANSACTION_EXAMPLE])
    ],
    idempotency_key: KeyHeader = None,
) -> None:
    """Records for up to 100 topics, and offsets of consumer groups, in one commit: everybody sees
    all of it or nothing, whatever dies. Records are those of the v3 `records` route (types `JSON`,
    `STRING` and `BINARY`), 10,000 at most; an offset is that of the next record to read. `acks` is
    always all.

    **Consume, transform, produce, exactly once** takes two requests in a loop, no transaction
    coordinator, and any broker for each of them:

    ```
    where = 0                                                    # or, after a start:
    GET  /v3/clusters/{c}/consumer-groups/enrich/offsets         # 404: nothing committed yet
    loop:
      GET  /topics/flights/partitions/0/records?offset={where}&timeout=5000
                                                                 # 200, Tidelog-Next-Offset: 42
      POST /v3/clusters/{c}/transactions                         # what is made of them, and
           Idempotency-Key: "enrich-flights-0-{where}"           # {"topic_name": "flights",
                                                                 #  "partition_id": 0, "offset": 42}
      where = 42
    ```

    Whoever dies anywhere in it goes on from the committed offset: a batch is either committed with
    its results, or neither is there. After 503, 504 or a lost answer send the same body with the
    same key, which answers as the first time.

    A consumer instance commits as `consumer_id`, its instance id, with the `generation` that its
    read was answered with (`Tidelog-Generation`): 409/40903 when the partition is another's since
    then, or the instance is gone. Who is refused deletes its instance and makes another, which goes
    on from what is committed: it has itself read beyond that. Without both the committer is no
    member, which a group with subscribed members refuses; it keeps others off its partitions by
    itself.
    """
    raise AssertionError("served by hotpath")
