"""Messages of the command line about the mistakes of a first hour: one line, the cause, what to do.

The commands run in this process, most of them without a broker.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar, NamedTuple

import pytest

from tests.repo.test_packaging import commands_of
from tests.support.broker import Broker
from tests.support.ports import free_port
from tidelog.service.cli import main as cli
from tidelog.service.cli.broker_requests import client_errors
from tidelog.service.cli.errors import Unreachable
from tidelog.service.client.connection import Connection
from tidelog.service.secret_files import PRIVATE_UMASK
from tidelog.storage.core.errors import StoreUnfit
from tidelog.storage.store.folder import FolderStore


class Said(NamedTuple):
    """The end of a command; `line` is all of stderr, without the program's name."""

    status: int
    out: str
    line: str


Command = Callable[..., Said]


@pytest.fixture
def tidelog(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Iterator[Command]:
    """Run a command line in this process. It sets the umask, which other tests need as it was."""
    old_umask = os.umask(PRIVATE_UMASK)
    for name in [name for name in os.environ if name.startswith("TIDELOG_")]:
        monkeypatch.delenv(name)

    def run(*words: str, server: str = "") -> Said:
        monkeypatch.setattr(sys, "argv", ["tidelog", *words])
        if server:
            monkeypatch.setenv("TIDELOG_URL", server)
        status = cli.main()
        out, err = capsysbinary.readouterr()
        lines = err.decode().splitlines()
        assert len(lines) <= 1, err
        return Said(status, out.decode(), "".join(lines).removeprefix("tidelog: "))

    yield run
    os.umask(old_umask)


# -- files


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("acls", "remove", "--principal", "User:a", "--prefixed", "--yes"),
            "--prefixed needs --topic, --group or --transactional-id",
        ),
        (
            ("acls", "add", "User:a", "-o", "read", "--cluster", "--prefixed"),
            "--prefixed needs --topic, --group or --transactional-id",
        ),
        (("repair", "--lost", "--strays", "--yes"), "--lost and --strays exclude each other"),
        (("repair", "--way", "adopt", "--lost"), "--way and --lost exclude each other"),
        (
            ("repair", "events", "--strays"),
            "--strays is for the whole cluster: remove the topics",
        ),
        (
            ("topics", "delete", "a", "--yes", "--server", ""),
            "the list of servers is empty: give http://HOST:PORT, or HOST:PORT",
        ),
        (
            ("--server", "", "status"),
            "the list of servers is empty: give http://HOST:PORT, or HOST:PORT",
        ),
    ],
)
def test_options_that_contradict_are_refused(
    tidelog: Command, words: tuple[str, ...], line: str
) -> None:
    assert tidelog(*words) == (2, "", line)


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e20"])
def test_times_without_end_are_refused(tidelog: Command, seconds: str) -> None:
    for words in (
        ("groups", "list", "--watch", seconds),
        ("keys", "create", "User:a", "--ttl-days", seconds),
    ):
        result = tidelog(*words)
        assert result.status == 2, result
        assert words[2 if words[0] == "groups" else 3] in result.line


def test_produce_of_a_folder(tidelog: Command, tmp_path: Path) -> None:
    assert tidelog("produce", "a", str(tmp_path)) == (
        2,
        "",
        f"cannot read {tmp_path}: it is a folder",
    )


def test_produce_of_a_file_that_is_not_there(tidelog: Command) -> None:
    assert tidelog("produce", "a", "/nofile").line == "cannot read /nofile: no such file"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot read {}: no such file"),
        (b"", "{} is empty"),
        (b" \n", "{} is empty"),
        (b"\xff", "cannot read {}: it is not UTF-8 text"),
    ],
)
def test_a_key_file_without_a_key(
    tidelog: Command, tmp_path: Path, content: bytes | None, why: str
) -> None:
    file = tmp_path / "alice.key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    result = tidelog("--key-file", str(file), "status")
    assert result == (2, "", f"key: {why.format(file)}")


@pytest.mark.parametrize("content", ["two\nlines", "schlüssel"])
def test_a_key_that_no_header_can_have(tidelog: Command, tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    (tmp_path / "key").chmod(0o600)
    result = tidelog("--key-file", str(tmp_path / "key"), "status")
    assert result.status == 2
    assert result.line.startswith("key: has a character that no key has")
    assert content not in result.line


def test_a_header_in_the_form_of_another_api(tidelog: Command, broker: Broker, topic: str) -> None:
    for headers in ('{"a": 1}', '[{"name": "a", "value": "YQ=="}]', '[{"key": "a", "value": 1}]'):
        file = Path(broker.store.removeprefix("file://")).parent / "headers.ndjson"
        line = f'{{"value": 1, "headers": {headers}}}'
        file.write_text(f"{line}\n")
        result = tidelog("produce", topic, str(file), "--format", "ndjson", server=broker.base_url)
        form = 'headers are an object of texts, or have the form [{"key": NAME, "value": BASE64}]'
        assert result.status == 1
        assert result.line.startswith(f"line 1: not a record: {form}: {line!r}")


# -- stores


class Plain(BaseHTTPRequestHandler):
    """A web server of another kind: it has no page at all."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "command",
    [["serve", "ftp://foo"], ["serve", "--store", "s3:///x"]]
    + [
        [*command.split(), "--store", "ftp://foo"]
        for command in (
            *("scrub", "maintain", "retain", "compact", "collect", "repair", "upgrade"),
            *("delete-records a 0:1", "replay a --to b"),
        )
    ],
    ids=" ".join,
)
def test_a_malformed_url_of_a_store_is_wrong_usage(tidelog: Command, command: list[str]) -> None:
    result = tidelog(*command)
    assert result.status == 2
    assert result.line.startswith(f"store url {command[-1]!r} is none of memory://, ")


def test_the_default_store_that_is_not_there(
    tidelog: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = f"{tmp_path.as_uri()}/tidelog-data does not exist or is not a folder"
    hint = "; this is the default: name another with --store"
    assert tidelog("scrub") == (3, "", missing + hint)
    assert tidelog("scrub", "--store", f"{tmp_path}/tidelog-data") == (3, "", missing)


@pytest.mark.parametrize("endpoint", ["localhost:9000", "minio", "http://", "http://a:b"])
@pytest.mark.parametrize("command", ["serve s3://b/p", "scrub --store s3://b/p"])
def test_an_s3_endpoint_that_is_no_url(
    tidelog: Command, monkeypatch: pytest.MonkeyPatch, command: str, endpoint: str
) -> None:
    monkeypatch.setenv("TIDELOG_S3_ENDPOINT", endpoint)
    result = tidelog(*command.split())
    assert result == (2, "", f"s3_endpoint {endpoint!r} does not have the form http://HOST:PORT")


def test_a_store_below_a_file(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"")
    with pytest.raises(StoreUnfit, match="a part of the path is a file: name a folder"):
        FolderStore(file / "log")


class Forbidding(Plain):
    """An S3 that refuses every request, and keeps the headers by which the requests are signed."""

    signed: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.signed.append(self.headers["Authorization"])
        body = b"<Error><Code>AccessDenied</Code></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()


@pytest.fixture
def forbidding(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "x")
    monkeypatch.setattr(Forbidding, "signed", [])
    with serving(Forbidding) as address:
        yield f"http://{address}"


ON_STORE = (
    *("retain", "compact", "collect", "maintain", "scrub", "repair", "upgrade", "bounds"),
    *("delete-records t 0:1", "replay t --to {folder}/out", "backup {folder}/backups"),
    "restore {folder}/backups",
    *("query VALUES(1)", "search t x"),
)


@pytest.mark.parametrize("command", ON_STORE)
def test_a_command_takes_the_options_of_the_store(
    tidelog: Command, forbidding: str, tmp_path: Path, command: str
) -> None:
    (tmp_path / "backups").mkdir()
    words = command.format(folder=tmp_path).split()
    options = ("--store", "s3://b/p", "--s3-endpoint", forbidding, "--s3-region", "xx-test-7")
    result = tidelog(*words, *options)
    assert result.status == 3, result
    assert result.line.startswith("s3://b/p cannot be used: AccessDenied (403)"), result
    assert Forbidding.signed
    assert all("/xx-test-7/s3/" in header for header in Forbidding.signed)


def test_every_command_on_a_store_takes_its_options() -> None:
    named = {words[0]: options for words, options in commands_of(cli.loaded())}
    own = {command.split()[0] for command in ON_STORE}
    assert {name for name, options in named.items() if "--s3-endpoint" in options} == own | {
        "serve"
    }
    assert {name for name, options in named.items() if "--store" in options} == own | {"serve"}


# -- wrong words


@pytest.mark.parametrize("option", ["--session-timeout-ms 20000", "--client-id me"])
def test_an_option_of_members_without_a_group(tidelog: Command, option: str) -> None:
    result = tidelog("consume", "a", *option.split())
    assert result == (2, "", "--session-timeout-ms and --client-id need --group")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("consume t --format xml", "'xml' is not one of 'text', 'json', 'binary', 'ndjson'"),
        ("consume t --retry-s soon", "'soon' should be a valid number"),
        ("consume t -p first", "'first' should be a valid integer"),
        ("consume t -n -1", "'-1' should be greater than or equal to 0"),
    ],
)
def test_a_wrong_value_is_named(tidelog: Command, words: str, line: str) -> None:
    result = tidelog(*words.split())
    assert result.status == 2
    assert result.line.startswith("Invalid value for '--")
    assert result.line.endswith(f": {line} (see `tidelog consume --help`)")


def test_a_wrong_time_is_told_by_an_example(tidelog: Command) -> None:
    result = tidelog("consume", "a", "--from", "@2026-13-01")
    assert result.line.startswith("'@2026-13-01' is not a time: give @ and an ISO 8601 time, for")


# -- servers that are none


@pytest.fixture
def other_server() -> Iterator[str]:
    with serving(Plain) as address:
        yield address


def test_a_closed_port(tidelog: Command) -> None:
    server = f"http://127.0.0.1:{free_port()}"
    assert tidelog("topics", "list", "--server", server) == (
        3,
        "",
        f"cannot reach {server}: connection refused; start a broker (tidelog serve), or name one "
        "with --server or TIDELOG_URL",
    )


def test_https_to_a_server_without_tls(tidelog: Command, other_server: str) -> None:
    result = tidelog("status", server=f"https://{other_server}")
    assert result.status == 3
    assert result.line.endswith(f"{other_server}: the server does not use TLS: use http://")


def test_a_host_without_an_address(tidelog: Command) -> None:
    result = tidelog("status", server="http://nosuchhost.invalid")
    assert result.status == 3
    assert "the name of the host has no address" in result.line


async def test_a_server_that_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with Connection(url) as client:
            with (
                pytest.raises(Unreachable, match=f"^cannot reach {url}: no response in time$"),
                client_errors(),
            ):
                await client.get("/v3/clusters", response_s=0.05)


def test_a_url_below_which_nothing_is(tidelog: Command, other_server: str, broker: Broker) -> None:
    for url in (f"http://{other_server}", f"{broker.base_url}/nope"):
        result = tidelog("topics", "describe", "a", server=url)
        assert result == (3, "", f"{url}/v3/clusters: HTTP 404: is this the URL of a broker?")


def test_the_console_is_no_server(tidelog: Command, broker: Broker) -> None:
    for url in (f"{broker.base_url}/ui/", f"{broker.base_url}/ui"):
        result = tidelog("topics", "list", server=url)
        assert result == (2, "", f"server {url!r} is the console's URL: remove /ui")


async def test_a_server_that_closes_the_connection() -> None:
    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, Connection(url) as client:
        with (
            pytest.raises(Unreachable, match=r"no response: .* \(a port for Kafka clients\?\)$"),
            client_errors(),
        ):
            await client.get("/v3/clusters")


def test_a_proxy_is_not_used_for_this_machine(
    tidelog: Command, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    assert tidelog("topics", "list", server=broker.base_url).status == 0


def test_a_proxy_that_cannot_be_used(tidelog: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "gopher://127.0.0.1:70")
    result = tidelog("topics", "list", server="http://broker.example:8082")
    assert result.status == 2
    assert result.line.startswith("the proxy in the environment cannot be used: ")


# -- retries


class Late(ThreadingHTTPServer):
    """A server that starts to answer with its third request."""

    requests = 0


class LateHandler(Plain):
    server: Late

    def do_GET(self) -> None:
        self.server.requests += 1
        if self.server.requests < 3:
            self.send_error(503)
        else:
            self.send_error(404)


@pytest.fixture
def late() -> Iterator[Late]:
    server = Late(("127.0.0.1", 0), LateHandler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("command", ["produce a /dev/null", "consume a", "consume a --group g"])
def test_retry_s_holds_for_the_first_request_if_it_is_given(
    tidelog: Command, late: Late, command: str
) -> None:
    url = f"http://127.0.0.1:{late.server_port}"
    assert tidelog(*command.split(), server=url).status == 3
    assert late.requests == 1
    result = tidelog(*command.split(), "--retry-s", "600", server=url)
    assert "is this the URL of a broker?" in result.line
    assert late.requests == 3


# -- topics, groups


@pytest.mark.parametrize(
    "command",
    [
        "topics describe {}",
        "topics alter {} -p 9",
        "topics alter {} -c retention.ms=1",
        "topics delete {} --yes",
        "seal {}",
        "consume {}",
    ],
)
def test_an_unknown_topic_is_named(tidelog: Command, broker: Broker, command: str) -> None:
    result = tidelog(*command.format("nosuch").split(), server=broker.base_url)
    assert result == (4, "", "topic 'nosuch' does not exist")


def test_alter_says_what_it_has_changed(tidelog: Command, broker: Broker) -> None:
    broker.create_topic("altered", 4)
    config = ["-c", "retention.ms=86400000"]
    result = tidelog("topics", "alter", "altered", *config, server=broker.base_url)
    assert result.out == "altered altered: retention.ms=86400000 (1d)\n"
    result = tidelog("topics", "alter", "altered", "-u", "retention.ms", "-p", "5")
    assert result.out == "altered altered: retention.ms reset to its default, 5 partitions\n"


@pytest.mark.parametrize("number", ["2", "4"])
def test_fewer_partitions_are_refused_before_a_config_changes(
    tidelog: Command, broker: Broker, number: str
) -> None:
    name = f"shrunk{number}"
    broker.create_topic(name, 4)
    changes = ["-c", "retention.ms=86400000", "-p", number]
    result = tidelog("topics", "alter", name, *changes, server=broker.base_url)
    has = f"topic {name!r} has 4 partitions already: the new number, {number}, must be larger"
    assert result == (1, "", has)
    described = json.loads(tidelog("topics", "describe", name, "--json").out)
    assert described["configs"]["retention.ms"]["is_default"]


def test_consume_from_beyond_the_end_says_where_the_end_is(
    tidelog: Command, broker: Broker, topic: str
) -> None:
    broker.cli("produce", topic, stdin="a\nb\n")
    result = tidelog("consume", topic, "--from", "99999", server=broker.base_url)
    ends = f"no record from offset 99999 on: {topic} ends before it (partition 0 at 2)"
    assert result == (0, "", ends)
    assert tidelog("consume", topic, "--from", "2") == (0, "", "")
    result = tidelog("consume", topic, "--from", "99999", "--follow")
    assert (result.status, result.out) == (1, "")
    assert "offset 99999 is out of range" in result.line


def test_consume_from_beyond_the_end_of_one_partition_says_nothing(
    tidelog: Command, broker: Broker
) -> None:
    broker.create_topic("uneven", 2)
    broker.cli("produce", "uneven", "-p", "1", stdin="a\nb\n")
    assert tidelog("consume", "uneven", "--from", "1", server=broker.base_url) == (0, "b\n", "")


def test_a_group_without_members_shows_its_lag(
    tidelog: Command, broker: Broker, topic: str
) -> None:
    broker.cli("produce", topic, stdin="a\n")
    broker.cli("consume", topic, "--group", "idle")
    result = tidelog("groups", "describe", "idle", server=broker.base_url)
    assert result.out.splitlines()[1] == "no members"
    assert result.out.splitlines()[-1].split()[:4] == [topic, "0", "1", "1"]


def test_a_reset_beyond_the_end_says_that_it_goes_to_the_end(
    tidelog: Command, broker: Broker, topic: str
) -> None:
    broker.cli("produce", topic, stdin="a\nb\n")
    words = ["groups", "reset", "far", "--topic", topic, "--to"]
    result = tidelog(*words, "99999", server=broker.base_url)
    assert [line.split() for line in result.out.splitlines()[1:-1]] == [[topic, "0", "2"]]
    assert result.out.splitlines()[-1] == (
        "far goes to offset 99999, or to the nearest offset of a partition without it"
    )
    assert tidelog(*words, "1").out.splitlines()[-1] == "far goes to offset 1"


@pytest.mark.parametrize("command", ["keys list", "acls list", "quotas list"])
def test_without_security_it_says_how_to_have_it(
    tidelog: Command, broker: Broker, command: str
) -> None:
    result = tidelog(*command.split(), server=broker.base_url)
    assert result.status == 1
    assert result.line == "security is off on this broker: start it with --security keys"
