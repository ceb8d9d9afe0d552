"""Configs of topics and brokers: describe and alter."""

from typing import Annotated

from tidelog.service.kafka.messages.schema import (
    Field,
    Int8,
    Int16,
    Int32,
    Message,
    Structure,
)


class DescribeConfigsResource(Structure):
    """A topic or a broker, and the names of its configs; null asks for all."""

    resource_type: Int8
    resource_name: str
    configuration_keys: list[str] | None


class DescribeConfigsRequest(Message, api_key=32, versions="1-4", flexible="4+"):
    resources: list[DescribeConfigsResource]
    include_synonyms: bool = False
    include_documentation: Annotated[bool, Field("3+")] = False


class DescribeConfigsSynonym(Structure):
    """A value of the config, and the place that sets it."""

    name: str
    value: str | None
    source: Int8


class DescribeConfigsResourceResult(Structure):
    name: str
    value: str | None
    read_only: bool
    config_source: Int8 = -1
    is_sensitive: bool
    synonyms: list[DescribeConfigsSynonym]
    config_type: Annotated[Int8, Field("3+")] = 0
    documentation: Annotated[str | None, Field("3+")] = None


class DescribeConfigsResult(Structure):
    """The configs of a resource, or the error."""

    error_code: Int16
    error_message: str | None
    resource_type: Int8
    resource_name: str
    configs: list[DescribeConfigsResourceResult]


class DescribeConfigsResponse(Message, api_key=32, versions="1-4", flexible="4+"):
    """The configs of the request."""

    throttle_time_ms: Int32
    results: list[DescribeConfigsResult]


class AlterableConfig(Structure):
    """A config and its new value."""

    name: str
    value: str | None


class AlterConfigsResource(Structure):
    """All new configs of a topic or a broker."""

    resource_type: Int8
    resource_name: str
    configs: list[AlterableConfig]


class AlterConfigsRequest(Message, api_key=33, versions="0-2", flexible="2+"):
    """Replaces the configs of resources: configs that it does not name get their defaults."""

    resources: list[AlterConfigsResource]
    validate_only: bool


class AlterConfigsResourceResponse(Structure):
    """The result for one resource."""

    error_code: Int16
    error_message: str | None
    resource_type: Int8
    resource_name: str


class AlterConfigsResponse(Message, api_key=33, versions="0-2", flexible="2+"):
    """The results of an AlterConfigs request."""

    throttle_time_ms: Int32
    responses: list[AlterConfigsResourceResponse]


class IncrementalAlterableConfig(Structure):
    """A config and its change: set 0, delete 1, append 2, subtract 3."""

    name: str
    config_operation: Int8
    value: str | None


class IncrementalAlterConfigsResource(Structure):
    """Changed configs of a topic or a broker."""

    resource_type: Int8
    resource_name: str
    configs: list[IncrementalAlterableConfig]


class IncrementalAlterConfigsRequest(Message, api_key=44, versions="0-1", flexible="1+"):
    """Changes single configs of resources."""

    resources: list[IncrementalAlterConfigsResource]
    validate_only: bool


class IncrementalAlterConfigsResponse(Message, api_key=44, versions="0-1", flexible="1+"):
    """The results of an IncrementalAlterConfigs request."""

    throttle_time_ms: Int32
    responses: list[AlterConfigsResourceResponse]
