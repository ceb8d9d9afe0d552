"""Each API of the port for Kafka clients, with each array of its request, is among the attacks."""

import pytest

from tests.service.kafka.conftest import broker
from tests.tools.attack.kafka_schema import (
    ArrayField,
    array_fields,
    elements_of,
    frame_of,
    requests,
)
from tests.tools.attack.measure import MIB
from tidelog.service.kafka.messages.compiler import decoder
from tidelog.service.kafka.messages.header import decode_header
from tidelog.service.kafka.messages.primitives import MalformedMessage


async def test_the_attacks_have_each_api() -> None:
    async with broker() as kafka:
        apis = {api.request for api in kafka.server.listener.server.apis.values()}
    assert apis <= {*requests()}


@pytest.mark.parametrize("field", array_fields(), ids=str)
def test_a_request_with_many_elements_is_a_frame_that_is_decoded(field: ArrayField) -> None:
    data = frame_of(field, 0.01)[4:]
    assert len(data) <= MIB
    position = decode_header(data).position
    request = decoder(field.request, field.version)(data, position)
    elements = elements_of(field, request)
    assert len(elements) >= 10
    assert request.api_key == field.request.api_key


@pytest.mark.parametrize("field", array_fields(), ids=str)
def test_a_request_with_more_elements_than_allowed_is_refused(field: ArrayField) -> None:
    data = frame_of(field, 0.001)[4:]
    position = decode_header(data).position
    bounded = type("Bounded", (field.request,), {"elements_max": 9})
    with pytest.raises(MalformedMessage, match="elements"):
        decoder(bounded, field.version)(data, position)
