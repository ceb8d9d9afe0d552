"""Requests that are under way, and which of them is next with which outcome.

Requests of one process are done in their order; checkpoints and announcements are in lanes of their
own. While a process has a request under way, its next one is done first: another lane instead is a
preemption. If it has none, each other lane may be next. A request that commutes with all others is
done at once.

Time stands still while a request is under way. That it passes before, so that a broker gives up a
message, is a preemption, too. A late request (a PUT whose sender has no answer, a message) arrives
at any later moment as a preemption, and before the next rest in any case.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.explore.choices import Choices, Option
from tests.sim import machine
from tests.sim.machine import Process

INSTANT_S = 0.001
"""A timer that is due within this time counts as due now: threads that do their work in order."""
PASSED_S = 0.35
"""How much time passes in a preemption: more than brokers wait for a peer (world.SETTINGS)."""
REST_S = 1.0
"""Without a request for so long, all are at rest: longer than the pauses after two faults."""

DONE = "done"
NOT_DONE = "not done, no answer"
ANSWER_LOST = "done, no answer"
CALLED_412 = "done, answered 412"
LATE = "late, no answer"
KILLED_BEFORE = "the process is killed before"
KILLED_AMID = "the process is killed amid"
KILLED_AFTER = "the process is killed after"
SUSPENDED = "the process is suspended before"


@dataclass
class Request:
    """One request of a process.

    `act` does it, with the chosen fate; `fates` are the faults that it may meet now.
    """

    lane: str
    name: str
    process: Process | None
    act: Callable[[str], None]
    fates: Callable[[], Sequence[str]] = tuple
    commutes: Callable[[], bool] = lambda: False
    body: bytes = b""
    """The content of a PUT."""


@dataclass
class Stage:
    """Where requests wait for their turn."""

    choices: Choices
    note: Callable[[str], None] = lambda what: None
    is_free: bool = True
    """Requests are done at once, without a choice."""
    has_deletes: bool = False
    """Reads of objects do not commute then."""
    may_suspend: bool = False
    patient: list[Process] = field(default_factory=list)
    """Those that wait for the answer to a message with a limit of time."""
    held: list[Request] = field(default_factory=list)
    """Of suspended processes."""
    late: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    _lanes: dict[str, list[Request]] = field(default_factory=dict)
    _last: str = ""

    def send(self, request: Request) -> None:
        self._lanes.setdefault(request.lane, []).append(request)

    def hold(self, request: Request) -> None:
        """Suspend the request's process before the request is done."""
        assert request.process is not None
        request.process.stop()
        self.held.append(request)

    def wake(self) -> None:
        """Let suspended processes go on, with their requests."""
        for request in self.held:
            assert request.process is not None
            request.process.go_on()
            if self.is_free and not request.process.is_dead:
                request.act(DONE)
            else:
                self.send(request)
        self.held = []

    async def play(self, is_over: Callable[[], bool]) -> None:
        """Do requests in chosen order with chosen fates, until it is over and all are at rest."""
        self.is_free, self._last = False, ""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, machine.Loop)
        rest_s: float | None = None
        while True:
            await self._settle(loop)
            if (commuting := self._commuting()) is not None:
                self._do(commuting)
                continue
            if self._lanes or self.late or not is_over():
                rest_s = None
            elif rest_s is None:
                rest_s = loop.time() + REST_S
            if rest_s is not None and min(loop.next_s, rest_s) >= rest_s:
                break
            await self._move(loop, is_over=is_over())
        self.is_free = True

    async def _settle(self, loop: machine.Loop) -> None:
        """Until nothing runs before time passes or a request is done."""
        while True:
            await asyncio.sleep(0)
            wait_s = loop.next_s - loop.time()
            if wait_s <= INSTANT_S:
                await asyncio.sleep(max(wait_s, 0.0))
            elif loop.is_idle:
                break
        for lane, requests in list(self._lanes.items()):
            alive = [
                request for request in requests if not (request.process and request.process.is_dead)
            ]
            if alive:
                self._lanes[lane] = alive
            else:
                del self._lanes[lane]

    def _commuting(self) -> Request | None:
        for requests in self._lanes.values():
            if requests[0].commutes():
                return requests[0]
        return None

    async def _move(self, loop: machine.Loop, *, is_over: bool) -> None:
        lanes = list(self._lanes)
        is_free = self._last not in lanes
        if not is_free:
            lanes.remove(self._last)
            lanes.insert(0, self._last)
        options = [
            Option(self._lanes[lane][0].name, preemptions=not is_free and number > 0)
            for number, lane in enumerate(lanes)
        ]
        if not lanes and (not self.late or not is_over):
            options.append(Option("time"))
        late = len(options)
        options += [Option(f"late {name}", preemptions=bool(options)) for name, _ in self.late]
        if lanes and any(not (process.is_dead or process.is_stopped) for process in self.patient):
            options.append(Option("time", preemptions=1))
        index = self.choices.choose("next", options)
        if options[index].name == "time":
            pause_s = PASSED_S if lanes else max(loop.next_s - loop.time(), 0.0)
            self.note("time passes")
            await asyncio.sleep(pause_s)
        elif late <= index < late + len(self.late):
            name, arrive = self.late.pop(index - late)
            self.note(f"late {name} arrives")
            arrive()
        else:
            self._last = lanes[index]
            self._do(self._lanes[lanes[index]][0])

    def _do(self, request: Request) -> None:
        requests = self._lanes[request.lane]
        requests.remove(request)
        if not requests:
            del self._lanes[request.lane]
        options = [Option(DONE), *(Option(fate, faults=1) for fate in request.fates())]
        fate = options[self.choices.choose(request.name, options)].name
        self.note(f"{request.name}: {fate}")
        request.act(fate)
