"""The records of a fetch, as read and as encoded."""

from typing import NamedTuple, cast

from tidelog.service.formats import arrow
from tidelog.service.formats.json_text import ReadFormat
from tidelog.service.formats.read_parameters import FRAMINGS
from tidelog.service.formats.record_pages import OnError, RecordPage, encode_page
from tidelog.storage.core.model import ReadBounds
from tidelog.storage.records import FetchResult


class FetchParams(NamedTuple):
    """The parameters of a fetch, without the offset."""

    topic: str
    partition: int
    format_name: str
    embedded: str
    bounds: ReadBounds
    on_error: OnError = "stop"


class FetchPage(NamedTuple):
    """A fetch and its encoded records.

    Both end at `fetched.next_offset`, also if the page stops at a record that does not decode.
    `fetched` has no pieces, because they may be large.
    """

    fetched: FetchResult
    page: RecordPage


def encode(view: FetchParams, fetched: FetchResult) -> FetchPage:
    """Return the records in the format of the fetch."""
    batches = [piece.batch for piece in fetched.pieces]
    flags = [piece.is_json for piece in fetched.pieces]
    fetched = fetched._replace(pieces=[])
    if view.format_name == "arrow":
        records = sum(batch.num_rows for batch in batches)
        body = arrow.encode_arrow(batches)
        return FetchPage(fetched, RecordPage(view.topic, view.partition, body, records))
    page = encode_page(
        batches,
        view.topic,
        view.partition,
        cast("ReadFormat", view.embedded),
        is_json=flags,
        framing=FRAMINGS.get(view.format_name, "array"),
        on_error=view.on_error,
    )
    if page.stopped is not None:
        fetched = fetched._replace(next_offset=page.stopped.offset)
    return FetchPage(fetched, page)


def positions(
    fetched: FetchResult, first_offset: int | None = None
) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers with the offsets of a fetch. Only a fetch backwards has `first_offset`."""
    headers = (
        (b"tidelog-next-offset", b"%d" % fetched.next_offset),
        *limits(fetched.log_start_offset, fetched.high_watermark),
    )
    if first_offset is None:
        return headers
    return ((b"tidelog-first-offset", b"%d" % first_offset), *headers)


def limits(log_start_offset: int, high_watermark: int) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers with the first and the end offset of a partition."""
    return (
        (b"tidelog-high-watermark", b"%d" % high_watermark),
        (b"tidelog-log-start-offset", b"%d" % log_start_offset),
    )
