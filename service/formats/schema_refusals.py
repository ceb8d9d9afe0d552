"""Errors of requests that need a schema registry, which tidelog does not have. Pure."""

import msgspec

from tidelog.service.formats.json_in import BadBody, InvalidBody, check_records
from tidelog.storage.core.errors import InvalidRequest, LogError


class NoSchemaRegistry(InvalidRequest):
    """A request needs a schema, and the cluster has no schema registry."""

    status = 408
    code = 40801


class SchemaMissing(InvalidBody):
    """The body's format needs a schema, and the body has none."""


class _RecordMembers(msgspec.Struct):
    key: msgspec.Raw = msgspec.Raw()
    value: msgspec.Raw = msgspec.Raw()


class _Schemas(msgspec.Struct):
    """The fields of a body in a format with schemas. The error depends on them."""

    key_schema: msgspec.Raw = msgspec.Raw()
    key_schema_id: msgspec.Raw = msgspec.Raw()
    value_schema: msgspec.Raw = msgspec.Raw()
    value_schema_id: msgspec.Raw = msgspec.Raw()
    records: list[_RecordMembers] = msgspec.field(default_factory=list)

    def uses(self, part: str) -> bool:
        """Whether a record has this part (`key` or `value`)."""
        return any(bytes(getattr(record, part)) not in (b"", b"null") for record in self.records)

    def has(self, part: str) -> bool:
        """Whether the body has a schema for this part (`key` or `value`)."""
        schemas = (getattr(self, f"{part}_schema"), getattr(self, f"{part}_schema_id"))
        return any(bytes(schema) not in (b"", b"null") for schema in schemas)


def schema_error(body: bytes) -> LogError:
    """Return the error of Kafka's REST proxies for a body that needs a schema registry.

    Raises RecordTooLarge.
    """
    check_records(body)
    try:
        schemas = msgspec.json.decode(body, type=_Schemas)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return BadBody("the body is not a JSON object")
    has_keys = schemas.uses("key")
    if not schemas.has("value") and (schemas.uses("value") or not has_keys):
        return SchemaMissing("Value schema is missing: give value_schema or value_schema_id", 42202)
    if has_keys and not schemas.has("key"):
        return SchemaMissing("Key schema is missing: give key_schema or key_schema_id", 42201)
    return NoSchemaRegistry("no schema registry: tidelog takes json, binary, text and arrow")
