"""`tidelog dev`: a broker with live data, to look at until Ctrl-C.

The broker is a child process. This process is its client: it produces departures of invented
flights, and reads them as the members of two groups, of which one is slower than the data. The log
is kept. A later start continues with the next departure and at the committed offsets.

**On a crash**: if this process is killed, Linux sends SIGTERM to the broker. The members expire.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import math
import os
import random
import signal
import sys
import webbrowser
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tidelog.service.cli.requests import quoted
from tidelog.service.cli.results import BadUsage, CommandError, NotThere
from tidelog.service.exit_status import EXIT_OK
from tidelog.service.server.banner import Fact, banner, command, console_of, local
from tidelog.service.setting_fields import BadSettings
from tidelog.service.settings import Settings, client_ca_file, client_key, load
from tidelog.storage.io.open import folder_of

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess
    from multiprocessing.synchronize import Event

    from tidelog.service.cli.client import Client

TOPIC = "departures"
PARTITIONS = 4
CONFIGS = {"segment.ms": "60000", "retention.ms": "86400000"}
"""After a minute, the topic has a table to look at. After a day, departures are deleted."""
MEDIA_TYPE = "application/vnd.kafka.json.v2+json"
SEED = 2013
PRODUCE_S = 0.2
"""Time between two requests of the producer: each is a commit, and an object in the folder."""
START_S = 240.0
"""A broker needs 1.5 s of CPU to start; a busy machine takes longer."""
STOP_S = 28.0
"""A broker needs at most 22 s to stop."""
POLL_MS = 2000
SESSION_MS = 10_000
"""If this process was killed, the next one gets the partitions after this time."""

_CARRIERS = ("AA", "B6", "DL", "EV", "MQ", "UA", "US", "WN")
_ORIGINS = ("EWR", "JFK", "LGA")
_AIRPORTS = (("ATL", 762), ("BOS", 187), ("LAX", 2475), ("MIA", 1089), ("ORD", 733), ("SFO", 2586))
_PLANES = 400


class Group(NamedTuple):
    """A group of one member. A member reads at most `records` records each `pause_s` seconds."""

    name: str
    records: int
    pause_s: float


GROUPS = (Group("dashboard", 1000, 0.5), Group("report", 5, 0.5))
"""The group `report` reads 10 records a second, so it lags."""


def departure(number: int) -> dict[str, Any]:
    """Return the record of one departure. Equal numbers have equal records."""
    chance = random.Random(SEED * 1_000_003 + number)
    carrier = chance.choice(_CARRIERS)
    plane = chance.randrange(_PLANES)
    airport, distance = chance.choice(_AIRPORTS)
    value = {
        "number": number,
        "carrier": carrier,
        "flight": f"{carrier}{100 + plane}",
        "origin": chance.choice(_ORIGINS),
        "destination": airport,
        "distance": distance,
        "delay": round(chance.expovariate(1 / 18)) - 5,  # minutes; 18 is a usual mean
    }
    return {"key": f"N{10_000 + plane}{carrier}", "value": value}


def dev(
    store_url: Annotated[
        str | None,
        typer.Argument(metavar="STORE", help="folder or URL of the log (default ./tidelog-data)"),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="port of the broker (8082)")
    ] = None,
    rate: Annotated[
        int, typer.Option("--rate", min=1, max=10_000, metavar="N", help="records a second")
    ] = 50,
    browser: Annotated[
        bool,
        typer.Option(
            "--browser/--no-browser",
            help="open the console, if this is a terminal with a graphical browser",
        ),
    ] = True,
) -> None:
    """Run a broker with live data until Ctrl-C.

    The topic `departures` gets invented flights. The group `dashboard` reads all of them; the group
    `report` is too slow, so it lags. The log is kept, and the next start continues with it. Other
    settings are variables, as for `tidelog serve`.

    Example: tidelog dev ./trial
    """
    given = {"store": store_url, "port": None if port is None else str(port)}
    try:
        settings = load({name: text for name, text in given.items() if text is not None})
    except BadSettings as error:
        raise BadUsage(str(error)) from None
    if settings.port == 0 or settings.workers > 1:
        raise BadUsage("tidelog dev runs one broker on a port that it knows: set port, not workers")
    if importlib.util.find_spec("uvicorn") is None:
        raise ModuleNotFoundError(name="uvicorn")  # the message names the extra
    raise typer.Exit(asyncio.run(_run(settings, rate, is_browser_wanted=browser)))


async def _run(settings: Settings, rate: int, *, is_browser_wanted: bool) -> int:
    """Run the broker and its clients until SIGINT or SIGTERM, or until the broker ends. Return the
    exit status: that of the broker."""
    from tidelog.service.cli.client import Client

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = local(f"{'https' if settings.tls_cert_file else 'http'}://{host}:{settings.port}")
    async with _broker(settings, ended) as process:
        client = Client(url, key=client_key(), retry_s=math.inf, ca_file=client_ca_file())
        async with client:
            members = [_Member(client, group) for group in GROUPS]
            work = asyncio.create_task(_live(client, members, rate))
            greeting = asyncio.create_task(
                _greet(members, _banner(url, settings, rate), url if is_browser_wanted else "")
            )
            stop = asyncio.create_task(ended.wait())
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            has_failed = work.done()
            for task in (work, greeting, stop):
                task.cancel()
            await asyncio.gather(work, greeting, stop, return_exceptions=True)
            client.retry_s = 0.0
            for member in members:
                await member.leave()
            if has_failed:
                work.result()  # raises the error that ended it
    return EXIT_OK if process.exitcode is None else abs(process.exitcode)


@contextlib.asynccontextmanager
async def _broker(settings: Settings, ended: asyncio.Event) -> "AsyncIterator[SpawnProcess]":
    """Run a broker in a child process; yield it when it listens, or when `ended` is set. Set
    `ended` when the broker ends. At the end it has stopped."""
    import multiprocessing

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
        await asyncio.to_thread(process.join, STOP_S)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(settings: Settings, is_up: "Event", parent: int) -> None:
    """Run the broker. This is the entry point of its process."""
    from tidelog.service.server.serve import leave, run
    from tidelog.service.server.workers import end_with

    end_with(parent)
    # Ctrl-C goes to all processes of the terminal's foreground group. The parent ends the broker
    # when its members have left their groups.
    os.setpgid(0, 0)
    leave(run(settings, on_listening=is_up.set))


async def _live(client: "Client", members: Sequence["_Member"], rate: int) -> None:
    """Produce and read without end. Raises CommandError."""
    from tidelog.storage.io.tasks import together

    first = await _create_topic(client)
    await together(_produce(client, first, rate), *(member.run() for member in members))


async def _greet(members: Sequence["_Member"], text: str, browser_url: str) -> None:
    """Print the banner when each member has read. Then open the console, if `browser_url` is not
    empty and this is a terminal."""
    for member in members:
        await member.has_read.wait()
    sys.stderr.write(f"{text}\n")
    if browser_url and sys.stderr.isatty():
        await asyncio.to_thread(_open_browser, f"{browser_url}/ui/")


async def _create_topic(client: "Client") -> int:
    """Create the topic if it does not exist; return the number of its records so far."""
    path = f"/topics/{TOPIC}"
    try:
        partitions = await client.get_json(f"{path}/partitions")
    except NotThere:
        configs = [{"name": name, "value": value} for name, value in CONFIGS.items()]
        body = {"topic_name": TOPIC, "partitions_count": PARTITIONS, "configs": configs}
        await client.post(f"{await client.cluster()}/topics", json=body)
        return 0
    ends = [
        (await client.get_json(f"{path}/partitions/{each['partition']}/offsets"))["end_offset"]
        for each in partitions
    ]
    return int(sum(ends))


async def _produce(client: "Client", number: int, rate: int) -> None:
    """Produce departures from `number` on, `rate` of them each second."""
    from tidelog.storage.io.clock import SystemClock

    run_id = SystemClock().new_id().hex()
    loop = asyncio.get_running_loop()
    due, sent_s = 0.0, loop.time()
    while True:
        # After a pause of the machine, go on at the same rate: do not make up for the pause.
        now_s = loop.time()
        due, sent_s = due + min(now_s - sent_s, 1.0) * rate, now_s
        count = int(due)
        if count:
            due -= count
            body = {"records": [departure(number + each) for each in range(count)]}
            headers = {"content-type": MEDIA_TYPE, "idempotency-key": f'"dev-{run_id}-{number}"'}
            await client.post(f"/topics/{TOPIC}", json=body, headers=headers)
            number += count
        await asyncio.sleep(PRODUCE_S)


class _Member:
    """The member of one group, from `run` to `leave`. `has_read` is set after its first commit."""

    def __init__(self, client: "Client", group: Group) -> None:
        self.has_read = asyncio.Event()
        self._client = client
        self._group = group
        self._base = f"/consumers/{quoted(group.name)}"
        self._instance = ""

    async def run(self) -> None:
        """Read and commit until the task is cancelled. Raises CommandError."""
        while True:
            try:
                await self._join()
                while True:
                    await self._read()
                    await asyncio.sleep(self._group.pause_s)
            except NotThere:
                self._instance = ""  # it expired, as after a suspend of the machine: join again

    async def leave(self) -> None:
        """Delete the instance, so that the next start gets its partitions at once."""
        if self._instance:
            with contextlib.suppress(CommandError):  # without a broker, it expires
                await self._client.call("DELETE", self._instance)

    async def _join(self) -> None:
        body = {
            "format": "json",
            "auto.offset.reset": "earliest",
            "auto.commit.enable": False,
            "max.poll.records": self._group.records,
            "session.timeout.ms": SESSION_MS,
            "on.error": "skip",  # records that a user produced in another form
            "client.id": "tidelog-dev",
        }
        created = self._client.json_of(await self._client.post(self._base, json=body))
        self._instance = f"{self._base}/instances/{quoted(created['instance_id'])}"
        await self._client.post(f"{self._instance}/subscription", json={"topics": [TOPIC]})

    async def _read(self) -> None:
        path = f"{self._instance}/records"
        answer = await self._client.get(
            path, params={"timeout": POLL_MS}, headers={"accept": MEDIA_TYPE}
        )
        if self._client.json_of(answer):
            await self._client.post(f"{self._instance}/offsets")  # all that was read
            self.has_read.set()


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
        found = webbrowser.get()
        if type(found) is not webbrowser.GenericBrowser:  # the class of browsers in a terminal
            found.open(url)
