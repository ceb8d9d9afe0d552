"""Routes for the upkeep of a topic without rights on the object store.

They are the deletion of records, and compaction. The seal is in service.routes.topics_v2.
"""

from typing import Annotated, Any

import msgspec
from fastapi import Request
from pydantic import BaseModel, Field

from tidelog.service.formats.strict_bodies import Items, StrictModel, WholeNumber
from tidelog.service.http.body_limit import SMALL_BODY
from tidelog.service.http.route import TIDELOG, Permission, Route, RouteAccess, RouteDoc
from tidelog.service.operations.compaction_jobs import CompactionJob, Compactions
from tidelog.service.operations.rights import ALTER_TOPIC, DELETE_TOPIC
from tidelog.service.operations.topics import END
from tidelog.service.routes.dependencies import (
    CHANGE_ERRORS,
    ERRORS,
    BrokerOperations,
    CallerChange,
    FreshBroker,
    Rights,
    TopicName,
)
from tidelog.storage.core.errors import InvalidRequest, LogError
from tidelog.storage.core.topic_configs import PARTITIONS_MAX


class RecordsBefore(StrictModel):
    partition_id: WholeNumber
    offset: WholeNumber = Field(
        ge=END, description="first offset to keep; -1: the end, no record is kept"
    )


class DeleteRecords(StrictModel):
    partitions: Annotated[Items[RecordsBefore], Field(min_length=1, max_length=PARTITIONS_MAX)] = (
        Field(examples=[[{"partition_id": 0, "offset": 17}]])
    )
    validate_only: bool = Field(default=False, description="change nothing")


class MovedLogStart(BaseModel):
    partition_id: int
    was: int = Field(description="log start offset before the request")
    log_start_offset: int = Field(description="first offset that is kept")


class DeletedRecords(BaseModel):
    topic_name: str
    validate_only: bool
    partitions: list[MovedLogStart]


class NewCompaction(StrictModel):
    validate_only: bool = Field(default=False, description="find what is due, change nothing")
    is_forced: bool = Field(
        default=False, description="compact even below `min.cleanable.dirty.ratio`"
    )


class CompactionData(BaseModel):
    """A compaction of a topic that a client has started."""

    job_id: str
    broker: str = Field(description="name of the broker that runs it")
    broker_id: int
    topic: str
    is_dry_run: bool
    is_forced: bool
    started_ms: int
    state: str = Field(description="running, done, failed, or stopped with its broker")
    ended_ms: int | None
    rows_read: int = Field(description="rows that were read so far, some of them twice")
    error: str
    results: list[dict[str, Any]] = Field(description="merges and compactions, at the end")
    has_more_results: bool = Field(description="only the first 1,000 results are here")


class CompactionList(BaseModel):
    data: list[CompactionData]


async def delete_records(
    topic_name: TopicName,
    body: DeleteRecords,
    operations: BrokerOperations,
    change: CallerChange,
) -> DeletedRecords:
    """Delete the records before given offsets, as Kafka's DeleteRecords does.

    Consumers see the change at once; retention removes the records from the table within minutes.

    All offsets are checked before the first change. The partitions change independently; after an
    error, send the request again: a log start never moves back.
    """
    offsets = _offsets(body)
    moves = await operations.topics.planned_deletion(change.rights, topic_name, offsets)
    if not body.validate_only:
        outcomes = await operations.topics.delete_records(change, topic_name, [*offsets.items()])
        for number, outcome in zip(offsets, outcomes, strict=True):
            if isinstance(outcome, LogError):
                raise outcome
            moves[number] = outcome
    moved = [
        MovedLogStart(partition_id=number, was=move.was, log_start_offset=move.log_start_offset)
        for number, move in moves.items()
    ]
    return DeletedRecords(topic_name=topic_name, validate_only=body.validate_only, partitions=moved)


def _offsets(body: DeleteRecords) -> dict[int, int]:
    offsets: dict[int, int] = {}
    for records_before in body.partitions:
        number = records_before.partition_id
        if number in offsets:
            raise InvalidRequest(f"partition {number} is given twice")
        offsets[number] = records_before.offset
    return offsets


async def start_compaction(
    request: Request, topic_name: TopicName, body: NewCompaction, broker: FreshBroker
) -> CompactionData:
    """Start a compaction of a topic on this broker.

    It merges small segments and, if the topic's cleanup.policy has `compact`, keeps the newest
    record of each key. The job goes on after the response. A broker runs one job at a time.
    """
    broker.state.topic(topic_name)  # raises UnknownTopic
    jobs: Compactions = request.app.state.reports.compactions
    job = jobs.start(topic_name, is_dry_run=body.validate_only, is_forced=body.is_forced)
    return _data(job)


async def list_compactions(
    request: Request, operations: BrokerOperations, rights: Rights
) -> CompactionList:
    """The last compactions that clients have started, the newest first.

    The list has those of all brokers that answer within a second. A broker keeps its last 20 until
    it stops.
    """
    jobs: Compactions = request.app.state.reports.compactions
    shown = [job for job in await jobs.all() if operations.topics.is_shown(rights, job.topic)]
    return CompactionList(data=[_data(job) for job in shown])


def _data(job: CompactionJob) -> CompactionData:
    return CompactionData(**msgspec.structs.asdict(job))


_RECORDS = "/topics/{topic_name}/records:delete"
_COMPACT = "/topics/{topic_name}/compactions"
_DELETE = Permission(DELETE_TOPIC, "topic_name")
_ALTER = Permission(ALTER_TOPIC, "topic_name")
_CHECKED = RouteAccess.CHECKED_BY_HANDLER
_DELETE_BODY = SMALL_BODY.with_items(PARTITIONS_MAX, 100, 3)
_DELETE_DOC = RouteDoc(ERRORS | CHANGE_ERRORS)
_COMPACT_DOC = RouteDoc(ERRORS | {409: "40904: the broker runs a compaction already"}, 202)

ROUTES = (
    Route(
        "POST",
        _RECORDS,
        delete_records,
        _DELETE,
        "topics",
        TIDELOG,
        _DELETE_DOC,
        body=_DELETE_BODY,
    ),
    Route("POST", _COMPACT, start_compaction, _ALTER, "topics", TIDELOG, _COMPACT_DOC),
    Route("GET", "/compactions", list_compactions, _CHECKED, "topics", TIDELOG, RouteDoc()),
)
