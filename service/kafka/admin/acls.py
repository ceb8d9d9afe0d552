"""DescribeAcls, CreateAcls, DeleteAcls of a broker with `security=off`: SECURITY_DISABLED.

MirrorMaker 2 asks for ACLs in each round. After this code, it asks no more; without the API, it
logs an error and a stack trace each time. A broker with keys does not list these APIs: its ACLs are
changed by `tidelog acls` and by REST.
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from tidelog.service.kafka.answer_forms import EncodedAnswer
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.error_responses import refused
from tidelog.service.kafka.errors import Code
from tidelog.service.kafka.messages import acls
from tidelog.service.kafka.messages.compiler import encoder
from tidelog.service.kafka.messages.schema import Message

DISABLED = "there are no ACLs, because the brokers run with security=off"


def disabled_acl_apis(context: Context) -> Iterable[Api]:
    """Return the rows of the APIs of ACLs of a broker without keys."""
    return (
        Api(acls.DescribeAclsRequest, acls.DescribeAclsResponse, _describe(context)),
        Api(
            acls.CreateAclsRequest,
            acls.CreateAclsResponse,
            _change(context, "CreateAcls", acls.CreateAclsResponse),
        ),
        Api(
            acls.DeleteAclsRequest,
            acls.DeleteAclsResponse,
            _change(context, "DeleteAcls", acls.DeleteAclsResponse),
        ),
    )


def _describe(
    context: Context,
) -> Callable[[acls.DescribeAclsRequest, ApiClient], acls.DescribeAclsResponse]:
    def serve(request: acls.DescribeAclsRequest, client: ApiClient) -> acls.DescribeAclsResponse:
        return acls.DescribeAclsResponse(
            throttle_time_ms=0,
            error_code=context.refusal("DescribeAcls", Code.SECURITY_DISABLED),
            error_message=DISABLED,
            resources=[],
        )

    return serve


def _change(
    context: Context, api: str, response: type[Message]
) -> Callable[[Message, ApiClient], Coroutine[Any, Any, EncodedAnswer]]:
    """Return a handler that refuses each item of a request. A request has up to 100,000 items."""

    async def serve(request: Message, client: ApiClient) -> EncodedAnswer:
        code = context.refusal(api, Code.SECURITY_DISABLED)
        encode = encoder(response, client.version)
        return await context.encoded(
            client.rights, lambda: encode(refused(response, request, client.version, code))
        )

    return serve
