"""The wait of a client whose members had short lives, before its next join.

So the other members of the group are not rebalanced each time. A member that joins and leaves costs
its group two rebalances, and a client in a crash loop would cost the group two rebalances every
second. So the coordinator counts the short lives of each client in each group. A life is short if
less than LIFE_S passes between the join and the last request. A client with SHORT_LIVES_MAX short
lives in WINDOW_S may join at most once in PAUSE_S. The coordinator refuses its other joins, with
the time to wait. If a member changes its subscription within LIFE_S, this counts as a short life,
too. Pure: callers give the times. The counts are soft state, so after a crash the next coordinator
counts from zero.

These are the reasons for the numbers. Members that start together, and members that a roll-out
replaces after more than a minute, have no short lives: no join is held, whatever their number. The
first five joins never wait, so a deployment that fails at first is not delayed. After that, 2 joins
a minute cost at most 4 generations a minute. The pause is shorter than Kubernetes' pause from the
third restart on (40 s), and a job that joins once a minute never waits.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from tidelog.storage.core.actions import MemberConfig
from tidelog.storage.core.errors import Throttled

LIFE_S = 60.0
SILENT_S = 30.0
"""A member without a request for this time counts as gone, if its life was short. Its session may
last longer: 5 minutes by default."""
SHORT_LIVES_MAX = 5
WINDOW_S = 300.0
"""Longer than SHORT_LIVES_MAX pauses. So a client that fails all the time, and joins once in each
pause, always has at least SHORT_LIVES_MAX short lives in the window."""
PAUSE_S = 30.0
CLIENTS_MAX = 1_000
"""Bound of clients with short lives in a group (I10), each ~1 KiB. The oldest is forgotten."""


class MemberHeld(Throttled):
    """The refusal of a join: the client had too many short lives."""


class ClientId(NamedTuple):
    """The identity of a client over the lives of its members.

    It is the `group.instance.id` if there is one, else the principal, the `client.id` and the
    address. It does not have the member's name, because many clients create a new name at each
    start.
    """

    instance_id: str
    principal: str
    client_id: str
    host: str

    def __str__(self) -> str:
        if self.instance_id:
            return f"static member {self.instance_id!r}"
        names = [f"client.id {self.client_id!r}" if self.client_id else "no client.id"]
        if self.principal:
            names.append(self.principal)
        return f"the client at {self.host or 'an unknown address'} ({', '.join(names)})"


def client_of(config: MemberConfig, instance_id: str, host: str) -> ClientId:
    if instance_id:
        return ClientId(instance_id, "", "", "")
    return ClientId("", config.principal, config.client_id, host)


class Life(NamedTuple):
    """The times of a member's join and of its last request, by `Clock.boot_s`."""

    joined_s: float
    heard_s: float

    @property
    def is_short(self) -> bool:
        return self.heard_s - self.joined_s < LIFE_S


class HeldMember(NamedTuple):
    """A client whose join was refused and that may not join yet.

    `member_id` is the name in that join.
    """

    client: ClientId
    member_id: str
    short_lives: int
    wait_s: float


@dataclass(slots=True)
class _Client:
    """`ends_s` are the times of the last requests of short lives.

    `silent` is the number of short lives whose members are still in the group. `refused` is the
    member id of the last refused join. `named_s` is the time of the last log line that named the
    client.
    """

    ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=2 * SHORT_LIVES_MAX))
    silent: int = 0
    joined_s: float = -math.inf
    refused: str = ""
    named_s: float = -math.inf

    def short_lives(self, now_s: float) -> int:
        while self.ends_s and self.ends_s[0] <= now_s - WINDOW_S:
            self.ends_s.popleft()
        return len(self.ends_s) + self.silent


class ShortLives:
    """The clients of one group whose members had short lives. `refused` counts refused joins."""

    def __init__(self) -> None:
        self.refused = 0
        self._clients: dict[ClientId, _Client] = {}

    def ended(self, client: ClientId, life: Life) -> None:
        """Count the life of a member that was subscribed and is no longer in the group."""
        if life.is_short:
            client_state = self._known(client)
            client_state.ends_s.append(life.heard_s)
            client_state.joined_s = max(client_state.joined_s, life.joined_s)

    def hold(
        self, client: ClientId, member_id: str, now_s: float, *, silent: int = 0
    ) -> HeldMember | None:
        """Return the client with the time that its join must wait, or None if it may join now.

        `silent` is the number of its members that had a short life and are silent for SILENT_S.
        """
        client_state = self._clients.get(client)
        if client_state is None:
            if silent < SHORT_LIVES_MAX:
                return None
            client_state = self._known(client)
        client_state.silent = silent
        lives, wait_s = client_state.short_lives(now_s), client_state.joined_s + PAUSE_S - now_s
        if lives < SHORT_LIVES_MAX or wait_s <= 0:
            client_state.joined_s, client_state.refused = now_s, ""
            return None
        client_state.refused = member_id
        self.refused += 1
        return HeldMember(client, member_id, lives, wait_s)

    def is_to_be_named(self, client: ClientId, now_s: float) -> bool:
        """Return whether a log line should name the client: once in WINDOW_S."""
        client_state = self._known(client)
        is_due = now_s - client_state.named_s >= WINDOW_S
        if is_due:
            client_state.named_s = now_s
        return is_due

    def held(self, now_s: float) -> list[HeldMember]:
        """Return the clients that may not join yet."""
        held_members = []
        for client, client_state in self._clients.items():
            lives, wait_s = client_state.short_lives(now_s), client_state.joined_s + PAUSE_S - now_s
            if client_state.refused and lives >= SHORT_LIVES_MAX and wait_s > 0:
                held_members.append(HeldMember(client, client_state.refused, lives, wait_s))
        return held_members

    def _known(self, client: ClientId) -> _Client:
        client_state = self._clients.get(client)
        if client_state is None:
            if len(self._clients) >= CLIENTS_MAX:
                del self._clients[next(iter(self._clients))]
            client_state = self._clients[client] = _Client()
        return client_state


def refusal(held_member: HeldMember, group_id: str) -> MemberHeld:
    """Return the error of a refused join."""
    return MemberHeld(
        f"{held_member.client} joined and left {held_member.short_lives} times in "
        f"{WINDOW_S:.0f} s and rebalanced the other members of group {group_id!r} each time: its "
        f"member {held_member.member_id!r} must wait {math.ceil(held_member.wait_s)} s; find out "
        "why its members end or change subscriptions",
        retry_after_ms=math.ceil(held_member.wait_s * 1000),
    )
