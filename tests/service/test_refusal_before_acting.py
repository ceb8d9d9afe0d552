"""A request that will be refused is refused before it acts."""

import pytest

from tests.service.conftest import V2, Broker, assert_refused
from tests.service.instances import created, subscribed


@pytest.mark.parametrize("accept", ["application/xml", "garbage"])
async def test_a_deletion_whose_answer_is_not_wanted_deletes_nothing(
    topic_broker: Broker, accept: str
) -> None:
    instance = await subscribed(topic_broker)
    answer = await instance("DELETE", accept=accept)
    assert answer.status_code == 406
    assert_refused(answer, 406, 40601)
    assert await instance.ok("GET", "/subscription") == {"topics": ["t"]}


@pytest.mark.parametrize("accept", ["application/xml", "garbage"])
async def test_a_subscription_whose_answer_is_not_wanted_subscribes_nothing(
    topic_broker: Broker, accept: str
) -> None:
    instance = await created(topic_broker)
    before = await instance.ok("GET", "/subscription")
    answer = await instance("POST", "/subscription", {"topics": ["t"]}, accept=accept)
    assert answer.status_code == 406
    assert_refused(answer, 406, 40601)
    assert await instance.ok("GET", "/subscription") == before


async def test_a_name_is_checked_before_the_body(topic_broker: Broker) -> None:
    path = "/consumers/my%03group/instances/a/subscription"
    answer = await topic_broker.http.post(path, headers={"content-type": V2})
    assert answer.status_code == 400
    assert "my\u2403group" in answer.json()["message"]


async def test_an_empty_body_is_called_empty(topic_broker: Broker) -> None:
    instance = await created(topic_broker)
    answer = await instance.http.post(f"{instance.path}/subscription", headers={"content-type": V2})
    assert answer.status_code in (400, 422)
    assert answer.json()["message"] == "the body is empty"
