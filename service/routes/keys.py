"""Routes of keys.

They are under /tidelog/v1; no other REST proxy has them. Only the response to the creation of a key
has the key's secret. If security is off, they respond as a Kafka cluster without an authorizer.
"""

from typing import Annotated, Any

from fastapi import Header, Response
from pydantic import BaseModel, ConfigDict, Field

from tidelog.service.formats.strict_bodies import StrictModel, WholeNumber
from tidelog.service.http.errors import NoSuchResource
from tidelog.service.http.paging import WantedPage, answer_page
from tidelog.service.http.route import TIDELOG, Permission, Route, RouteDoc
from tidelog.service.operations.rights import ALTER_ACCESS, DESCRIBE_CLUSTER
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
from tidelog.storage.state.access import Key

TTL_S_MAX = 100 * 365 * 86_400


class NewKey(StrictModel):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"principal": "User:alice", "note": "the nightly job"}]},
    )
    principal: str = Field(examples=["User:alice"])
    ttl_s: WholeNumber | None = Field(default=None, ge=1, le=TTL_S_MAX, description="null: never")
    note: str = Field(default="", description="free text")


class KeyData(BaseModel):
    """A key without its secret."""

    key_id: str
    principal: str
    created_ms: int
    expires_ms: int | None = Field(description="null: never")
    is_expired: bool
    note: str


class CreatedKey(KeyData):
    secret: str = Field(description="no other response has it")


async def list_keys(
    broker: FreshBroker, security: RequiredSecurity, empty: EmptyListing, page: WantedPage
) -> Listing[KeyData]:
    """All keys, oldest first."""
    now_ms, key_by_id = security.clock.now_ms(), broker.state.access.keys
    by_age = ((key.created_ms, key.key_id) for key in key_by_id.values())

    def shown(position: tuple[int, str]) -> KeyData | None:
        key = key_by_id.get(position[1])
        return None if key is None else KeyData(**_fields(key, now_ms))

    keys = await in_order(by_age, page.position(int, str))
    response: Listing[KeyData] = await answer_page(page, empty, keys, shown)
    return response


async def create_key(
    response: Response,
    body: NewKey,
    operations: BrokerOperations,
    change: CallerChange,
    security: RequiredSecurity,
    idempotency_key: Annotated[
        str | None,
        Header(
            max_length=255,
            description="a repetition within ten minutes replaces the key of the first request, "
            "whose secret is then invalid: after a lost response there is one key",
        ),
    ] = None,
) -> CreatedKey:
    """Create a key of a principal. Only this response has its secret."""
    key, secret = await operations.access.create_key(
        change, body.principal, body.ttl_s, body.note, idempotency_key
    )
    response.headers["Cache-Control"] = "no-store"
    return CreatedKey(**_fields(key, security.clock.now_ms()), secret=secret)


async def delete_key(
    key_id: str, operations: BrokerOperations, change: CallerChange, _: RequiredSecurity
) -> Response:
    """Revoke a key and its sessions.

    This broker refuses them at once, other brokers when they apply the commit, after
    `poll_interval_ms` and a second at most.
    """
    if await operations.access.delete_key(change, key_id) is None:
        raise NoSuchResource(f"Key {key_id} cannot be found.")
    return Response(status_code=204)


def _fields(key: Key, now_ms: int) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "principal": key.principal,
        "created_ms": key.created_ms,
        "expires_ms": key.expires_ms or None,
        "is_expired": bool(key.expires_ms) and key.expires_ms <= now_ms,
        "note": key.note,
    }


_DESCRIBE = Permission(DESCRIBE_CLUSTER)
_ALTER = Permission(ALTER_ACCESS)
_CHANGE_ERRORS = SECURITY_ERRORS | CHANGE_ERRORS
_DELETE_ERRORS = _CHANGE_ERRORS | {404: ERRORS[404]}
_DOC = RouteDoc(SECURITY_ERRORS)
_CREATE_DOC = RouteDoc(_CHANGE_ERRORS | {422: "the Idempotency-Key was used for another key"}, 201)
_DELETE_DOC = RouteDoc(_DELETE_ERRORS, 204)

ROUTES = (
    # The permissions are those that Kafka requires for SCRAM credentials.
    Route("GET", "/keys", list_keys, _DESCRIBE, SECURITY_LABEL, TIDELOG, _DOC),
    Route("POST", "/keys", create_key, _ALTER, SECURITY_LABEL, TIDELOG, _CREATE_DOC),
    Route("DELETE", "/keys/{key_id}", delete_key, _ALTER, SECURITY_LABEL, TIDELOG, _DELETE_DOC),
)
