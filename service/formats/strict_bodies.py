"""Bodies of requests in JSON: every unknown or misspelt field is refused.

If a broker ignored a misspelt field, it would do something that the sender does not want. For
example, a commit with a misspelt field `offsets` would commit all records that were read. So each
body derives from one of two base classes: StrictBody if msgspec decodes the body, StrictModel if
FastAPI decodes it. Pure.
"""

from itertools import islice
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from tidelog.service.formats.json_in import BadBody, InvalidBody, one_line

Body = TypeVar("Body")
Item = TypeVar("Item")

UNKNOWN_FIELDS_MAX = 3
"""Maximum errors for fields that an object with too many fields does not have."""
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list in a StrictModel. pydantic stops at the first invalid item. Without this, a body would
cost a large error for each item."""


class StrictBody(msgspec.Struct, forbid_unknown_fields=True):
    """A body, or an object in it, that msgspec decodes."""


class StrictModel(BaseModel):
    """A body, or an object in it, that FastAPI decodes."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_many_fields(cls, body: Any) -> Any:
        """Refuse an object that has more fields than the model.

        pydantic would make an error for each unknown field.
        """
        if isinstance(body, dict) and len(body) > len(cls.model_fields):
            unknown = (name for name in body if name not in cls.model_fields)
            raise ValidationError.from_exception_data(
                cls.__name__,
                [
                    {"type": "extra_forbidden", "loc": (name,), "input": None}
                    for name in islice(unknown, UNKNOWN_FIELDS_MAX)
                ],
            )
        return body


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a boolean is no number")
    return value


WholeNumber = Annotated[int, BeforeValidator(_no_boolean)]
"""A whole number in a StrictModel. A string like "12" is accepted, too. A boolean is refused,
because pydantic would take `true` for 1."""


def decode_body(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Decode a body, or raise BadBody if it is not JSON.

    Raises InvalidBody if it is empty or does not have the decoder's type.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidBody(unrecognized(one_line(str(error)))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not body.strip():
            raise InvalidBody("the body is empty") from error
        raise BadBody(f"the body is not JSON: {one_line(str(error))}") from error


def unrecognized(message: str) -> str:
    """Return msgspec's message with the words of Kafka's REST proxies for an unknown field."""
    return message.replace("Object contains unknown field", "Unrecognized field:")
