"""Members of classic groups as Kafka's clients behave, without a network: used by several tests."""

from tidelog.storage.core.actions import SettleGroup
from tidelog.storage.groups.classic_protocol import ClassicGroup
from tidelog.storage.groups.kafka_requests import (
    GroupCode,
    Identity,
    Joined,
    JoinRequest,
    Synced,
    SyncRequest,
)

RANGE = [("range", b"r")]
BOTH = [("sticky", b"s"), ("range", b"r")]


def request(
    member_id: str = "",
    *,
    instance_id: str = "",
    client_id: str = "app",
    protocols: list[tuple[str, bytes]] = RANGE,
    session_ms: int = 10_000,
    rebalance_ms: int = 60_000,
    protocol_type: str = "consumer",
    version: int = 9,
    principal: str = "",
) -> JoinRequest:
    return JoinRequest(
        Identity(member_id, instance_id),
        client_id,
        "/127.0.0.1",
        principal,
        session_ms,
        rebalance_ms,
        protocol_type,
        protocols,
        needs_member_id=version >= 4,
        may_skip=version >= 9,
    )


class Machine:
    """A group with its clock, and the answers of its members by name.

    Commits succeed at once, unless the test takes them.
    """

    def __init__(self, group: ClassicGroup) -> None:
        self.group = group
        self.now_s = 0.0
        self.joined: dict[str, Joined] = {}
        self.synced: dict[str, Synced] = {}

    def join(self, member_id: str = "", **fields) -> Joined | None:
        """The answer, or None if it waits. A new member joins with its id."""
        got: list[Joined] = []

        def reply(answer: Joined) -> None:
            got.append(answer)
            self.joined[answer.member_id] = answer

        self.group.join(request(member_id, **fields), reply, self.now_s)
        if got and got[0].code is GroupCode.MEMBER_ID_REQUIRED:
            return self.join(got[0].member_id, **fields)
        return got[0] if got else None

    def sync(
        self, member_id: str, generation: int, instance_id: str = "", **assignments: bytes
    ) -> Synced | None:
        got: list[Synced] = []

        def reply(answer: Synced) -> None:
            got.append(answer)
            self.synced[member_id] = answer

        assignment_by_member = {
            name.replace("_", "-"): assignment for name, assignment in assignments.items()
        }
        self.group.sync(
            SyncRequest(Identity(member_id, instance_id), generation, assignment_by_member),
            reply,
            self.now_s,
        )
        return got[0] if got else None

    def heartbeat(self, member_id: str, generation: int, instance_id: str = "") -> GroupCode:
        return self.group.heartbeat(Identity(member_id, instance_id), generation, self.now_s)

    def leave(self, member_id: str, instance_id: str = "") -> GroupCode:
        return self.group.leave(Identity(member_id, instance_id), self.now_s)

    def commit(self, member_id: str, generation: int) -> GroupCode:
        return self.group.check_commit(Identity(member_id), generation, self.now_s)

    def settle(self, code: GroupCode = GroupCode.NONE) -> None:
        """Commit what waits."""
        while self.group.actions:
            action = self.group.actions.pop(0)
            if isinstance(action, SettleGroup):
                self.group.settled(action, code, self.now_s)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.group.tick(self.now_s)
