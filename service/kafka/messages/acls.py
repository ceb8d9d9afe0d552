"""ACLs: describe, create, delete."""

from typing import Annotated

from tidelog.service.kafka.messages.schema import Field, Int8, Int16, Int32, Message, Structure

LITERAL = 3


class DescribeAclsRequest(Message, api_key=29, versions="1-3", flexible="2+"):
    """Asks for the ACLs that fit a filter; null fits all."""

    resource_type_filter: Int8
    resource_name_filter: str | None
    pattern_type_filter: Annotated[Int8, Field("1+")] = LITERAL
    principal_filter: str | None
    host_filter: str | None
    operation: Int8
    permission_type: Int8


class AclDescription(Structure):
    """An operation that a principal may, or may not, do with a resource."""

    principal: str
    host: str
    operation: Int8
    permission_type: Int8


class DescribeAclsResource(Structure):
    """The ACLs of one pattern of resources."""

    resource_type: Int8
    resource_name: str
    pattern_type: Annotated[Int8, Field("1+")] = LITERAL
    acls: list[AclDescription]


class DescribeAclsResponse(Message, api_key=29, versions="1-3", flexible="2+"):
    """The ACLs of the filter, or the error."""

    throttle_time_ms: Int32
    error_code: Int16
    error_message: str | None
    resources: list[DescribeAclsResource]


class AclCreation(Structure):
    resource_type: Int8
    resource_name: str
    resource_pattern_type: Annotated[Int8, Field("1+")] = LITERAL
    principal: str
    host: str
    operation: Int8
    permission_type: Int8


class CreateAclsRequest(Message, api_key=30, versions="1-3", flexible="2+"):
    creations: list[AclCreation]


class AclCreationResult(Structure):
    """The result for one ACL."""

    error_code: Int16
    error_message: str | None


class CreateAclsResponse(Message, api_key=30, versions="1-3", flexible="2+"):
    """The results of a CreateAcls request, in its order."""

    throttle_time_ms: Int32
    results: list[AclCreationResult]


class DeleteAclsFilter(Structure):
    """A filter of ACLs; null fits all."""

    resource_type_filter: Int8
    resource_name_filter: str | None
    pattern_type_filter: Annotated[Int8, Field("1+")] = LITERAL
    principal_filter: str | None
    host_filter: str | None
    operation: Int8
    permission_type: Int8


class DeleteAclsRequest(Message, api_key=31, versions="1-3", flexible="2+"):
    """Deletes the ACLs that fit any of the filters."""

    filters: list[DeleteAclsFilter]


class DeleteAclsMatchingAcl(Structure):
    """A deleted ACL, or the error."""

    error_code: Int16
    error_message: str | None
    resource_type: Int8
    resource_name: str
    pattern_type: Annotated[Int8, Field("1+")] = LITERAL
    principal: str
    host: str
    operation: Int8
    permission_type: Int8


class DeleteAclsFilterResult(Structure):
    """The ACLs that one filter deleted, or the error."""

    error_code: Int16
    error_message: str | None
    matching_acls: list[DeleteAclsMatchingAcl]


class DeleteAclsResponse(Message, api_key=31, versions="1-3", flexible="2+"):
    """The results of a DeleteAcls request, in the order of its filters."""

    throttle_time_ms: Int32
    filter_results: list[DeleteAclsFilterResult]
