"""`tidelog topics ...` and `tidelog seal`: clients of the v3 routes."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from tidelog.service.cli.completion import topic_names
from tidelog.service.cli.positions import config_in_words, configs_with_units
from tidelog.service.cli.requests import (
    Commands,
    JsonOption,
    ServerOption,
    YesOption,
    missing_is,
    no_topic,
    quoted,
    request,
)
from tidelog.service.cli.results import (
    BadUsage,
    CommandError,
    NotThere,
    confirm,
    plural,
    show,
    show_json,
    show_line,
    show_rows,
    show_table,
    warn,
    with_progress,
)
from tidelog.storage.core.topic_configs import without_effect
from tidelog.storage.runtime.tasks import together

TopicArgument = Annotated[
    str, typer.Argument(metavar="TOPIC", show_default=False, autocompletion=topic_names)
]
ConfigOption = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="KEY=VALUE",
        help="config of the topic, for example retention.ms=7d or segment.bytes=1GiB; repeatable",
    ),
]

OFFSETS_AT_ONCE = 16
SHOWN_BYTES = 50_000
RETENTION_WORDS = ("retention", "cleanup.policy")
"""A config whose name has one of these words may make retention delete more records."""

SOURCES = {
    "DYNAMIC_TOPIC_CONFIG": "topic",
    "DYNAMIC_DEFAULT_BROKER_CONFIG": "cluster",
    "STATIC_BROKER_CONFIG": "broker",
    "DEFAULT_CONFIG": "default",
}
"""Words for the sources of configs: the topic, the cluster's default, a setting of the broker, the
built-in default."""

app = Commands(no_args_is_help=True, help="Create, list, describe, alter, delete topics.")


@app.command("create")
def create_topic(
    ctx: typer.Context,
    name: TopicArgument,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions",
            "-p",
            min=1,
            help="number of partitions (default: the cluster's num.partitions, else the "
            "broker's default_partitions)",
        ),
    ] = None,
    config: ConfigOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a topic.

    Example: tidelog topics create events -p 8 -c retention.ms=7d
    """
    configs = parsed_configs(config)
    items = [{"name": key, "value": value} for key, value in configs.items()]
    body = {"topic_name": name, "partitions_count": partitions, "configs": items}
    count = request(ctx, server, "POST", "{cluster}/topics", json=body)["partitions_count"]
    text = f"created {name} with {plural(count, 'partition')}"
    if configs:
        text += f": {changes_in_words(configs)}"
    show({"name": name, "partitions": count}, text, as_json=as_json)
    _warn_of_configs(configs)


@app.command("list")
def list_topics(
    ctx: typer.Context, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """List topics with their number of partitions."""
    listed = request(ctx, server, "GET", "{cluster}/topics")["data"]
    topics = [{"name": t["topic_name"], "partitions": t["partitions_count"]} for t in listed]
    show_rows(topics, ("topic", "partitions"), as_json=as_json)


@app.command("describe")
def describe_topic(
    ctx: typer.Context,
    name: TopicArgument,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the partitions, offsets and configs of a topic."""
    from tidelog.service.cli.client import CommandConnection, with_client

    async def work(client: CommandConnection) -> dict[str, Any]:
        path = f"{await client.cluster()}/topics/{quoted(name)}"
        with missing_is(no_topic(name)):
            count = (await client.get_json(path))["partitions_count"]
        configs = (await client.get_json(f"{path}/configs"))["data"]

        async def offsets(number: int) -> dict[str, int]:
            bounds = await client.get_json(f"{path}/partitions/{number}/offset")
            start, end = bounds["earliest_offset"], bounds["latest_offset"]
            return {"partition": number, "log_start_offset": start, "high_watermark": end}

        return {
            "name": name,
            "partitions": await together(*map(offsets, range(count)), at_once=OFFSETS_AT_ONCE),
            "configs": {
                config["name"]: {
                    "value": config["value"],
                    "is_default": config["is_default"],
                    "source": source_of(config),
                }
                for config in configs
            },
        }

    description = with_client(ctx, server, work)
    if as_json:
        show_json(description)
        return
    show_table(
        ("partition", "log start", "high watermark", "offsets"),
        [
            (p["partition"], start, end, end - start)
            for p in description["partitions"]
            for start, end in [(p["log_start_offset"], p["high_watermark"])]
        ],
    )
    show_line("")
    show_table(
        ("config", "value", "source"),
        [
            (key, config["value"], config["source"])
            for key, config in description["configs"].items()
        ],
    )


@app.command("alter")
def alter_topic(
    ctx: typer.Context,
    name: TopicArgument,
    config: ConfigOption = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(
            "--unset", "-u", metavar="KEY", help="reset a config to its default; repeatable"
        ),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions",
            "-p",
            min=1,
            help="new number, larger than the old one; a key may then map to another partition",
        ),
    ] = None,
    yes: YesOption = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change configs of a topic, or add partitions.

    Either all these configs change, or none of them. If retention would then delete records that it
    keeps now, says how many, and asks.

    Example: tidelog topics alter events -c segment.ms=60s -u retention.ms
    """
    from tidelog.service.cli.client import CommandConnection, with_client
    from tidelog.service.client.admin import config_changes

    changes = parsed_changes(config, unset)
    if not changes and partitions is None:
        raise BadUsage("nothing to alter: give --config, --unset or --partitions")
    if not yes:
        confirm_expiry(ctx, server, f"topics/{quoted(name)}/configs", name, changes)

    async def work(client: CommandConnection) -> None:
        path = f"{await client.cluster()}/topics/{quoted(name)}"
        with missing_is(no_topic(name)):
            # Check before the configs change, so that with a wrong number nothing changes.
            if partitions is not None:
                _check_larger(name, (await client.get_json(path))["partitions_count"], partitions)
            if changes:
                await client.post(f"{path}/configs:alter", json=config_changes(changes))
            if partitions is not None:
                await client.call("PATCH", path, json={"partitions_count": partitions})

    with_client(ctx, server, work)
    value = {"name": name, "configs": changes, "partitions": partitions}
    words = [changes_in_words(changes)] if changes else []
    if partitions is not None:
        words.append(plural(partitions, "partition"))
    show(value, f"altered {name}: {', '.join(words)}", as_json=as_json)
    _warn_of_configs(changes)


@app.command("delete")
def delete_topic(
    ctx: typer.Context,
    name: TopicArgument,
    yes: YesOption = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a topic and all its records."""
    confirm("deleting", name, f"Delete topic {name} and all its records?", yes=yes)
    path = f"{{cluster}}/topics/{quoted(name)}"
    request(ctx, server, "DELETE", path, missing=no_topic(name))
    show({"name": name, "deleted": True}, f"deleted {name}", as_json=as_json)


@app.command("skew")
def show_skew(
    ctx: typer.Context,
    name: TopicArgument,
    sample: Annotated[
        int, typer.Option("--sample", min=1, max=1_000_000, help="newest records to read")
    ] = 10_000,
    keys: Annotated[int, typer.Option("--keys", min=1, max=1000, help="keys to show")] = 10,
    salts: Annotated[
        int, typer.Option("--salt", min=1, max=1000, help="keys that replace each shown key")
    ] = 8,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the keys with the largest shares of a topic's newest records.

    Also shows the share of the hottest partition, and what it would be if producers added a suffix
    (a salt) of --salt values to each of the shown keys.
    """
    from tidelog.service.cli.client import CommandConnection, with_client
    from tidelog.service.cli.records.key_skew import Skew, sampled, skew_of

    async def work(client: CommandConnection) -> Skew | None:
        record_sample, partitions = await sampled(client, name, sample)
        return skew_of(record_sample, partitions, top=keys, salts=salts)

    skew = with_client(ctx, server, work)
    if skew is None:
        raise CommandError(f"topic {name!r} has no records")
    top = [
        {
            "key": None if key is None else key.decode("utf-8", "backslashreplace"),
            "share": share,
            "partition": number,
            "partitions": places,
        }
        for key, number, share, places in skew.top
    ]
    if as_json:
        show_json({"topic": name, **skew._asdict(), "top": top, "salts": salts})
        return
    show_table(
        ("key", "share", "partition"),
        [(str(row["key"]), f"{row['share']:.1%}", str(row["partition"])) for row in top],
    )
    hottest = f"partition {skew.hottest} has {skew.share:.1%}, the average is {skew.average:.1%}"
    show_line(f"{plural(skew.sampled, 'record')} of {plural(skew.keys, 'key')}: {hottest}")
    if top:
        keys_text = f"{plural(salts, 'salt')} for each of the shown keys"
        show_line(f"with {keys_text}, the hottest partition would have {skew.salted_share:.1%}")


def seal(
    ctx: typer.Context,
    name: TopicArgument,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move the tails of a topic into its table now.

    Spark, DuckDB and other readers of Delta tables see only sealed records.
    """
    from tidelog.service.cli.client import CommandConnection, with_client

    async def work(client: CommandConnection) -> int:
        path = f"/admin/topics/{quoted(name)}/seal"
        sealing = with_progress(f"sealing {name}", lambda _: client.post(path, wait_s=math.inf))
        sealed: int = (await sealing).json()["sealed_records"]
        return sealed

    sealed = with_client(ctx, server, work)
    text = f"sealed {plural(sealed, 'record')} of {name}"
    show({"name": name, "sealed_records": sealed}, text, as_json=as_json)


def _check_larger(name: str, has: int, wanted: int) -> None:
    if wanted <= has:
        raise CommandError(
            f"topic {name!r} has {plural(has, 'partition')} already: the new number, {wanted}, "
            "must be larger"
        )


def source_of(config: dict[str, Any]) -> str:
    """Return the source of a config's value, in the words of the command line."""
    source: str = config.get("source", "")  # a newer broker may have other sources
    return SOURCES.get(source, source)


def _warn_of_configs(changes: Mapping[str, str | None]) -> None:
    """Print a line on stderr for each config that was set, but that has no effect."""
    for text in without_effect(changes):
        warn(text)


def changes_in_words(changes: Mapping[str, str | None]) -> str:
    """Return changes of configs as text. None stands for a reset."""
    return ", ".join(
        f"{key} reset to its default" if text is None else config_in_words(key, text)
        for key, text in changes.items()
    )


def parsed_changes(config: list[str] | None, unset: list[str] | None) -> dict[str, str | None]:
    """Return the changes of `--config` and `--unset`. None stands for a reset. Raises BadUsage."""
    configs = parsed_configs(config)
    if twice := sorted({*configs} & {*(unset or [])}):
        raise BadUsage(f"{twice[0]} is given to --config and to --unset")
    return {**configs, **dict.fromkeys(unset or [])}


def confirm_expiry(
    ctx: typer.Context,
    server: str | None,
    path: str,
    name: str,
    changes: Mapping[str, str | None],
) -> None:
    """Ask for confirmation if retention would delete records of `name` because of these changes."""
    from tidelog.service.client.admin import config_changes

    if not any(word in config for config in changes for word in RETENTION_WORDS):
        return
    body = config_changes(changes)
    try:
        preview = request(ctx, server, "POST", f"/tidelog/v1/{path}:preview", json=body)
    except NotThere:
        return  # the topic does not exist, or the broker is of an older version
    if preview["records"]:
        more = "at least " if preview.get("has_more") else ""
        size = f" ({preview['bytes'] / 1e6:,.1f} MB)" if preview["bytes"] >= SHOWN_BYTES else ""
        records = f"{more}{preview['records']:,} records{size}"
        question = f"Retention will delete {records} of {name}. Alter it?"
        confirm(f"deleting {records} of", name, question, yes=False)


def parsed_configs(texts: list[str] | None) -> dict[str, str]:
    configs = {}
    for text in texts or []:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise BadUsage(f"--config {text!r} does not have the form KEY=VALUE")
        configs[key] = value
    return configs_with_units(configs)
