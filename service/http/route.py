"""A route of the API as one value: path, handler, access, metrics label, documentation.

Each module of service.routes and service.console declares its routes in a tuple `ROUTES`;
service.server.router joins them. Everything else that depends on a route (matching, authorization,
metrics, OpenAPI) reads this declaration.
"""

from collections.abc import Callable, Coroutine, Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeAlias

from tidelog.service.http.body_limit import SMALL_BODY, BodyLimit
from tidelog.service.http.media_types import (
    EMBEDDED,
    JSON,
    JSON_V2_TYPES,
    SCHEMA_FORMATS,
    types_of_formats,
)
from tidelog.storage.core.acls import Right

# -- access


class Permission(NamedTuple):
    """Access by a right to the resource that the path names.

    The path parameter `parameter` has the resource's name. If `parameter` is empty, the resource is
    the cluster.
    """

    right: Right
    parameter: str = ""


class RouteAccess(Enum):
    """Access to a route that has no Permission."""

    PUBLIC = "every client, without a key"
    KEY_UNLESS_BROWSER = "every key; a browser without a key is redirected to the console"
    ANY_KEY = "every key"
    CHECKED_BY_HANDLER = "every key; the handler checks what the request names or lists"


Access: TypeAlias = Permission | RouteAccess

# -- dialects


class Dialect(NamedTuple):
    """Where a dialect is served, and the media types of its JSON."""

    mounts: tuple[str, ...]
    """Each route is served below each of these paths. The documentation has only the first."""
    served: tuple[bytes, ...]
    """The types of an `Accept` that its JSON answers. The first is the type of the answer."""

    @property
    def media_type(self) -> bytes:
        return self.served[0]


V2 = Dialect(("",), JSON_V2_TYPES)
V2_INSTANCES = Dialect(("",), (*JSON_V2_TYPES, *types_of_formats((*EMBEDDED, *SCHEMA_FORMATS))))
"""Requests of members. Clients such as Karapace's send the type of the records with all of them."""
V3 = Dialect(("/v3", "/kafka/v3"), (JSON,))
"""Confluent's REST proxy serves `/v3`. Confluent Server and Cloud serve `/kafka/v3`."""
TIDELOG = Dialect(("/tidelog/v1",), (JSON,))
"""Routes that no other proxy has."""
PLANNED = "planned"
ICEBERG = Dialect(("/iceberg/v1", f"/iceberg/v1/{PLANNED}"), (JSON,))
"""Iceberg's REST catalog. Below the second mount, the broker plans the scans."""
PLAIN = Dialect(("",), (JSON,))
"""Health, metrics, and files of the console."""

_V2_PREFIXES = ("/topics", "/brokers", "/consumers", "/admin/")


def media_type_of_errors(path: str) -> bytes:
    """Return the media type of an error's body.

    It depends on the path, not on the route, because a path without a route gets an error, too.
    """
    return V2.media_type if path.startswith(_V2_PREFIXES) else JSON


# -- documentation


class Parameter(NamedTuple):
    """A query parameter, or a header, that a route takes."""

    name: str
    description: str
    schema: Mapping[str, Any]
    place: str = "query"


class Body(NamedTuple):
    """A request's body."""

    media_type: bytes
    example: Mapping[str, Any]
    is_required: bool = True


class Content(NamedTuple):
    """A response's body: one of the msgspec structs `types`, in one of the `media_types`."""

    media_types: tuple[bytes, ...]
    types: tuple[type, ...] = ()
    example: Any = None


class Answer(NamedTuple):
    """A response that is no error."""

    description: str
    contents: tuple[Content, ...] = ()


class RouteDoc(NamedTuple):
    """A route in the OpenAPI document.

    For a route that FastAPI declares, only the first four fields are set, because FastAPI reads the
    others from the handler's signature and docstring.
    """

    errors: Mapping[int, str] = {}
    """For each status of an error: when the route responds with it."""
    status: int = 200
    """Status of a successful response."""
    is_hidden: bool = False
    omit: Literal["", "none", "unset"] = ""
    """Fields that FastAPI omits from a response: null fields (`none`) or unset fields (`unset`)."""
    tag: str = ""
    """The tag in the document. If it is empty, the route's label is the tag."""
    summary: str = ""
    text: str = ""
    parameters: tuple[Parameter, ...] = ()
    """Parameters that are not in the path."""
    body: Body | None = None
    answers: Mapping[int, Answer] = {}


HIDDEN = RouteDoc(is_hidden=True)


class Route(NamedTuple):
    """One route. `access` has no default, so every route declares its access."""

    method: str
    path: str
    """The path below the mount. A parameter is `{name}`."""
    serve: Callable[..., Coroutine[Any, Any, Any]]
    """For a hot route, a method that takes an HttpRequest and the path's parameters. For other
    routes, a handler with FastAPI's annotations."""
    access: Access
    label: str
    """Label in the metrics. Labels are a bounded set (I10)."""
    dialect: Dialect
    doc: RouteDoc
    is_ack: bool = False
    """Whether the time until its response is the latency of an acknowledgment."""
    body: BodyLimit | None = SMALL_BODY
    """The limit of its request's body; None for records, which `request_bytes_max` bounds."""
    is_reading: bool = False
    """Whether a POST changes nothing: it is no mutation, and not in the audit log."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the whole path under each mount."""
        return tuple(mount + self.path for mount in self.dialect.mounts)
