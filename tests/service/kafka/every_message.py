"""All messages, found in the package; and values of the oracle as instances of their classes."""

import importlib
import pkgutil
from typing import Any

from tidelog.service.kafka import messages
from tidelog.service.kafka.messages.schema import Message, Structure, members_of


def every_message() -> list[type[Message]]:
    """Return the class of each message, sorted by name."""
    classes = set[type[Message]]()
    for module in pkgutil.iter_modules(messages.__path__, f"{messages.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, Message) and value is not Message:
                classes.add(value)
    return sorted(classes, key=lambda message: message.__name__)


def every_version() -> list[tuple[type[Message], int]]:
    """Return each message with each of its versions."""
    return [(message, version) for message in every_message() for version in message.versions]


def instance_of(structure: type[Structure], value: dict[str, Any]) -> Any:
    """Make an instance of a value of the oracle."""
    members = {member.name: member for member in members_of(structure)}
    made = {}
    for name, item in value.items():
        form = members[name].form
        if item is not None and isinstance(form, type):
            is_array = members[name].is_array
            item = (
                [instance_of(form, part) for part in item] if is_array else instance_of(form, item)
            )
        made[name] = [item] if form == "pieces" and item is not None else item
    return structure(**made)
