"""The table of the APIs that a broker serves. The answer to `ApiVersions` lists these APIs."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import configs, fetch, handshake, metadata, produce, topics
from tidelog.service.kafka.messages.compiler import decoder, encoder
from tidelog.service.kafka.messages.schema import Message

PRODUCE, API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE = 0, 18, 17, 36
SASL_KEYS = frozenset({API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE})
"""APIs that a client may use before it has proved its principal."""


class Api:
    """One API: its messages and its handler."""

    __slots__ = (
        "_decoders",
        "_encoders",
        "is_kept_by_group",
        "is_pipelined",
        "is_waiting",
        "key",
        "name",
        "request",
        "response",
        "serve",
    )

    def __init__(
        self,
        request: type[Message],
        response: type[Message],
        serve: Callable[..., Any] | None,
        *,
        is_pipelined: bool = False,
        is_waiting: bool = False,
        is_kept_by_group: bool = False,
    ) -> None:
        """`serve(request, client)` returns the response, or a coroutine, a future or a `Later` of
        the response. `serve` is None for an API that the connection itself serves. If
        `is_pipelined`, a request may begin before the earlier requests of its connection are
        answered. If `is_waiting`, a request is cancelled when its connection ends. If
        `is_kept_by_group`, `serve` gets a third argument. It calls this when the group counts what
        the request brought: from then on, the request holds no memory of the listener."""
        assert request.api_key is not None, request
        self.key: int = request.api_key
        self.name = request.__name__.removesuffix("Request")
        self.request = request
        self.response = response
        self.serve = serve
        self.is_pipelined = is_pipelined
        self.is_waiting = is_waiting
        self.is_kept_by_group = is_kept_by_group
        self._decoders: dict[int, Callable[[bytes | bytearray, int], Any]] = {}
        self._encoders: dict[int, Callable[[Any], list[bytes | memoryview]]] = {}

    def decode(self, frame: bytes | bytearray, position: int, version: int) -> Any:
        """Decode a request. Raises MalformedMessage."""
        decode = self._decoders.get(version)
        if decode is None:
            # librdkafka sends bytes after the end of some requests. Kafka ignores these bytes, too.
            decode = decoder(self.request, version, to_the_end=False)
            self._decoders[version] = decode
        return decode(frame, position)

    def encode(self, response: Any, version: int) -> list[bytes | memoryview]:
        """Encode a response."""
        encode = self._encoders.get(version)
        if encode is None:
            encode = self._encoders[version] = encoder(self.response, version)
        return encode(response)


class Handlers(NamedTuple):
    """The objects whose methods serve the APIs."""

    produce: Any
    fetch: Any
    offsets: Any
    routing: Any
    placement: Any
    topics: Any
    configs: Any
    others: Iterable[Api] = ()
    """APIs of other modules."""


def table(handlers: Handlers) -> dict[int, Api]:
    """Return the APIs by key."""
    routing, offsets = handlers.routing, handlers.offsets
    rows = (
        Api(
            produce.ProduceRequest,
            produce.ProduceResponse,
            handlers.produce.produce,
            is_pipelined=True,
        ),
        Api(fetch.FetchRequest, fetch.FetchResponse, handlers.fetch.fetch, is_waiting=True),
        Api(
            fetch.ListOffsetsRequest,
            fetch.ListOffsetsResponse,
            offsets.list_offsets,
            is_waiting=True,
        ),
        Api(metadata.MetadataRequest, metadata.MetadataResponse, routing.metadata),
        Api(
            metadata.FindCoordinatorRequest,
            metadata.FindCoordinatorResponse,
            routing.find_coordinator,
            is_waiting=True,
        ),
        Api(handshake.SaslHandshakeRequest, handshake.SaslHandshakeResponse, None),
        Api(handshake.ApiVersionsRequest, handshake.ApiVersionsResponse, None),
        Api(
            produce.InitProducerIdRequest,
            produce.InitProducerIdResponse,
            handlers.produce.init_producer_id,
        ),
        Api(
            fetch.OffsetForLeaderEpochRequest,
            fetch.OffsetForLeaderEpochResponse,
            offsets.offset_for_leader_epoch,
            is_waiting=True,
        ),
        Api(handshake.SaslAuthenticateRequest, handshake.SaslAuthenticateResponse, None),
        Api(
            metadata.DescribeClusterRequest,
            metadata.DescribeClusterResponse,
            routing.describe_cluster,
        ),
        Api(
            metadata.DescribeTopicPartitionsRequest,
            metadata.DescribeTopicPartitionsResponse,
            routing.describe_topic_partitions,
            is_waiting=True,
        ),
        Api(
            topics.DescribeLogDirsRequest,
            topics.DescribeLogDirsResponse,
            handlers.placement.describe_log_dirs,
            is_waiting=True,
        ),
        Api(
            topics.ListPartitionReassignmentsRequest,
            topics.ListPartitionReassignmentsResponse,
            handlers.placement.list_partition_reassignments,
        ),
        Api(
            topics.CreateTopicsRequest,
            topics.CreateTopicsResponse,
            handlers.topics.create_topics,
        ),
        Api(
            topics.DeleteTopicsRequest,
            topics.DeleteTopicsResponse,
            handlers.topics.delete_topics,
        ),
        Api(
            topics.DeleteRecordsRequest,
            topics.DeleteRecordsResponse,
            handlers.topics.delete_records,
        ),
        Api(
            topics.CreatePartitionsRequest,
            topics.CreatePartitionsResponse,
            handlers.topics.create_partitions,
        ),
        Api(
            configs.DescribeConfigsRequest,
            configs.DescribeConfigsResponse,
            handlers.configs.describe_configs,
            is_waiting=True,
        ),
        Api(
            configs.AlterConfigsRequest,
            configs.AlterConfigsResponse,
            handlers.configs.alter_configs,
        ),
        Api(
            configs.IncrementalAlterConfigsRequest,
            configs.IncrementalAlterConfigsResponse,
            handlers.configs.incremental_alter_configs,
        ),
        *handlers.others,
    )
    apis = {api.key: api for api in rows}
    assert len(apis) == len(rows), "an API has one row"
    return apis


def versions_answer(apis: Mapping[int, Api], *, is_known: bool) -> handshake.ApiVersionsResponse:
    """Return the versions of all APIs. For a request of an unknown version, return the error and
    only the versions of ApiVersions. With the whole list, a client would not send the request
    again, and the broker would not get the name of the client's library.

    Produce is listed from version 0 on, because librdkafka needs that (KAFKA-18659).
    """
    if not is_known:
        versions = [_versions(apis[API_VERSIONS])]
        return handshake.ApiVersionsResponse(error_code=Code.UNSUPPORTED_VERSION, api_keys=versions)
    return handshake.ApiVersionsResponse(
        error_code=Code.NONE, api_keys=[_versions(apis[key]) for key in sorted(apis)]
    )


def _versions(api: Api) -> handshake.ApiVersion:
    served = api.request.versions
    first = 0 if api.key == PRODUCE else served[0]
    return handshake.ApiVersion(api_key=api.key, min_version=first, max_version=served[-1])
