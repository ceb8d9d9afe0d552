"""F3: `tidelog serve` without options starts, and every command finds the log that it made."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.service.conftest import broker_on
from tests.support.broker import environment, error_line, tidelog, until
from tidelog.service.http.loop_turns import Turns
from tidelog.service.server.service import security_of
from tidelog.service.settings.settings import Settings, load
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.core.errors import StoreUnfit
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.open import open_store
from tidelog.storage.store.read_only import open_to_read

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")


@contextmanager
def serving(folder: Path, *arguments: str, **variables: str) -> Iterator[str]:
    """`tidelog serve` in a working directory, on a port that is free; the URL of the broker."""
    log = folder.parent / f"{folder.name}.log"
    command = [sys.executable, "-m", "tidelog.service.cli", *arguments]
    process_environment = environment(**{"TIDELOG_PORT": "0", **variables})
    with open(log, "wb") as said:
        process = subprocess.Popen(
            command, cwd=folder, env=process_environment, stdout=said, stderr=said
        )
    try:
        until(lambda: process.poll() is not None or bool(LISTENING.search(log.read_text())))
        match = LISTENING.search(log.read_text())
        assert match is not None, log.read_text()
        yield match[1]
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write_and_seal(url: str) -> None:
    tidelog("topics", "create", "t", TIDELOG_URL=url)
    tidelog("produce", "t", "--format", "ndjson", stdin='{"value":1}\n', TIDELOG_URL=url)
    tidelog("seal", "t", TIDELOG_URL=url)


CARE = ("scrub", "retain", "compact", "collect", "maintain", "delete-records t 0:1", "upgrade")


def test_every_command_finds_log_of_serve_without_options(here: Path) -> None:
    with serving(here, "serve") as url:
        write_and_seal(url)
        for command in CARE:
            tidelog(*command.split())
        assert b"whole: " in tidelog("scrub").stdout
    assert [path.name for path in here.iterdir()] == ["tidelog-data"]


def test_replay_finds_log_of_serve_without_options(here: Path, tmp_path: Path) -> None:
    """The command looks for the topic in the log, then for the target, and then starts Spark.

    tests/spark/test_replay.py has the records.
    """
    with serving(here, "serve") as url:
        write_and_seal(url)
    done = tidelog("replay", "t", "--to", str(tmp_path), status=1)
    assert "already exists" in error_line(done)
    done = tidelog("replay", "u", "--to", str(tmp_path), status=4)
    assert "already exists" not in error_line(done)


@pytest.mark.parametrize("command", ["serve", "scrub"])
@pytest.mark.parametrize("url", ["file://./data", ""])
def test_every_command_refuses_url_that_names_no_folder(here: Path, command: str, url: str) -> None:
    done = tidelog(command, "--store", url, status=2)
    assert f"store url {url!r} is none of memory://, file:///folder, a path" in error_line(done)
    assert not list(here.iterdir())


async def test_readers_and_writers_take_url_for_same_folder(here: Path) -> None:
    for name in ("plain", "a b", "c%20d"):
        for url in (f"./{name}", name, str(here / name), (here / name).as_uri()):
            writer = await open_store(url)
            reader = await open_to_read(url)
            assert reader.url == writer.url == (here / name).as_uri()
            await writer.close()
            await reader.close()


async def test_readers_refuse_what_writers_refuse() -> None:
    for url in (
        *("", "file:", "file://", "file:///", "file://./here", "gopher://burrow/7", "s3:///p"),
    ):
        for opening in (open_store, open_to_read):
            with pytest.raises(StoreUnfit, match="is none of memory://"):
                await opening(url)


# -- the image


def variables_of(stage: str) -> dict[str, str]:
    """The variables of tidelog that a stage of the Dockerfile sets."""
    text = re.search(
        rf"^FROM \S+ AS {stage}$(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL
    )
    assert text is not None
    return dict(re.findall(r"^(?:ENV|   ) (TIDELOG_\w+)=(\S+)", text[1], re.MULTILINE))


def test_image_serves_folder_of_its_volume_to_other_hosts() -> None:
    (volume,) = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.MULTILINE)
    settings = load({}, variables_of("broker"))
    assert Path(volume) in Path(settings.store).parents
    assert settings.host == "0.0.0.0"
    assert f"EXPOSE {settings.port} " in DOCKERFILE
    assert f"http://127.0.0.1:{settings.port}/ready" in DOCKERFILE
    assert load({}, variables_of("spark")).store == settings.store


def test_command_of_image_starts_with_variables_of_image(here: Path) -> None:
    assert 'ENTRYPOINT ["tidelog"]\nCMD ["serve"]' in DOCKERFILE
    store = variables_of("broker")["TIDELOG_STORE"]
    inside = {"TIDELOG_STORE": f"{here}{store}", "HOME": str(here)}
    with serving(here, "serve", **inside) as url:
        write_and_seal(url)
        assert b"whole: " in tidelog("scrub", **inside).stdout
    assert (here / store[1:] / "cluster.json").is_file()


@pytest.mark.parametrize(("host", "warnings"), [("127.0.0.1", 0), ("0.0.0.0", 1)])
async def test_broker_that_others_reach_without_keys_says_so(
    caplog: pytest.LogCaptureFixture, host: str, warnings: int
) -> None:
    async with broker_on(MemoryStore()) as broker:
        caplog.clear()
        assert not security_of(Settings(host=host), broker.log, None, HttpCounters(), Turns())
    assert caplog.text.count(f"every client that reaches {host} may do all") == warnings


# -- make serve


def test_make_serve_is_serve_without_options() -> None:
    done = subprocess.run(
        ["make", "-n", "-o", "has-runtime", "serve", "ARGS=--port 9000"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},  # without MAKEFLAGS and MAKELEVEL of `make test`
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [".venv/bin/tidelog serve --port 9000"]
