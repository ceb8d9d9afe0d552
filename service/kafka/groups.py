"""Groups of Kafka's classic protocol, and the lists and descriptions of all groups.

The protocol itself is in storage.groups.classic_protocol; these handlers check the rights and turn
its answers into messages. Kafka's clients see REST's groups too: as groups of type classic, whose
members have assignments in the format of Kafka's consumers.
"""

from collections.abc import Callable, Iterable

from tidelog.service.kafka.admin.calls import GroupCall
from tidelog.service.kafka.answer_forms import EncodedAnswer
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import consumer_protocol
from tidelog.service.kafka.messages import groups as messages
from tidelog.service.kafka.messages.consumer_protocol import (
    AssignedPartitions,
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
)
from tidelog.service.kafka.metadata import operations_of
from tidelog.service.kafka.wide_answers import answered
from tidelog.service.operations.rights import DELETE_GROUP, DESCRIBE_GROUP, JOIN_GROUP
from tidelog.service.slices import sliced
from tidelog.service.telemetry.group_lags import group_ids
from tidelog.storage.core.acls import GROUP
from tidelog.storage.groups.kafka_requests import (
    DescribedMember,
    Description,
    GroupPhase,
    Identity,
    JoinRequest,
    SyncRequest,
)
from tidelog.storage.state.group_state import GroupMember

GROUPS_MAX = 1_000
"""Groups in one request for descriptions or deletions."""
DESCRIBED_BYTES_MAX = 16 * 1024 * 1024
"""Metadata and assignments in one answer to DescribeGroups. One group has less."""
NOT_CLASSIC = "group.protocol=consumer (KIP-848) is not served: set group.protocol=classic"
TYPE = "classic"
CONSUMER = "consumer"


class Groups:
    """The APIs of groups, except offsets. One per listener."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._broker = context.broker
        self._groups = context.broker.groups.kafka

    # -- members

    def apis(self) -> Iterable[Api]:
        """Return the rows of these APIs."""
        return (
            Api(
                messages.JoinGroupRequest,
                messages.JoinGroupResponse,
                self.join,
                is_waiting=True,
                is_kept_by_group=True,
            ),
            Api(
                messages.SyncGroupRequest,
                messages.SyncGroupResponse,
                self.sync,
                is_waiting=True,
            ),
            Api(messages.HeartbeatRequest, messages.HeartbeatResponse, self.heartbeat),
            Api(messages.LeaveGroupRequest, messages.LeaveGroupResponse, self.leave),
            Api(
                messages.ConsumerGroupHeartbeatRequest,
                messages.ConsumerGroupHeartbeatResponse,
                self.heartbeat_of_consumer,
            ),
            Api(
                messages.ListGroupsRequest,
                messages.ListGroupsResponse,
                self.list,
                is_waiting=True,
            ),
            Api(
                messages.DescribeGroupsRequest,
                messages.DescribeGroupsResponse,
                self.describe,
                is_waiting=True,
            ),
            Api(messages.DeleteGroupsRequest, messages.DeleteGroupsResponse, self.delete),
        )

    def heartbeat_of_consumer(
        self, request: messages.ConsumerGroupHeartbeatRequest, client: ApiClient
    ) -> messages.ConsumerGroupHeartbeatResponse:
        """Refuse ConsumerGroupHeartbeat.

        Without this API in the list of APIs, librdkafka would look for a coordinator again and
        again. The code is fatal for it and for Java, whose text names `group.protocol=classic`;
        franz-go then uses the classic protocol.
        """
        api, code = "ConsumerGroupHeartbeat", Code.UNSUPPORTED_VERSION
        return messages.ConsumerGroupHeartbeatResponse(
            throttle_time_ms=0,
            error_code=self._context.not_served(api, client, code, NOT_CLASSIC),
            error_message=NOT_CLASSIC,
            member_epoch=0,
            heartbeat_interval_ms=0,
        )

    async def join(
        self, request: messages.JoinGroupRequest, client: ApiClient, on_kept: Callable[[], object]
    ) -> messages.JoinGroupResponse:
        """Answer JoinGroup, at the end of the join phase."""
        code = await self._context.group_refusal("JoinGroup", client, JOIN_GROUP, request.group_id)
        version = client.version
        timeout_ms = request.rebalance_timeout_ms
        joining = JoinRequest(
            Identity(request.member_id, request.group_instance_id or ""),
            client.client_id,
            f"/{client.host}",
            client.rights.principal,
            request.session_timeout_ms,
            request.session_timeout_ms if version < 1 else timeout_ms,
            request.protocol_type,
            [(protocol.name, protocol.metadata) for protocol in request.protocols],
            needs_member_id=version >= 4,
            may_skip=version >= 9,
        )
        if code:
            return self._join_refusal(code, request.member_id, version)
        # Of the request, only what the group counts is kept during the wait.
        request.protocols, request.reason = [], None
        answer = await self._groups.join(request.group_id, joining, on_kept)
        if answer.code:
            code = self._context.refusal("JoinGroup", Code(answer.code))
            return self._join_refusal(code, answer.member_id, version)
        return messages.JoinGroupResponse(
            error_code=Code.NONE,
            generation_id=answer.generation,
            protocol_type=answer.protocol_type,
            protocol_name=answer.protocol,
            leader=answer.leader,
            skip_assignment=answer.skip_assignment,
            member_id=answer.member_id,
            members=[
                messages.JoinGroupResponseMember(
                    member_id=member.member_id,
                    group_instance_id=member.instance_id or None,
                    metadata=member.metadata,
                )
                for member in answer.members
            ],
        )

    def _join_refusal(self, code: Code, member_id: str, version: int) -> messages.JoinGroupResponse:
        return messages.JoinGroupResponse(
            error_code=code,
            protocol_name=None if version >= 7 else "",
            leader="",
            member_id=member_id,
            members=[],
        )

    async def sync(
        self, request: messages.SyncGroupRequest, client: ApiClient
    ) -> messages.SyncGroupResponse:
        """Answer SyncGroup, when the assignments are committed."""
        code = await self._context.group_refusal("SyncGroup", client, JOIN_GROUP, request.group_id)
        if code:
            return messages.SyncGroupResponse(error_code=code, assignment=b"")
        syncing = SyncRequest(
            _identity(request.member_id, request.group_instance_id),
            request.generation_id,
            {assignment.member_id: assignment.assignment for assignment in request.assignments},
            request.protocol_type,
            request.protocol_name,
        )
        answer = await self._groups.sync(request.group_id, syncing)
        return messages.SyncGroupResponse(
            error_code=self._counted("SyncGroup", answer.code),
            protocol_type=answer.protocol_type,
            protocol_name=answer.protocol,
            assignment=answer.assignment,
        )

    async def heartbeat(
        self, request: messages.HeartbeatRequest, client: ApiClient
    ) -> messages.HeartbeatResponse:
        """Answer Heartbeat."""
        code = await self._context.group_refusal("Heartbeat", client, JOIN_GROUP, request.group_id)
        if not code:
            identity = _identity(request.member_id, request.group_instance_id)
            group_code = await self._groups.heartbeat(
                request.group_id, identity, request.generation_id
            )
            code = self._counted("Heartbeat", group_code)
        return messages.HeartbeatResponse(error_code=code)

    async def leave(
        self, request: messages.LeaveGroupRequest, client: ApiClient
    ) -> messages.LeaveGroupResponse:
        """Answer LeaveGroup, when the members are removed."""
        code = await self._context.group_refusal("LeaveGroup", client, JOIN_GROUP, request.group_id)
        leaving = request.members
        if client.version < 3:
            leaving = [messages.MemberIdentity(member_id=request.member_id)]
        codes: list[Code] = []
        if not code:
            identities = [
                _identity(member.member_id, member.group_instance_id)
                async for member in sliced(leaving)
            ]
            codes_or_code = await self._groups.leave(request.group_id, identities)
            if isinstance(codes_or_code, list):
                codes = [
                    self._counted("LeaveGroup", member_code)
                    async for member_code in sliced(codes_or_code)
                ]
            else:
                code = self._counted("LeaveGroup", codes_or_code)
        if client.version < 3:
            return messages.LeaveGroupResponse(error_code=code or codes[0])
        return messages.LeaveGroupResponse(
            error_code=code,
            members=[
                messages.MemberResponse(
                    member_id=member.member_id,
                    group_instance_id=member.group_instance_id,
                    error_code=member_code,
                )
                async for member, member_code in sliced(zip(leaving, codes, strict=False))
            ],
        )

    def _counted(self, api: str, code: int) -> Code:
        return self._context.refusal(api, Code(code)) if code else Code.NONE

    # -- administration

    async def list(
        self, request: messages.ListGroupsRequest, client: ApiClient
    ) -> messages.ListGroupsResponse | EncodedAnswer:
        """Answer ListGroups: the groups that this broker coordinates."""
        states = {state.lower() for state in request.states_filter}
        types = {kind.lower() for kind in request.types_filter}
        listed: list[messages.ListedGroup] = []
        ids = dict.fromkeys((*group_ids(self._broker), *self._groups.ids()))
        async for group_id in sliced(ids):
            if (types and TYPE not in types) or not self._groups.is_coordinator(group_id):
                continue
            if not self._context.operations.groups.is_shown(client.rights, group_id):
                continue
            described = self._describe(group_id)
            if described is None or (states and described.phase.value.lower() not in states):
                continue
            listed.append(
                messages.ListedGroup(
                    group_id=group_id,
                    protocol_type=described.protocol_type,
                    group_state=described.phase.value,
                    group_type=TYPE,
                )
            )
        response = messages.ListGroupsResponse(error_code=Code.NONE, groups=listed)
        return await answered(self._context, client, response, len(listed))

    async def describe(
        self, request: messages.DescribeGroupsRequest, client: ApiClient
    ) -> messages.DescribeGroupsResponse | EncodedAnswer:
        """Answer DescribeGroups.

        Groups that would make the answer too large have an error: a request of a few bytes may name
        groups of many megabytes.
        """
        groups: list[messages.DescribedGroup] = []
        remaining_bytes = DESCRIBED_BYTES_MAX
        async for group_id in sliced([*dict.fromkeys(request.groups)][:GROUPS_MAX]):
            group = await self._described_group(group_id, request, client)
            size = sum(
                len(member.member_metadata) + len(member.member_assignment)
                for member in group.members
            )
            if size > remaining_bytes:
                group.error_code = self._context.refusal("DescribeGroups", Code.MESSAGE_TOO_LARGE)
                group.error_message = "the answer would be too large: ask for fewer groups at once"
                group.members = []
            else:
                remaining_bytes -= size
            groups.append(group)
        response = messages.DescribeGroupsResponse(groups=groups)
        elements = len(groups) + sum(len(group.members) for group in groups)
        return await answered(self._context, client, response, elements)

    async def _described_group(
        self, group_id: str, request: messages.DescribeGroupsRequest, client: ApiClient
    ) -> messages.DescribedGroup:
        api, code, why, described = "DescribeGroups", Code.NONE, None, None
        if not self._context.operations.groups.is_shown(client.rights, group_id):
            code = await self._context.right_refusal(api, client, DESCRIBE_GROUP, group_id)
        if not code and not self._groups.is_coordinator(group_id):
            code = self._context.refusal(api, Code.NOT_COORDINATOR)
        elif not code:
            described = self._describe(group_id)
            if described is None and client.version >= 6:
                code = self._context.refusal(api, Code.GROUP_ID_NOT_FOUND)
                why = f"group {group_id} does not exist"
        answer = messages.DescribedGroup(
            error_code=code,
            error_message=why,
            group_id=group_id,
            group_state="" if code and code is not Code.GROUP_ID_NOT_FOUND else "Dead",
            protocol_type="",
            protocol_data="",
            members=[],
        )
        if described is None:
            return answer
        answer.group_state = described.phase.value
        answer.protocol_type = described.protocol_type
        answer.protocol_data = described.protocol if described.phase is GroupPhase.STABLE else ""
        answer.members = [
            messages.DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id or None,
                client_id=member.client_id,
                client_host=member.host,
                member_metadata=member.metadata,
                member_assignment=member.assignment,
            )
            for member in described.members
        ]
        if request.include_authorized_operations:
            answer.authorized_operations = operations_of(client.rights, GROUP, group_id)
        return answer

    def _describe(self, group_id: str) -> Description | None:
        """Return a group of either kind, or None if there is none."""
        described = self._groups.describe(group_id)
        if described is not None:
            return described
        group = self._broker.state.members.get(group_id)
        if group is not None and group.members:
            members = [self._of_rest(member) for member in group.members.values()]
            return Description(GroupPhase.STABLE, CONSUMER, group.assignor, members)
        if group_id in self._broker.state.committed_offsets:
            return Description(GroupPhase.EMPTY, "" if group is None else CONSUMER, "", [])
        return None

    def _of_rest(self, member: GroupMember) -> DescribedMember:
        """Return a member of a REST group, as a Kafka consumer would describe itself."""
        numbers: dict[str, list[int]] = {}
        for topic_id, number in member.owned:
            topic = self._broker.state.topic_of_id(topic_id)
            if topic is not None:
                numbers.setdefault(topic.name, []).append(number)
        assignment = ConsumerProtocolAssignment(
            assigned_partitions=[
                AssignedPartitions(topic=name, partitions=partitions)
                for name, partitions in numbers.items()
            ]
        )
        return DescribedMember(
            member.member_id,
            member.instance_id,
            member.config.client_id,
            "",
            consumer_protocol.encode(ConsumerProtocolSubscription(topics=member.topics), 0),
            consumer_protocol.encode(assignment, 0),
        )

    async def delete(
        self, request: messages.DeleteGroupsRequest, client: ApiClient
    ) -> messages.DeleteGroupsResponse:
        """Answer DeleteGroups."""
        call = GroupCall(self._context, "DeleteGroups", client)
        results = [
            messages.DeletableGroupResult(
                group_id=group_id, error_code=await self._delete(group_id, call)
            )
            async for group_id in sliced([*dict.fromkeys(request.groups_names)][:GROUPS_MAX])
        ]
        return messages.DeleteGroupsResponse(throttle_time_ms=call.throttle_ms, results=results)

    async def _delete(self, group_id: str, call: GroupCall) -> Code:
        api, context = call.api, self._context
        if code := await context.right_refusal(api, call.client, DELETE_GROUP, group_id):
            return code
        if not self._groups.is_coordinator(group_id):
            return context.refusal(api, Code.NOT_COORDINATOR)
        return await call.code(context.operations.groups.delete(call, group_id))


def _identity(member_id: str, instance_id: str | None) -> Identity:
    return Identity(member_id, instance_id or "")
