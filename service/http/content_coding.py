"""Content-Encoding of bodies and answers: gzip and zstd.

A body is unpacked in a thread, by the codecs of record batches: up to 64 times its bytes, or 16 MiB
if that is more. Unpacking stops at this bound or the body's limit, with a 413 for the request. A
large answer is packed if the client accepts a coding. On hot routes, the client must also refuse
unpacked answers (`identity;q=0`). The reason: most client libraries send `Accept-Encoding: gzip` by
default, and packing takes more CPU than the rest of a fetch.
"""

import asyncio
import zlib
from functools import lru_cache

import pyarrow as pa

from tidelog.storage.codec import decompression
from tidelog.storage.codec.batch_header import InvalidBatch
from tidelog.storage.core.errors import InvalidRequest, RecordTooLarge

ACCEPTED = "gzip, zstd"
PACKED_BYTES_MIN = 16 * 1024
"""Minimum size of an answer that is packed. A smaller answer takes few packets, packed or not."""
_GZIP_BITS = 31
_GZIP_LEVEL = 1
_CODINGS = {b"gzip": b"gzip", b"x-gzip": b"gzip", b"zstd": b"zstd"}
_CODECS = {b"gzip": decompression.GZIP, b"zstd": decompression.ZSTD}
_IDENTITY = (b"", b"identity")


class UnsupportedEncoding(InvalidRequest):
    """The body has a Content-Encoding that no route accepts."""

    status = 415
    code = 415
    headers = {"Accept-Encoding": ACCEPTED}  # noqa: RUF012 never changed


class BadEncoding(InvalidRequest):
    """The body does not have the form that its Content-Encoding declares."""

    status = 400
    code = 400


class BodyTooLarge(RecordTooLarge):
    """The body is over its limit. The connection ends, because the rest of the body is not read."""

    headers = {"Connection": "close"}  # noqa: RUF012 never changed

    def __init__(self, size: int, bytes_max: int) -> None:
        super().__init__(f"request body of {size} bytes or more is over the limit of {bytes_max}")


class UnpacksToMore(RecordTooLarge):
    """The content of the body is over its bound."""

    headers = BodyTooLarge.headers

    def __init__(self, size: int, bound: int) -> None:
        super().__init__(
            f"request body of {size} bytes unpacks to more than {bound} bytes: send smaller or "
            "less compressed bodies"
        )


def coding_of_body(header: bytes) -> bytes:
    """Return the coding of a body with this Content-Encoding, or an empty name for no coding.

    Raises UnsupportedEncoding.
    """
    name = header.strip().lower()
    if name in _IDENTITY:
        return b""
    if name not in _CODINGS:
        shown = header.decode("latin-1")[:100]
        raise UnsupportedEncoding(f"Content-Encoding {shown!r} is not supported: use {ACCEPTED}")
    return _CODINGS[name]


def unpack(body: bytes, coding: bytes, bytes_max: int) -> bytes:
    """Return the content of a body. Raises UnpacksToMore, BadEncoding."""
    try:
        return decompression.unpack(_CODECS[coding], body, bytes_max)
    except decompression.TooMuch as error:
        raise UnpacksToMore(len(body), error.bound) from error
    except InvalidBatch as error:
        raise BadEncoding(f"the body does not unpack: {error}") from error


@lru_cache(maxsize=256)
def coding_of_answer(accept_encoding: bytes, *, is_hot: bool) -> bytes:
    """Return the coding of a large answer to a client with this Accept-Encoding.

    For no coding, return an empty name.
    """
    qualities: dict[bytes, float] = {}
    for part in accept_encoding.lower().split(b","):
        name, _, parameter = part.partition(b";")
        qualities[name.strip()] = _quality(parameter)
    other_quality = qualities.get(b"*", 0.0)
    if is_hot and qualities.get(b"identity", qualities.get(b"*", 1.0)) > 0:
        return b""
    zstd, gzip = (qualities.get(name, other_quality) for name in (b"zstd", b"gzip"))
    if not max(zstd, gzip) > 0:
        return b""
    return b"zstd" if zstd >= gzip else b"gzip"


def _quality(parameter: bytes) -> float:
    name, _, number = parameter.partition(b"=")
    try:
        return float(number) if name.strip() == b"q" else 1.0
    except ValueError:
        return 1.0


async def packed(body: bytes, coding: bytes) -> bytes:
    return await asyncio.to_thread(pack, body, coding)


def pack(body: bytes, coding: bytes) -> bytes:
    return _gzip(body) if coding == b"gzip" else _pack_zstd(body)


def packed_bound(size: int) -> int:
    """Return an upper bound of the bytes of so many bytes, packed."""
    return size + size // 64 + 1024


def headers_of(coding: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"content-encoding", coding), (b"vary", b"accept-encoding"))


def _gzip(body: bytes) -> bytes:
    return zlib.compress(body, _GZIP_LEVEL, wbits=_GZIP_BITS)


def _pack_zstd(body: bytes) -> bytes:
    packed_body: bytes = pa.Codec("zstd", compression_level=1).compress(body, asbytes=True)
    return packed_body
