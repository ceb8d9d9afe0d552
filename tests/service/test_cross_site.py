"""Pages of other sites read nothing here, as there is no CORS, and write nothing."""

import httpx
import pytest

from tests.service.conftest import JSON, Broker, ends

RECORDS = b'{"records":[{"value":1}]}'
FOREIGN = {"sec-fetch-site": "cross-site"}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/topics/{topic}", RECORDS),
        ("POST", "/consumers/g", b"{}"),
        ("POST", "/admin/topics", b'{"topic_name":"u","partitions_count":1}'),
        ("DELETE", "/v3/clusters/{cluster}/topics/{topic}", b""),
        ("PUT", "/v3/clusters/{cluster}/topics/{topic}/configs/retention.ms", b'{"value":"1"}'),
    ],
)
async def test_a_page_of_another_site_changes_nothing(
    broker: Broker, topic: str, method: str, path: str, body: bytes
) -> None:
    url = path.format(topic=topic, cluster=broker.log.identity.cluster_id)
    before = broker.log.state.encode()
    answer = await broker.http.request(method, url, content=body, headers=FOREIGN)
    assert (answer.status_code, answer.json()["error_code"]) == (403, 40301)
    assert broker.log.state.encode() == before


@pytest.mark.parametrize("site", ["same-origin", "none", None])
async def test_other_requests_are_allowed(broker: Broker, topic: str, site: str | None) -> None:
    headers = {"content-type": JSON} | ({"sec-fetch-site": site} if site else {})
    answer = await broker.http.post(f"/topics/{topic}", content=RECORDS, headers=headers)
    assert answer.status_code == 200
    assert sum(ends(broker.log, topic)) == 1


async def test_reads_are_the_browsers_business(broker: Broker) -> None:
    answer: httpx.Response = await broker.http.get("/topics", headers=FOREIGN)
    assert answer.status_code == 200
