"""Requests of a connection that are not answered yet."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from tidelog.service.kafka.answer_forms import EncodedAnswer
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import ApiClient


class Pending:
    """A request that is not answered."""

    __slots__ = (
        "answer",
        "api",
        "client",
        "correlation_id",
        "decoded_bytes",
        "decoded_owner",
        "frame",
        "has_left",
        "is_later",
        "owner",
        "size",
        "started_s",
        "task",
    )

    def __init__(
        self,
        api: Api,
        client: ApiClient,
        correlation_id: int,
        frame: bytes | bytearray,
        owner: str,
    ) -> None:
        self.owner = owner
        """The owner of the frame's bytes in `RequestMemory`."""
        self.decoded_owner = owner
        self.size = len(frame)
        self.api = api
        self.client = client
        self.correlation_id = correlation_id
        self.frame: bytes | bytearray = frame
        """Empty when the bytes were given back."""
        self.answer: EncodedAnswer | None = None
        self.decoded_bytes = 0
        """The bytes that the request holds of `RequestMemory.decoded`."""
        self.task: asyncio.Task[Any] | None = None
        """The task that serves the request; None when it has ended (`KafkaConnection._done`)."""
        self.has_left = False
        """Whether the client has left, so that its answer is not used."""
        self.is_later = False
        """Whether a `Later` will give the answer."""
        self.started_s = time.perf_counter()


async def served_large(
    context: Context, pending: Pending, position: int, call: Callable[[Pending, Any], Any]
) -> Any:
    """Decode a large request in a thread, call its handler, and encode the answer in a thread.

    If the client has left meanwhile, the answer is not encoded.

    The handler runs in the same task: a cancellation cannot come between its end and its result,
    which may hold memory.
    """
    api, version, rights = pending.api, pending.client.version, pending.client.rights
    decode = partial(api.decode, pending.frame, position, version)
    request = await context.threads.run_to_end(rights, decode)
    del decode
    result = call(pending, request)
    if isinstance(result, Awaitable):
        result = await result
    if result is None or isinstance(result, EncodedAnswer) or pending.has_left:
        return result
    encoded = await context.encoded(rights, partial(api.encode, result, version))
    return encoded._replace(throttle_s=throttle_s_of(result))


def throttle_s_of(response: Any) -> float:
    """Return for how long the handler throttles the client."""
    if isinstance(response, EncodedAnswer):
        return response.throttle_s
    throttle_ms: int = getattr(response, "throttle_time_ms", 0)
    return throttle_ms / 1000
