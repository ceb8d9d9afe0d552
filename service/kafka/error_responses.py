"""The answer to a request whose handler raised an error of the log.

A handler knows best which part of a request failed, and most handlers catch the errors of the store
themselves. For each other error of the log, of every API, the client gets an answer with the code
of the error at each place of the response that has a code, and an item for each item of the
request, as Kafka answers. Without an answer, the client would lose its connection, and all its
requests under way with it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import Api
from tidelog.service.kafka.client import ApiClient
from tidelog.service.kafka.errors import Code, RequestKind
from tidelog.service.kafka.messages import (
    configs,
    fetch,
    group_offsets,
    groups,
    metadata,
    offsets,
    produce,
)
from tidelog.service.kafka.messages import topics as admin
from tidelog.service.kafka.messages.primitives import ZERO_UUID
from tidelog.service.kafka.messages.schema import CompiledField, Message, Structure, members_of
from tidelog.service.security.caller import Unauthenticated
from tidelog.storage.core.errors import LogError

S = TypeVar("S", bound=Structure)
_KINDS = {
    produce.__name__: RequestKind.PRODUCE,
    fetch.__name__: RequestKind.FETCH,
    offsets.__name__: RequestKind.FETCH,
    metadata.__name__: RequestKind.FETCH,
    groups.__name__: RequestKind.GROUP,
    group_offsets.__name__: RequestKind.GROUP,
    admin.__name__: RequestKind.ADMIN,
    configs.__name__: RequestKind.ADMIN,
}
"""The kind of the requests of a module of messages."""
_KIND_OF: Mapping[type[Message], RequestKind] = {
    metadata.FindCoordinatorRequest: RequestKind.GROUP,
    metadata.DescribeClusterRequest: RequestKind.ADMIN,
}
"""The kind of requests that is not the kind of their module."""
_NAMES_IN_REQUEST = {
    "responses": ("topic_data", "topics", "topic_names", "resources"),
    "partition_responses": ("partition_data",),
    "results": ("groups_names", "topics", "resources", "creations"),
    "filter_results": ("filters",),
    "coordinators": ("coordinator_keys",),
    "partitions": ("partition_indexes",),
    "partition_index": ("partition",),
}
"""The names that a field of a response has in requests, if these are others."""
_ONLY_NAMES = ("group_id", "key", "name", "partition_index")
"""The fields for items of a request that are only a text or a number."""
_NONE: Mapping[str, object] = {
    "text": "",
    "bytes": b"",
    "records": b"",
    "pieces": [],
    "?": False,
    "16s": ZERO_UUID,
}
"""Values for none, by the form of a field. For numbers, Kafka has -1."""


def called(
    context: Context,
    api: Api,
    serve: Callable[..., Any],
    request: Any,
    client: ApiClient,
    *callbacks: object,
) -> Any:
    """Call a handler of an API.

    Return what it returns, or the answer to its error of the log; for an async function, return a
    coroutine that does the same. Raises Unauthenticated.
    """
    if api.is_async:
        return _awaited(context, api, serve, request, client, *callbacks)
    try:
        return serve(request, client, *callbacks)
    except LogError as error:
        return _answer(context, api, request, client, error)


async def _awaited(
    context: Context,
    api: Api,
    serve: Callable[..., Any],
    request: Any,
    client: ApiClient,
    *callbacks: object,
) -> Any:
    """Await a handler, and answer its error of the log.

    The handler is called only here: if the client leaves before the task begins, there is no
    coroutine of the handler without an await.
    """
    try:
        return await serve(request, client, *callbacks)
    except LogError as error:
        return _answer(context, api, request, client, error)


def _answer(
    context: Context, api: Api, request: Any, client: ApiClient, error: LogError
) -> Structure:
    if isinstance(error, Unauthenticated):
        raise error
    code = context.denial(api.name, client, error, kind_of(api.request))
    return refused(api.response, request, max(client.version, 0), code)


def kind_of(request: type[Message]) -> RequestKind:
    """Return the kind of the requests of this class. It decides the code of an error."""
    return _KIND_OF.get(request) or _KINDS.get(request.__module__, RequestKind.ADMIN)


def refused(response: type[S], request: Any, version: int, code: Code) -> S:
    """Return a response, or a part of one, with the code at each place for a code.

    `request` is the request or the part of it that this part answers; a text or a number if it is
    only a name.
    """
    values: dict[str, object] = {}
    for member in members_of(response):
        if member.name == "error_code":
            values[member.name] = code
        elif member.is_array and isinstance(member.form, type):
            form = member.form
            items = _items(request, member.name) if _has_code(form, version) else ()
            values[member.name] = [refused(form, item, version, code) for item in items]
        else:
            values[member.name] = _value(request, member, version)
    return response(**values)


@cache
def _has_code(structure: type[Structure], version: int) -> bool:
    """Whether a structure, or a part of it, has a code in this version."""
    return any(
        member.name == "error_code"
        or (isinstance(member.form, type) and _has_code(member.form, version))
        for member in members_of(structure)
        if version in member.versions
    )


def _names(member_name: str) -> Sequence[str]:
    return member_name, *_NAMES_IN_REQUEST.get(member_name, ())


def _items(request: Any, member_name: str) -> Sequence[Any]:
    """Return the items of the request that the items of this field of the response answer."""
    lists = (getattr(request, name, None) for name in _names(member_name))
    return next(filter(None, lists), ())


def _value(request: Any, member: CompiledField, version: int) -> object:
    """Return the request's value of a field of the response; without one, the value for none."""
    if isinstance(request, str | int) and member.name in _ONLY_NAMES:
        return request
    is_null = version in member.null_versions
    for name in _names(member.name):
        value = getattr(request, name, None)
        if value is not None or (is_null and hasattr(request, name)):
            return value
    if member.default is not msgspec.NODEFAULT:
        return list(member.default) if member.is_array else member.default
    if member.is_array:
        return []
    if is_null:
        return None
    return 0 if member.name == "throttle_time_ms" else _NONE.get(str(member.form), -1)
