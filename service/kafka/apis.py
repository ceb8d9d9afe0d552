"""The table of the APIs that a broker serves. The answer to `ApiVersions` lists these APIs.

A class of handlers has its rows in a method `apis`, beside the handlers.
"""

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeAlias

from tidelog.service.kafka.answer_forms import EncodedAnswer, Later
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import handshake
from tidelog.service.kafka.messages.compiler import decoder, encoder
from tidelog.service.kafka.messages.schema import Message

PRODUCE, API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE = 0, 18, 17, 36
SASL_KEYS = frozenset({API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE})
"""APIs that a client may use before it has proved its principal."""

Answer: TypeAlias = Message | EncodedAnswer | Later | None
"""None for a request that gets no answer."""
ApiHandler: TypeAlias = Callable[..., Answer | Coroutine[Any, Any, Answer]]
"""Gets a request and its ApiClient."""


class Api:
    """One API: its messages and its handler."""

    __slots__ = (
        "_decoders",
        "_encoders",
        "is_async",
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
        serve: ApiHandler | None,
        *,
        is_pipelined: bool = False,
        is_waiting: bool = False,
        is_kept_by_group: bool = False,
    ) -> None:
        """`serve` is None for an API that the connection itself serves.

        If `is_pipelined`, a request may begin before the earlier requests of its connection are
        answered. If `is_waiting`, a request is cancelled when its connection ends. If
        `is_kept_by_group`, `serve` gets a third argument. It calls this when the group counts what
        the request brought: from then on, the request holds no memory of the listener.
        """
        assert request.api_key is not None, request
        assert request.api_key == response.api_key, (request, response)
        self.key: int = request.api_key
        self.name = request.__name__.removesuffix("Request")
        self.request = request
        self.response = response
        self.serve = serve
        self.is_async = inspect.iscoroutinefunction(serve)
        self.is_pipelined = is_pipelined
        self.is_waiting = is_waiting
        self.is_kept_by_group = is_kept_by_group
        self._decoders: dict[int, Callable[[bytes | bytearray, int], Any]] = {}
        self._encoders: dict[int, Callable[[Any], list[bytes | memoryview]]] = {}

    def decode(self, frame: bytes | bytearray, position: int, version: int) -> Message:
        """Decode a request. Raises MalformedMessage."""
        decode = self._decoders.get(version)
        if decode is None:
            # librdkafka sends bytes after the end of some requests. Kafka ignores these bytes, too.
            decode = decoder(self.request, version, to_the_end=False)
            self._decoders[version] = decode
        return decode(frame, position)

    def encode(self, response: Message, version: int) -> list[bytes | memoryview]:
        """Encode a response."""
        encode = self._encoders.get(version)
        if encode is None:
            encode = self._encoders[version] = encoder(self.response, version)
        return encode(response)


HANDSHAKE_APIS: tuple[Api, ...] = (
    Api(handshake.SaslHandshakeRequest, handshake.SaslHandshakeResponse, None),
    Api(handshake.ApiVersionsRequest, handshake.ApiVersionsResponse, None),
    Api(handshake.SaslAuthenticateRequest, handshake.SaslAuthenticateResponse, None),
)
"""The APIs that a connection serves by itself."""


def table(rows: Iterable[Api]) -> dict[int, Api]:
    """Return the APIs by key: `rows` and HANDSHAKE_APIS."""
    apis: dict[int, Api] = {}
    for api in (*HANDSHAKE_APIS, *rows):
        assert api.key not in apis, f"{api.name} has two rows"
        apis[api.key] = api
    return apis


def versions_answer(apis: Mapping[int, Api], *, is_known: bool) -> handshake.ApiVersionsResponse:
    """Return the versions of all APIs.

    For a request of an unknown version, return the error and only the versions of ApiVersions. With
    the whole list, a client would not send the request again, and the broker would not get the name
    of the client's library.

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
