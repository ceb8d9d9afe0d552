"""A clock that tests hold: nothing moves it but they, or the loop whose time it follows."""

from collections.abc import Callable


class ManualClock:
    """Both clocks move together by `advance`; ids count up, and differ between `name`s.

    `loop_time`, if given, moves them too: the time of a virtual loop (tests.support.vloop).
    `skew_ms` is how wrong this machine's wall clock is.
    """

    def __init__(
        self,
        name: int = 0,
        *,
        start_ms: int = 1_700_000_000_000,
        loop_time: Callable[[], float] | None = None,
    ) -> None:
        self.name = name
        self.skew_ms = 0
        self._start_ms = start_ms
        self._slept_s = 1000.0
        self._ids = 0
        self._loop_time = loop_time

    def now_ms(self) -> int:
        return self._start_ms + self.skew_ms + int((self.boot_s() - 1000.0) * 1000)

    def boot_s(self) -> float:
        return self._slept_s + (0.0 if self._loop_time is None else self._loop_time())

    def new_id(self) -> bytes:
        self._ids += 1
        return self.name.to_bytes(8, "big") + self._ids.to_bytes(8, "big")

    def miss(self, seconds: float) -> None:
        """Let boot time miss this much, as that of a guest does that its host paused.

        Wall time is right again.
        """
        self._slept_s -= seconds
        self.skew_ms += int(seconds * 1000)

    def advance(self, seconds: float) -> None:
        """Let so much time pass, as a suspended machine does."""
        self._slept_s += seconds
