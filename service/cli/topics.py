"""`tidelog topics ...`: clients of the v3 routes."""

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from typer import Option

from tidelog.service.cli.broker_requests import ClientCommand, missing_is, no_topic
from tidelog.service.cli.completion import TopicArgument
from tidelog.service.cli.errors import BadUsage, CommandError, NotThere
from tidelog.service.cli.option_units import config_in_words, configs_with_units
from tidelog.service.cli.options import Commands, YesOption
from tidelog.service.cli.output import (
    confirm,
    plural,
    show_json,
    show_line,
    show_table,
    warn,
)
from tidelog.service.client.admin import config_changes
from tidelog.service.client.connection import Connection, quoted
from tidelog.storage.codec.key_partition import partition_of
from tidelog.storage.core.topic_configs import without_effect
from tidelog.storage.runtime.tasks import together

ConfigOption = Annotated[
    list[str] | None,
    Option(
        "--config",
        "-c",
        metavar="KEY=VALUE",
        help="config of the topic, for example retention.ms=7d or segment.bytes=1GiB; repeatable",
    ),
]

OFFSETS_AT_ONCE = 16
SAMPLED_AT_ONCE = 8
RECORDS_A_READ = 5_000
Sample = Counter[tuple[bytes | None, int]]
"""Sampled records by key and partition."""
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

topics = Commands(no_args_is_help=True, help="Create, list, describe, alter, delete topics.")


@topics.command("create")
def create_topic(
    name: TopicArgument,
    *,
    partitions: Annotated[
        int | None,
        Option(
            "--partitions",
            "-p",
            min=1,
            help="number of partitions (default: the cluster's num.partitions, else the "
            "broker's default_partitions)",
        ),
    ] = None,
    config: ConfigOption = None,
    command: ClientCommand,
) -> None:
    """Create a topic.

    Example: tidelog topics create events -p 8 -c retention.ms=7d
    """
    configs = parsed_configs(config)
    items = [{"name": key, "value": value} for key, value in configs.items()]
    body = {"topic_name": name, "partitions_count": partitions, "configs": items}
    count = command.request("POST", "{cluster}/topics", json=body)["partitions_count"]
    text = f"created {name} with {plural(count, 'partition')}"
    if configs:
        text += f": {changes_in_words(configs)}"
    command.show({"name": name, "partitions": count}, text)
    for warning in without_effect(configs):
        warn(warning)


@topics.command("list")
def list_topics(command: ClientCommand) -> None:
    """List topics with their number of partitions."""
    rows = [
        {"name": topic["topic_name"], "partitions": topic["partitions_count"]}
        for topic in command.request("GET", "{cluster}/topics")["data"]
    ]
    command.show_rows(rows, ("topic", "partitions"))


@topics.command("describe")
def describe_topic(name: TopicArgument, command: ClientCommand) -> None:
    """Show the partitions, offsets, configs and table of a topic."""
    description = command.run(lambda connection: _description(connection, name))
    if command.as_json:
        show_json(description)
        return
    if description["table"] is not None:
        show_line(f"table: {description['table']}\n")
    bounds = [tuple(partition.values()) for partition in description["partitions"]]
    show_table(
        ("partition", "log start", "high watermark", "offsets"),
        [(number, start, end, end - start) for number, start, end in bounds],
    )
    show_line("")
    show_table(
        ("config", "value", "source"),
        [
            (key, config["value"], config["source"])
            for key, config in description["configs"].items()
        ],
    )


async def _description(connection: Connection, name: str) -> dict[str, Any]:
    path = f"{await connection.cluster()}/topics/{quoted(name)}"
    with missing_is(no_topic(name)):
        topic = await connection.get_json(path)
    configs = (await connection.get_json(f"{path}/configs"))["data"]

    async def offsets(number: int) -> dict[str, int]:
        bounds = await connection.get_json(f"{path}/partitions/{number}/offset")
        start, end = bounds["earliest_offset"], bounds["latest_offset"]
        return {"partition": number, "log_start_offset": start, "high_watermark": end}

    return {
        "name": name,
        "table": topic.get("table_uri"),
        "partitions": await together(
            *map(offsets, range(topic["partitions_count"])), at_once=OFFSETS_AT_ONCE
        ),
        "configs": {
            config["name"]: {
                "value": config["value"],
                "is_default": config["is_default"],
                "source": source_of(config),
            }
            for config in configs
        },
    }


@topics.command("alter")
def alter_topic(
    name: TopicArgument,
    *,
    config: ConfigOption = None,
    unset: Annotated[
        list[str] | None,
        Option("--unset", "-u", metavar="KEY", help="reset a config to its default; repeatable"),
    ] = None,
    partitions: Annotated[
        int | None,
        Option(
            "--partitions",
            "-p",
            min=1,
            help="new number, larger than the old one; a key may then map to another partition",
        ),
    ] = None,
    yes: YesOption = False,
    command: ClientCommand,
) -> None:
    """Change configs of a topic, or add partitions.

    Either all these configs change, or none of them. If retention would then delete records that it
    keeps now, says how many, and asks.

    Example: tidelog topics alter events -c segment.ms=60s -u retention.ms
    """
    changes = parsed_changes(config, unset)
    if not changes and partitions is None:
        raise BadUsage("nothing to alter: give --config, --unset or --partitions")
    if not yes:
        confirm_expiry(command, f"topics/{quoted(name)}/configs", name, changes)
    command.run(lambda connection: _alter(connection, name, changes, partitions))
    words = [changes_in_words(changes)] if changes else []
    if partitions is not None:
        words.append(plural(partitions, "partition"))
    value = {"name": name, "configs": changes, "partitions": partitions}
    command.show(value, f"altered {name}: {', '.join(words)}")
    for warning in without_effect(changes):
        warn(warning)


async def _alter(
    connection: Connection, name: str, changes: Mapping[str, str | None], partitions: int | None
) -> None:
    path = f"{await connection.cluster()}/topics/{quoted(name)}"
    with missing_is(no_topic(name)):
        # Check before the configs change, so that with a wrong number nothing changes.
        if partitions is not None:
            count = (await connection.get_json(path))["partitions_count"]
            if partitions <= count:
                raise CommandError(
                    f"topic {name!r} has {plural(count, 'partition')} already: the new number, "
                    f"{partitions}, must be larger"
                )
        if changes:
            await connection.post(f"{path}/configs:alter", json=config_changes(changes))
        if partitions is not None:
            await connection.call("PATCH", path, json={"partitions_count": partitions})


@topics.command("delete")
def delete_topic(name: TopicArgument, *, yes: YesOption = False, command: ClientCommand) -> None:
    """Delete a topic and all its records."""
    confirm("deleting", name, f"Delete topic {name} and all its records?", yes=yes)
    command.request("DELETE", f"{{cluster}}/topics/{quoted(name)}", missing=no_topic(name))
    command.show({"name": name, "deleted": True}, f"deleted {name}")


@topics.command("skew")
def show_skew(
    name: TopicArgument,
    *,
    sample: Annotated[
        int, Option("--sample", min=1, max=1_000_000, help="newest records to read")
    ] = 10_000,
    keys: Annotated[int, Option("--keys", min=1, max=1000, help="keys to show")] = 10,
    salts: Annotated[
        int, Option("--salt", min=1, max=1000, help="keys that replace each shown key")
    ] = 8,
    command: ClientCommand,
) -> None:
    """Show the keys with the largest shares of a topic's newest records.

    Also shows the share of the hottest partition, and what it would be if producers added a suffix
    (a salt) of --salt values to each of the shown keys.
    """

    async def work(connection: Connection) -> Skew | None:
        record_sample, partitions = await sampled(connection, name, sample)
        return skew_of(record_sample, partitions, top=keys, salts=salts)

    skew = command.run(work)
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
    if command.as_json:
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


class Skew(NamedTuple):
    """The skew of a topic: shares are parts of the sampled records.

    `salted_share` is the share of the hottest partition if the shown keys had salts.
    """

    sampled: int
    keys: int
    hottest: int
    share: float
    average: float
    salted_share: float
    top: list[tuple[bytes | None, int, float, int]]
    """(key, partition with most of its records, share, partitions)"""


async def sampled(connection: Connection, topic: str, size: int) -> tuple[Sample, int]:
    """Return a sample of about `size` of the newest records, and the number of partitions.

    Each partition has the same share of the sample as of the topic's records.
    """
    path = f"/topics/{quoted(topic)}/partitions"
    count = await connection.partitions(topic)

    finding = (connection.ends(topic, number) for number in range(count))
    ranges = await together(*finding, at_once=SAMPLED_AT_ONCE)
    total = sum(end - start for start, end in ranges)
    sample: Sample = Counter()

    async def read(number: int) -> None:
        start, end = ranges[number]
        row_count = math.ceil(size * (end - start) / max(total, 1))
        offset = max(start, end - row_count)
        while offset < end:
            answer = await connection.get(
                f"{path}/{number}/records",
                params={"offset": offset, "timeout": 0, "max_records": RECORDS_A_READ},
                headers={"accept": "application/vnd.kafka.binary.v2+json"},
            )
            records: list[dict[str, Any]] = connection.json_of(answer)
            for record in records:
                if record["offset"] < end:
                    key = record["key"]
                    sample[None if key is None else base64.b64decode(key), number] += 1
            if not records:
                return
            offset = records[-1]["offset"] + 1

    await together(*map(read, range(count)), at_once=SAMPLED_AT_ONCE)
    return sample, count


def skew_of(sample: Sample, partitions: int, *, top: int, salts: int) -> Skew | None:
    """Return the skew of a sample, None if the sample is empty. The `top` keys get the salts."""
    total = sum(sample.values())
    if not total:
        return None
    by_key: Counter[bytes | None] = Counter()
    by_partition: Counter[int] = Counter()
    places: dict[bytes | None, Counter[int]] = {}
    for (key, number), count in sample.items():
        by_key[key] += count
        by_partition[number] += count
        places.setdefault(key, Counter())[number] += count
    keys = [(key, count) for key, count in by_key.most_common() if key is not None][:top]
    spread = {number: float(count) for number, count in by_partition.items()}
    for key, count in keys:
        for number, records in places[key].items():
            spread[number] -= records
        for salt in range(salts):
            number = partition_of(b"%s-%d" % (key, salt), partitions)
            spread[number] = spread.get(number, 0.0) + count / salts
    hottest, most = by_partition.most_common(1)[0]
    return Skew(
        sampled=total,
        keys=sum(key is not None for key in by_key),
        hottest=hottest,
        share=most / total,
        average=1 / partitions,
        salted_share=max(spread.values()) / total,
        top=[
            (key, places[key].most_common(1)[0][0], count / total, len(places[key]))
            for key, count in keys
        ],
    )


def source_of(config: dict[str, Any]) -> str:
    """Return the source of a config's value, in the words of the command line."""
    source: str = config.get("source", "")  # a newer broker may have other sources
    return SOURCES.get(source, source)


def changes_in_words(changes: Mapping[str, str | None]) -> str:
    """Return changes of configs as text. None stands for a reset."""
    return ", ".join(
        f"{key} reset to its default" if text is None else config_in_words(key, text)
        for key, text in changes.items()
    )


def parsed_changes(config: list[str] | None, unset: list[str] | None) -> dict[str, str | None]:
    """Return the changes of `--config` and `--unset`. None stands for a reset. Raises BadUsage."""
    configs = parsed_configs(config)
    if repeated_names := sorted({*configs} & {*(unset or [])}):
        raise BadUsage(f"{repeated_names[0]} is given to --config and to --unset")
    return {**configs, **dict.fromkeys(unset or [])}


def confirm_expiry(
    command: ClientCommand, path: str, name: str, changes: Mapping[str, str | None]
) -> None:
    """Ask for confirmation if retention would delete records of `name` because of these changes."""
    if not any(word in config for config in changes for word in RETENTION_WORDS):
        return
    body = config_changes(changes)
    try:
        preview = command.request("POST", f"/tidelog/v1/{path}:preview", json=body)
    except NotThere:
        return  # the topic does not exist, or the broker is of an older version
    if preview["records"]:
        qualifier = "at least " if preview.get("has_more") else ""
        size = f" ({preview['bytes'] / 1e6:,.1f} MB)" if preview["bytes"] >= SHOWN_BYTES else ""
        records = f"{qualifier}{preview['records']:,} records{size}"
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
