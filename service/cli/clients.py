"""`tidelog clients`: the Kafka clients that are connected to a cluster."""

import datetime as dt
from typing import Any

from tidelog.service.cli.broker_requests import ClientCommand
from tidelog.service.cli.output import plural, show_json, show_line, show_table, warn

COLUMNS = ("broker", "client", "software", "principal", "address", "connections", "requests")


def clients(command: ClientCommand) -> None:
    """Show the Kafka clients that are connected to the brokers of the cluster.

    A row has the connections of one client to one broker, since the oldest of them.
    """
    answer = command.request("GET", "/tidelog/v1/kafka-clients")
    for name in answer["missing_brokers"]:
        warn(f"broker {name} did not answer: its clients are not shown")
    if command.as_json:
        show_json({**answer, "clients": [_client(client) for client in answer["clients"]]})
        return
    rows = [_row(_client(client)) for client in answer["clients"]]
    if not rows:
        show_line("no Kafka client is connected")
        return
    show_table((*COLUMNS, "since"), rows)
    if answer["is_truncated"]:
        shown = sum(client["connections"] for client in answer["clients"])
        all_of_them = plural(answer["connections"], "connection")
        show_line(f"and other clients: the table has {shown:,} of {all_of_them}")


def _client(data: dict[str, Any]) -> dict[str, Any]:
    """Return a client with the field names of this command."""
    since = dt.datetime.fromtimestamp(data["connected_ms"] / 1000, dt.UTC)
    same = ("principal", "address", "is_tls", "connections", "requests", "bytes_in", "bytes_out")
    return {
        "broker": data["broker"],
        "client": data["client_id"],
        "software": data["software_name"],
        "version": data["software_version"],
        **{name: data[name] for name in same},
        "since": since.isoformat(timespec="seconds").replace("+00:00", "Z"),
    }


def _row(client: dict[str, Any]) -> tuple[str | int, ...]:
    software = f"{client['software']} {client['version']}".strip()
    return (*({**client, "software": software}[name] for name in COLUMNS), client["since"])
