"""`tidelog status`: whether the cluster is well, from the broker's route `/tidelog/v1/health`."""

from collections.abc import Iterator
from typing import Any

import typer

from tidelog.service.cli.broker_requests import ClientCommand
from tidelog.service.cli.output import age, plural, show_json, show_line, show_table
from tidelog.service.client.connection import Connection
from tidelog.service.exit_status import EXIT_FAILED

GROUPS_SHOWN = 20
OF_KIND_SHOWN = 3
"""Problems of one kind that are shown."""


def status(command: ClientCommand) -> None:
    """Show whether the cluster is well: brokers, store, sealing, maintenance, groups.

    Names each problem and the section of deploy/README.md that says what to do. The exit status is
    1 if there is a problem, and 3 if the broker cannot be reached.
    """

    async def work(connection: Connection) -> dict[str, Any]:
        health = await connection.get_json("/tidelog/v1/health")
        return {"server": connection.servers.current, **health}

    health = command.run(work)
    if command.as_json:
        show_json(health)
    else:
        _show(health)
    if not health["is_well"]:
        raise typer.Exit(EXIT_FAILED)


def _show(health: dict[str, Any]) -> None:
    cluster = f"cluster {health['cluster_id']} on {health['store_url']}, level {health['level']}"
    show_line(f"{health['server']}: {cluster}")
    show_line("")
    _show_brokers(health)
    show_line("")
    for name, text in _lines(health):
        show_line(f"{name:<12} {text}")
    _show_groups([group for group in health["groups"] if group["lag"]])
    show_line("")
    for problems in _by_kind(health["problems"]):
        for problem in problems[:OF_KIND_SHOWN]:
            show_line(f"{problem['name']}: {problem['what']}")
        if len(problems) > OF_KIND_SHOWN:
            show_line(f"    and {len(problems) - OF_KIND_SHOWN} more of this kind (--json)")
        show_line(f"    {problems[0]['runbook']}")
    count = len(health["problems"])
    show_line(f"NOT WELL: {plural(count, 'problem')}" if count else "well")


def _show_brokers(health: dict[str, Any]) -> None:
    show_table(
        ("broker", "version", "age", "sequencer", "clock", "connections", "address"),
        [_broker(broker) for broker in health["brokers"]],
    )
    for broker in health.get("gone", ()):
        since = age((health["now_ms"] - broker["since_ms"]) / 1000)
        show_line(f"{broker['name']} is gone: its last answer was {since} ago")


def _show_groups(behind: list[dict[str, Any]]) -> None:
    """Show the groups that have a lag."""
    if not behind:
        return
    show_line("")
    show_table(
        ("group", "members", "lag", "oldest"),
        [
            (group["consumer_group_id"], group["members"], group["lag"], age(group["lag_seconds"]))
            for group in behind[:GROUPS_SHOWN]
        ],
    )
    if len(behind) > GROUPS_SHOWN:
        hidden_groups = plural(len(behind) - GROUPS_SHOWN, "group")
        show_line(f"... and {hidden_groups} more: tidelog groups list")


def _by_kind(problems: list[dict[str, str]]) -> list[list[dict[str, str]]]:
    """Return the problems of each kind (name and runbook), the worst kind first."""
    kinds: dict[tuple[str, str], list[dict[str, str]]] = {}
    for problem in problems:
        kinds.setdefault((problem["name"], problem["runbook"]), []).append(problem)
    return list(kinds.values())


def _broker(broker: dict[str, Any]) -> tuple[str | int, ...]:
    clock_ms = broker["clock_offset_ms"]
    return (
        broker["name"],
        broker["version"] or "no answer",
        age(broker["age_s"]),
        "yes" if broker["is_sequencer"] else "",
        "" if clock_ms is None else f"{clock_ms:+d} ms",
        "" if broker["connections"] is None else str(broker["connections"]),
        broker["address"],
    )


def _lines(health: dict[str, Any]) -> Iterator[tuple[str, str]]:
    store, tails = health["store"], health["tails"]
    if store["p50_ms"] is None:
        yield "store", "no requests in the last minute"
    else:
        latency = f"p50 {store['p50_ms']:g} ms, p99 {store['p99_ms']:g} ms"
        requests = f"{store['failures']:,} of {store['requests']:,} requests failed"
        yield "store", f"{latency}; {requests} in the last minute"
    yield "commits", f"{store['commits_per_minute']:g} a minute"
    yield "requests", _costs(store)
    if tails["oldest_s"] is None:
        yield "tails", "all records are sealed"
    else:
        oldest = f"the oldest is {age(tails['oldest_s'])} old, in {tails['oldest_topic']}"
        yield "tails", f"{plural(tails['records'], 'record')} are not sealed; {oldest}"
    for maintenance in health["maintenance"]:
        yield maintenance["task"], _task(maintenance)
    if health["holds"]:
        yield "backups", f"{plural(health['holds'], 'backup')} under way: nothing is collected"


def _costs(store: dict[str, Any]) -> str:
    """Return the price of the requests, and its largest part with the setting that lowers it."""
    terms: list[dict[str, Any]] = store.get("costs") or []
    if not terms:
        return "none in the last half hour"
    total = sum(term["usd_a_month"] for term in terms)
    first = terms[0]
    lowers = f", which {first['setting']} lowers" if first["setting"] else ""
    most = f"${first['usd_a_month']:,.2f} for {first['purpose']}{lowers}"
    return f"${total:,.2f} a month at S3 Standard and this pace; the most is {most}"


def _task(maintenance: dict[str, Any]) -> str:
    since = f"{age(maintenance['since_success_s'])} ago"
    if maintenance["damage"]:
        return f"DAMAGE: {maintenance['what']}, {since}"
    if maintenance["is_ok"] is None:
        return "no run is known"
    if not maintenance["is_ok"]:
        return f"failed: {maintenance['what']}; the last complete run was {since}"
    return f"complete {since}"
