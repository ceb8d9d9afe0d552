"""`tidelog dev`: a broker with live data, until Ctrl-C.

The broker is a child process. This process is its client: it produces departures of invented
flights, numbered from 0, and reads them as the members of two groups, of which one is slower than
the data. The log is kept. A later start continues with the next departure and at the committed
offsets.

**On a crash**: if this process is killed, Linux sends SIGTERM to the broker. The members expire.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import math
import multiprocessing
import os
import signal
import sys
import webbrowser
from collections.abc import AsyncIterator, Sequence
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from typing import Annotated

import typer
from typer import Argument, Option

from tidelog.service.cli.broker_requests import client_errors
from tidelog.service.cli.errors import BadUsage
from tidelog.service.cli.output import warn
from tidelog.service.cli.sample_flights import GROUPS, TOPIC, DepartureReader, live
from tidelog.service.client.connection import Connection
from tidelog.service.exit_status import EXIT_OK, EXIT_SIGNALS
from tidelog.service.server.banner import Fact, banner, command, console_of, local
from tidelog.service.settings.settings import Settings, client_ca_file, client_key, load
from tidelog.storage.store.open import folder_of

START_S = 240.0
"""A broker needs 1.5 s of CPU to start; a busy machine takes longer."""


def dev(
    store_url: Annotated[
        str | None,
        Argument(metavar="STORE", help="folder or URL of the log (default ./tidelog-data)"),
    ] = None,
    port: Annotated[
        int | None, Option("--port", min=1, max=65535, help="port of the broker (8082)")
    ] = None,
    rate: Annotated[
        int, Option("--rate", min=1, max=10_000, metavar="N", help="records a second")
    ] = 50,
    browser: Annotated[
        bool,
        Option(
            "--browser/--no-browser",
            help="open the console, if this is a terminal with a graphical browser",
        ),
    ] = True,
) -> None:
    """Run a broker with live data until Ctrl-C.

    The topic `departures` gets invented flights. The group `dashboard` reads all of them; the group
    `report` is too slow, so it lags. The log is kept, and the next start continues with it. Other
    settings come from variables, as for `tidelog serve`.

    Example: tidelog dev ./trial
    """
    flags = {"store": store_url, "port": None if port is None else str(port)}
    settings = load({name: text for name, text in flags.items() if text is not None}, warn=warn)
    if settings.port == 0 or settings.workers > 1:
        raise BadUsage("tidelog dev runs one broker: port 0 and more than one worker are refused")
    if importlib.util.find_spec("uvicorn") is None:
        raise ModuleNotFoundError(name="uvicorn")  # the message names the extra
    with client_errors():
        raise typer.Exit(asyncio.run(_run(settings, rate, is_browser_wanted=browser)))


async def _run(settings: Settings, rate: int, *, is_browser_wanted: bool) -> int:
    """Run the broker and its clients until SIGINT or SIGTERM, or until the broker ends.

    Return the exit status: that of the broker.
    """
    from tidelog.service.http.urls import host_of_url

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    scheme = "https" if settings.tls_cert_file else "http"
    url = local(f"{scheme}://{host_of_url(settings.host)}:{settings.port}")
    async with _broker(settings, ended) as process:
        key, ca_file = client_key(), client_ca_file()
        async with Connection(url, key=key, retry_s=math.inf, ca_file=ca_file) as connection:
            members = [DepartureReader(connection, group) for group in GROUPS]
            work = asyncio.create_task(live(connection, members, rate))
            greeting = asyncio.create_task(
                _greet(members, _banner(url, settings, rate), url if is_browser_wanted else "")
            )
            stop = asyncio.create_task(ended.wait())
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            has_failed = work.done()
            if not has_failed and process.is_alive():
                drain_s = settings.drain_ms / 1000
                _say(f"stopping; connected clients have up to {drain_s:g} s to end")
            for task in (work, greeting, stop):
                task.cancel()
            await asyncio.gather(work, greeting, stop, return_exceptions=True)
            if has_failed:
                work.result()  # raises the error that ended it
    code = process.exitcode or EXIT_OK
    return code if code >= 0 else EXIT_SIGNALS - code


@contextlib.asynccontextmanager
async def _broker(settings: Settings, ended: asyncio.Event) -> AsyncIterator[SpawnProcess]:
    """Run a broker in a child process; yield it when it listens, or when `ended` is set.

    Set `ended` when the broker ends. At the end it has stopped.
    """
    from tidelog.service.server.serve import STOP_S_MAX

    context = multiprocessing.get_context("spawn")
    is_up = context.Event()
    quiet = dataclasses.replace(settings, log_level="warning")
    process = context.Process(target=_serve, args=(quiet, is_up, os.getpid()), name="broker")
    process.start()
    asyncio.get_running_loop().add_reader(process.sentinel, ended.set)
    try:
        is_listening = asyncio.create_task(asyncio.to_thread(is_up.wait, START_S))
        has_ended = asyncio.create_task(ended.wait())
        await asyncio.wait((is_listening, has_ended), return_when=asyncio.FIRST_COMPLETED)
        has_ended.cancel()
        is_up.set()  # ends the thread
        yield process
    finally:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        if process.is_alive():
            process.terminate()
        for number in (signal.SIGINT, signal.SIGTERM):  # a second signal ends the drain
            asyncio.get_running_loop().add_signal_handler(number, process.terminate)
        await asyncio.to_thread(process.join, settings.drain_ms / 1000 + STOP_S_MAX)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(settings: Settings, is_up: Event, parent: int) -> None:
    """Run the broker. This is the entry point of its process."""
    from tidelog.service.server.serve import leave, run
    from tidelog.service.server.workers import end_with

    end_with(parent)
    # At Ctrl-C, the terminal sends SIGINT to all processes of its foreground group. The broker
    # leaves this group, because the parent ends it later: when the members have left their groups.
    os.setpgid(0, 0)
    leave(run(settings, on_listening=is_up.set))


def _say(text: str) -> None:
    sys.stderr.write(f"tidelog dev: {text}\n")


async def _greet(members: "Sequence[DepartureReader]", text: str, browser_url: str) -> None:
    """Print the banner when each member has read.

    Then open the console, if `browser_url` is not empty and this is a terminal.
    """
    for member in members:
        await member.has_read.wait()
    sys.stderr.write(f"{text}\n")
    if browser_url and sys.stderr.isatty():
        await asyncio.to_thread(_open_browser, f"{browser_url}/ui/")


def _banner(url: str, settings: Settings, rate: int) -> str:
    folder = folder_of(settings.store)
    store = settings.store if folder is None else str(folder.absolute())
    facts = [console_of(url), Fact("store", store)]
    if settings.kafka_port:
        facts.append(Fact("Kafka", f"{settings.kafka_host or settings.host}:{settings.kafka_port}"))
    fast, slow = (group.name for group in GROUPS)
    record = """echo '{"value": "hello"}' | """
    facts += [
        Fact("data", f"{rate} records a second in topic {TOPIC}, read by {fast} and {slow}"),
        Fact("next", command(f"consume {TOPIC} --follow --max 5", url)),
        Fact("", command(f"groups lag {slow}", url)),
        Fact("", f"{record}{command(f'produce {TOPIC} --format ndjson', url)}"),
        Fact("end", "Ctrl-C; the log is kept, and the next start continues with it"),
    ]
    return banner(f"tidelog dev: a broker with live data on {url}", facts)


def _open_browser(url: str) -> None:
    """Open the console in a graphical browser. A browser in the terminal would hide the banner."""
    with contextlib.suppress(webbrowser.Error):
        browser = webbrowser.get()
        if type(browser) is not webbrowser.GenericBrowser:  # the class of browsers in a terminal
            browser.open(url)


# -- the live data
