"""`tidelog topics ...` and `tidelog seal`: a thin layer on the v3 routes."""

import asyncio
from typing import Annotated, Any

import typer

from service.cli_results import (
    BadUsage,
    SlowProgress,
    confirm,
    plural,
    show_json,
    show_line,
    show_table,
)

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", metavar="URL", help="of the broker (default http://127.0.0.1:8082; TIDELOG_URL)"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]
ConfigOption = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="KEY=VALUE", help="topic config; repeat for more"),
]

OFFSETS_AT_ONCE = 16

app = typer.Typer(no_args_is_help=True, help="Create, list, describe, alter and delete topics.")


@app.command("create")
def create_topic(
    name: TopicArgument,
    partitions: Annotated[
        int | None,
        typer.Option("--partitions", "-p", min=1, help="the broker's default when not given"),
    ] = None,
    config: ConfigOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a topic."""
    from service.cli_client import Client, with_client

    configs = [{"name": key, "value": value} for key, value in _configs(config).items()]

    async def work(client: Client) -> int:
        body = {"topic_name": name, "partitions_count": partitions, "configs": configs}
        answer = await client.post(f"{await client.cluster()}/topics", json=body)
        count: int = answer.json()["partitions_count"]
        return count

    made = with_client(server, work)
    if as_json:
        show_json({"name": name, "partitions": made})
    else:
        show_line(f"created {name} with {plural(made, 'partition')}")


@app.command("list")
def list_topics(server: ServerOption = None, as_json: JsonOption = False) -> None:
    """List all topics with their number of partitions."""
    from service.cli_client import Client, with_client

    async def work(client: Client) -> list[dict[str, Any]]:
        listed = (await client.get_json(f"{await client.cluster()}/topics"))["data"]
        return [{"name": t["topic_name"], "partitions": t["partitions_count"]} for t in listed]

    topics = with_client(server, work)
    if as_json:
        show_json(topics)
    else:
        show_table(("topic", "partitions"), [(t["name"], t["partitions"]) for t in topics])


@app.command("describe")
def describe_topic(
    name: TopicArgument, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Show a topic's partitions, with their offsets, and its configs."""
    from service.cli_client import Client, quoted, together, with_client

    async def work(client: Client) -> dict[str, Any]:
        path = f"{await client.cluster()}/topics/{quoted(name)}"
        count = (await client.get_json(path))["partitions_count"]
        configs = (await client.get_json(f"{path}/configs"))["data"]
        slots = asyncio.Semaphore(OFFSETS_AT_ONCE)

        async def offsets(number: int) -> dict[str, int]:
            async with slots:
                found = await client.get_json(f"{path}/partitions/{number}/offset")
            start, end = found["earliest_offset"], found["latest_offset"]
            return {"partition": number, "log_start_offset": start, "high_watermark": end}

        return {
            "name": name,
            "partitions": await together(*(offsets(number) for number in range(count))),
            "configs": {
                each["name"]: {"value": each["value"], "is_default": each["is_default"]}
                for each in configs
            },
        }

    told = with_client(server, work)
    if as_json:
        show_json(told)
        return
    show_table(
        ("partition", "log start", "high watermark", "offsets"),
        [
            (p["partition"], start, end, end - start)
            for p in told["partitions"]
            for start, end in [(p["log_start_offset"], p["high_watermark"])]
        ],
    )
    show_line("")
    show_table(
        ("config", "value", ""),
        [
            (key, config["value"], "default" if config["is_default"] else "set")
            for key, config in told["configs"].items()
        ],
    )


@app.command("alter")
def alter_topic(
    name: TopicArgument,
    config: ConfigOption = None,
    unset: Annotated[
        list[str] | None,
        typer.Option("--unset", "-u", metavar="KEY", help="return a config to its default"),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option("--partitions", "-p", min=1, help="more of them; keys map anew from then on"),
    ] = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change a topic's configs, give it more partitions.

    Configs change all or none.
    """
    from service.cli_client import Client, quoted, with_client

    changes: list[dict[str, str]] = [
        {"name": key, "value": value, "operation": "SET"} for key, value in _configs(config).items()
    ]
    changes += [{"name": key, "operation": "DELETE"} for key in unset or []]
    if not changes and partitions is None:
        raise BadUsage("nothing to alter: give --config, --unset or --partitions")

    async def work(client: Client) -> None:
        path = f"{await client.cluster()}/topics/{quoted(name)}"
        if changes:
            await client.post(f"{path}/configs:alter", json={"data": changes})
        if partitions is not None:
            await client.call("PATCH", path, json={"partitions_count": partitions})

    with_client(server, work)
    if as_json:
        said = {each["name"]: each.get("value") for each in changes}
        show_json({"name": name, "configs": said, "partitions": partitions})
    else:
        show_line(f"altered {name}")


@app.command("delete")
def delete_topic(
    name: TopicArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a topic with all its records."""
    from service.cli_client import Client, quoted, with_client

    if not yes:
        confirm("deleting", name, f"Delete topic {name} with all its records?")

    async def work(client: Client) -> None:
        await client.call("DELETE", f"{await client.cluster()}/topics/{quoted(name)}")

    with_client(server, work)
    if as_json:
        show_json({"name": name, "deleted": True})
    else:
        show_line(f"deleted {name}")


def seal(name: TopicArgument, server: ServerOption = None, as_json: JsonOption = False) -> None:
    """Move a topic's tail into its table now, where Spark and others see it."""
    from service.cli_client import Client, quoted, with_client

    async def work(client: Client) -> int:
        with SlowProgress(f"sealing {name}") as progress:
            path = f"/admin/topics/{quoted(name)}/seal"
            sealing = asyncio.create_task(client.post(path, answer_s=None))
            while not (await asyncio.wait({sealing}, timeout=0.2))[0]:
                progress.show(0)
            sealed: int = sealing.result().json()["sealed_records"]
            return sealed

    sealed = with_client(server, work)
    if as_json:
        show_json({"name": name, "sealed_records": sealed})
    else:
        show_line(f"sealed {plural(sealed, 'record')} of {name}")


def _configs(given: list[str] | None) -> dict[str, str]:
    configs = {}
    for text in given or []:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise BadUsage(f"--config {text!r} is not KEY=VALUE")
        configs[key] = value
    return configs
