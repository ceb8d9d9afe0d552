"""`tidelog keys`, `tidelog acls`, `tidelog quotas`: clients of the routes for security."""

import contextlib
import datetime as dt
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from tidelog.service.cli.requests import (
    Commands,
    JsonOption,
    ServerOption,
    YesOption,
    quoted,
    request,
)
from tidelog.service.cli.results import BadUsage, confirm, show, show_rows, warn
from tidelog.service.secret_files import why_not_read
from tidelog.storage.core.acls import CLUSTER_NAME, DEFAULT

KEYS, ACLS, QUOTAS = "/tidelog/v1/keys", "{cluster}/acls", "/tidelog/v1/quotas"
ACL_FIELDS = (
    "principal",
    "permission",
    "operation",
    "resource_type",
    "resource_name",
    "pattern_type",
    "host",
)
FILTER_WORDS = ("resource_type", "pattern_type", "operation", "permission")
"""Fields of a filter. A request that deletes ACLs must give all four; ANY matches all values."""

PrincipalArgument = Annotated[
    str, typer.Argument(metavar="PRINCIPAL", help="User:alice or alice", show_default=False)
]

keys = Commands(no_args_is_help=True, help="Create, list, delete API keys of principals.")
acls = Commands(no_args_is_help=True, help="Add, list, remove access control lists (ACLs).")
quotas = Commands(no_args_is_help=True, help="Set, list, remove quotas of principals.")


def principal_of(text: str) -> str:
    """Return the principal that `text` names. `alice` names User:alice."""
    return text if ":" in text or text == DEFAULT else f"User:{text}"


# -- keys


@keys.command("create")
def create_key(
    ctx: typer.Context,
    principal: PrincipalArgument,
    ttl_days: Annotated[
        float | None,
        typer.Option("--ttl-days", min=0.001, help="lifetime in days (default: unlimited)"),
    ] = None,
    note: Annotated[str, typer.Option("--note", help="purpose of the key")] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="write the secret to this new file, which only you can read, and do not print it",
        ),
    ] = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a key, and print its secret or write it to a file.

    The secret is shown only this once, because the cluster stores only its digest.

    Example: tidelog keys create alice --ttl-days 90 --out alice.key
    """
    body: dict[str, Any] = {"principal": principal_of(principal), "note": note}
    if ttl_days is not None:
        body["ttl_s"] = round(ttl_days * 86_400)

    if out is None:
        created = request(ctx, server, "POST", KEYS, json=body)
        show(created, created["secret"], as_json=as_json)
        return
    with _new_secret_file(out) as file:
        created = request(ctx, server, "POST", KEYS, json=body)
        file.write(created.pop("secret") + "\n")
    text = f"created {created['key_id']} of {created['principal']}: its secret is in {out}"
    show({**created, "file": str(out)}, text, as_json=as_json)


@contextlib.contextmanager
def _new_secret_file(path: Path) -> Iterator[TextIO]:
    """Create a file that only this user can read. If the block fails, remove it. Raises BadUsage
    if the file exists or cannot be created."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise BadUsage(f"{path} exists already: give another file") from None
    except OSError as error:
        raise BadUsage(f"cannot create {path}: {why_not_read(error)}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yield file
    except BaseException:
        path.unlink()
        raise


@keys.command("list")
def list_keys(ctx: typer.Context, server: ServerOption = None, as_json: JsonOption = False) -> None:
    """List keys, without secrets."""
    listed = request(ctx, server, "GET", KEYS)["data"]
    rows = [
        (
            key["key_id"],
            key["principal"],
            _day(key["created_ms"]),
            _day(key["expires_ms"]) + (" (expired)" if key["is_expired"] else ""),
            key["note"],
        )
        for key in listed
    ]
    show_rows(listed, ("key", "principal", "created", "expires", "note"), rows, as_json=as_json)


@keys.command("delete")
def delete_key(
    ctx: typer.Context,
    key_id: Annotated[str, typer.Argument(metavar="KEY", show_default=False)],
    yes: YesOption = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a key. Brokers then reject the key."""
    confirm("deleting key", key_id, f"Delete key {key_id}?", yes=yes)
    path = f"{KEYS}/{quoted(key_id)}"
    request(ctx, server, "DELETE", path, missing=f"key {key_id} does not exist")
    show({"key_id": key_id, "deleted": True}, f"deleted {key_id}", as_json=as_json)


# -- access control lists

TopicOption = Annotated[
    str | None, typer.Option("--topic", "-t", help="name of a topic; * for all")
]
GroupOption = Annotated[
    str | None, typer.Option("--group", "-g", help="name of a group; * for all")
]
ClusterOption = Annotated[bool, typer.Option("--cluster", help="the cluster as the resource")]
TransactionOption = Annotated[
    str | None,
    typer.Option("--transactional-id", help="stored for Kafka compatibility; not checked"),
]
PrefixedOption = Annotated[
    bool, typer.Option("--prefixed", help="match all names with this prefix")
]


@acls.command("add")
def add_acls(  # noqa: PLR0913 - a command's options are its arguments
    ctx: typer.Context,
    principal: PrincipalArgument,
    operation: Annotated[
        list[str],
        typer.Option(
            "--operation",
            "-o",
            metavar="OPERATION",
            help="READ, WRITE, DESCRIBE, ...; repeatable",
        ),
    ],
    topic: TopicOption = None,
    group: GroupOption = None,
    cluster: ClusterOption = False,
    transactional_id: TransactionOption = None,
    prefixed: PrefixedOption = False,
    deny: Annotated[
        bool, typer.Option("--deny", help="deny the operations, even if another ACL allows them")
    ] = False,
    host: Annotated[str, typer.Option("--host", help="address of the client; * for any")] = "*",
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Allow or deny operations to a principal.

    User:* stands for all principals.

    Example: tidelog acls add alice -o READ -o WRITE --topic events
    """
    resource = _resource(topic, group, cluster, transactional_id)
    if resource is None:
        raise BadUsage("no resource: give one of --topic, --group, --cluster, --transactional-id")
    kind, name = resource
    added = [
        {
            "principal": principal_of(principal),
            "permission": "DENY" if deny else "ALLOW",
            "operation": operation_name.upper(),
            "resource_type": kind,
            "resource_name": name,
            "pattern_type": "PREFIXED" if prefixed else "LITERAL",
            "host": host,
        }
        for operation_name in operation
    ]

    request(ctx, server, "POST", f"{ACLS}:batch", json={"data": added})
    _show_acls(added, as_json=as_json)


@acls.command("list")
def list_acls(
    ctx: typer.Context,
    principal: Annotated[str | None, typer.Option("--principal")] = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    cluster: ClusterOption = False,
    transactional_id: TransactionOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List all ACLs, or the ACLs that match a principal, a resource or both."""
    query = _filter(principal, _resource(topic, group, cluster, transactional_id), "MATCH")

    answer = request(ctx, server, "GET", ACLS, params=query)
    _show_acls(answer["data"], as_json=as_json)


@acls.command("remove")
def remove_acls(  # noqa: PLR0913 - as above
    ctx: typer.Context,
    principal: Annotated[str | None, typer.Option("--principal")] = None,
    operation: Annotated[
        str | None, typer.Option("--operation", "-o", help="default: all operations")
    ] = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    cluster: ClusterOption = False,
    transactional_id: TransactionOption = None,
    prefixed: PrefixedOption = False,
    yes: YesOption = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the ACLs of a principal, a resource, or both.

    The name of the resource must be exactly the name in the ACL.
    """
    resource = _resource(topic, group, cluster, transactional_id)
    if principal is None and resource is None:
        raise BadUsage(
            "no filter: give --principal, --topic, --group, --cluster or --transactional-id"
        )
    query = _filter(principal, resource, "PREFIXED" if prefixed else "LITERAL")
    if operation is not None:
        query["operation"] = operation.upper()
    what = " ".join(query.values())
    confirm("removing ACLs of", what, f"Remove the ACLs of {what}?", yes=yes)
    query = dict.fromkeys(FILTER_WORDS, "ANY") | query

    answer = request(ctx, server, "DELETE", ACLS, params=query)
    if not answer["data"]:
        warn(f"no ACL matches {what}: nothing was removed")
    _show_acls(answer["data"], as_json=as_json)


def _resource(
    topic: str | None, group: str | None, cluster: bool, transactional_id: str | None
) -> tuple[str, str] | None:
    resources = [
        (kind, name)
        for kind, name in (
            ("TOPIC", topic),
            ("GROUP", group),
            ("CLUSTER", CLUSTER_NAME if cluster else None),
            ("TRANSACTIONAL_ID", transactional_id),
        )
        if name is not None
    ]
    if len(resources) > 1:
        raise BadUsage("--topic, --group, --cluster and --transactional-id exclude each other")
    return resources[0] if resources else None


def _filter(
    principal: str | None, resource: tuple[str, str] | None, pattern_type: str
) -> dict[str, str]:
    query = {} if principal is None else {"principal": principal_of(principal)}
    if resource is not None:
        query["resource_type"], query["resource_name"] = resource
        query["pattern_type"] = pattern_type
    return query


def _show_acls(acl_list: list[dict[str, str]], *, as_json: bool) -> None:
    rows = [{name: acl[name] for name in ACL_FIELDS} for acl in acl_list]
    columns = ("principal", "", "operation", "on", "name", "pattern", "from")
    show_rows(rows, columns, as_json=as_json)


# -- quotas

RateOption = typer.Option(min=1, metavar="BYTES", help="bytes a second at each broker")
QuotaOption = typer.Option(
    "--quota", metavar="NAME=NUMBER", help="any other quota, such as members=100 or mutation_rate=5"
)
BYTE_RATES = ("producer_byte_rate", "consumer_byte_rate")


@quotas.command("list")
def list_quotas(
    ctx: typer.Context, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """List quotas.

    A quota that a principal does not have is taken from <default>.
    """
    listed = request(ctx, server, "GET", QUOTAS)["data"]
    columns = ("principal", *BYTE_RATES)
    rows = [
        (*(own_quotas[name] or "" for name in columns), _others(own_quotas))
        for own_quotas in listed
    ]
    show_rows(listed, (*columns, "others"), rows, as_json=as_json)


@quotas.command("set")
def set_quotas(
    ctx: typer.Context,
    principal: PrincipalArgument,
    producer_byte_rate: Annotated[int | None, RateOption] = None,
    consumer_byte_rate: Annotated[int | None, RateOption] = None,
    quota: Annotated[list[str] | None, QuotaOption] = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
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
    name = principal_of(principal)

    own_quotas = request(ctx, server, "PUT", f"{QUOTAS}/{quoted(name)}", json=body)
    rates = [f"{field} {own_quotas[field] or 'none'}" for field in BYTE_RATES]
    show(
        own_quotas, f"{name}: {', '.join([*rates, *_others(own_quotas).split()])}", as_json=as_json
    )


@quotas.command("remove")
def remove_quotas(
    ctx: typer.Context,
    principal: PrincipalArgument,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the quotas of a principal. Then the quotas of <default> apply to it."""
    name = principal_of(principal)

    path = f"{QUOTAS}/{quoted(name)}"
    request(ctx, server, "DELETE", path, missing=f"{name} has no quotas of its own")
    show({"principal": name, "removed": True}, f"removed the quotas of {name}", as_json=as_json)


def _others(own_quotas: dict[str, Any]) -> str:
    """Return the quotas that are not rates of bytes, as NAME=NUMBER."""
    names = [name for name in own_quotas if name not in ("principal", *BYTE_RATES)]
    return " ".join(f"{name}={own_quotas[name]}" for name in names if own_quotas[name] is not None)


def _day(at_ms: int | None) -> str:
    if at_ms is None:
        return "never"
    return f"{dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC):%Y-%m-%d %H:%M}"
