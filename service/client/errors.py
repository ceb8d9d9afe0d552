"""Errors of the client. A message is one line: what happened, which object, what to do.

A class exists only where a caller acts differently. `advice` is a key of ADVICE: it names the
argument that the caller may have to change. The command line has options instead of these
arguments, so it prints `message` and its own advice.
"""

ADVICE = {
    "server": "; start a broker (tidelog serve), or name another one",
    "ca": ": name its CA by ca_file",
    "key": " (give the client a key)",
}


class ClientError(Exception):
    """Root of all errors of the client.

    `is_unknown`: a broker may have done what the request says. A repetition with the same
    Idempotency-Key is safe for an hour.
    """

    is_unknown = False

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message + ADVICE.get(advice, ""))
        self.message = message
        self.advice = advice


class BadArgument(ClientError):
    """The caller's argument cannot be used. No request was sent."""


class Closed(ClientError):
    """The producer or consumer is closed."""


class NotABroker(ClientError):
    """The response is not one of a tidelog broker: of a proxy, for example."""

    is_unknown = True


class NotReachable(ClientError):
    """No broker served the request in time. Repeat it later."""

    def __init__(self, message: str, advice: str = "", *, is_unknown: bool = False) -> None:
        super().__init__(message, advice)
        self.is_unknown = is_unknown


class Refused(ClientError):
    """The broker rejected the request.

    It has changed nothing, unless `is_unknown`: the response to an earlier attempt was lost, or the
    broker has failed (status 500).

    `status` is the HTTP status, `code` the `error_code` of the response (0: none).
    """

    def __init__(self, message: str, advice: str = "", *, status: int = 0, code: int = 0) -> None:
        super().__init__(message, advice)
        self.status = status
        self.code = code


class NotFound(Refused):
    """The topic, partition, group or instance does not exist."""


class UndecodableRecord(ClientError):
    """A record does not decode.

    `topic`, `partition`, `offset` name it. The consumer delivers no later record of this partition
    until the caller seeks to another offset.
    """

    def __init__(self, topic: str, partition: int, offset: int, why: str) -> None:
        super().__init__(
            f"{topic}-{partition}@{offset} does not decode: {why} (seek to offset {offset + 1}, or "
            "choose another on_error)"
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.why = why
