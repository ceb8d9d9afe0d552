"""A compressed body is decoded, or refused as one."""

import gzip

import pytest

from tests.service.conftest import JSON, V2, Broker


@pytest.mark.parametrize(
    ("path", "media_type", "body"),
    [
        ("/topics/t", JSON, b'{"records":[{"value":1}]}'),
        ("/consumers/g", V2, b'{"format":"json"}'),
        ("/admin/topics", "application/json", b'{"topic_name":"u","partitions_count":1}'),
    ],
)
async def test_gzip_is_decoded_or_refused_as_gzip(
    topic_broker: Broker, path: str, media_type: str, body: bytes
) -> None:
    headers = {"content-type": media_type, "content-encoding": "gzip"}
    answer = await topic_broker.http.post(path, content=gzip.compress(body), headers=headers)
    assert answer.status_code in (200, 201, 415), answer.text
    if answer.status_code == 415:
        assert "accept-encoding" in answer.headers
