"""Routes of the quotas of principals.

They are under /tidelog/v1; no other REST proxy has them. If security is off, they respond as a
Kafka cluster without an authorizer.
"""

from typing import Annotated

from fastapi import Response
from pydantic import Field

from tidelog.service.formats.strict_bodies import StrictModel, WholeNumber
from tidelog.service.http.errors import NoSuchResource
from tidelog.service.http.paging import WantedPage, answer_page
from tidelog.service.http.route import TIDELOG, Permission, Route, RouteDoc
from tidelog.service.operations.rights import ALTER_DEFAULTS, DESCRIBE_DEFAULTS
from tidelog.service.routes.dependencies import (
    CHANGE_ERRORS,
    ERRORS,
    SECURITY_ERRORS,
    SECURITY_LABEL,
    BrokerOperations,
    CallerChange,
    EmptyListing,
    FreshBroker,
    Listing,
    RequiredSecurity,
)
from tidelog.service.slices import in_order
from tidelog.storage.core.acls import DEFAULT

Rate = Annotated[
    WholeNumber | None,
    Field(
        default=None,
        description="bytes a second; null: as `<default>`, or no limit if that is null",
    ),
]


RequestRate = Annotated[
    WholeNumber | None,
    Field(
        default=None,
        description="requests a second; null: as `<default>`, or no limit if that is null",
    ),
]


Percentage = Annotated[
    WholeNumber | None,
    Field(
        default=None,
        description="CPU time of requests, in percent of one thread; null: as `<default>`, or no "
        "limit if that is null",
    ),
]


Share = Annotated[
    WholeNumber | None,
    Field(
        default=None,
        description="maximum number (bytes for `offset_metadata_bytes`) that the principal may "
        "have; null: as `<default>`, or a quarter of the cluster's bound if that is null",
    ),
]


class QuotaRates(StrictModel):
    """Rates and the percentage apply to each broker, the other quotas to the whole cluster."""

    producer_byte_rate: Rate
    consumer_byte_rate: Rate
    request_rate: RequestRate
    mutation_rate: RequestRate
    request_percentage: Percentage
    topics: Share
    partitions: Share
    keys: Share
    offsets: Share
    offset_metadata_bytes: Share
    members: Share
    patterns: Share
    idempotency_keys: Share
    producers: Share
    producer_partitions: Share


class QuotaData(QuotaRates):
    """The quotas of a principal.

    Each broker applies rates and the percentage by itself. The other quotas are shares of the
    cluster's bounds. A quota that a principal does not have is taken from `<default>`.
    """

    principal: str = Field(examples=["User:alice", DEFAULT])


async def list_quotas(
    broker: FreshBroker, _: RequiredSecurity, empty: EmptyListing, page: WantedPage
) -> Listing[QuotaData]:
    """All quotas, by principal."""
    quotas_by_principal = broker.state.access.quotas

    def shown(principal: str) -> QuotaData | None:
        quotas = quotas_by_principal.get(principal)
        return None if quotas is None else QuotaData(principal=principal, **quotas)

    principals = await in_order(quotas_by_principal, page.key(str))
    response: Listing[QuotaData] = await answer_page(page, empty, principals, shown)
    return response


async def set_quotas(
    principal: str,
    body: QuotaRates,
    operations: BrokerOperations,
    change: CallerChange,
    _: RequiredSecurity,
) -> QuotaData:
    """Set quotas of a principal.

    A quota that the body omits does not change. The value null removes a quota.
    """
    rates: dict[str, int | None] = body.model_dump(exclude_unset=True)
    quotas = await operations.access.set_quotas(change, principal, rates)
    return QuotaData(principal=principal, **quotas)


async def delete_quotas(
    principal: str, operations: BrokerOperations, change: CallerChange, _: RequiredSecurity
) -> Response:
    """Remove the quotas of a principal, so that the default quotas apply to it again."""
    if not await operations.access.delete_quotas(change, principal):
        raise NoSuchResource(f"Quotas of {principal} cannot be found.")
    return Response(status_code=204)


_DESCRIBE_QUOTAS = Permission(DESCRIBE_DEFAULTS)


_ALTER_QUOTAS = Permission(ALTER_DEFAULTS)


_CHANGE_DOC = RouteDoc(SECURITY_ERRORS | CHANGE_ERRORS)
_DOC = RouteDoc(SECURITY_ERRORS)
_DELETE_DOC = RouteDoc(SECURITY_ERRORS | CHANGE_ERRORS | {404: ERRORS[404]}, 204)

ROUTES = (
    # The permissions are those that Kafka requires for client quotas.
    Route("GET", "/quotas", list_quotas, _DESCRIBE_QUOTAS, SECURITY_LABEL, TIDELOG, _DOC),
    Route(
        "PUT",
        "/quotas/{principal}",
        set_quotas,
        _ALTER_QUOTAS,
        SECURITY_LABEL,
        TIDELOG,
        _CHANGE_DOC,
    ),
    Route(
        "DELETE",
        "/quotas/{principal}",
        delete_quotas,
        _ALTER_QUOTAS,
        SECURITY_LABEL,
        TIDELOG,
        _DELETE_DOC,
    ),
)
