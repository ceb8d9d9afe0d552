"""`tidelog keys`, `tidelog acls`, `tidelog quotas`: a thin layer on the routes of security."""

import datetime as dt
from typing import Annotated, Any

import typer

from service.cli_results import BadUsage, NotThere, confirm, show_json, show_line, show_table
from service.cli_topics import JsonOption, ServerOption

KEYS, QUOTAS = "/tidelog/v1/keys", "/tidelog/v1/quotas"
CLUSTER_NAME = "kafka-cluster"
DEFAULT = "<default>"
FIELDS = (
    "principal",
    "permission",
    "operation",
    "resource_type",
    "resource_name",
    "pattern_type",
    "host",
)

PrincipalArgument = Annotated[
    str, typer.Argument(metavar="PRINCIPAL", help="User:alice, or alice", show_default=False)
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]

keys = typer.Typer(no_args_is_help=True, help="Create, list and delete keys of principals.")
acls = typer.Typer(no_args_is_help=True, help="List, add and remove access control lists.")
quotas = typer.Typer(no_args_is_help=True, help="List, set and remove quotas of principals.")


def principal_of(text: str) -> str:
    """`alice` is User:alice."""
    return text if ":" in text or text == DEFAULT else f"User:{text}"


# -- keys


@keys.command("create")
def create_key(
    principal: PrincipalArgument,
    ttl_days: Annotated[
        float | None,
        typer.Option("--ttl-days", min=0.001, help="how long it holds; for ever when not given"),
    ] = None,
    note: Annotated[str, typer.Option("--note", help="what it is for")] = "",
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a key. Its secret is printed once, alone on stdout, and known to nobody else."""
    from service.cli_client import Client, with_client

    body: dict[str, Any] = {"principal": principal_of(principal), "note": note}
    if ttl_days is not None:
        body["ttl_s"] = round(ttl_days * 86_400)

    async def work(client: Client) -> dict[str, Any]:
        answer = await client.post(KEYS, json=body)
        made: dict[str, Any] = answer.json()
        return made

    made = with_client(server, work)
    if as_json:
        show_json(made)
    else:
        show_line(made["secret"])


@keys.command("list")
def list_keys(server: ServerOption = None, as_json: JsonOption = False) -> None:
    """List keys, without their secrets."""
    from service.cli_client import Client, with_client

    async def work(client: Client) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = await client.get_json(KEYS)
        return listed

    listed = with_client(server, work)
    if as_json:
        show_json(listed)
        return
    rows = [
        (
            each["key_id"],
            each["principal"],
            _day(each["created_ms"]),
            _day(each["expires_ms"]) + (" (expired)" if each["is_expired"] else ""),
            each["note"],
        )
        for each in listed
    ]
    show_table(("key", "principal", "created", "expires", "note"), rows)


@keys.command("delete")
def delete_key(
    key_id: Annotated[str, typer.Argument(metavar="KEY", show_default=False)],
    yes: YesOption = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a key: nobody is known by it any more."""
    from service.cli_client import Client, quoted, with_client

    if not yes:
        confirm("deleting key", key_id, f"Delete key {key_id}?")

    async def work(client: Client) -> None:
        try:
            await client.call("DELETE", f"{KEYS}/{quoted(key_id)}")
        except NotThere:
            raise NotThere(f"key {key_id} does not exist") from None

    with_client(server, work)
    if as_json:
        show_json({"key_id": key_id, "deleted": True})
    else:
        show_line(f"deleted {key_id}")


# -- access control lists

TopicOption = Annotated[str | None, typer.Option("--topic", "-t", help="a topic; * is all")]
GroupOption = Annotated[str | None, typer.Option("--group", "-g", help="a group; * is all")]
ClusterOption = Annotated[bool, typer.Option("--cluster", help="the cluster itself")]
TransactionOption = Annotated[
    str | None, typer.Option("--transactional-id", help="kept for Kafka's clients: nobody asks it")
]
PrefixedOption = Annotated[
    bool, typer.Option("--prefixed", help="all names that begin so, not that name alone")
]


@acls.command("add")
def add_acls(  # noqa: PLR0913 - a command's options are its arguments
    principal: PrincipalArgument,
    operation: Annotated[
        list[str],
        typer.Option("--operation", "-o", help="READ, WRITE, DESCRIBE, ...; repeat for more"),
    ],
    topic: TopicOption = None,
    group: GroupOption = None,
    cluster: ClusterOption = False,
    transactional_id: TransactionOption = None,
    prefixed: PrefixedOption = False,
    deny: Annotated[bool, typer.Option("--deny", help="forbid it, whatever allows it")] = False,
    host: Annotated[str, typer.Option("--host", help="an address; * is any")] = "*",
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a principal do something, or forbid it. User:* is everybody."""
    from service.cli_client import Client, with_client

    resource = _resource(topic, group, cluster, transactional_id)
    if resource is None:
        raise BadUsage("say on what: one of --topic, --group, --cluster, --transactional-id")
    kind, name = resource
    added = [
        {
            "principal": principal_of(principal),
            "permission": "DENY" if deny else "ALLOW",
            "operation": each.upper(),
            "resource_type": kind,
            "resource_name": name,
            "pattern_type": "PREFIXED" if prefixed else "LITERAL",
            "host": host,
        }
        for each in operation
    ]

    async def work(client: Client) -> None:
        await client.post(f"{await client.cluster()}/acls:batch", json={"data": added})

    with_client(server, work)
    _show_acls(added, as_json=as_json)


@acls.command("list")
def list_acls(
    principal: Annotated[str | None, typer.Option("--principal")] = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    cluster: ClusterOption = False,
    transactional_id: TransactionOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List ACLs; with a name those that the name falls under."""
    from service.cli_client import Client, with_client

    query = _filter(principal, _resource(topic, group, cluster, transactional_id), "MATCH")

    async def work(client: Client) -> list[dict[str, str]]:
        found = await client.get_json(f"{await client.cluster()}/acls", params=query)
        listed: list[dict[str, str]] = found["data"]
        return listed

    _show_acls(with_client(server, work), as_json=as_json)


@acls.command("remove")
def remove_acls(  # noqa: PLR0913 - as above
    principal: Annotated[str | None, typer.Option("--principal")] = None,
    operation: Annotated[
        str | None, typer.Option("--operation", "-o", help="any otherwise")
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
    """Remove the ACLs of a principal, of exactly this name, or both."""
    from service.cli_client import Client, with_client

    resource = _resource(topic, group, cluster, transactional_id)
    if principal is None and resource is None:
        raise BadUsage("say whose or on what: --principal, --topic, --group, --cluster, ...")
    query = _filter(principal, resource, "PREFIXED" if prefixed else "LITERAL")
    if operation is not None:
        query["operation"] = operation.upper()
    what = " ".join(query.values())
    if not yes:
        confirm("removing ACLs of", what, f"Remove the ACLs of {what}?")

    async def work(client: Client) -> list[dict[str, str]]:
        answer = await client.call("DELETE", f"{await client.cluster()}/acls", params=query)
        gone: list[dict[str, str]] = answer.json()["data"]
        return gone

    _show_acls(with_client(server, work), as_json=as_json)


def _resource(
    topic: str | None, group: str | None, cluster: bool, transactional_id: str | None
) -> tuple[str, str] | None:
    given = [
        (kind, name)
        for kind, name in (
            ("TOPIC", topic),
            ("GROUP", group),
            ("CLUSTER", CLUSTER_NAME if cluster else None),
            ("TRANSACTIONAL_ID", transactional_id),
        )
        if name is not None
    ]
    if len(given) > 1:
        raise BadUsage("--topic, --group, --cluster and --transactional-id exclude each other")
    return given[0] if given else None


def _filter(
    principal: str | None, resource: tuple[str, str] | None, pattern_type: str
) -> dict[str, str]:
    query = {} if principal is None else {"principal": principal_of(principal)}
    if resource is not None:
        query["resource_type"], query["resource_name"] = resource
        query["pattern_type"] = pattern_type
    return query


def _show_acls(found: list[dict[str, str]], *, as_json: bool) -> None:
    rows = [{name: each[name] for name in FIELDS} for each in found]
    if as_json:
        show_json(rows)
    else:
        columns = ("principal", "", "operation", "on", "name", "pattern", "from")
        show_table(columns, [tuple(each.values()) for each in rows])


# -- quotas

RateOption = typer.Option(min=1, metavar="BYTES", help="a second, of each broker")


@quotas.command("list")
def list_quotas(server: ServerOption = None, as_json: JsonOption = False) -> None:
    """List quotas; <default> is for whoever has none."""
    from service.cli_client import Client, with_client

    async def work(client: Client) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = await client.get_json(QUOTAS)
        return listed

    listed = with_client(server, work)
    if as_json:
        show_json(listed)
        return
    columns = ("principal", "producer_byte_rate", "consumer_byte_rate")
    show_table(columns, [tuple(each[name] or "" for name in columns) for each in listed])


@quotas.command("set")
def set_quotas(
    principal: PrincipalArgument,
    producer_byte_rate: Annotated[int | None, RateOption] = None,
    consumer_byte_rate: Annotated[int | None, RateOption] = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set quotas of a principal, or of <default>; what is not given stays."""
    from service.cli_client import Client, quoted, with_client

    given = {"producer_byte_rate": producer_byte_rate, "consumer_byte_rate": consumer_byte_rate}
    body = {name: rate for name, rate in given.items() if rate is not None}
    if not body:
        raise BadUsage("give --producer-byte-rate, --consumer-byte-rate, or both")
    name = principal_of(principal)

    async def work(client: Client) -> dict[str, Any]:
        answer = await client.call("PUT", f"{QUOTAS}/{quoted(name)}", json=body)
        held: dict[str, Any] = answer.json()
        return held

    held = with_client(server, work)
    if as_json:
        show_json(held)
    else:
        rates = (f"{field} {held[field] or 'none'}" for field in given)
        show_line(f"{name}: {', '.join(rates)}")


@quotas.command("remove")
def remove_quotas(
    principal: PrincipalArgument, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Remove a principal's quotas: the default ones are its own again."""
    from service.cli_client import Client, quoted, with_client

    name = principal_of(principal)

    async def work(client: Client) -> None:
        try:
            await client.call("DELETE", f"{QUOTAS}/{quoted(name)}")
        except NotThere:
            raise NotThere(f"{name} has no quotas of its own") from None

    with_client(server, work)
    if as_json:
        show_json({"principal": name, "removed": True})
    else:
        show_line(f"removed the quotas of {name}")


def _day(at_ms: int | None) -> str:
    if at_ms is None:
        return "never"
    return f"{dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC):%Y-%m-%d %H:%M}"
