"""Requests and answers of Kafka's classic protocol for groups. Pure."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, IntEnum
from typing import NamedTuple, TypeAlias


class GroupCode(IntEnum):
    """The error codes of Kafka's protocol for groups."""

    NONE = 0
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    UNSUPPORTED_VERSION = 35
    INVALID_REQUEST = 42
    MEMBER_ID_REQUIRED = 79
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82


class GroupPhase(Enum):
    """The state of a group, with Kafka's names."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


class Identity(NamedTuple):
    """A member as requests name it.

    `instance_id` is empty for a dynamic member. `member_id` may be empty in a first JoinGroup, and
    in a LeaveGroup that names a static member.
    """

    member_id: str
    instance_id: str = ""


PROTOCOL_BYTES = 200
"""Memory of an assignor of a request, in addition to its name and metadata."""
CHAR_BYTES = 4
"""The most memory of a character of a text."""


class JoinRequest(NamedTuple):
    """A JoinGroup request.

    `protocols` are the member's assignors, in the order of its preference, with its metadata for
    each. If `needs_member_id`, a new dynamic member gets its id in a refusal and joins again (from
    version 4 on). If `may_skip`, the member understands `skip_assignment` (from version 9 on).
    """

    who: Identity
    client_id: str
    host: str
    principal: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: Sequence[tuple[str, bytes]]
    needs_member_id: bool = False
    may_skip: bool = False

    @property
    def size(self) -> int:
        """Return the bytes that the group keeps of the request, at most."""
        return CHAR_BYTES * len(self.protocol_type) + sum(
            PROTOCOL_BYTES + CHAR_BYTES * len(name) + len(data) for name, data in self.protocols
        )


class JoinedMember(NamedTuple):
    """A member in the leader's list, with its metadata for the chosen assignor."""

    member_id: str
    instance_id: str
    metadata: bytes


class Joined(NamedTuple):
    """The answer to JoinGroup.

    `members` is empty for all members but the leader. If `skip_assignment`, the leader must not
    compute assignments, because the last ones are valid.
    """

    code: GroupCode
    member_id: str
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    skip_assignment: bool = False
    members: Sequence[JoinedMember] = ()


class SyncRequest(NamedTuple):
    """A SyncGroup request.

    The leader sends `assignments` by member id. `protocol_type` and `protocol` are None below
    version 5.
    """

    who: Identity
    generation: int
    assignments: Mapping[str, bytes]
    protocol_type: str | None = None
    protocol: str | None = None


class Synced(NamedTuple):
    """The answer to SyncGroup."""

    code: GroupCode
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class DescribedMember(NamedTuple):
    """A member for people and admin tools. `metadata` is for the group's assignor."""

    member_id: str
    instance_id: str
    client_id: str
    host: str
    metadata: bytes
    assignment: bytes


class Description(NamedTuple):
    """A group for people and admin tools."""

    phase: GroupPhase
    protocol_type: str
    protocol: str
    members: list[DescribedMember]


OnJoined: TypeAlias = Callable[[Joined], None]
OnSynced: TypeAlias = Callable[[Synced], None]
