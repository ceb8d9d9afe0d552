"""`tidelog` as processes against a broker process: what it does, prints, and exits with."""

import dataclasses
import importlib.metadata
import json
import socket
import subprocess
import sys
from pathlib import Path

import deltalake
import pytest

from tests.support.broker import Broker, Tuning, error_line, json_of, tidelog
from tests.support.ports import free_port
from tidelog.service.cli import main
from tidelog.service.exit_status import EXIT_STATUSES
from tidelog.service.settings.settings import Settings

# -- the command itself


def test_help_names_commands_and_exit_statuses() -> None:
    told = tidelog("--help").stdout.decode()
    for command in ("serve", "topics", "produce", "consume", "replay", "seal", "status"):
        assert f"\n  {command} " in told
    for status, meaning in EXIT_STATUSES.items():
        assert f"{status}  {meaning}" in told


@pytest.mark.parametrize("words", [(), ("topics",), ("topics", "create"), ("serve",)], ids=" ".join)
def test_a_short_option_shows_the_help(words: tuple[str, ...]) -> None:
    assert tidelog(*words, "-h").stdout == tidelog(*words, "--help").stdout


def test_the_version_is_that_of_the_distribution() -> None:
    assert tidelog("--version").stdout.decode() == f"{importlib.metadata.version('tidelog')}\n"


def test_every_setting_is_a_flag_of_serve() -> None:
    told = " ".join(tidelog("serve", "--help").stdout.decode().split())
    for field in dataclasses.fields(Settings):
        assert f"--{field.name.replace('_', '-')} " in told
        assert f"TIDELOG_{field.name.upper()}" in told.replace(" ", "")


def modules_after(code: str) -> set[str]:
    """Return the modules that a new interpreter has after this code."""
    program = f"import sys\nfrom tidelog.service.cli import main\n{code}\nprint(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    return set(process.stdout.decode().split())


SLOW = {"deltalake", "fastapi", "numpy", "pandas", "pyarrow", "pyspark", "rich", "uvicorn"}


def test_the_command_line_loads_nothing_that_is_slow() -> None:
    modules = modules_after("")
    assert not modules & (SLOW | {"asyncio", "httpx"})
    commands = {f"tidelog.service.cli.{name.replace('-', '_')}" for name in main.SUMMARIES}
    assert not modules & commands


def test_a_command_is_loaded_without_what_is_slow() -> None:
    modules = modules_after("main.loaded()")
    assert not modules & SLOW
    assert "httpx" in modules


def test_the_summary_of_a_command_is_the_first_sentence_of_its_help() -> None:
    for name, command in main.loaded().commands.items():
        summary = main.SUMMARIES[name]
        assert " ".join(command.help.split()).startswith(summary)
        assert command.get_short_help_str(limit=200) == summary


def test_without_a_command_it_says_which_there_are() -> None:
    assert "Commands:" in tidelog(status=2).stdout.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nope"],
        ["bogus"],
        ["topics", "bogus"],
        ["topics", "create"],
        ["topics", "create", "t", "--partitions", "none"],
        ["topics", "create", "t", "--partitions", "0"],
        ["topics", "create", "t", "--config", "segment.ms"],
        ["topics", "alter", "t"],
        ["topics", "alter", "t", "-c", "retention.ms=1", "-u", "retention.ms"],
        ["topics", "delete", "t"],
        ["topics", "list", "--server", "localhost"],
        ["produce"],
        ["produce", "t", "/no/such/file"],
        ["produce", "t", "--format", "avro"],
        ["produce", "t", "--values"],
        ["produce", "t", "--acks", "2"],
        ["produce", "t", "--format", "ndjson", "--key-separator", ":"],
        ["consume", "t", "--from", "yesterday"],
        ["consume", "t", "--from", "@yesterday"],
        ["consume", "t", "--until", "-1"],
        ["consume", "t", "--json", "--key-separator", ":"],
        ["consume", "t", "--follow", "--until", "@2020-01-01"],
        ["replay", "t"],
        ["replay", "t", "--to", "d", "--as", "orc"],
        ["replay", "t", "--to", "d", "--from", "17"],
        ["serve", "--port", "x"],
        ["serve", "--port", "70000"],
        ["serve", "--security", "rar"],
        ["serve", "--wal-retention-ms", "4000"],
        ["serve", "--seal-enabled", "--nope"],
        ["serve", "--wal-codec", "lz4"],
        ["serve", "./a", "--store", "./b"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_status_2(arguments: list[str]) -> None:
    process = tidelog(*arguments, status=2)
    assert error_line(process)
    assert not process.stdout


def test_a_wrong_variable_is_wrong_usage() -> None:
    assert "TIDELOG_PROT" in error_line(tidelog("serve", status=2, TIDELOG_PROT="1"))


def test_a_broker_starts_with_the_old_name_of_a_setting_and_warns(tmp_path: Path) -> None:
    old_names = {"sealing": False, "handover_bytes": 1024, "log_format": "json"}
    with Broker(tmp_path, **old_names) as broker:
        lines = [json.loads(line) for line in broker.log().splitlines()]
    warned = [line["message"] for line in lines if line["level"] == "warning"]
    assert len(warned) == 2
    assert warned[0].startswith("setting sealing is now seal_enabled:")


@pytest.mark.parametrize(
    "arguments",
    [
        ["topics", "list"],
        ["topics", "create", "t"],
        ["topics", "describe", "t"],
        ["topics", "alter", "t", "--partitions", "3"],
        ["topics", "delete", "t", "--yes"],
        ["produce", "t"],
        ["consume", "t"],
        ["seal", "t"],
        ["status"],
    ],
    ids=" ".join,
)
def test_a_broker_that_is_not_there_is_status_3(arguments: list[str]) -> None:
    server = f"http://127.0.0.1:{free_port()}"
    assert server in error_line(tidelog(*arguments, "--server", server, status=3))


@pytest.mark.parametrize(
    "arguments",
    [
        ["topics", "describe", "nope"],
        ["topics", "alter", "nope", "--partitions", "3"],
        ["topics", "delete", "nope", "--yes"],
        ["produce", "nope"],
        ["consume", "nope"],
        ["consume", "nope", "--partition", "0"],
        ["seal", "nope"],
    ],
    ids=" ".join,
)
def test_a_topic_that_is_not_there_is_status_4(broker: Broker, arguments: list[str]) -> None:
    assert error_line(broker.cli(*arguments, stdin="x\n", status=4))


# -- topics


def test_the_life_of_a_topic(broker: Broker) -> None:
    name = "life"
    process = broker.cli("topics", "create", name, "-p", "3", "-c", "segment.ms=60000", "--json")
    assert json_of(process) == {"name": name, "partitions": 3}
    assert {"name": name, "partitions": 3} in json_of(broker.cli("topics", "list", "--json"))
    assert f"{name} " in broker.cli("topics", "list").stdout.decode()

    broker.cli("produce", name, stdin="a\nb\n")
    described = json_of(broker.cli("topics", "describe", name, "--json"))
    assert described["name"] == name
    assert described["table"].startswith(f"{broker.store}/topics/{name}-")
    assert (
        f"table: {described['table']}\n" in broker.cli("topics", "describe", name).stdout.decode()
    )
    broker.cli("seal", name)
    assert deltalake.DeltaTable(described["table"]).to_pyarrow_table().num_rows == 2
    assert [part["partition"] for part in described["partitions"]] == [0, 1, 2]
    assert sum(part["high_watermark"] for part in described["partitions"]) == 2
    assert {part["log_start_offset"] for part in described["partitions"]} == {0}
    own = {"value": "60000", "is_default": False, "source": "topic"}
    assert described["configs"]["segment.ms"] == own
    built_in = {"value": "delete", "is_default": True, "source": "default"}
    assert described["configs"]["cleanup.policy"] == built_in
    assert "segment.ms" in broker.cli("topics", "describe", name).stdout.decode()

    changes = ["-c", "retention.ms=1000", "--unset", "segment.ms", "--partitions", "4"]
    changes += ["-c", "min.insync.replicas=2", "--yes"]
    altered = broker.cli("topics", "alter", name, *changes)
    assert altered.stderr.decode() == (
        "tidelog: min.insync.replicas has no effect here: the object store replicates\n"
    )
    told = json_of(broker.cli("topics", "describe", name, "--json"))
    assert len(told["partitions"]) == 4
    assert told["configs"]["retention.ms"]["value"] == "1000"
    assert told["configs"]["segment.ms"]["is_default"]

    broker.cli("topics", "delete", name, "--yes")
    assert name not in [topic["name"] for topic in json_of(broker.cli("topics", "list", "--json"))]


def test_a_lower_retention_says_how_many_records_it_deletes(broker: Broker, topic: str) -> None:
    broker.cli("produce", topic, "-p", "0", stdin=b"a\nb\nc\n")

    def retention_ms() -> str:
        described = json_of(broker.cli("topics", "describe", topic, "--json"))
        value: str = described["configs"]["retention.ms"]["value"]
        return value

    old_ms = retention_ms()
    alter = ("topics", "alter", topic, "-c", "retention.ms=1")
    refused = error_line(broker.cli(*alter, status=2))
    assert f"deleting 3 records of {topic} cannot be undone: confirm with --yes" in refused
    assert retention_ms() == old_ms
    defaults = ("defaults", "alter", "-c", "log.retention.ms=1")
    refused = error_line(broker.cli(*defaults, status=2))
    assert "of all topics cannot be undone" in refused
    broker.cli("topics", "alter", topic, "-c", "retention.ms=8d", "-c", "segment.ms=1h")
    broker.cli(*alter, "--yes")
    assert retention_ms() == "1"


def test_defaults_of_the_cluster(broker: Broker) -> None:
    broker.cli("topics", "create", "plain")
    changes = ["-c", "log.roll.ms=61000", "-c", "num.partitions=2"]
    altered = broker.cli("defaults", "alter", *changes, "-u", "log.retention.ms")
    assert "log.roll.ms=61000" in altered.stdout.decode()
    listed = json_of(broker.cli("defaults", "list", "--json"))
    defaults = {config["name"]: (config["value"], config["source"]) for config in listed}
    assert defaults["log.roll.ms"] == ("61000", "cluster")
    assert defaults["auto.create.topics.enable"] == ("false", "broker")
    assert defaults["log.retention.ms"] == ("604800000", "default")
    described = json_of(broker.cli("topics", "describe", "plain", "--json"))
    shown = {"value": "61000", "is_default": False, "source": "cluster"}
    assert described["configs"]["segment.ms"] == shown
    assert json_of(broker.cli("topics", "create", "two", "--json"))["partitions"] == 2
    unset = broker.cli("defaults", "alter", "-u", "log.roll.ms", "-u", "num.partitions", "--json")
    assert json_of(unset) == {"configs": {"log.roll.ms": None, "num.partitions": None}}
    wrong = broker.cli("defaults", "alter", "-c", "segment.ms=1", status=1)
    assert "use the name log.roll.ms" in error_line(wrong)
    broker.cli("defaults", "alter", status=2)


def test_what_the_broker_refuses_is_status_1(broker: Broker, topic: str) -> None:
    for arguments, words in [
        (["create", topic], "already exists"),
        (["create", "new", "-c", "nope=1"], "nope"),
        (["create", "new", "-c", "segment.ms=0"], "segment.ms"),
        (["create", "a b"], "illegal"),
        (["alter", topic, "--partitions", "1"], "partition"),
        (["alter", topic, "--unset", "nope"], "nope"),
    ]:
        assert words in error_line(broker.cli("topics", *arguments, status=1))


# -- seal, status


def test_seal(broker: Broker, topic: str) -> None:
    broker.cli("produce", topic, stdin="a\nb\nc\n")
    assert json_of(broker.cli("seal", topic, "--json"))["sealed_records"] == 3
    assert "sealed 0 records" in broker.cli("seal", topic).stdout.decode()
    broker.cli("produce", topic, stdin="d\n")
    assert broker.cli("consume", topic).stdout == b"a\nb\nc\nd\n"


def test_status(broker: Broker, topic: str) -> None:
    broker.cli("produce", topic, stdin="a\n")
    status = json_of(broker.cli("status", "--json"))
    assert status["server"] == broker.base_url
    assert [row["is_sequencer"] for row in status["brokers"]] == [True]
    assert (status["is_well"], status["problems"]) == (True, [])
    shown = broker.cli("status").stdout.decode()
    assert status["cluster_id"] in shown
    assert status["brokers"][0]["name"] in shown
    assert shown.splitlines()[-1] == "well"


def test_server_url_may_end_with_a_slash(broker: Broker) -> None:
    status = json_of(tidelog("status", "--json", "--server", broker.base_url + "/"))
    assert status["server"] == broker.base_url


# -- serve


def last_line(process: subprocess.CompletedProcess[bytes]) -> str:
    """The line after the log's; asserts that there is no traceback among them."""
    output = process.stderr.decode()
    assert "Traceback" not in output, output
    last = output.splitlines()[-1]
    assert last.startswith("tidelog: "), output
    return last


def serve(
    *arguments: str, tuning: Tuning | None = None, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    process = tidelog("serve", "--port", "0", *arguments, status=None, tuning=tuning, **variables)
    assert process.returncode not in {0, None}
    return process


def test_serve_on_a_store_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for store in ((tmp_path / "file").as_uri(), (tmp_path / "file" / "below").as_uri()):
        assert "file" in last_line(serve("--store", store))


def test_serve_on_a_store_without_permission() -> None:
    # The tests may run as root, which ignores a folder's mode; /proc accepts no folders.
    assert "/proc/tidelog" in last_line(serve("--store", "file:///proc/tidelog"))


@pytest.mark.parametrize("url", ["ftp://host/x", "s3://", "file://host/x"])
def test_serve_on_a_url_that_is_no_store(url: str) -> None:
    assert "store" in last_line(serve(url))


def test_serve_on_a_store_that_does_not_answer_is_status_3() -> None:
    credentials = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    endpoint = f"http://127.0.0.1:{free_port()}"
    soon = {"service": {"start_retry_s": 2.0}}
    process = serve("s3://bucket/prefix", "--s3-endpoint", endpoint, tuning=soon, **credentials)
    assert process.returncode == 3
    assert "s3://bucket/prefix" in last_line(process)


def test_serve_on_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        process = tidelog("serve", str(tmp_path), "--port", str(port), status=1)
    assert f"cannot listen on 127.0.0.1:{port}" in last_line(process)


def test_serve_refuses_another_cluster(broker: Broker) -> None:
    process = serve("--store", broker.store, "--cluster-id", "another")
    assert "another" in last_line(process)


def test_serve_takes_settings_from_variables_and_ends_politely(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    with Broker(tmp_path, default_partitions=3, seal_enabled=False) as broker:
        broker.cli("topics", "create", "t")
        assert json_of(broker.cli("topics", "list", "--json")) == [{"name": "t", "partitions": 3}]
        assert broker.stop() == 0
    assert store in broker.log()
    assert (tmp_path / "store").is_dir()


def test_a_broker_that_was_killed_comes_back_on_its_port(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        url = broker.base_url
        broker.create_topic("t")
        broker.cli("produce", "t", stdin="a\n")
        broker.kill()
        assert not broker.is_running
        broker.start()
        assert broker.base_url == url
        assert broker.cli("consume", "t").stdout == b"a\n"
        broker.restart()
        assert broker.cli("consume", "t").stdout == b"a\n"


def test_the_skew_of_a_topic(broker: Broker) -> None:
    broker.create_topic("skewed", 4)
    lines = "".join(f"{'hot' if number % 4 else number}:v\n" for number in range(400))
    broker.cli("produce", "skewed", "--key-separator", ":", stdin=lines)
    skew = json_of(broker.cli("topics", "skew", "skewed", "--salt", "64", "--json"))
    assert (skew["sampled"], skew["keys"]) == (400, 101)
    assert (skew["top"][0]["key"], skew["top"][0]["share"]) == ("hot", 0.75)
    assert skew["salted_share"] < skew["share"]
    assert "hot" in broker.cli("topics", "skew", "skewed", "--sample", "40").stdout.decode()
    error_line(broker.cli("topics", "skew", "absent", status=4))
