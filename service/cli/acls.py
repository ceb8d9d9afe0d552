"""`tidelog acls ...`: access control lists."""

from typing import Annotated, NamedTuple

from typer import Argument, Option

from tidelog.service.cli.broker_requests import ClientCommand
from tidelog.service.cli.errors import BadUsage
from tidelog.service.cli.options import Commands, YesOption
from tidelog.service.cli.output import confirm, warn
from tidelog.storage.core.acls import CLUSTER_NAME, DEFAULT

ACLS = "{cluster}/acls"
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

acls = Commands(no_args_is_help=True, help="Add, list, remove access control lists (ACLs).")


def principal_of(text: str | None) -> str | None:
    """Return the principal that `text` names. `alice` names User:alice."""
    return text if text is None or ":" in text or text == DEFAULT else f"User:{text}"


PrincipalArgument = Annotated[
    str,
    Argument(
        metavar="PRINCIPAL", help="User:alice or alice", show_default=False, callback=principal_of
    ),
]
PrincipalOption = Annotated[str | None, Option("--principal", callback=principal_of)]
PrefixedOption = Annotated[bool, Option("--prefixed", help="match all names with this prefix")]


class ResourceOptions(NamedTuple):
    """The resource of ACLs; its options exclude each other."""

    topic: Annotated[str | None, Option("--topic", "-t", help="name of a topic; * for all")] = None
    group: Annotated[str | None, Option("--group", "-g", help="name of a group; * for all")] = None
    cluster: Annotated[bool, Option("--cluster", help="the cluster as the resource")] = False
    transactional_id: Annotated[
        str | None, Option("--transactional-id", help="stored for Kafka compatibility; not checked")
    ] = None

    def fields(self, pattern_type: str) -> dict[str, str]:
        """Return the fields of the resource in an ACL or in a filter, none without a resource.

        Raises BadUsage.
        """
        names = (self.topic, self.group, self.transactional_id)
        if pattern_type == "PREFIXED" and names == (None, None, None):
            raise BadUsage("--prefixed needs --topic, --group or --transactional-id")
        resources = [
            {"resource_type": kind, "resource_name": name, "pattern_type": pattern_type}
            for kind, name in (
                ("TOPIC", self.topic),
                ("GROUP", self.group),
                ("CLUSTER", CLUSTER_NAME if self.cluster else None),
                ("TRANSACTIONAL_ID", self.transactional_id),
            )
            if name is not None
        ]
        if len(resources) > 1:
            raise BadUsage("--topic, --group, --cluster and --transactional-id exclude each other")
        return resources[0] if resources else {}


@acls.command("add")
def add_acls(
    principal: PrincipalArgument,
    *,
    operation: Annotated[
        list[str],
        Option(
            "--operation", "-o", metavar="OPERATION", help="READ, WRITE, DESCRIBE, ...; repeatable"
        ),
    ],
    resource: ResourceOptions,
    prefixed: PrefixedOption = False,
    deny: Annotated[
        bool, Option("--deny", help="deny the operations, even if another ACL allows them")
    ] = False,
    host: Annotated[str, Option("--host", help="address of the client; * for any")] = "*",
    command: ClientCommand,
) -> None:
    """Allow or deny operations to a principal.

    User:* stands for all principals.

    Example: tidelog acls add alice -o READ -o WRITE --topic events
    """
    fields = resource.fields("PREFIXED" if prefixed else "LITERAL")
    if not fields:
        raise BadUsage("no resource: give one of --topic, --group, --cluster, --transactional-id")
    fields |= {"principal": principal, "permission": "DENY" if deny else "ALLOW", "host": host}
    added = [{**fields, "operation": name.upper()} for name in operation]
    command.request("POST", f"{ACLS}:batch", json={"data": added})
    _show_acls(command, added)


@acls.command("list")
def list_acls(
    *, principal: PrincipalOption = None, resource: ResourceOptions, command: ClientCommand
) -> None:
    """List all ACLs, or the ACLs that match a principal, a resource or both."""
    query = _filter(principal, resource, "MATCH")
    _show_acls(command, command.request("GET", ACLS, params=query)["data"])


@acls.command("remove")
def remove_acls(
    *,
    principal: PrincipalOption = None,
    operation: Annotated[
        str | None, Option("--operation", "-o", help="default: all operations")
    ] = None,
    resource: ResourceOptions,
    prefixed: PrefixedOption = False,
    yes: YesOption = False,
    command: ClientCommand,
) -> None:
    """Remove the ACLs of a principal, a resource, or both.

    The name of the resource must be exactly the name in the ACL.
    """
    query = _filter(principal, resource, "PREFIXED" if prefixed else "LITERAL")
    if not query:
        raise BadUsage(
            "no filter: give --principal, --topic, --group, --cluster or --transactional-id"
        )
    if operation is not None:
        query["operation"] = operation.upper()
    filter_text = " ".join(query.values())
    confirm("removing ACLs of", filter_text, f"Remove the ACLs of {filter_text}?", yes=yes)
    query = dict.fromkeys(FILTER_WORDS, "ANY") | query

    removed = command.request("DELETE", ACLS, params=query)["data"]
    if not removed:
        warn(f"no ACL matches {filter_text}: nothing was removed")
    _show_acls(command, removed)


def _filter(principal: str | None, resource: ResourceOptions, pattern_type: str) -> dict[str, str]:
    query = {} if principal is None else {"principal": principal}
    return query | resource.fields(pattern_type)


def _show_acls(command: ClientCommand, acl_list: list[dict[str, str]]) -> None:
    rows = [{name: acl[name] for name in ACL_FIELDS} for acl in acl_list]
    command.show_rows(rows, ("principal", "", "operation", "on", "name", "pattern", "from"))
