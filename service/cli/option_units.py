"""Durations, sizes and configs with units, as the options of all commands take them."""

from collections.abc import Callable

import typer

from tidelog.service import quantities
from tidelog.service.cli.errors import BadUsage


def duration_ms(low: int = 0) -> Callable[[str], int]:
    """Return a parser of an option in ms: `90s`, `7d`, or a number of ms of at least `low`."""
    return _at_least(low, quantities.milliseconds, "ms")


def size_bytes(low: int = 1) -> Callable[[str], int]:
    """Return a parser of an option in bytes: `10MB`, `1GiB`, or a number, at least `low`."""
    return _at_least(low, quantities.octets, "bytes")


def _at_least(low: int, parse: Callable[[str], int], unit: str) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        try:
            value = parse(str(text))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if value < low:
            raise typer.BadParameter(f"{text} is below {low} {unit}")
        return value

    return parsed


def configs_with_units(configs: dict[str, str]) -> dict[str, str]:
    """Return configs with durations and sizes as numbers, as brokers take them.

    `retention.ms=7d` becomes 604800000. Raises BadUsage.
    """
    broker_configs = {}
    for name, text in configs.items():
        try:
            broker_configs[name] = quantities.with_unit(name, text)
        except ValueError as error:
            raise BadUsage(f"{name}: {error}") from None
    return broker_configs


def config_in_words(name: str, text: str) -> str:
    """Return NAME=VALUE. If VALUE is a long number of ms or bytes, add it in a larger unit."""
    parse = quantities.parser_of(name)
    if parse is None or not text.isascii() or not text.isdigit():
        return f"{name}={text}"
    shown = (quantities.duration if parse is quantities.milliseconds else quantities.size)(
        int(text)
    )
    is_plain = shown in {f"{text}ms", f"{text}B"} or text == "0"
    return f"{name}={text}" if is_plain else f"{name}={text} ({shown})"
