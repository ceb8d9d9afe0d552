"""Where clients send their requests: node ids, live brokers, leaders of partitions, coordinators.

Every broker serves every partition. The leader that Metadata names only spreads the load: it is the
live broker with the greatest rendezvous hash, among those of the client's zone if there are any.
For a moment, brokers with different views of the live brokers may name different leaders; this does
no harm. The leader epoch is always 0, because clients ignore metadata with an epoch below one that
they know.

A client names its zone in its client id, because requests of producers have no field for it. The
client id contains `az=ZONE`, with a comma, a pipe or a blank between this and other text. A broker
also reads the names that Inkless and WarpStream use instead of `az`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tidelog.service.kafka.admin.calls import AdminCall
from tidelog.service.kafka.answer_forms import EncodedAnswer
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.errors import Code, RequestKind
from tidelog.service.kafka.messages.compiler import encoder
from tidelog.service.kafka.messages.metadata import (
    Cursor,
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    KeyCoordinator,
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from tidelog.service.kafka.messages.primitives import ZERO_UUID
from tidelog.service.operations.rights import DESCRIBE_GROUP, DESCRIBE_TOPIC
from tidelog.service.security.caller import CallerRights, Forbidden, allowed_operations
from tidelog.service.slices import Slices, in_order, sliced
from tidelog.storage.cluster.liveness import KafkaListener, Member, weight
from tidelog.storage.codec.batch_header import TRANSACTIONS_NOT_SERVED
from tidelog.storage.core.acls import CLUSTER, CLUSTER_NAME, TOPIC
from tidelog.storage.core.errors import LogError
from tidelog.storage.state.topic import Topic
from tidelog.storage.state.topic_checks import is_new_topic_name

LEADER_EPOCH = 0
FIRST_WITHOUT_NAME = 12
"""The first version of Metadata whose answer may have a topic without a name."""
FIRST_WITH_COORDINATORS = 4
"""The first version of FindCoordinator that asks for several groups."""
NOT_ASKED = -(2**31)
"""Authorized operations that the client did not ask for."""
PARTITIONS_INLINE_MAX = 1_000
"""Partitions of an answer that the event loop builds. Larger answers are built in a thread."""
PAGE_PARTITIONS_MAX = 2_000
"""Most partitions in an answer to DescribeTopicPartitions, as in Kafka."""
LEADERS_MAX = 100_000
"""Partitions whose leaders are cached."""
GROUP_KEY, TRANSACTION_KEY = 0, 1
_ZONE = re.compile(r"(?:^|[ ,|])(?:az|diskless_az|warpstream_az|ws_az)=([^=,| ]*)")
_OPERATION_BITS = {
    name: 1 << bit
    for bit, name in enumerate(
        ("READ", "WRITE", "CREATE", "DELETE", "ALTER", "DESCRIBE", "CLUSTER_ACTION"), start=3
    )
} | {"DESCRIBE_CONFIGS": 1 << 10, "ALTER_CONFIGS": 1 << 11, "IDEMPOTENT_WRITE": 1 << 12}


class KafkaNode(NamedTuple):
    """A live broker with a listener for Kafka clients."""

    node_id: int
    host: str
    port: int
    zone: str
    broker_id: str


def zone_of(client_id: str) -> str:
    """Return the zone that a client id names, or ""."""
    match = _ZONE.search(client_id)
    return "" if match is None else match.group(1)


def nodes_of(me: KafkaNode, started_ms: int, peers: Sequence[Member]) -> list[KafkaNode]:
    """Return the live brokers that Kafka clients can use, by node id.

    Of two brokers with the same node id, the one that started first is named.
    """
    nodes = {me.node_id: (started_ms, me)}
    for peer in peers:
        for listener in peer.kafka[:1]:
            node = KafkaNode(listener.node_id, listener.host, listener.port, listener.zone, peer.id)
            other = nodes.get(node.node_id)
            if other is None or (peer.started_ms, peer.id) < (other[0], other[1].broker_id):
                nodes[node.node_id] = peer.started_ms, node
    return [nodes[node_id][1] for node_id in sorted(nodes)]


class KafkaMetadata:
    """The APIs of metadata.

    One per listener. `listener` has the address that clients of this broker use.
    """

    def __init__(self, context: Context, listener: KafkaListener) -> None:
        self._context = context
        self._broker = context.broker
        self.listener = listener
        self._seen: tuple[object, ...] = ()
        self._nodes: list[KafkaNode] = []
        self._leaders: dict[tuple[str, str], list[int]] = {}
        self._leader_count = 0

    def apis(self) -> Iterable[Api]:
        """Return the rows of these APIs."""
        return (
            Api(MetadataRequest, MetadataResponse, self.metadata),
            Api(
                FindCoordinatorRequest,
                FindCoordinatorResponse,
                self.find_coordinator,
                is_waiting=True,
            ),
            Api(DescribeClusterRequest, DescribeClusterResponse, self.describe_cluster),
            Api(
                DescribeTopicPartitionsRequest,
                DescribeTopicPartitionsResponse,
                self.describe_topic_partitions,
                is_waiting=True,
            ),
        )

    def nodes(self) -> list[KafkaNode]:
        """Return the live brokers, by node id.

        A broker that drains names only the others, if there are others.
        """
        me, peers, _, _ = self._broker.cluster.members()
        is_draining = self._context.is_draining
        member_ids = (is_draining, *(peer.id for peer in peers))
        if member_ids != self._seen or not self._nodes:
            own = KafkaNode(
                self.listener.node_id,
                self.listener.host,
                self.listener.port,
                self.listener.zone,
                me.id,
            )
            nodes = nodes_of(own, me.started_ms, peers)
            if is_draining:
                nodes = [node for node in nodes if node.broker_id != me.id] or nodes
            if nodes != self._nodes:
                self._leaders.clear()
                self._leader_count = 0
            self._seen, self._nodes = member_ids, nodes
        return self._nodes

    def leaders(self, topic: Topic, zone: str) -> list[int]:
        """Return the node ids of the leaders of a topic's partitions."""
        nodes = self.nodes()
        if len(nodes) == 1:
            return [nodes[0].node_id] * len(topic.partitions)
        near = [node for node in nodes if node.zone == zone] or nodes
        key = (topic.topic_id, near[0].zone if len(near) < len(nodes) else "")
        leaders = self._leaders.get(key, [])
        if len(leaders) < len(topic.partitions):
            if self._leader_count > LEADERS_MAX:
                self._leaders.clear()
                self._leader_count = 0
            leaders = leaders + [
                max(near, key=lambda node: weight(task, node.broker_id)).node_id
                for task in (
                    f"{topic.topic_id}/{number}"
                    for number in range(len(leaders), len(topic.partitions))
                )
            ]
            self._leaders[key] = leaders
            self._leader_count += len(leaders)
        return leaders[: len(topic.partitions)]

    # -- Metadata

    async def metadata(
        self, request: MetadataRequest, client: ApiClient
    ) -> MetadataResponse | EncodedAnswer:
        """Answer Metadata."""
        rights, named = client.rights, request.topics
        if named is None or (not named and client.version == 0):
            topics = await self._context.operations.topics.all_shown(rights)
            failed: list[MetadataResponseTopic] = []
        else:
            unread = Code.NONE
            if any(self._is_unknown(asked_topic) for asked_topic in named):
                unread = await self._context.refreshed("Metadata", RequestKind.FETCH)
            topics, failed = [], []
            slices = Slices()
            # A topic is described once, as in Kafka: a request may name it thousands of times.
            known_keys = set[str | bytes]()
            for asked_topic in named:
                await slices.pause()
                key = asked_topic.topic_id if asked_topic.name is None else asked_topic.name
                if key in known_keys:
                    continue
                known_keys.add(key)
                topic = await self._topic_of(asked_topic, request, client, unread)
                (topics if isinstance(topic, Topic) else failed).append(topic)  # type: ignore[arg-type]
        response = self._without_topics(request, rights)
        zone = zone_of(client.client_id)
        operations = [NOT_ASKED] * len(topics)
        if request.include_topic_authorized_operations:
            operations = [
                operations_of(rights, TOPIC, topic.name) async for topic in sliced(topics)
            ]

        def describe() -> None:
            described = [
                self._description(topic, zone, allowed)
                for topic, allowed in zip(topics, operations, strict=True)
            ]
            response.topics = described + failed

        if len(failed) + sum(len(t.partitions) for t in topics) <= PARTITIONS_INLINE_MAX:
            describe()
            return response

        def encode() -> list[bytes | memoryview]:
            describe()
            return encoder(MetadataResponse, client.version)(response)

        return await self._context.encoded(rights, encode)

    def _without_topics(self, request: MetadataRequest, rights: CallerRights) -> MetadataResponse:
        operations = NOT_ASKED
        if request.include_cluster_authorized_operations:
            operations = operations_of(rights, CLUSTER, CLUSTER_NAME)
        nodes = self.nodes()
        return MetadataResponse(
            brokers=[
                MetadataResponseBroker(
                    node_id=node.node_id, host=node.host, port=node.port, rack=node.zone or None
                )
                for node in nodes
            ],
            cluster_id=self._broker.state.cluster_id,
            controller_id=nodes[0].node_id,
            topics=[],
            cluster_authorized_operations=operations,
        )

    def _is_unknown(self, named: MetadataRequestTopic) -> bool:
        state = self._broker.state
        if named.name is None:
            return state.topic_of_id(named.topic_id.hex()) is None
        return named.name not in state.topics

    async def _topic_of(
        self,
        named: MetadataRequestTopic,
        request: MetadataRequest,
        client: ApiClient,
        unread: Code,
    ) -> Topic | MetadataResponseTopic:
        """Return the topic, or the answer with the error.

        Create a missing topic if the request and `auto.create.topics.enable` allow it. `unread` is
        the error of the store that keeps this broker from the knowledge whether the topic exists,
        if there is one.
        """
        context, state, rights, name = self._context, self._broker.state, client.rights, named.name
        if name is None:
            topic = state.topic_of_id(named.topic_id.hex())
            if topic is not None and context.operations.topics.is_shown(rights, topic.name):
                return topic
            no_name = None if client.version >= FIRST_WITHOUT_NAME else ""
            return self._unknown(Code.UNKNOWN_TOPIC_ID, no_name, named.topic_id, unread=unread)
        if code := await context.right_refusal("Metadata", client, DESCRIBE_TOPIC, name):
            return MetadataResponseTopic(error_code=code, name=name, partitions=[])
        if (topic := state.topics.get(name)) is not None:
            return topic
        if not is_new_topic_name(name):
            return self._unknown(Code.INVALID_TOPIC_EXCEPTION, name)
        if unread:
            return self._unknown(Code.UNKNOWN_TOPIC_OR_PARTITION, name, unread=unread)
        if not request.allow_auto_topic_creation:
            return self._unknown(Code.UNKNOWN_TOPIC_OR_PARTITION, name)
        change = AdminCall(context, "Metadata", client)
        try:
            return await context.operations.topics.create_on_demand(change, name)
        except Forbidden as error:
            code = context.denial("Metadata", client, error, RequestKind.FETCH)
        except LogError as error:
            code = context.code("Metadata", error, RequestKind.ADMIN)
        return MetadataResponseTopic(error_code=code, name=name, partitions=[])

    def _unknown(
        self,
        code: Code,
        name: str | None,
        topic_id: bytes = ZERO_UUID,
        *,
        unread: Code = Code.NONE,
    ) -> MetadataResponseTopic:
        code = unread or self._context.refusal("Metadata", code)
        return MetadataResponseTopic(error_code=code, name=name, topic_id=topic_id, partitions=[])

    def _description(self, topic: Topic, zone: str, operations: int) -> MetadataResponseTopic:
        return MetadataResponseTopic(
            error_code=Code.NONE,
            name=topic.name,
            topic_id=bytes.fromhex(topic.topic_id),
            partitions=[
                MetadataResponsePartition(
                    error_code=Code.NONE,
                    partition_index=number,
                    leader_id=leader,
                    leader_epoch=LEADER_EPOCH,
                    replica_nodes=[leader],
                    isr_nodes=[leader],
                )
                for number, leader in enumerate(self.leaders(topic, zone))
            ],
            topic_authorized_operations=operations,
        )

    # -- DescribeCluster, DescribeTopicPartitions

    def describe_cluster(
        self, request: DescribeClusterRequest, client: ApiClient
    ) -> DescribeClusterResponse:
        """Answer DescribeCluster."""
        nodes = self.nodes()
        operations = NOT_ASKED
        if request.include_cluster_authorized_operations:
            operations = operations_of(client.rights, CLUSTER, CLUSTER_NAME)
        return DescribeClusterResponse(
            throttle_time_ms=0,
            error_code=Code.NONE,
            endpoint_type=request.endpoint_type,
            cluster_id=self._broker.state.cluster_id,
            controller_id=nodes[0].node_id,
            brokers=[
                DescribeClusterBroker(
                    broker_id=node.node_id, host=node.host, port=node.port, rack=node.zone or None
                )
                for node in nodes
            ],
            cluster_authorized_operations=operations,
        )

    async def describe_topic_partitions(
        self, request: DescribeTopicPartitionsRequest, client: ApiClient
    ) -> DescribeTopicPartitionsResponse:
        """Answer DescribeTopicPartitions: a page of partitions, by the names of their topics."""
        api, rights, operations = "DescribeTopicPartitions", client.rights, self._context.operations
        names, unread = {asked_topic.name for asked_topic in request.topics}, Code.NONE
        if any(name not in self._broker.state.topics for name in names):
            unread = await self._context.refreshed(api, RequestKind.FETCH)
        state = self._broker.state  # the read may have loaded another
        is_all = not names
        cursor = request.cursor
        remaining_count = max(min(request.response_partition_limit, PAGE_PARTITIONS_MAX), 1)
        answers: list[DescribeTopicPartitionsResponseTopic] = []
        following: Cursor | None = None
        slices = Slices()
        for name in await in_order(state.topics if is_all else names):
            await slices.pause()
            if cursor is not None and name < cursor.topic_name:
                continue
            if is_all and operations.topics.shown(rights, name) is None:
                continue
            first = 0
            if cursor is not None and name == cursor.topic_name:
                first = max(cursor.partition_index, 0)
            if remaining_count <= 0:
                following = Cursor(topic_name=name, partition_index=first)
                break
            topic, context = state.topics.get(name), self._context
            code = await context.right_refusal(api, client, DESCRIBE_TOPIC, name)
            if topic is None and not code:
                is_name = is_new_topic_name(name)
                unknown = Code.UNKNOWN_TOPIC_OR_PARTITION
                unknown = unknown if is_name else Code.INVALID_TOPIC_EXCEPTION
                code = (is_name and unread) or context.refusal(api, unknown)
            if topic is None or code:
                answers.append(
                    DescribeTopicPartitionsResponseTopic(
                        error_code=code, name=name, topic_id=ZERO_UUID, partitions=[]
                    )
                )
            else:
                answers.append(self._page_of(topic, first, remaining_count, client))
                first += len(answers[-1].partitions)
                remaining_count -= max(len(answers[-1].partitions), 1)
                if first < len(topic.partitions):
                    following = Cursor(topic_name=name, partition_index=first)
                    break
        return DescribeTopicPartitionsResponse(
            throttle_time_ms=0, topics=answers, next_cursor=following
        )

    def _page_of(
        self, topic: Topic, first: int, most: int, client: ApiClient
    ) -> DescribeTopicPartitionsResponseTopic:
        leaders = self.leaders(topic, zone_of(client.client_id))[first : first + most]
        return DescribeTopicPartitionsResponseTopic(
            error_code=Code.NONE,
            name=topic.name,
            topic_id=bytes.fromhex(topic.topic_id),
            partitions=[
                DescribeTopicPartitionsResponsePartition(
                    error_code=Code.NONE,
                    partition_index=number,
                    leader_id=leader,
                    leader_epoch=LEADER_EPOCH,
                    replica_nodes=[leader],
                    isr_nodes=[leader],
                    offline_replicas=[],
                )
                for number, leader in enumerate(leaders, start=first)
            ],
            topic_authorized_operations=operations_of(client.rights, TOPIC, topic.name),
        )

    # -- FindCoordinator

    async def find_coordinator(
        self, request: FindCoordinatorRequest, client: ApiClient
    ) -> FindCoordinatorResponse:
        """Answer FindCoordinator: the brokers that coordinate these groups."""
        has_many = client.version >= FIRST_WITH_COORDINATORS
        keys = request.coordinator_keys if has_many else [request.key]
        kind = request.key_type
        coordinators = [await self._coordinator(key, kind, client) async for key in sliced(keys)]
        if has_many:
            return FindCoordinatorResponse(coordinators=coordinators)
        only = coordinators[0]
        return FindCoordinatorResponse(
            error_code=only.error_code,
            error_message=only.error_message,
            node_id=only.node_id,
            host=only.host,
            port=only.port,
        )

    async def _coordinator(self, key: str, key_type: int, client: ApiClient) -> KeyCoordinator:
        api, context = "FindCoordinator", self._context
        if key_type == TRANSACTION_KEY:
            code = context.no_transactions(api, client, _transactions_code(client.version), key)
            why = TRANSACTIONS_NOT_SERVED
        elif key_type != GROUP_KEY:
            code = context.refusal(api, Code.INVALID_REQUEST)
            why = f"keys of type {key_type} have no coordinator"
        else:
            code = await context.right_refusal(api, client, DESCRIBE_GROUP, key)
            why = f"{client.rights.principal} may not DESCRIBE group {key!r}"
        if code:
            return KeyCoordinator(
                key=key, node_id=-1, host="", port=-1, error_code=code, error_message=why
            )
        coordinator = self._broker.groups.coordinator_of(key)
        nodes = {node.broker_id: node for node in self.nodes()}
        node = nodes.get(coordinator) or self._next_coordinator(key)
        return KeyCoordinator(
            key=key,
            node_id=node.node_id,
            host=node.host,
            port=node.port,
            error_code=Code.NONE,
            error_message=None,
        )

    def _next_coordinator(self, group_id: str) -> KafkaNode:
        """Return the broker that takes a group whose coordinator drains, or has no listener."""
        return max(self.nodes(), key=lambda node: weight(group_id, node.broker_id))


def _transactions_code(version: int) -> Code:
    """Return the code of FindCoordinator for a transactional id.

    Each client has one that ends it at once. Java, which sends version 4 or later, shows the text
    beside every code but TRANSACTIONAL_ID_AUTHORIZATION_FAILED; librdkafka, which sends earlier
    versions, asks again after every other code, and shows the text beside this one.
    """
    if version >= FIRST_WITH_COORDINATORS:
        return Code.UNSUPPORTED_VERSION
    return Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


def operations_of(rights: CallerRights, resource_type: str, name: str) -> int:
    """Return the operations that the client may do, as Kafka's bits."""
    operations = allowed_operations(rights, resource_type, name)
    return sum(_OPERATION_BITS[operation] for operation in operations)
