"""A forked process of the command line behaves as a new interpreter does."""

import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.broker import CAN_FORK, Broker, environment, tidelog

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="the fork server is for Linux")
PORT_OF_NOBODY = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    "arguments", [("--help",), ("bogus",), ("topics", "list"), ("serve", "--port", "x"), ()]
)
def test_status_and_streams_are_the_same(arguments: tuple[str, ...]) -> None:
    forked, fresh = (
        tidelog(*arguments, status=None, is_fresh=is_fresh, TIDELOG_URL=PORT_OF_NOBODY)
        for is_fresh in (False, True)
    )
    assert (forked.returncode, forked.stdout, forked.stderr) == (
        fresh.returncode,
        fresh.stdout,
        fresh.stderr,
    )


def test_streams_and_variables_are_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Broker(tmp_path) as broker:
        broker.create_topic("t")
        lines = b"\x00 \xe2\x82\xac\n" * 20_000  # more than a pipe takes at once
        broker.cli("produce", "t", stdin=lines)
        for is_fresh in (False, True):
            read = tidelog("consume", "t", is_fresh=is_fresh, TIDELOG_URL=broker.base_url)
            assert read.stdout == lines
        assert tidelog("scrub", "--store", "store").stdout.startswith(b"whole: ")
        assert os.environ.get("TIDELOG_URL") is None
        assert broker.stop() == 0


def test_limits_are_those_of_the_process_that_asks(tmp_path: Path) -> None:
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    limited = (10**12, old_limits[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, limited)
    try:
        with Broker(tmp_path) as broker:
            assert resource.prlimit(broker.pid, resource.RLIMIT_FSIZE) == limited
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)


def test_a_killed_process_has_the_signal_as_its_status(tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    broker.start()
    os.kill(broker.pid, signal.SIGKILL)
    assert broker._process is not None
    assert broker._process.wait(60) == -signal.SIGKILL
    assert not broker.is_running


def test_a_process_that_goes_on_is_no_status(tmp_path: Path) -> None:
    with open(os.devnull, "r+b") as nothing:
        process = fork_server.Forked(
            ["serve", "--port", "0", "--store", str(tmp_path)],
            [nothing.fileno()] * 3,
            environment(),
        )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.terminate()
    assert process.wait(60) in {0, -signal.SIGTERM}  # it may end before it handles the signal
    process.kill()  # of an ended process: nothing
