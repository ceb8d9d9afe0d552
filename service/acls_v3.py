"""Access control lists in Confluent's v3 dialect.

Where security is off the answer is that of a cluster without an authorizer, which clients know:
nobody takes an empty list for "nothing is allowed", or a 404 for another version of the API.
"""

import logging
from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from service.admin_v3 import Made, known_cluster
from service.caller import Rights
from service.errors import documented
from service.keys_api import switched_on
from service.resources_v3 import ListMetadata, Metadata, Resources
from service.topics import CHANGE_ERRORS, ERRORS, Asking, FreshLog, decided
from storage import acls
from storage.acls import ANY, Acl, AclFilter
from storage.entry import CreateAcls, DeleteAcls
from storage.errors import InvalidRequest

log = logging.getLogger("tidelog.access")

Upper = BeforeValidator(lambda word: word.upper() if isinstance(word, str) else word)
"""Clients write `topic` and `TOPIC`."""


class NewAcl(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
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
        """Raises InvalidRequest."""
        made = Acl(**self.model_dump())
        refusal = acls.check(made)
        if refusal is not None:
            raise refusal
        return made


class NewAcls(BaseModel):
    model_config = ConfigDict(extra="forbid")
    data: list[NewAcl] = Field(min_length=1)


class AclData(BaseModel):
    kind: Literal["KafkaAcl"] = "KafkaAcl"
    metadata: Metadata
    cluster_id: str
    resource_type: str
    resource_name: str
    pattern_type: str
    principal: str
    host: str
    operation: str
    permission: str


class AclList(BaseModel):
    kind: Literal["KafkaAclList"] = "KafkaAclList"
    metadata: ListMetadata
    data: list[AclData]


class DeletedAcls(BaseModel):
    data: list[AclData] = Field(description="those that were there")


async def asked_filter(
    resource_type: Annotated[str, Query(description="ANY, TOPIC, GROUP, CLUSTER, ...")] = ANY,
    resource_name: Annotated[str, Query(description="empty: whatever it is")] = "",
    pattern_type: Annotated[
        str, Query(description="ANY, LITERAL, PREFIXED; MATCH: what the name falls under")
    ] = ANY,
    principal: Annotated[str, Query(description="empty: whoever it is")] = "",
    host: str = "",
    operation: str = ANY,
    permission: str = ANY,
) -> AclFilter:
    """As Confluent's query has it: what is empty or ANY may be anything."""
    return AclFilter(
        _word("resource_type", resource_type, acls.RESOURCE_TYPES),
        resource_name or None,
        _word("pattern_type", pattern_type, (*acls.PATTERN_TYPES, acls.MATCH)),
        principal or None,
        host or None,
        _word("operation", operation, acls.OPERATIONS),
        _word("permission", permission, acls.PERMISSIONS),
    )


def _word(what: str, text: str, words: tuple[str, ...]) -> str:
    if text.upper() not in (ANY, *words):
        raise InvalidRequest(f"{what} {text[:99]!r} is none of {ANY}, {', '.join(words)}")
    return text.upper()


Asked = Annotated[AclFilter, Depends(asked_filter)]
router = APIRouter(
    prefix="/clusters/{cluster_id}",
    tags=["v3 cluster"],
    dependencies=[Depends(known_cluster), Depends(switched_on)],
    responses=ERRORS | documented({400: "40002: security is off, or a word is none of Kafka's"}),
)


@router.get("/acls")
async def list_acls(asked: Asked, broker: FreshLog, make: Made) -> AclList:
    """The ACLs that a filter finds. 400/40002 where security is off."""
    found = [acl for acl in broker.state.access.acls if asked.matches(acl)]
    return AclList(metadata=make.listed("acls"), data=_data(make, found))


@router.post("/acls", status_code=201, response_class=Response, responses=CHANGE_ERRORS)
async def create_acl(body: NewAcl, broker: FreshLog, make: Made, asking: Asking) -> Response:
    """Let a principal do something, or forbid it."""
    acl = body.acl()
    await decided(broker.access.submit(CreateAcls([acl])))
    _tell(asking, "added", [acl])
    return Response(status_code=201, headers={"Location": _url(make, acl)})


@router.post("/acls:batch", status_code=201, response_class=Response, responses=CHANGE_ERRORS)
async def create_acls(body: NewAcls, broker: FreshLog, asking: Asking) -> Response:
    """The same for several, all or none."""
    made = [each.acl() for each in body.data]
    await decided(broker.access.submit(CreateAcls(made)))
    _tell(asking, "added", made)
    return Response(status_code=201)


@router.delete("/acls", responses=CHANGE_ERRORS)
async def delete_acls(asked: Asked, broker: FreshLog, make: Made, asking: Asking) -> DeletedAcls:
    """Delete the ACLs that a filter finds; without any, all."""
    found = [acl for acl in broker.state.access.acls if asked.matches(acl)]
    if found:
        await decided(broker.access.submit(DeleteAcls(found)))
        _tell(asking, "removed", found)
    return DeletedAcls(data=_data(make, found))


def _tell(asking: Rights, deed: str, changed: list[Acl]) -> None:
    for acl in changed:
        log.info("%s %s ACL %s", asking.principal, deed, " ".join(_fields(acl).values()))


def _data(make: Resources, found: list[Acl]) -> list[AclData]:
    """In Confluent's order."""
    return [
        AclData(
            metadata=Metadata(self_url=_url(make, acl), resource_name=_name(make)),
            cluster_id=make.cluster_id,
            resource_type=acl.resource_type,
            resource_name=acl.resource_name,
            pattern_type=acl.pattern_type,
            principal=acl.principal,
            host=acl.host,
            operation=acl.operation,
            permission=acl.permission,
        )
        for acl in sorted(found, key=lambda acl: tuple(_fields(acl).values()))
    ]


def _fields(acl: Acl) -> dict[str, str]:
    return {name: getattr(acl, name) for name in Acl.__struct_fields__}


def _url(make: Resources, acl: Acl) -> str:
    return f"{make.url('acls')}?{urlencode(_fields(acl))}"


def _name(make: Resources) -> str:
    return f"crn:///kafka={make.cluster_id}/acl"
