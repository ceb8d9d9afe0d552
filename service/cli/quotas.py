"""`tidelog quotas ...`: quotas of principals."""

from typing import Annotated, Any

from typer import Option

from tidelog.service.cli.acls import PrincipalArgument
from tidelog.service.cli.broker_requests import ClientCommand
from tidelog.service.cli.errors import BadUsage
from tidelog.service.cli.options import Commands
from tidelog.service.client.connection import quoted

QUOTAS = "/tidelog/v1/quotas"
BYTE_RATES = ("producer_byte_rate", "consumer_byte_rate")

RateOption = Annotated[
    int | None, Option(min=1, metavar="BYTES", help="bytes a second at each broker")
]

quotas = Commands(no_args_is_help=True, help="Set, list, remove quotas of principals.")


@quotas.command("list")
def list_quotas(command: ClientCommand) -> None:
    """List quotas.

    A quota that a principal does not have is taken from <default>.
    """
    listed = command.request("GET", QUOTAS)["data"]
    columns = ("principal", *BYTE_RATES)
    rows = [
        (*(own_quotas[name] or "" for name in columns), _others(own_quotas))
        for own_quotas in listed
    ]
    command.show_rows(listed, (*columns, "others"), rows)


@quotas.command("set")
def set_quotas(
    principal: PrincipalArgument,
    *,
    producer_byte_rate: RateOption = None,
    consumer_byte_rate: RateOption = None,
    quota: Annotated[
        list[str] | None,
        Option(
            "--quota",
            metavar="NAME=NUMBER",
            help="any other quota, such as members=100 or mutation_rate=5",
        ),
    ] = None,
    command: ClientCommand,
) -> None:
    """Set quotas of a principal, or of <default>.

    A quota that is not given stays as it is.

    Example: tidelog quotas set alice --producer-byte-rate 1000000 --quota members=100
    """
    byte_rates = dict(zip(BYTE_RATES, (producer_byte_rate, consumer_byte_rate), strict=True))
    body = {name: rate for name, rate in byte_rates.items() if rate is not None}
    for quota_text in quota or ():
        quota_name, _, number = quota_text.partition("=")
        if not number.isascii() or not number.isdigit():
            raise BadUsage(f"--quota is NAME=NUMBER, such as members=100, not {quota_text!r}")
        body[quota_name] = int(number)
    if not body:
        raise BadUsage("no quota: give --producer-byte-rate, --consumer-byte-rate or --quota")

    own_quotas = command.request("PUT", f"{QUOTAS}/{quoted(principal)}", json=body)
    rates = [f"{field} {own_quotas[field] or 'none'}" for field in BYTE_RATES]
    shown = ", ".join([*rates, *_others(own_quotas).split()])
    command.show(own_quotas, f"{principal}: {shown}")


@quotas.command("remove")
def remove_quotas(principal: PrincipalArgument, command: ClientCommand) -> None:
    """Remove the quotas of a principal. Then the quotas of <default> apply to it."""
    path = f"{QUOTAS}/{quoted(principal)}"
    command.request("DELETE", path, missing=f"{principal} has no quotas of its own")
    value = {"principal": principal, "removed": True}
    command.show(value, f"removed the quotas of {principal}")


def _others(own_quotas: dict[str, Any]) -> str:
    """Return the quotas that are not rates of bytes, as NAME=NUMBER."""
    names = [name for name in own_quotas if name not in ("principal", *BYTE_RATES)]
    return " ".join(f"{name}={own_quotas[name]}" for name in names if own_quotas[name] is not None)
