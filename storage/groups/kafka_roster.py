"""The members of one group of Kafka's classic protocol, with their requests that wait. Pure."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tidelog.storage.core.actions import SettledMember
from tidelog.storage.groups.kafka_requests import (
    GroupCode,
    Identity,
    Joined,
    JoinRequest,
    OnJoined,
    OnSynced,
    Synced,
)
from tidelog.storage.state.group_state import ClientMember, ConsumerGroup


@dataclass(slots=True, eq=False)
class RosterMember:
    """A member of the group.

    `joining` or `syncing` is the callback of its waiting request. `heard_s` is the time of its last
    request.
    """

    member_id: str
    request: JoinRequest
    heard_s: float
    assignment: bytes = b""
    joining: OnJoined | None = None
    syncing: OnSynced | None = None

    @classmethod
    def restored(cls, member: ClientMember, group: ConsumerGroup, now_s: float) -> "RosterMember":
        """Continue a member of the cluster state.

        Of its assignors, the state has only the chosen one.
        """
        request = JoinRequest(
            Identity(member.member_id, member.instance_id),
            member.config.client_id,
            member.host,
            member.config.principal,
            member.config.session_timeout_ms,
            member.config.max_poll_interval_ms,
            group.protocol_type,
            [(group.protocol, member.metadata)],
        )
        return cls(member.member_id, request, now_s, member.assignment)

    @property
    def instance_id(self) -> str:
        return self.request.who.instance_id

    @property
    def ends_s(self) -> float:
        """Return the time at which the session ends. It cannot end while a request waits."""
        if self.joining is not None or self.syncing is not None:
            return math.inf
        return self.heard_s + self.request.session_timeout_ms / 1000

    def metadata(self, protocol: str) -> bytes:
        return next(
            (metadata for name, metadata in self.request.protocols if name == protocol), b""
        )

    def settled(self, protocol: str, assignment: bytes) -> SettledMember:
        request = self.request
        return SettledMember(
            self.member_id,
            self.instance_id,
            request.client_id,
            request.host,
            request.session_timeout_ms,
            request.rebalance_timeout_ms,
            self.metadata(protocol),
            assignment,
            request.principal,
        )

    def answer_join(self, answer: Joined) -> None:
        reply, self.joining = self.joining, None
        if reply is not None:
            reply(answer)

    def answer_sync(self, answer: Synced) -> None:
        reply, self.syncing = self.syncing, None
        if reply is not None:
            reply(answer)

    def refuse(self, code: GroupCode) -> None:
        """Answer the waiting requests with an error."""
        self.answer_join(Joined(code, self.member_id))
        self.answer_sync(Synced(code))


class Promise(NamedTuple):
    """A member id is kept for a principal until the time `ends_s`."""

    ends_s: float
    principal: str


class Roster:
    """The members by id, in the order of their joins, and by instance id.

    The roster counts how many members have each assignor. `size` is the sum of their requests'
    sizes, and `sizes` has the sums by principal. `counts` has the members and the promised member
    ids by principal.
    """

    def __init__(self) -> None:
        self.size = 0
        self.sizes: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.promised: dict[str, Promise] = {}
        """Member ids whose first JoinGroup has not come yet."""
        self._members: dict[str, RosterMember] = {}
        self._static: dict[str, str] = {}
        self._support: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[RosterMember]:
        return iter(list(self._members.values()))

    def __contains__(self, member_id: object) -> bool:
        return member_id in self._members

    def __getitem__(self, member_id: str) -> RosterMember:
        return self._members[member_id]

    def find(self, identity: Identity) -> RosterMember | None:
        """Return the member of this id, or of this instance id if the member id is empty."""
        return self._members.get(identity.member_id or self._static.get(identity.instance_id, ""))

    def check(self, identity: Identity) -> GroupCode:
        """Return NONE if this is the identity of a member, else the error."""
        if identity.instance_id:
            holder = self._static.get(identity.instance_id)
            if holder is not None and holder != identity.member_id:
                return GroupCode.FENCED_INSTANCE_ID
            if holder is None:
                return GroupCode.UNKNOWN_MEMBER_ID
        return (
            GroupCode.NONE if identity.member_id in self._members else GroupCode.UNKNOWN_MEMBER_ID
        )

    def promise(self, member_id: str, principal: str, ends_s: float) -> None:
        self.promised[member_id] = Promise(ends_s, principal)
        _add(self.counts, principal, 1)

    def end_promise(self, member_id: str) -> bool:
        """Forget a promised member id. Return whether it was promised."""
        promise = self.promised.pop(member_id, None)
        if promise is not None:
            _add(self.counts, promise.principal, -1)
        return promise is not None

    def growth(self, request: JoinRequest) -> tuple[int, int]:
        """Return how many members and bytes the request would add to those of its principal."""
        own = self.find(request.who)
        if own is None or own.request.principal != request.principal:
            return int(request.who.member_id not in self.promised), request.size
        return 0, request.size - own.request.size

    def put(self, member: RosterMember) -> None:
        self._members[member.member_id] = member
        member.request = _named(member, member.request)
        if member.instance_id:
            self._static[member.instance_id] = member.member_id
        self._count(member.request, 1)

    def change(self, member: RosterMember, request: JoinRequest) -> None:
        """Replace the member's request. The member keeps its instance id."""
        self._count(member.request, -1)
        member.request = _named(member, request)
        self._count(request, 1)

    def rename(self, member: RosterMember, member_id: str) -> None:
        """Give a static member another member id."""
        del self._members[member.member_id]
        member.member_id = member_id
        self._members[member_id] = member
        self._static[member.instance_id] = member_id

    def remove(self, member: RosterMember) -> None:
        del self._members[member.member_id]
        if self._static.get(member.instance_id) == member.member_id:
            del self._static[member.instance_id]
        self._count(member.request, -1)

    def _count(self, request: JoinRequest, sign: int) -> None:
        self.size += sign * request.size
        _add(self.sizes, request.principal, sign * request.size)
        _add(self.counts, request.principal, sign)
        for name in {name for name, _ in request.protocols}:
            _add(self._support, name, sign)

    # -- assignors

    def is_compatible(self, request: JoinRequest, own: RosterMember | None) -> bool:
        """Return whether the request has an assignor that all members except `own` have."""
        other_count = len(self) - (own is not None)
        mine = set() if own is None else {name for name, _ in own.request.protocols}
        return any(
            self._support[name] - (name in mine) == other_count for name, _ in request.protocols
        )

    def elect(self) -> str:
        """Return the assignor that most members prefer, of those that all members have."""
        common = {name for name, count in self._support.items() if count == len(self)}
        votes = Counter(
            next(name for name, _ in member.request.protocols if name in common)
            for member in self._members.values()
            if common
        )
        return max(votes, key=votes.__getitem__, default="")

    # -- the group as a whole

    @property
    def rebalance_timeout_s(self) -> float:
        """Return how long the members may take to join again."""
        return max((member.request.rebalance_timeout_ms for member in self), default=0) / 1000

    @property
    def have_all_joined(self) -> bool:
        return all(member.joining is not None for member in self._members.values())

    def settled(self, protocol: str, assignments: Mapping[str, bytes]) -> list[SettledMember]:
        return [member.settled(protocol, assignments.get(member.member_id, b"")) for member in self]


def _add(counts: Counter[str], key: str, added_count: int) -> None:
    counts[key] += added_count
    if not counts[key]:
        del counts[key]


def _named(member: RosterMember, request: JoinRequest) -> JoinRequest:
    """Return the request with the member's ids."""
    return request._replace(who=Identity(member.member_id, member.instance_id))
