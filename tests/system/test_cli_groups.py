"""`tidelog groups` and `tidelog consume --group`, on a real broker."""

import json
from pathlib import Path

import pytest

from tests.support.broker import Broker, error_line, json_of, lines_of, running


@pytest.fixture
def read(broker: Broker, topic: str) -> str:
    """A group that has read 3 of the topic's records."""
    broker.cli("produce", topic, stdin="a\nb\nc\nd\ne\n")
    group = f"readers-{topic}"
    process = broker.cli("consume", topic, "--group", group, "-n", "3")
    assert process.stdout == b"a\nb\nc\n"
    return group


def test_a_group_goes_on_where_it_has_printed_to(broker: Broker, topic: str, read: str) -> None:
    shown = broker.cli("consume", topic, "-g", read, "--json", "-f", "text")
    assert [record["offset"] for record in lines_of(shown)] == [3, 4]
    assert broker.cli("consume", topic, "-g", read).stdout == b""
    other = broker.cli("consume", topic, "-g", f"late-{topic}", "--from", "end")
    assert other.stdout == b""


def test_list_describe_lag(broker: Broker, topic: str, read: str) -> None:
    listed = json_of(broker.cli("groups", "list", "--json"))
    assert [group["state"] for group in listed if group["group"] == read] == ["EMPTY"]
    told = json_of(broker.cli("groups", "describe", read, "--json"))
    assert told["members"] == []
    lag = json_of(broker.cli("groups", "lag", read, "--json"))
    assert lag["lag"] == 2
    assert "readers" in broker.cli("groups", "list").stdout.decode()
    assert topic in broker.cli("groups", "lag", read).stdout.decode()
    assert "EMPTY" in broker.cli("groups", "describe", read).stdout.decode()


def test_reset_and_delete(broker: Broker, topic: str, read: str) -> None:
    dry = json_of(broker.cli("groups", "reset", read, "--to", "end", "--dry-run", "--json"))
    assert dry["is_dry_run"] is True
    assert json_of(broker.cli("groups", "lag", read, "--json"))["lag"] == 2
    for target, lag in (("beginning", 5), ("4", 1), ("@2120-01-01", 0), ("-1h", 5), ("end", 0)):
        broker.cli("groups", "reset", read, "--to", target, "--topic", topic)
        assert json_of(broker.cli("groups", "lag", read, "--json"))["lag"] == lag, target
    assert "confirm with --yes" in error_line(broker.cli("groups", "delete", read, status=2))
    broker.cli("groups", "delete", read, "--yes")
    assert "readers" in error_line(broker.cli("groups", "delete", read, "-y", status=4))


def test_wrong_usage(broker: Broker, topic: str) -> None:
    for arguments in (
        ("consume", topic, "--group", "g", "-p", "0"),
        ("consume", topic, "--group", "g", "--until", "3"),
        ("groups", "reset", "g", "--to", "soon"),
        ("groups", "reset", "g", "--to", "end", "-p", "0"),
    ):
        error_line(broker.cli(*arguments, status=2))
    error_line(broker.cli("groups", "describe", "nobody", status=4))


def test_one_line_for_each_group_with_its_lag(broker: Broker, topic: str, read: str) -> None:
    listed = json_of(broker.cli("groups", "list", "--json"))
    (own,) = (group for group in listed if group["group"] == read)
    assert (own["members"], own["lag"], own["topics"]) == (0, 2, [topic])
    assert 0 <= own["lag_seconds"] < 3_600
    with running(broker, "groups", "list", "--watch", "0.1", "--json") as watching:
        assert watching.stdout is not None
        for _ in range(2):
            again = json.loads(watching.stdout.readline())
            assert read in {group["group"] for group in again}


def test_describe_shows_positions_beside_committed_offsets(broker: Broker, read: str) -> None:
    (position,) = json_of(broker.cli("groups", "describe", read, "--json"))["positions"]
    assert (position["committed"], position["end"], position["lag"]) == (3, 5, 2)
    shown = broker.cli("groups", "describe", read).stdout.decode()
    assert "no members" in shown
    assert "committed" in shown


def test_reset_by_shift_and_from_a_file(
    broker: Broker, topic: str, read: str, tmp_path: Path
) -> None:
    def committed() -> int:
        (partition,) = json_of(broker.cli("groups", "lag", read, "--json"))["partitions"]
        offset: int = partition["committed"]
        return offset

    file = tmp_path / "offsets.json"
    file.write_bytes(broker.cli("groups", "export", read).stdout)
    broker.cli("groups", "reset", read, "--by", "-2", "-t", topic, "-p", "0")
    assert committed() == 1
    broker.cli("groups", "reset", read, "--file", str(file))
    assert committed() == 3
    error = error_line(broker.cli("groups", "reset", "fresh", "--to", "end", status=4))
    assert "--topic" in error
    for line in ("tidelog: group 'fresh' is new: it had no members and no committed offsets\n", ""):
        process = broker.cli("groups", "reset", "fresh", "--to", "end", "-t", topic)
        assert process.stderr.decode() == line
    for arguments in (
        ("--to", "end", "--by", "1"),
        (),
        ("--file", str(tmp_path / "none")),
        ("--file", str(file), "-t", topic),
    ):
        error_line(broker.cli("groups", "reset", read, *arguments, status=2))
