"""Classic groups on brokers: commits, timers, coordinators that die or only seem to.

In virtual time. The last test draws everything that may happen to a group, with members that behave
as Kafka's clients do.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from tests.storage.groups.kafka_group_driver import request
from tests.support.instances import CONFIG, Chosen, started, virtual
from tests.support.logs import closing, kill, opened, store_of
from tidelog.storage.broker import Broker
from tidelog.storage.core.actions import CommitOffsets, GroupOffset, JoinGroup
from tidelog.storage.core.errors import (
    GroupNotEmpty,
    IllegalGeneration,
    InconsistentGroupProtocol,
    LogError,
    Unavailable,
    UnknownMember,
)
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.groups import classic_protocol, kafka_groups
from tidelog.storage.groups import coordinator as coordinators
from tidelog.storage.groups.classic_protocol import ClassicGroup
from tidelog.storage.groups.coordinator import TICKS_AT_ONCE
from tidelog.storage.groups.kafka_groups import PROTOCOL_BYTES_MAX, KafkaGroups
from tidelog.storage.groups.kafka_requests import GroupCode, GroupPhase, Identity, SyncRequest
from tidelog.storage.groups.offset_commits import OffsetCommits
from tidelog.storage.groups.rest_groups import RestGroups
from tidelog.storage.state.principal_shares import CLIENT_BYTES, MEMBERS
from tidelog.storage.store.memory import MemoryStore

PARTITIONS = 8


class Coordinator:
    """A broker's classic groups with a choice of coordinators that the test makes."""

    def __init__(self, log: Broker, name: str, live: list[str], delay_s: float = 0.05) -> None:
        self.log = log
        self.name = name
        engine = log._log
        self.coordinator = coordinators.Coordinator(engine, Chosen(name, live))
        engine.wal.subscribers.append(self.coordinator)
        self.commits = OffsetCommits(engine)
        self.rest_groups = RestGroups(engine, log.records, self.coordinator, self.commits)
        self.groups = KafkaGroups(engine, self.coordinator, self.commits, delay_s)
        self.task = asyncio.create_task(self.coordinator.run(self.rest_groups.do_duties))
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        self.task.cancel()
        await self.coordinator.close()

    async def crash(self) -> None:
        self.task.cancel()
        self.dead.set_result(None)
        tasks = [*self.coordinator.stop(), *self.commits._tasks]
        for task in tasks:
            task.cancel()
        await kill(self.log)
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def coordinator(delay_s: float = 0.0) -> AsyncIterator[Coordinator]:
    log = await opened(MemoryStore())
    async with closing(log):
        await log.topics.create("t", PARTITIONS, {})
        broker = Coordinator(log, "b1", ["b1"], delay_s)
        yield broker
        await broker.close()


async def joined(groups: KafkaGroups, member_id: str = "", **fields) -> str:
    """Join and sync as the only member; return the member id."""
    answer = await groups.join("g", request(member_id, **fields))
    if answer.code is GroupCode.MEMBER_ID_REQUIRED:
        return await joined(groups, answer.member_id, **fields)
    assert answer.code is GroupCode.NONE
    assignments = {member.member_id: member.member_id.encode() for member in answer.members}
    identity = Identity(answer.member_id, fields.get("instance_id", ""))
    synced = await groups.sync("g", SyncRequest(identity, answer.generation, assignments))
    assert synced.code is GroupCode.NONE
    return answer.member_id


async def commit(
    groups: KafkaGroups, member_id: str, generation: int, offset: int = 5
) -> GroupCode | LogError:
    topic_id = groups._log.state.topic("t").topic_id
    offsets = [GroupOffset(topic_id, 0, offset)]
    try:
        return await groups.commit_offsets("g", Identity(member_id), generation, offsets, ())
    except LogError as error:
        return error


@virtual
async def test_principal_that_joins_many_groups_leaves_room_for_others() -> None:
    """Bytes of members' metadata have shares, and are free again when the members leave."""
    metadata, members = b"x" * (PROTOCOL_BYTES_MAX // 16), list[tuple[str, str]]()
    async with coordinator() as broker:

        async def join(group_id: str, principal: str) -> GroupCode:
            join_request = request(principal=principal, protocols=[("range", metadata)], version=3)
            answer = await broker.groups.join(group_id, join_request)
            if answer.code is GroupCode.NONE:
                members.append((group_id, answer.member_id))
            return answer.code

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(classic_protocol, "PROTOCOL_BYTES_MAX", PROTOCOL_BYTES_MAX)
            codes = [await join(f"a{number}", "User:a") for number in range(16)]
            assert codes == [GroupCode.NONE] * 8 + [GroupCode.GROUP_MAX_SIZE_REACHED] * 8
            codes = [await join(f"b{number}", "User:b") for number in range(4)]
            assert codes == [GroupCode.NONE] * 4
            for group_id, member_id in members:
                assert await broker.groups.leave(group_id, [Identity(member_id)]) == [
                    GroupCode.NONE
                ]
            assert not broker.groups.used.total(CLIENT_BYTES)
            assert await join("again", "User:a") is GroupCode.NONE


@virtual
async def test_members_that_join_again_need_no_more_room() -> None:
    """In a rebalance all members join again, also if their principals have no room for more."""
    metadata, members = b"x" * (PROTOCOL_BYTES_MAX // 16), list[tuple[str, str, str]]()
    async with coordinator() as broker:

        async def join(
            group_id: str, principal: str, member_id: str = "", size: int = 0
        ) -> GroupCode:
            protocols = [("range", metadata + b"x" * size)]
            join_request = request(member_id, principal=principal, protocols=protocols, version=3)
            answer = await broker.groups.join(group_id, join_request)
            if answer.code is GroupCode.NONE and not member_id:
                members.append((group_id, principal, answer.member_id))
            return answer.code

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(classic_protocol, "PROTOCOL_BYTES_MAX", PROTOCOL_BYTES_MAX)
            for principal in ("User:a", "User:b"):
                number = 0
                while await join(f"{principal}{number}", principal) is GroupCode.NONE:
                    number += 1
                assert number
            assert len(members) >= 8
            again = [await join(*member) for member in members]
            assert again == [GroupCode.NONE] * len(members)
            for group_id, principal, member_id in members:
                code = await join(group_id, principal, member_id, size=PROTOCOL_BYTES_MAX // 2)
                assert code is GroupCode.GROUP_MAX_SIZE_REACHED


@virtual
async def test_principal_that_joins_many_members_leaves_room_for_others() -> None:
    """Members have shares, and so have the member ids that wait for their first JoinGroup.

    A member that joins again needs no more room.
    """
    members = list[tuple[str, str]]()
    async with coordinator() as broker:

        async def join(
            group_id: str, principal: str, member_id: str = "", version: int = 3
        ) -> GroupCode:
            join_request = request(member_id, principal=principal, version=version)
            answer = await broker.groups.join(group_id, join_request)
            if answer.code in (GroupCode.NONE, GroupCode.MEMBER_ID_REQUIRED):
                members.append((group_id, answer.member_id))
            return answer.code

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kafka_groups, "MEMBERS_MAX", 16)
            codes = [await join(f"a{number}", "User:a") for number in range(7)]
            assert codes == [GroupCode.NONE] * 7
            assert await join("a7", "User:a", version=4) is GroupCode.MEMBER_ID_REQUIRED
            codes = [await join(f"a{number}", "User:a") for number in range(8, 40)]
            assert codes == [GroupCode.GROUP_MAX_SIZE_REACHED] * 32
            codes = [await join(f"b{number}", "User:b") for number in range(4)]
            assert codes == [GroupCode.NONE] * 4
            assert await join("a0", "User:a", members[0][1]) is GroupCode.NONE
            assert await join("a7", "User:a", members[7][1], version=4) is GroupCode.NONE
            assert len(broker.coordinator.groups) == 12
            for group_id, member_id in dict(members).items():
                assert await broker.groups.leave(group_id, [Identity(member_id)]) == [
                    GroupCode.NONE
                ]
            assert not broker.coordinator.groups
            assert not broker.groups.used.total(MEMBERS)
            assert await join("again", "User:a") is GroupCode.NONE


@virtual
async def test_sessions_that_end_at_one_time_end_in_steps() -> None:
    """Until then the groups need no work."""
    count, steps = 4 * TICKS_AT_ONCE, list[list[str]]()
    tick = ClassicGroup.tick

    def ticked(group: ClassicGroup, now_s: float) -> None:
        if not steps or steps[-1][-1] == "":
            steps.append([])
            asyncio.get_running_loop().call_soon(lambda last: last.append(""), steps[-1])
        steps[-1].append(group.group_id)
        tick(group, now_s)

    async with coordinator() as broker:
        join_request = request(session_ms=60_000, rebalance_ms=60_000, version=3)
        await asyncio.gather(
            *(broker.groups.join(f"g{number}", join_request) for number in range(count))
        )
        await asyncio.sleep(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ClassicGroup, "tick", ticked)
            await asyncio.sleep(50)
            assert not steps
            await asyncio.sleep(10)
        assert not broker.coordinator.groups
        assert [len(step) for step in steps] == [TICKS_AT_ONCE + 1] * 4


@virtual
async def test_sessions_begin_again_after_a_process_was_suspended() -> None:
    async with coordinator() as broker:
        await joined(broker.groups, session_ms=10_000)
        await asyncio.sleep(1)
        with pytest.MonkeyPatch.context() as patch:
            boot_s = broker.log.clock.boot_s
            patch.setattr(broker.log.clock, "boot_s", lambda: boot_s() + 60)
            await asyncio.sleep(9)
            assert broker.groups.ids() == ["g"]
            await asyncio.sleep(2)
            assert broker.groups.ids() == []


@virtual
async def test_the_assignments_are_in_the_state_before_the_answer() -> None:
    async with coordinator() as broker:
        me = await joined(broker.groups)
        group = broker.log.state.members.get("g")
        assert group is not None
        assert (group.generation, list(group.members), group.term) == (1, [me], 1)
        assert await broker.groups.heartbeat("g", Identity(me), 1) is GroupCode.NONE
        assert await commit(broker.groups, me, 1) is GroupCode.NONE
        assert await commit(broker.groups, me, 0) is GroupCode.ILLEGAL_GENERATION
        assert await commit(broker.groups, "", -1) is GroupCode.UNKNOWN_MEMBER_ID
        described = broker.groups.describe("g")
        assert described is not None
        assert (described.phase, described.members[0].assignment) == (
            GroupPhase.STABLE,
            me.encode(),
        )
        assert broker.groups.ids() == ["g"]
        with pytest.raises(GroupNotEmpty):
            await broker.groups.delete("g")
        assert await broker.groups.leave("g", [Identity("ghost"), Identity(me)]) == [
            GroupCode.UNKNOWN_MEMBER_ID,
            GroupCode.NONE,
        ]
        assert not group.members
        assert await commit(broker.groups, "", -1, 7) is GroupCode.NONE
        assert await commit(broker.groups, me, -1, 8) is GroupCode.NONE
        assert await commit(broker.groups, me, 1) is GroupCode.UNKNOWN_MEMBER_ID
        assert await broker.groups.leave("g", [Identity(me)]) == [GroupCode.UNKNOWN_MEMBER_ID]
        await joined(broker.groups)
        assert group.generation == 2
        await asyncio.sleep(11)
        assert not group.members
        assert not broker.coordinator.groups
        await broker.groups.delete("g")
        assert await commit(broker.groups, "x", 1) is GroupCode.ILLEGAL_GENERATION


@virtual
async def test_a_new_group_gets_a_greater_generation_if_another_group_is_deleted() -> None:
    """The deletion comes between the end of the join phase and the commit of the assignments."""
    async with coordinator() as broker:
        refusal = await broker.groups.join("g", request())
        answer = await broker.groups.join("g", request(refusal.member_id))
        assert answer.generation == 1
        other = await broker.groups.join("other", request())
        other = await broker.groups.join("other", request(other.member_id))
        identity = Identity(other.member_id)
        synced = await broker.groups.sync(
            "other", SyncRequest(identity, 1, {other.member_id: b"x"})
        )
        assert synced.code is GroupCode.NONE
        assert await broker.groups.leave("other", [identity]) == [GroupCode.NONE]
        await broker.groups.delete("other")
        assert broker.log.state.members.generation_floor == 1
        identity = Identity(answer.member_id)
        synced = await broker.groups.sync("g", SyncRequest(identity, 1, {answer.member_id: b"x"}))
        assert synced.code is GroupCode.REBALANCE_IN_PROGRESS
        assert await joined(broker.groups, answer.member_id) == answer.member_id
        group = broker.log.state.members.get("g")
        assert group is not None
        assert (group.generation, list(group.members)) == (2, [answer.member_id])


@virtual
async def test_a_group_of_rest_takes_no_members_of_kafka_and_the_other_way() -> None:
    async with coordinator() as broker:
        instances = await started(broker.log, Chosen("b1", ["b1"]))
        await instances.join("g", "r", CONFIG)
        answer = await broker.groups.join("g", request())
        assert answer.code is GroupCode.INCONSISTENT_GROUP_PROTOCOL
        assert await broker.groups.heartbeat("g", Identity("r"), 0) is GroupCode.UNKNOWN_MEMBER_ID
        await instances.leave("g", "r")
        me = await joined(broker.groups)
        with pytest.raises(InconsistentGroupProtocol):
            await instances.join("g", "r", CONFIG)
        with pytest.raises(UnknownMember):
            await instances.heartbeat("g", me)
        await asyncio.sleep(3)
        assert await broker.groups.heartbeat("g", Identity(me), 1) is GroupCode.NONE
        await instances.close()


@virtual
async def test_a_group_that_rest_takes_during_the_rebalance() -> None:
    async with coordinator() as broker:
        answer = await broker.groups.join("g", request())
        answer = await broker.groups.join("g", request(answer.member_id))
        await broker.log._log.submit(JoinGroup("g", "r", "b1", CONFIG))
        synced = await broker.groups.sync("g", SyncRequest(Identity(answer.member_id), 1, {}))
        assert synced.code is GroupCode.UNKNOWN_MEMBER_ID
        again = await broker.groups.join("g", request())
        assert again.code is GroupCode.INCONSISTENT_GROUP_PROTOCOL


@virtual
async def test_another_coordinator_continues_without_a_rebalance() -> None:
    store, live = MemoryStore(), ["b1", "b2"]
    first, second = await opened(store), await opened(store)
    async with closing(second):
        await first.topics.create("t", PARTITIONS, {})
        broker_a, broker_b = Coordinator(first, "b1", live), Coordinator(second, "b2", live)
        me = await joined(broker_a.groups, instance_id="s")
        assert await broker_b.groups.heartbeat("g", Identity(me), 1) is GroupCode.NOT_COORDINATOR
        await broker_a.crash()
        live.remove("b1")
        identity = Identity(me, "s")
        assert await broker_b.groups.heartbeat("g", identity, 1) is GroupCode.NONE
        synced = await broker_b.groups.sync("g", SyncRequest(identity, 1, {}))
        assert (synced.code, synced.assignment) == (GroupCode.NONE, me.encode())
        assert await commit(broker_b.groups, me, 1) is GroupCode.NONE
        group = second.state.members.get("g")
        assert group is not None
        assert (group.generation, group.coordinator, group.term) == (1, "b2", 2)
        again = await broker_b.groups.join("g", request(instance_id="s"))
        assert (again.code, again.generation, again.skip_assignment) == (GroupCode.NONE, 1, True)
        assert list(group.members) == [again.member_id]
        assert isinstance(await commit(broker_b.groups, again.member_id, 1), GroupCode)
        await broker_b.close()


@virtual
async def test_groups_of_a_dead_coordinator_are_taken_and_their_members_expire() -> None:
    store, live = MemoryStore(), ["b1", "b2"]
    first, second = await opened(store), await opened(store)
    async with closing(second):
        await first.topics.create("t", PARTITIONS, {})
        broker_a, broker_b = Coordinator(first, "b1", live), Coordinator(second, "b2", live)
        await joined(broker_a.groups)
        await second._log.wal.refresh()
        await broker_a.crash()
        live.remove("b1")
        await asyncio.sleep(9)
        group = second.state.members.get("g")
        assert group is not None
        assert len(group.members) == 1
        await asyncio.sleep(5)
        assert not group.members
        await broker_b.close()


@contextlib.asynccontextmanager
async def two_coordinators() -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """The group "g" has a member at the first; in the view of the second, the first is dead."""
    store = MemoryStore()
    first, second = await opened(store), await opened(store)
    async with closing(first, second):
        await first.topics.create("t", PARTITIONS, {})
        broker_a, broker_b = Coordinator(first, "b1", ["b1"]), Coordinator(second, "b2", ["b2"])
        yield broker_a, broker_b
        await broker_a.close()
        await broker_b.close()


@virtual
async def test_a_replaced_coordinator_settles_nothing() -> None:
    async with two_coordinators() as (broker_a, broker_b):
        me = await joined(broker_a.groups)
        assert await broker_b.groups.heartbeat("g", Identity(me), 1) is GroupCode.NONE
        broker_a.log._log.wal.subscribers.remove(
            broker_a.coordinator
        )  # it learns nothing by itself
        answer = await broker_a.groups.join("g", request(me, protocols=[("range", b"other")]))
        assert answer.generation == 2
        synced = await broker_a.groups.sync("g", SyncRequest(Identity(me), 2, {me: b"mine"}))
        assert synced.code is GroupCode.NOT_COORDINATOR
        stale = CommitOffsets("g", 2, [], me)
        with pytest.raises(IllegalGeneration):
            await broker_a.log._log.submit(stale)


@virtual
async def test_a_replaced_coordinator_releases_the_group_when_it_learns_of_it() -> None:
    """Members that wait at it go to the other coordinator, which has their group."""
    async with two_coordinators() as (broker_a, broker_b):
        me = await joined(broker_a.groups)
        fresh = await broker_a.groups.join("g", request())
        waiting = asyncio.create_task(broker_a.groups.join("g", request(fresh.member_id)))
        await asyncio.sleep(0.1)
        assert await broker_b.groups.heartbeat("g", Identity(me), 1) is GroupCode.NONE
        assert broker_a.groups.ids() == ["g"]
        assert not waiting.done()
        await broker_a.log._log.wal.refresh()
        await asyncio.sleep(0)
        assert waiting.done()
        assert (await waiting).code is GroupCode.NOT_COORDINATOR
        assert broker_a.groups.ids() == []
        assert broker_b.groups.ids() == ["g"]


@virtual
async def test_a_replaced_coordinator_deletes_no_offset() -> None:
    """A commit of an older generation that resets a partition is refused as a whole."""
    async with two_coordinators() as (broker_a, broker_b):
        me = await joined(broker_a.groups)
        assert await commit(broker_a.groups, me, 1, 5) is GroupCode.NONE
        broker_a.log._log.wal.subscribers.remove(
            broker_a.coordinator
        )  # it learns nothing by itself
        assert await broker_b.groups.heartbeat("g", Identity(me), 1) is GroupCode.NONE
        assert await joined(broker_b.groups, me, protocols=[("range", b"other")]) == me
        topic_id = broker_a.log.state.topic("t").topic_id
        partition = TopicIdPartition(topic_id, 0)
        with pytest.raises(IllegalGeneration):
            await broker_a.groups.commit_offsets(
                "g", Identity(me), 1, [GroupOffset(topic_id, 1, 7)], [partition]
            )
        for log in (broker_a.log, broker_b.log):
            await log._log.wal.refresh()
            offsets = log.state.committed_offsets.of_group("g")[topic_id]
            assert {number: offset.offset for number, offset in offsets.items()} == {0: 5}


@virtual
async def test_requests_that_wait_are_answered_when_the_broker_drains() -> None:
    async with coordinator() as broker:
        me = await joined(broker.groups)
        fresh = await broker.groups.join("g", request())
        waiting = asyncio.create_task(broker.groups.join("g", request(fresh.member_id)))
        await asyncio.sleep(0.1)
        assert (
            await broker.groups.heartbeat("g", Identity(me), 1) is GroupCode.REBALANCE_IN_PROGRESS
        )
        broker.groups.release()
        assert (await waiting).code is GroupCode.NOT_COORDINATOR
        assert (await broker.groups.join("g", request())).code is GroupCode.NOT_COORDINATOR
        assert await commit(broker.groups, me, 1) is GroupCode.NOT_COORDINATOR


@virtual
async def test_a_store_that_refuses_lets_the_members_join_again() -> None:
    async with coordinator() as broker:
        answer = await broker.groups.join("g", request())
        answer = await broker.groups.join("g", request(answer.member_id))
        identity = Identity(answer.member_id)

        async def refused(*actions) -> None:
            raise Unavailable("no space")

        real, broker.log._log.submit = broker.log._log.submit, refused  # type: ignore[method-assign]
        synced = await broker.groups.sync("g", SyncRequest(identity, 1, {}))
        assert synced.code is GroupCode.COORDINATOR_NOT_AVAILABLE
        assert await broker.groups.leave("g", [identity]) == [GroupCode.NONE]
        broker.log._log.submit = real  # type: ignore[method-assign]
        me = await joined(broker.groups)
        assert me != answer.member_id
        await asyncio.sleep(kafka_groups.RETRY_S + 1)
        group = broker.log.state.members.get("g")
        assert group is not None
        assert list(group.members) == [me]


@virtual
async def test_a_client_that_goes_while_it_waits() -> None:
    async with coordinator() as broker:
        me = await joined(broker.groups)
        fresh = await broker.groups.join("g", request())
        waiting = asyncio.create_task(broker.groups.join("g", request(fresh.member_id)))
        await asyncio.sleep(0.1)
        waiting.cancel()
        for _ in range(12):
            await asyncio.sleep(1)
            await broker.groups.heartbeat("g", Identity(me), 1)
        assert await joined(broker.groups, me) == me
        group = broker.log.state.members.get("g")
        assert group is not None
        assert list(group.members) == [me]


# -- everything that may happen


class World:
    """Brokers over one store, and the assignments that their members got."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.store = MemoryStore()
        self.live: list[str] = []
        self.brokers: dict[str, Coordinator] = {}
        self.owners: dict[tuple[int, int], str] = {}
        self.members: list[Consumer] = []
        self.numbers = iter(range(1, 1000))

    async def add_broker(self) -> None:
        log = await opened(self.store)
        name = f"b{next(self.numbers)}"
        store_of(log).latency = lambda _: self.draw.choice([0.001, 0.02, 0.1])
        self.brokers[name] = Coordinator(log, name, self.live)
        self.live.append(name)

    async def crash_broker(self) -> None:
        name = self.draw.choice(list(self.brokers))
        if len(self.brokers) > 1:
            self.live.remove(name)
            await self.brokers.pop(name).crash()

    def broker(self) -> Coordinator:
        """The coordinator, as a client finds it from any broker."""
        any_coordinator = self.draw.choice(list(self.brokers.values()))
        group = any_coordinator.log.state.members.get("g")
        holder = "" if group is None else group.coordinator
        name = holder if holder in self.live else self.live[0]
        return self.brokers[name]

    def own(self, generation: int, member_id: str, assignment: bytes) -> None:
        """I8: in each generation, each partition has one owner."""
        for partition in assignment:
            owner = self.owners.setdefault((generation, partition), member_id)
            assert owner == member_id, f"{generation}-{partition}: {owner} and {member_id}"

    def add_member(self) -> None:
        self.members.append(Consumer(self))


class Consumer:
    """A consumer that divides the partitions evenly when it leads.

    `owned` is None while it has no assignment.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.member_id = ""
        self.generation = -1
        self.owned: bytes | None = None
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        while True:
            broker = self.world.broker()
            turn = asyncio.create_task(self.turn(broker.groups))
            try:
                await asyncio.wait({turn, broker.dead}, return_when=asyncio.FIRST_COMPLETED)
                code = turn.result() if turn.done() else GroupCode.NOT_COORDINATOR
            except LogError:
                code = GroupCode.COORDINATOR_NOT_AVAILABLE
            finally:
                turn.cancel()  # a dead broker answers nothing: the connection is lost
            if code in (GroupCode.UNKNOWN_MEMBER_ID, GroupCode.ILLEGAL_GENERATION):
                self.member_id = "" if code is GroupCode.UNKNOWN_MEMBER_ID else self.member_id
                self.owned = None
            elif code is GroupCode.REBALANCE_IN_PROGRESS:
                self.owned = None
            elif code is not GroupCode.NONE:
                await asyncio.sleep(0.1)

    async def turn(self, groups: KafkaGroups) -> GroupCode:
        if self.owned is None:
            return await self.join(groups)
        await asyncio.sleep(1)
        identity = Identity(self.member_id)
        if self.world.draw.random() < 0.5:
            return await groups.heartbeat("g", identity, self.generation)
        topic_id = groups._log.state.topic("t").topic_id
        offsets = [GroupOffset(topic_id, partition, 1) for partition in self.owned]
        try:
            code = await groups.commit_offsets("g", identity, self.generation, offsets, ())
        except IllegalGeneration:
            return GroupCode.ILLEGAL_GENERATION
        except UnknownMember:
            return GroupCode.UNKNOWN_MEMBER_ID
        return code

    async def lossy(self, request) -> object:
        """A connection may be lost while the request waits."""
        if self.world.draw.random() < 0.1:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.world.draw.random()):
                    return await request
            return None
        async with asyncio.timeout(30):
            return await request

    async def join(self, groups: KafkaGroups) -> GroupCode:
        try:
            answer = await self.lossy(groups.join("g", request(self.member_id, rebalance_ms=8_000)))
        except TimeoutError:
            raise AssertionError("a member waits without end") from None
        if answer is None:
            return GroupCode.COORDINATOR_NOT_AVAILABLE
        if answer.code is GroupCode.MEMBER_ID_REQUIRED:
            self.member_id = answer.member_id
        if answer.code is not GroupCode.NONE:
            return GroupCode.NONE if answer.code is GroupCode.MEMBER_ID_REQUIRED else answer.code
        self.member_id, self.generation = answer.member_id, answer.generation
        assignments: dict[str, bytes] = {}
        for number in range(PARTITIONS if answer.members else 0):
            owner = answer.members[number % len(answer.members)].member_id
            assignments[owner] = assignments.get(owner, b"") + bytes([number])
        syncing = SyncRequest(Identity(self.member_id), self.generation, assignments)
        synced = await self.lossy(groups.sync("g", syncing))
        if synced is None:
            return GroupCode.COORDINATOR_NOT_AVAILABLE
        if synced.code is GroupCode.NONE:
            self.owned = synced.assignment
            self.world.own(self.generation, self.member_id, synced.assignment)
        return synced.code

    async def stop(self, *, leaves: bool) -> None:
        self.world.members.remove(self)
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        if leaves:
            with contextlib.suppress(LogError):
                await self.world.broker().groups.leave("g", [Identity(self.member_id)])


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_partition_has_one_owner_and_all_are_read_in_the_end(
    seed: int,
) -> None:
    @virtual
    async def run() -> None:
        world = World(random.Random(seed))
        await world.add_broker()
        await next(iter(world.brokers.values())).log.topics.create("t", PARTITIONS, {})
        await world.add_broker()
        for _ in range(40):
            await asyncio.sleep(world.draw.choice([0.01, 0.3, 3.0]))
            match world.draw.randrange(10):
                case 0:
                    await world.crash_broker()
                case 1:
                    if len(world.brokers) < 3:
                        await world.add_broker()
                case 2 | 3:
                    if world.members:
                        await world.draw.choice(world.members).stop(leaves=False)
                case 4 | 5:
                    if world.members:
                        await world.draw.choice(world.members).stop(leaves=True)
                case _:
                    world.add_member()
            for member in world.members:
                assert not member.task.done(), member.task.exception()
        world.add_member()
        await asyncio.sleep(60)
        for member in world.members:
            assert not member.task.done(), member.task.exception()
        generations = {member.generation for member in world.members}
        assert len(generations) == 1
        numbers = sorted(number for member in world.members for number in member.owned or b"")
        assert numbers == list(range(PARTITIONS))
        for member in list(world.members):
            await member.stop(leaves=False)
        for broker in world.brokers.values():
            await broker.close()
            await broker.log.close()

    run()
