"""Bodies of requests in JSON: every unknown or misspelt field is refused.

If a broker ignored a misspelt field, it would do something that the sender does not want. For
example, a commit with a misspelt field `offsets` would commit all records that were read. So each
body derives from one of two base classes: StrictBody if msgspec decodes the body, StrictModel if
FastAPI decodes it. Pure.
"""

from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict

from tidelog.service.formats.json_in import BadBody, InvalidBody, one_line

Body = TypeVar("Body")


class StrictBody(msgspec.Struct, forbid_unknown_fields=True):
    """A body, or an object in it, that msgspec decodes."""


class StrictModel(BaseModel):
    """A body, or an object in it, that FastAPI decodes."""

    model_config = ConfigDict(extra="forbid")


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a boolean is no number")
    return value


WholeNumber = Annotated[int, BeforeValidator(_no_boolean)]
"""A whole number in a StrictModel. A string like "12" is accepted, too. A boolean is refused,
because pydantic would take `true` for 1."""


def decode_body(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Decode a body. Raises BadBody if the body is not JSON, and InvalidBody if it is empty or does
    not have the decoder's type."""
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
