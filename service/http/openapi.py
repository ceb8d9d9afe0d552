"""The OpenAPI document: FastAPI's part, the hot routes, and the security schemes.

FastAPI documents the routes that it declares. The hot routes are declared without it, so
`completed` adds them from their declarations. `completed` also gives every operation the `security`
that follows from the access of its route.
"""

import re
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any

import msgspec

from tidelog.service.http.errors import ErrorBody
from tidelog.service.http.route import (
    Answer,
    Body,
    Content,
    Parameter,
    Route,
    RouteAccess,
    media_type_of_errors,
)

_PARAMETER = re.compile(r"\{(\w+)\}")
_SCHEMAS = "#/components/schemas/"
_ERROR = {"schema": {"$ref": f"{_SCHEMAS}ErrorBody"}}

SECURITY_SCHEMES = {
    "basic": {
        "type": "http",
        "scheme": "basic",
        "description": "The user is the key's principal without `User:`; the password is the key's "
        "secret.",
    },
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "The secret of a key, or a token of the OIDC issuer in `oidc_issuer`.",
    },
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": "tidelog_",
        "description": "The console's session, from `POST /tidelog/v1/login`. The cookie's name "
        "ends in 8 characters that follow from the cluster's id. A request that changes something "
        "also needs the header `Tidelog-Console`.",
    },
}
_PATH_SCHEMAS: dict[str, dict[str, Any]] = {
    "topic_name": {"schema": {"type": "string"}, "example": "flights"},
    "partition_id": {"schema": {"type": "integer", "minimum": 0}, "example": 0},
    "consumer_group_id": {"schema": {"type": "string"}, "example": "enrich"},
    "instance": {"schema": {"type": "string"}, "example": "c1"},
    "cluster_id": {"schema": {"type": "string"}},
}
"""Path parameters of hot routes."""


def completed(
    document: dict[str, Any], routes: Iterable[Route], hot: Iterable[Route]
) -> dict[str, Any]:
    """Return FastAPI's `document` with the hot routes, and with the security of all `routes`."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    types = {kind for route in hot for kind in _types(route)}
    ordered = sorted(types, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=_SCHEMAS + "{name}")
    schemas.update(components)
    schemas[ErrorBody.__name__] = ErrorBody.model_json_schema()
    paths: dict[str, Any] = document["paths"]
    for route in hot:
        paths.setdefault(route.paths[0], {})[route.method.lower()] = _operation(route)
    document["components"]["securitySchemes"] = SECURITY_SCHEMES
    for route in routes:
        if not route.doc.is_hidden:
            paths[route.paths[0]][route.method.lower()]["security"] = _security(route)
    # The copy shares no object with the declarations, and no two parts of it share an object.
    copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document))
    return copied


def error_answer(path: str, description: str) -> dict[str, Any]:
    """Return the description of an error of the operation at `path`.

    If a `model` were given instead, it would cost FastAPI ~1 ms for each error of each route when a
    broker starts.
    """
    return {"description": description, "content": {media_type_of_errors(path).decode(): _ERROR}}


def _types(route: Route) -> Iterator[type]:
    for answer in route.doc.answers.values():
        for content in answer.contents:
            yield from content.types


def _security(route: Route) -> list[dict[str, list[str]]]:
    if route.access is RouteAccess.PUBLIC:
        return []
    schemes: list[dict[str, list[str]]] = [{name: []} for name in SECURITY_SCHEMES]
    return [*schemes, {}] if route.access is RouteAccess.KEY_UNLESS_BROWSER else schemes


def _operation(route: Route) -> dict[str, Any]:
    doc = route.doc
    path = route.paths[0]
    operation: dict[str, Any] = {
        "tags": [doc.tag or route.label],
        "summary": doc.summary,
        "description": doc.text or f"{doc.summary}.",
    }
    operation["operationId"] = re.sub(
        r"\W", "_", f"{route.serve.__name__}{path}_{route.method.lower()}"
    ).lstrip("_")
    operation["parameters"] = [
        *(
            {"in": "path", "name": name, "required": True, **_PATH_SCHEMAS[name]}
            for name in _PARAMETER.findall(path)
        ),
        *map(_parameter, doc.parameters),
    ]
    if doc.body is not None:
        operation["requestBody"] = _body(doc.body)
    answers = {str(status): _answer(answer) for status, answer in doc.answers.items()}
    for status, description in doc.errors.items():
        assert status >= HTTPStatus.BAD_REQUEST, "a response that is no error has an Answer"
        answers[str(status)] = error_answer(path, description)
    operation["responses"] = dict(sorted(answers.items()))
    return operation


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "in": parameter.place,
        "name": parameter.name,
        "required": False,
        "schema": parameter.schema,
        "description": parameter.description,
    }


def _body(body: Body) -> dict[str, Any]:
    content = {"schema": {"type": "object"}, "example": body.example}
    return {"content": {body.media_type.decode(): content}, "required": body.is_required}


def _answer(answer: Answer) -> dict[str, Any]:
    response: dict[str, Any] = {"description": answer.description}
    contents = {
        media_type.decode(): _content(content)
        for content in answer.contents
        for media_type in content.media_types
    }
    if contents:
        response["content"] = contents
    return response


def _content(content: Content) -> dict[str, Any]:
    if not content.types:
        return {}
    schemas, _ = msgspec.json.schema_components(content.types, ref_template=_SCHEMAS + "{name}")
    media_type_object: dict[str, Any] = {
        "schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    }
    if content.example is not None:
        media_type_object["example"] = content.example
    return media_type_object
