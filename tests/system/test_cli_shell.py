"""`tidelog` in a shell: where `--server` stands, completion, units, a full disk, an interrupt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.broker import Broker, error_line, json_of, tidelog
from tests.support.ports import free_port


def completed(words: str, url: str = "") -> list[str]:
    """Return what bash would offer after these words; the last one is incomplete."""
    count = str(len(words.split(" ")) - 1)
    process = tidelog(
        is_fresh=True,
        _TIDELOG_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD=count,
        TIDELOG_URL=url or "http://127.0.0.1:1",
    )
    assert not process.stderr
    return process.stdout.decode().split()


def test_the_server_stands_before_or_after_the_command(broker: Broker, topic: str) -> None:
    here, nowhere = ("--server", broker.base_url), ("--server", f"http://127.0.0.1:{free_port()}")
    for words in ((*here, "topics", "list"), ("topics", "list", *here)):
        assert topic in {row["name"] for row in json_of(tidelog(*words, "--json"))}
    tidelog(*nowhere, "topics", "list", *here)
    assert nowhere[1] in error_line(tidelog(*here, "topics", "list", *nowhere, status=3))


def test_a_shell_completes_commands_topics_and_groups(broker: Broker, topic: str) -> None:
    assert set(completed("tidelog topics de")) == {"describe", "delete"}
    assert completed(f"tidelog topics describe {topic}", broker.base_url) == [topic]
    assert completed(f"tidelog --server {broker.base_url} consume {topic}") == [topic]
    tidelog("produce", topic, "--server", broker.base_url, stdin="a\n")
    tidelog("consume", topic, "--group", f"of-{topic}", "--server", broker.base_url)
    assert completed(f"tidelog --server {broker.base_url} groups lag of-{topic}") == [f"of-{topic}"]
    assert completed(f"tidelog topics describe {topic}") == []


def test_times_before_now(broker: Broker, topic: str) -> None:
    there = ("--server", broker.base_url)
    tidelog("produce", topic, *there, stdin="a\nb\n")
    for back, lines in (("-1h", b"a\nb\n"), ("@-1h", b"a\nb\n"), ("@-0s", b"")):
        assert tidelog("consume", topic, "--from", back, *there).stdout == lines
    assert tidelog("consume", topic, "--until", "-1h", *there).stdout == b""
    process = tidelog("groups", "reset", "g", "--to", "@-1h", "-t", topic, "--dry-run", *there)
    assert "g would go to 20" in process.stdout.decode()
    assert "UTC (1h before now)" in process.stdout.decode()


def test_the_last_records_and_offsets_of_partitions(broker: Broker) -> None:
    there = ("--server", broker.base_url)
    tidelog("topics", "create", "two", "-p", "2", *there)
    for number in ("0", "1"):
        lines = "".join(f"{number}{letter}\n" for letter in "abc")
        tidelog("produce", "two", "-p", number, *there, stdin=lines)
    for words, expected in (
        (("--last", "1"), b"0c 1c"),
        (("--from", "-2"), b"0b 0c 1b 1c"),
        (("--last", "9", "-p", "1"), b"1a 1b 1c"),
        (("--last", "0"), b""),
        (("--from", "0:2,1:1"), b"0c 1b 1c"),
        (("--from", "1:end"), b""),
    ):
        assert sorted(tidelog("consume", "two", *words, *there).stdout.split()) == expected.split()
    for words in (("--last", "1", "--from", "3"), ("--from", "0:1", "-p", "0"), ("--until", "-1")):
        tidelog("consume", "two", *words, *there, status=2)
    for start in ("-1", "0:1"):
        tidelog("consume", "two", "--group", "g", "--from", start, *there, status=2)


def test_configs_with_units(broker: Broker) -> None:
    there = ("--server", broker.base_url)
    options = ("-c", "retention.ms=7d", "-c", "segment.bytes=32MiB")
    output = tidelog("topics", "create", "units", *options, *there).stdout.decode()
    assert "retention.ms=604800000 (1w), segment.bytes=33554432 (32MiB)" in output
    configs = json_of(tidelog("topics", "describe", "units", "--json", *there))["configs"]
    assert configs["retention.ms"]["value"] == "604800000"
    output = tidelog("topics", "alter", "units", "-c", "retention.ms=36h", *there).stdout.decode()
    assert output == "altered units: retention.ms=129600000 (36h)\n"
    refused = tidelog("topics", "alter", "units", "-c", "retention.ms=7y", *there, status=2)
    assert error_line(refused).startswith("retention.ms: '7y' is not a duration")


@pytest.mark.parametrize("place", ["-10", "0:17", "noon", "@noon", "-1y"])
def test_positions_that_a_command_does_not_take(place: str) -> None:
    output = error_line(tidelog("groups", "reset", "g", "--to", place, status=2))
    assert repr(place) in output


# -- stdout and interrupts


@pytest.mark.parametrize("command", ["--version", "serve -h", "topics list", "consume {topic}"])
def test_a_full_disk_behind_stdout(broker: Broker, topic: str, command: str) -> None:
    broker.cli("produce", topic, stdin="a\n")
    words = [sys.executable, "-m", "tidelog.service.cli", *command.format(topic=topic).split()]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            words,
            stdout=full,
            stderr=subprocess.PIPE,
            env=os.environ | {"TIDELOG_URL": broker.base_url},
            check=False,
        )
    assert ended.stderr == b"tidelog: cannot write to stdout: No space left on device\n"
    assert ended.returncode == 1


@pytest.mark.parametrize(
    ("command", "status"),
    [("--version", 1), ("--help", 1), ("consume {topic}", 1), ("", 2), ("topics", 2)],
)
def test_closed_stdout_is_one_line(broker: Broker, topic: str, command: str, status: int) -> None:
    broker.cli("produce", topic, stdin="a\n")
    ended = in_shell(f"{command.format(topic=topic)} >&-", broker)
    assert ended.stderr == b"tidelog: cannot write to stdout: Bad file descriptor\n"
    assert ended.returncode == status


@pytest.mark.parametrize(("command", "status"), [("topics describe nothing", 4), ("--bogus", 2)])
def test_full_disk_behind_stderr_leaves_exit_status(
    broker: Broker, command: str, status: int
) -> None:
    assert in_shell(f"{command} 2>/dev/full", broker).returncode == status


def test_closed_stdin_is_empty_and_closed_stderr_says_nothing(broker: Broker, topic: str) -> None:
    ended = in_shell(f"produce {topic} <&-", broker)
    assert ended.returncode == 0
    assert ended.stdout.startswith(b"produced 0 records")
    assert broker.high_watermark(topic) == 0
    ended = in_shell("topics describe nothing 2>&-", broker)
    assert (ended.returncode, ended.stdout, ended.stderr) == (4, b"", b"")


def in_shell(line: str, broker: Broker) -> subprocess.CompletedProcess[bytes]:
    words = ["sh", "-c", f"{sys.executable} -m tidelog.service.cli {line}"]
    variables = os.environ | {"TIDELOG_URL": broker.base_url}
    return subprocess.run(words, capture_output=True, env=variables, timeout=60, check=False)


def test_argument_that_is_not_utf8_is_refused(broker: Broker) -> None:
    process = broker.cli("topics", "create", os.fsdecode(b"\xff"), status=2)
    assert error_line(process) == "argument 3 is not UTF-8 text: b'\\xff'"


def test_name_of_file_may_have_any_bytes(broker: Broker, topic: str, tmp_path: Path) -> None:
    file = os.path.join(tmp_path, os.fsdecode(b"lines\xff"))
    with open(file, "w") as lines:
        lines.write("a\n")
    broker.cli("produce", topic, file)
    assert broker.high_watermark(topic) == 1


def test_an_interrupt_while_the_commands_load() -> None:
    program = """
import sys
from tidelog.service.cli.__main__ import main

class Interrupt:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")
