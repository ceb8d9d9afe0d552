"""The body, the key and the checks of a produce request, for the routes of every dialect."""

import re

import pyarrow as pa

from tidelog.service.formats import json_in
from tidelog.service.http.parameters import SHOWN_MAX, InvalidParameter
from tidelog.service.http.request import HttpRequest
from tidelog.service.security.caller import CallerRights
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.errors import (
    InvalidRequest,
    RecordTooLarge,
)
from tidelog.storage.core.topic_configs import FLUSH_MS_MAX, TopicConfig
from tidelog.storage.state.access import PRODUCER_BYTE_RATE

KEY_LENGTH_MAX = 255
LINGER_S_MAX = FLUSH_MS_MAX / 1000
_SECONDS = re.compile(rb"[0-9]{1,3}(\.[0-9]{1,6})?")


async def body_of(call: HttpRequest, rights: CallerRights, bytes_max: int) -> bytes:
    """Read and return the body.

    Then charge its bytes to the producer's quota, also if the body is refused. If the quota is used
    up, raises QuotaExceeded before the body is read, so a throttled client need not send it.
    """
    rights.charge(PRODUCER_BYTE_RATE)
    body = b""
    try:
        body = await call.body(bytes_max)
    finally:
        rights.record(PRODUCER_BYTE_RATE, max(call.received, len(body)))
    return body


def check_records(produced: json_in.Produced, config: TopicConfig) -> None:
    """Raise RecordTooLarge if a record is too large.

    If the topic is compacted, raise InvalidRequest for the first record without a key, because no
    record would ever replace it.
    """
    rows = produced.rows
    if produced.weight > config.max_message_bytes:
        check_weights(rows, config.max_message_bytes)
    if "compact" in config.cleanup_policy:
        if isinstance(rows, Rows):
            index = rows.keys.index(None) if None in rows.keys else -1
        else:
            index = rows.column("key").is_null().index(True).as_py()
        if index >= 0:
            raise InvalidRequest(f"record {index} has no key, and the topic is compacted by key")


def check_weights(rows: Rows | pa.RecordBatch, bytes_max: int) -> None:
    """Raise RecordTooLarge for the first record that weighs more than max.message.bytes."""
    weights = chunks.weights(rows)
    index = int((weights > bytes_max).argmax())
    if weights[index] > bytes_max:
        raise RecordTooLarge(
            f"record {index} has {weights[index]} bytes (key, value and headers, "
            f"{chunks.HEADER_BYTES} more for each header and {chunks.RECORD_BYTES} for the record):"
            f" the topic's max.message.bytes is {bytes_max}"
        )


def client_key(call: HttpRequest) -> str | None:
    """Return the Idempotency-Key, or None.

    The IETF draft requires a quoted string, but a string without quotes is accepted, too. Raises
    InvalidParameter.
    """
    header = call.headers.get(b"idempotency-key")
    if header is None:
        return None
    key = header.decode("latin-1").strip('"')
    if not 1 <= len(key) <= KEY_LENGTH_MAX or not key.isprintable():
        raise InvalidParameter(
            f"Idempotency-Key must be 1 to {KEY_LENGTH_MAX} printable characters, not {len(key)}"
        )
    return key


def linger_of(call: HttpRequest) -> float | None:
    """Return the `Linger` in seconds: how long the records may wait for their commit, or None.

    Raises InvalidParameter.
    """
    header = call.headers.get(b"linger")
    if header is None:
        return None
    if not _SECONDS.fullmatch(header) or float(header) > LINGER_S_MAX:
        raise InvalidParameter(
            f"Linger must be 0 to {LINGER_S_MAX:g} seconds, like 5 or 0.25, "
            f"not {header[:SHOWN_MAX].decode('latin-1')!r}"
        )
    return float(header)
