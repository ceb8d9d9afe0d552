"""`tidelog seal`: it moves the tail of a topic into its table."""

import math

from tidelog.service.cli.broker_requests import ClientCommand
from tidelog.service.cli.completion import TopicArgument
from tidelog.service.cli.output import (
    plural,
    with_progress,
)
from tidelog.service.client.connection import Connection, quoted


def seal(name: TopicArgument, command: ClientCommand) -> None:
    """Move the tails of a topic into its table now.

    Spark, DuckDB and other readers of Delta tables see only sealed records.
    """

    async def work(connection: Connection) -> int:
        path = f"/admin/topics/{quoted(name)}/seal"
        sealing = with_progress(f"sealing {name}", lambda _: connection.post(path, wait_s=math.inf))
        sealed: int = (await sealing).json()["sealed_records"]
        return sealed

    sealed = command.run(work)
    text = f"sealed {plural(sealed, 'record')} of {name}"
    command.show({"name": name, "sealed_records": sealed}, text)
