"""Access control lists in Confluent's v3 dialect.

If security is off, the response is the error of a Kafka cluster without an authorizer, because
clients know this error. An empty list would mean "nothing is allowed", and a 404 would mean another
version of the API.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlencode

import msgspec
from fastapi import Depends, Query, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tidelog.service.formats.resources_v3 import Resource, ResourceFactory, ResourceList
from tidelog.service.formats.strict_bodies import Items, StrictModel
from tidelog.service.http.body_limit import SMALL_BODY
from tidelog.service.http.paging import WHOLE, WantedPage, answer_page
from tidelog.service.http.route import V3, Permission, Route, RouteDoc
from tidelog.service.operations.rights import ALTER_ACCESS, DESCRIBE_CLUSTER
from tidelog.service.routes.dependencies import (
    CHANGE_ERRORS,
    ERRORS,
    BrokerOperations,
    CallerChange,
    RequiredSecurity,
    Resources,
    Rights,
)
from tidelog.service.slices import in_order, sliced
from tidelog.storage.core import acls
from tidelog.storage.core.acls import ANY, Acl, AclFilter
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.state.access import ACLS_AT_ONCE_MAX

AclKey: TypeAlias = tuple[str, ...]
"""The fields of an ACL. Lists of ACLs are in the order of these tuples."""
Upper = BeforeValidator(lambda word: word.upper() if isinstance(word, str) else word)
"""Makes a word upper case, because some clients send `topic`, others `TOPIC`."""


class NewAcl(StrictModel):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "resource_type": "TOPIC",
                    "resource_name": "flights",
                    "pattern_type": "LITERAL",
                    "principal": "User:alice",
                    "host": "*",
                    "operation": "READ",
                    "permission": "ALLOW",
                }
            ]
        },
    )
    resource_type: Annotated[str, Upper]
    resource_name: str
    pattern_type: Annotated[str, Upper]
    principal: str
    host: str
    operation: Annotated[str, Upper]
    permission: Annotated[str, Upper]

    def acl(self) -> Acl:
        """Return the ACL. Raises InvalidRequest."""
        acl = Acl(**self.model_dump())
        refusal = acls.check(acl)
        if refusal is not None:
            raise refusal
        return acl


class NewAcls(StrictModel):
    data: Items[NewAcl] = Field(min_length=1)


class AclData(Resource):
    kind: Literal["KafkaAcl"] = "KafkaAcl"
    resource_type: str
    resource_name: str
    pattern_type: str
    principal: str
    host: str
    operation: str
    permission: str


class AclList(ResourceList[AclData]):
    kind: Literal["KafkaAclList"] = "KafkaAclList"


class DeletedAcls(BaseModel):
    data: list[AclData] = Field(description="the deleted ACLs")


async def search_filter(
    resource_type: Annotated[str, Query(description="ANY, TOPIC, GROUP, CLUSTER, ...")] = ANY,
    resource_name: Annotated[str, Query(description="empty: every name")] = "",
    pattern_type: Annotated[
        str, Query(description="ANY, LITERAL, PREFIXED; MATCH: every ACL that applies to the name")
    ] = ANY,
    principal: Annotated[str, Query(description="empty: every principal")] = "",
    host: str = "",
    operation: str = ANY,
    permission: str = ANY,
) -> AclFilter:
    """Return the filter of a query, as in Confluent's API: empty and ANY match everything."""
    return AclFilter(
        _word("resource_type", resource_type, acls.RESOURCE_TYPES),
        resource_name or None,
        _word("pattern_type", pattern_type, (*acls.PATTERN_TYPES, acls.MATCH)),
        principal or None,
        host or None,
        _word("operation", operation, acls.OPERATIONS),
        _word("permission", permission, acls.PERMISSIONS),
    )


def _word(parameter: str, text: str, words: tuple[str, ...]) -> str:
    if text.upper() not in (ANY, *words):
        raise InvalidRequest(f"{parameter} {text[:99]!r} is none of {ANY}, {', '.join(words)}")
    return text.upper()


async def deletion_filter(
    resource_type: Annotated[str, Query(description="ANY, TOPIC, GROUP, CLUSTER, ...")],
    pattern_type: Annotated[
        str, Query(description="ANY, LITERAL, PREFIXED; MATCH: every ACL that applies to the name")
    ],
    operation: Annotated[str, Query(description="ANY, READ, WRITE, ...")],
    permission: Annotated[str, Query(description="ANY, ALLOW, DENY")],
    resource_name: Annotated[str | None, Query(description="absent: any")] = None,
    principal: Annotated[str | None, Query(description="absent: any")] = None,
    host: Annotated[str | None, Query(description="absent: any")] = None,
) -> AclFilter:
    """Return the filter of a deletion.

    As in Confluent's API, four parameters have no default. An empty `resource_name`, `principal` or
    `host` is an error, because it usually comes from an unset variable of a script.
    """
    names = {"resource_name": resource_name, "principal": principal, "host": host}
    for name, text in names.items():
        if text == "":
            raise InvalidRequest(f"{name} is empty: give a name, or omit the parameter for any")
    return await search_filter(
        resource_type,
        resource_name or "",
        pattern_type,
        principal or "",
        host or "",
        operation,
        permission,
    )


SearchFilter = Annotated[AclFilter, Depends(search_filter)]
DeletionFilter = Annotated[AclFilter, Depends(deletion_filter)]


async def list_acls(
    _: RequiredSecurity,
    acl_filter: SearchFilter,
    operations: BrokerOperations,
    rights: Rights,
    make: Resources,
    page: WantedPage,
) -> AclList:
    """The ACLs that match a filter. If security is off, the response is 400/40002."""
    start_key = page.position(*[str] * len(Acl.__struct_fields__))
    keys = await _in_order(await operations.access.acls(rights, acl_filter), start_key)
    shell = AclList(metadata=make.listed("acls"), data=[])
    response: AclList = await answer_page(page, shell, keys, lambda key: _resource(make, key))
    return response


async def create_acl(
    _: RequiredSecurity,
    body: NewAcl,
    operations: BrokerOperations,
    change: CallerChange,
    make: Resources,
) -> Response:
    """Allow or deny an operation to a principal. A principal is `User:` and a name."""
    acl = body.acl()
    await operations.access.create_acls(change, [acl])
    return Response(status_code=201, headers={"Location": make.url(_path(_fields(acl)))})


async def create_acls(
    _: RequiredSecurity, body: NewAcls, operations: BrokerOperations, change: CallerChange
) -> Response:
    """Create several ACLs, all or none."""
    await operations.access.create_acls(change, [new_acl.acl() for new_acl in body.data])
    return Response(status_code=201)


async def delete_acls(
    _: RequiredSecurity,
    acl_filter: DeletionFilter,
    operations: BrokerOperations,
    change: CallerChange,
    make: Resources,
) -> DeletedAcls:
    """Delete the ACLs that match a filter.

    `resource_type`, `pattern_type`, `operation` and `permission` are required: without one of them,
    the response is 400. Each may be ANY.
    """
    keys = await _in_order(await operations.access.delete_acls(change, acl_filter))
    deleted: DeletedAcls = await answer_page(
        WHOLE, DeletedAcls(data=[]), keys, lambda key: _resource(make, key)
    )
    return deleted


async def _in_order(matching_acls: list[Acl], start_key: AclKey | None = None) -> Iterator[AclKey]:
    return await in_order([_key(acl) async for acl in sliced(matching_acls)], start_key)


def _resource(make: ResourceFactory, key: AclKey) -> AclData:
    fields = dict(zip(Acl.__struct_fields__, key, strict=True))
    return make.create(AclData, "/acl", (_path(fields),), **fields)


def _key(acl: Acl) -> AclKey:
    return msgspec.structs.astuple(acl)


def _fields(acl: Acl) -> dict[str, str]:
    return msgspec.structs.asdict(acl)


def _path(fields: dict[str, str]) -> str:
    return f"acls?{urlencode(fields)}"


_ACLS = "/clusters/{cluster_id}/acls"
_DESCRIBE = Permission(DESCRIBE_CLUSTER)
_ALTER = Permission(ALTER_ACCESS)
_LABEL = "v3 cluster"
_ERRORS = ERRORS | {400: "40002: security is off, or a value is not one that Kafka defines"}
_DOC = RouteDoc(_ERRORS)
_CREATE_DOC = RouteDoc(_ERRORS | CHANGE_ERRORS, 201)
_DELETE_DOC = RouteDoc(_ERRORS | CHANGE_ERRORS)
_BATCH_BODY = SMALL_BODY.with_items(ACLS_AT_ONCE_MAX, 400, 8)

ROUTES = (
    Route("GET", _ACLS, list_acls, _DESCRIBE, _LABEL, V3, _DOC),
    Route("POST", _ACLS, create_acl, _ALTER, _LABEL, V3, _CREATE_DOC),
    Route("DELETE", _ACLS, delete_acls, _ALTER, _LABEL, V3, _DELETE_DOC),
    Route("POST", f"{_ACLS}:batch", create_acls, _ALTER, _LABEL, V3, _CREATE_DOC, body=_BATCH_BODY),
)
