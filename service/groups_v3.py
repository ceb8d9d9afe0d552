"""Consumer groups in the v3 dialect: so far, the offsets that they have committed.

Offsets are committed by `POST /v3/clusters/{c}/transactions`, and read here in the same words, so
that what was read can be sent back. Confluent's API has no such list; it is ours.
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path
from pydantic import BaseModel, Field

from service.admin_v3 import Made, known_cluster
from service.errors import NoSuchResource
from service.resources_v3 import ListMetadata
from service.topics import ERRORS, FreshLog

GroupId = Annotated[str, Path(examples=["enrich"])]


class GroupOffsetData(BaseModel):
    """An offset as a transaction commits it."""

    topic_name: str = Field(examples=["flights"])
    partition_id: int = Field(examples=[0])
    offset: int = Field(examples=[42], description="of the next record to read")
    metadata: str = Field(examples=[""], description="what the group wrote beside it")


class GroupOffsetList(BaseModel):
    """By topic and partition; partitions without a committed offset are not there."""

    kind: Literal["TidelogConsumerGroupOffsetList"] = "TidelogConsumerGroupOffsetList"
    metadata: ListMetadata
    cluster_id: str
    consumer_group_id: str
    data: list[GroupOffsetData]


router = APIRouter(
    prefix="/clusters/{cluster_id}",
    tags=["v3 consumer groups"],
    dependencies=[Depends(known_cluster)],
    responses=ERRORS,
)


@router.get("/consumer-groups/{consumer_group_id}/offsets")
async def list_group_offsets(
    consumer_group_id: GroupId, log: FreshLog, make: Made
) -> GroupOffsetList:
    """Where a group goes on reading, as of now on every broker.

    404 when it has committed nothing yet, or when all it did was forgotten: an offset is kept for a
    week after its commit, and no longer than its topic.
    """
    committed = log.committed_offsets(consumer_group_id)
    if not committed:
        raise NoSuchResource(f"Consumer group {consumer_group_id} has no committed offsets.")
    return GroupOffsetList(
        metadata=make.listed("consumer-groups", consumer_group_id, "offsets"),
        cluster_id=make.cluster_id,
        consumer_group_id=consumer_group_id,
        data=[
            GroupOffsetData(
                topic_name=where.topic,
                partition_id=where.partition,
                offset=each.offset,
                metadata=each.metadata,
            )
            for where, each in committed.items()
        ],
    )
