"""Answers with many elements: a thread encodes them, even if their requests are small."""

from functools import partial
from typing import TypeVar

from tidelog.service.kafka.answer_forms import EncodedAnswer
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.messages.compiler import encoder
from tidelog.service.kafka.messages.schema import Message

ELEMENTS_INLINE_MAX = 2_000
"""Elements of an answer that the event loop encodes. For 2,000 partitions, this takes ~2 ms."""

M = TypeVar("M", bound=Message)


async def answered(
    context: Context, client: ApiClient, response: M, elements: int
) -> M | EncodedAnswer:
    """Return the response, or its bytes if it has too many elements for the event loop."""
    if elements <= ELEMENTS_INLINE_MAX:
        return response
    encode = partial(encoder(type(response), client.version), response)
    return await context.encoded(client.rights, encode)
