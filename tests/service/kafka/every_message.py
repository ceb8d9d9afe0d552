"""All messages, found in the package; and values of the oracle as instances of their classes."""

import importlib
import pkgutil
from typing import Any

from tidelog.service.kafka import messages
from tidelog.service.kafka.messages.schema import Message, Structure, members_of


def every_message() -> list[type[Message]]:
    """Return the class of each message, sorted by name."""
    found = set[type[Message]]()
    for module in pkgutil.iter_modules(messages.__path__, f"{messages.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, Message) and value is not Message:
                found.add(value)
    return sorted(found, key=lambda message: message.__name__)


def every_version() -> list[tuple[type[Message], int]]:
    """Return each message with each of its versions."""
    return [(message, version) for message in every_message() for version in message.versions]


def instance_of(structure: type[Structure], value: dict[str, Any]) -> Any:
    """Make an instance of a value of the oracle."""
    members = {member.name: member for member in members_of(structure)}
    made = {}
    for name, one in value.items():
        form = members[name].form
        if one is not None and isinstance(form, type):
            is_array = members[name].is_array
            one = [instance_of(form, part) for part in one] if is_array else instance_of(form, one)
        made[name] = [one] if form == "pieces" and one is not None else one
    return structure(**made)
