"""The first messages of a connection: versions of the APIs, SASL."""

from typing import Annotated

from tidelog.service.kafka.messages.schema import (
    Field,
    Int16,
    Int32,
    Int64,
    Message,
    Structure,
)


class ApiVersionsRequest(Message, api_key=18, versions="0-4", flexible="3+"):
    """Asks which versions of which APIs the broker serves."""

    client_software_name: Annotated[str, Field("3+")] = ""
    client_software_version: Annotated[str, Field("3+")] = ""


class ApiVersion(Structure):
    api_key: Int16
    min_version: Int16
    max_version: Int16


class SupportedFeatureKey(Structure):
    """The versions of a feature that the broker supports."""

    name: str
    min_version: Int16
    max_version: Int16


class FinalizedFeatureKey(Structure):
    """The versions of a feature that the whole cluster uses."""

    name: str
    max_version_level: Int16
    min_version_level: Int16


class ApiVersionsResponse(Message, api_key=18, versions="0-4", flexible="3+"):
    """The versions of all APIs.

    If the version of the request is unknown, the answer has version 0.
    """

    error_code: Int16
    api_keys: list[ApiVersion]
    throttle_time_ms: Annotated[Int32, Field("1+")] = 0
    supported_features: Annotated[list[SupportedFeatureKey], Field("3+", tag=0)] = []
    finalized_features_epoch: Annotated[Int64, Field("3+", tag=1)] = -1
    finalized_features: Annotated[list[FinalizedFeatureKey], Field("3+", tag=2)] = []
    zk_migration_ready: Annotated[bool, Field("3+", tag=3)] = False


class SaslHandshakeRequest(Message, api_key=17, versions="0-1", flexible="none"):
    """Names the SASL mechanism that the client wants."""

    mechanism: str


class SaslHandshakeResponse(Message, api_key=17, versions="0-1", flexible="none"):
    """The SASL mechanisms that the broker has."""

    error_code: Int16
    mechanisms: list[str]


class SaslAuthenticateRequest(Message, api_key=36, versions="0-2", flexible="2+"):
    """Carries one SASL message of the client."""

    auth_bytes: bytes


class SaslAuthenticateResponse(Message, api_key=36, versions="0-2", flexible="2+"):
    """Carries one SASL message of the broker."""

    error_code: Int16
    error_message: str | None
    auth_bytes: bytes
    session_lifetime_ms: Annotated[Int64, Field("1+")] = 0
