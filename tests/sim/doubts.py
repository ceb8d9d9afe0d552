"""No broker doubts a table that only tidelog has changed."""

from collections.abc import Callable
from typing import Any

from tidelog.storage.core.errors import LogError, TableInDoubt
from tidelog.storage.state.topic import Topic
from tidelog.storage.tables.open_tables import OpenTables

Patch = tuple[Any, str, Any]


def noticed(expects: Callable[[LogError], bool], bug: Callable[[str], None]) -> list[Patch]:
    """Return the patch that reports each doubt of a broker that the world does not expect.

    A doubt that ends before the run does counts, too.
    """
    real = OpenTables.doubt

    def doubt(tables: OpenTables, topic: Topic, error: TableInDoubt | None) -> None:
        if error is not None and not expects(error):
            bug(f"a broker doubts a good table: {error}")
        real(tables, topic, error)

    return [(OpenTables, "doubt", doubt)]
