"""Whether IAM would allow a call: the part of its rules that our policies use, and no more.

A deny wins; else one allow is enough; a statement counts where its action, its resource and all its
conditions match. An operator that is not known here is an error, not a guess.
"""

import re
from collections.abc import Iterator
from typing import Any

from tests.support.s3_calls import Call

Statement = dict[str, Any]


def allowing(policy: dict[str, Any], call: Call) -> Iterator[tuple[str, str, str]]:
    """Sid, action and resource pattern of each permission that the call makes use of."""
    for statement in policy["Statement"]:
        if statement["Effect"] == "Allow":
            yield from _matches(statement, call)


def is_denied(policy: dict[str, Any], call: Call) -> bool:
    return any(
        bool(list(_matches(statement, call)))
        for statement in policy["Statement"]
        if statement["Effect"] == "Deny"
    )


def permissions(policy: dict[str, Any]) -> set[tuple[str, str, str]]:
    """All that the policy allows: a triple for each action on each pattern."""
    return {
        (statement["Sid"], action, resource)
        for statement in policy["Statement"]
        if statement["Effect"] == "Allow"
        for action in _listed(statement["Action"])
        for resource in _listed(statement["Resource"])
    }


def _matches(statement: Statement, call: Call) -> Iterator[tuple[str, str, str]]:
    if not all(
        _holds(operator, key, pattern, dict(call.conditions).get(key))
        for operator, keys in statement.get("Condition", {}).items()
        for key, pattern in keys.items()
    ):
        return
    for action in _listed(statement["Action"]):
        for resource in _listed(statement["Resource"]):
            if _is_like(action, call.action) and _is_like(resource, call.resource):
                yield statement.get("Sid", ""), action, resource


def _holds(operator: str, key: str, pattern: str, value: str | None) -> bool:
    match operator:
        case "StringLikeIfExists":
            return value is None or _is_like(pattern, value)
        case "Null":
            return (value is None) == (pattern == "true")
        case "Bool":
            return value == pattern
    raise AssertionError(f"{operator} of {key} is not known here")


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _is_like(pattern: str, text: str) -> bool:
    parts = (
        ".*" if character == "*" else "." if character == "?" else re.escape(character)
        for character in pattern
    )
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None
