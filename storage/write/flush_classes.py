"""How long the requests in the open segment may wait for their commit.

The class of a request is the longest time for which it waits. A client gives it (`linger_s`), or
the topics do (`flush.ms`). A request without a class is committed as soon as the pace permits, and
waits for one interval at most, after the flush under way. A patient request goes with an earlier
flush if there is one.
"""

import math
from collections.abc import Iterable

from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.wal.commit_pace import CommitPace
from tidelog.storage.write.requests import AppendRequest

ANSWER_SHARE = 1 / 3
"""No class is longer than this part of the answer timeout: the commit needs the rest."""


class OpenClasses:
    """The classes of the requests in the open segment."""

    def __init__(self) -> None:
        self.until_s = math.inf
        """The earliest boot time at which the class of a request ends."""
        self._prompt_s = math.inf
        """The boot time at which the first request without a class came."""
        self._idle_s = -math.inf
        """The boot time at which the last flush ended."""

    def add(
        self, request: AppendRequest, state: ClusterState, now_s: float, answer_timeout_s: float
    ) -> bool:
        """Add a request, and set its `until_s`. Return whether the segment may be due earlier."""
        linger_s, is_prompt = _class_of(request, state)
        if linger_s is not None:
            request.until_s = now_s + min(linger_s, answer_timeout_s * ANSWER_SHARE)
        is_first = is_prompt and self._prompt_s == math.inf
        is_earlier = is_first or request.until_s < self.until_s
        self.until_s = min(self.until_s, request.until_s)
        if is_first:
            self._prompt_s = now_s
        return is_earlier

    def restart(self, requests: Iterable[AppendRequest], now_s: float) -> None:
        """Begin again with the requests that a flush has left."""
        self.until_s = self._prompt_s = math.inf
        for request in requests:
            self.until_s = min(self.until_s, request.until_s)
            self._prompt_s = now_s

    def end_flush(self, now_s: float) -> None:
        """Note that the flush under way has ended. The next one may wait for its turn from now."""
        self._idle_s = now_s

    def due_s(self, pace: CommitPace) -> float:
        """Return the boot time at which the segment is to be closed; infinity if it is empty."""
        due_s = math.inf
        if self.until_s < math.inf:
            due_s = max(pace.last_close_s(self.until_s), pace.floor_s)
        if self._prompt_s < math.inf:
            # Entries of others may move the next close again and again.
            latest_s = max(self._prompt_s, self._idle_s) + pace.interval_s
            due_s = min(due_s, pace.first_close_s(), latest_s)
        return due_s


def _class_of(request: AppendRequest, state: ClusterState) -> tuple[float | None, bool]:
    """Return the shortest class in seconds, or None, and whether a part has no class."""
    if request.linger_s is not None:
        return request.linger_s, False
    linger_ms, is_prompt = math.inf, not request.parts
    for part in request.parts:
        topic = state.topic_of_id(part.topic_id)
        flush_ms = None if topic is None else topic.config.flush_class_ms
        if flush_ms is None:
            is_prompt = True
        else:
            linger_ms = min(linger_ms, flush_ms)
    return (None if linger_ms == math.inf else linger_ms / 1000), is_prompt
