"""The APIs of ACLs: SECURITY_DISABLED without keys, not listed with keys."""

from typing import Any

import pytest

from tests.service.kafka.conftest import Kafka, broker
from tests.service.keyed import SETTINGS
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import acls
from tidelog.service.kafka.messages.handshake import ApiVersionsRequest, ApiVersionsResponse

ACL_KEYS = {29, 30, 31}
CREATION = acls.AclCreation(
    resource_type=2,
    resource_name="t",
    principal="User:a",
    host="*",
    operation=3,
    permission_type=3,
)
EVERYTHING: dict[str, Any] = {
    "resource_type_filter": 1,
    "resource_name_filter": None,
    "principal_filter": None,
    "host_filter": None,
    "operation": 1,
    "permission_type": 1,
}
"""The filter that fits all ACLs."""


@pytest.mark.parametrize("version", acls.DescribeAclsRequest.versions)
async def test_without_keys_each_acl_is_answered_with_security_disabled(
    kafka: Kafka, version: int
) -> None:
    client = kafka.client()
    description = acls.DescribeAclsRequest(**EVERYTHING)
    described = await client.ask(description, acls.DescribeAclsResponse, version)
    assert (described.error_code, described.resources) == (Code.SECURITY_DISABLED, [])
    assert "security=off" in described.error_message
    creation = acls.CreateAclsRequest(creations=[CREATION] * 2)
    created = await client.ask(creation, acls.CreateAclsResponse, version)
    assert [result.error_code for result in created.results] == [Code.SECURITY_DISABLED] * 2
    deletion = acls.DeleteAclsRequest(filters=[acls.DeleteAclsFilter(**EVERYTHING)] * 2)
    deleted = await client.ask(deletion, acls.DeleteAclsResponse, version)
    assert [result.error_code for result in deleted.filter_results] == [Code.SECURITY_DISABLED] * 2


async def test_a_broker_with_keys_does_not_list_the_apis(kafka: Kafka) -> None:
    async with broker(**SETTINGS) as secured:
        for server, listed in ((kafka, ACL_KEYS), (secured, set())):
            answer = await server.client().ask(ApiVersionsRequest(), ApiVersionsResponse, 0)
            assert {api.api_key for api in answer.api_keys} & ACL_KEYS == listed
