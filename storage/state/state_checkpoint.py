"""The cluster state in a checkpoint: its elements, and their bytes (FORMAT.md section 5). Pure."""

import msgspec

from tidelog.storage.core import format_levels
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.state import principal_shares
from tidelog.storage.state.access import AccessCheckpoint
from tidelog.storage.state.applied_drafts import AppliedDraftMark
from tidelog.storage.state.collection_holds import Hold
from tidelog.storage.state.committed_offsets import CHECKPOINT, KeptGroups
from tidelog.storage.state.elapsed_time import ElapsedCheckpoint
from tidelog.storage.state.group_state import ClientGroupCheckpoint, MembersCheckpoint
from tidelog.storage.state.idempotency_records import IdempotencyRecord, OwnedRecords
from tidelog.storage.state.producers import ProducerOwners, ProducersCheckpoint, ReservedIds
from tidelog.storage.state.time_bounds_in_effect import BoundsCheckpoint
from tidelog.storage.state.topic import DeletedTopic, Topic
from tidelog.storage.state.topic_owners import PartitionsOf

ELEMENTS_MIN = 9
"""Number of elements that every checkpoint of level 1 has. Of the elements after them, `encode`
omits the empty ones at the end."""


class OwnersCheckpoint(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The owners of topics, groups, producers and idempotency records, from level 3 on.

    `StateCheckpoint.keys` has the idempotency records without a principal.
    """

    topics: dict[str, PartitionsOf]
    groups: dict[str, str]
    keys: OwnedRecords
    producers: ProducerOwners


class KafkaCheckpoint(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The parts of the state that only Kafka's protocol has, from level 4 on."""

    reserved_ids: list[ReservedIds]
    groups: list[ClientGroupCheckpoint]


class StateCheckpoint(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    level: int
    cluster_id: str
    seq: int
    hash: bytes
    time_ms: int
    topics: list[Topic]
    deleted: list[DeletedTopic]
    keys: list[IdempotencyRecord]
    hot_logs: dict[str, int]
    producers: ProducersCheckpoint | None = None
    committed_offsets: KeptGroups | None = None
    members: MembersCheckpoint | None = None
    origins: list[AppliedDraftMark] = []
    access: AccessCheckpoint | None = None
    elapsed: ElapsedCheckpoint | None = None
    bounds: BoundsCheckpoint | None = None
    holds: list[Hold] = []
    owners: OwnersCheckpoint | None = None
    kafka: KafkaCheckpoint | None = None
    defaults: dict[str, str] = {}


_decoder = msgspec.msgpack.Decoder(StateCheckpoint)


def encode(snapshot: StateCheckpoint) -> bytes:
    """Return the bytes: without the elements that the snapshot's level does not have."""
    elements = list(msgspec.structs.astuple(snapshot))
    if snapshot.level < format_levels.KAFKA:  # also the level of TOPIC_DEFAULTS
        del elements[-2:]
    if snapshot.level < principal_shares.LEVEL:
        elements.pop()
    while (
        snapshot.level == format_levels.FIRST and len(elements) > ELEMENTS_MIN and not elements[-1]
    ):
        elements.pop()
    return CHECKPOINT.encode(elements)


def with_groups_in_order(snapshot: StateCheckpoint) -> bytes:
    """Return the bytes with the groups of each kind in the order of their ids."""
    for kind in (snapshot.members, snapshot.kafka):
        if kind is not None:
            kind.groups.sort(key=lambda group: group.group_id)
    return encode(snapshot)


def decode(body: bytes, key: str) -> StateCheckpoint:
    """Decode a checkpoint's body. Raises Corrupt with the checkpoint's `key`, or NewerLevel."""
    format_levels.leading(body, key)
    try:
        snapshot = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(key, f"checkpoint does not decode: {error}") from error
    is_first = snapshot.level == format_levels.FIRST
    if any((part is None) != is_first for part in (snapshot.elapsed, snapshot.bounds)):
        raise Corrupt(key, "lacks elapsed time or bounds, or has one of them at level 1")
    if is_first and snapshot.holds:
        raise Corrupt(key, "a checkpoint has holds only from level 2 on")
    if (snapshot.owners is None) != (snapshot.level < principal_shares.LEVEL):
        raise Corrupt(key, "a checkpoint has owners from level 3 on, and not before")
    if (snapshot.kafka is None) != (snapshot.level < format_levels.KAFKA):
        raise Corrupt(key, "a checkpoint has Kafka's part from level 4 on, and not before")
    if snapshot.defaults and snapshot.level < format_levels.TOPIC_DEFAULTS:
        raise Corrupt(key, "a checkpoint has defaults of topics only from level 4 on")
    return snapshot
