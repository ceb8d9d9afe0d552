"""The checksum of chunks, segments and hot log frames: CRC-32C."""

import google_crc32c
import pyarrow as pa

from tidelog.storage.core.model import Part


def crc32c(body: Part, checksum: int = 0) -> int:
    """Return the CRC-32C of `body`; `checksum` is that of the bytes before it."""
    # The library takes bytes and Arrow buffers, but no memoryview. `py_buffer` does not copy.
    data = body if isinstance(body, bytes) else pa.py_buffer(body)
    return google_crc32c.extend(checksum, data)
