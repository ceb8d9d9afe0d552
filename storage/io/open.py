"""Opening of an object store by its `--store` URL, and the probe of its guarantees (DESIGN 4).

The probe writes below `probe/` only, under an id of its own, and deletes what it wrote.
**On a crash** before the delete: a few small objects are left, which no process reads.
"""

import asyncio
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tidelog.storage.core.errors import StoreUnfit
from tidelog.storage.io.clock import SystemClock
from tidelog.storage.io.folder import FolderStore
from tidelog.storage.io.memory import MemoryStore
from tidelog.storage.io.object_store import ObjectStore
from tidelog.storage.io.s3_options import S3Options
from tidelog.storage.io.start_retry import StartRetry


async def open_store(url: str, *, s3: S3Options | None = None, retry_s: float = 0.0) -> ObjectStore:
    """Open `memory://`, `file:///folder`, a plain path, or `s3://bucket/prefix`.

    Raises `StoreUnfit` if the URL or the store cannot be used until an operator changes it,
    `Unavailable` if the store does not answer for `retry_s`.
    """
    folder = folder_of(url)
    if folder is not None:
        return await asyncio.to_thread(FolderStore, folder)
    parts = urlsplit(url)
    match parts.scheme:
        case "memory":
            return MemoryStore()
        case "s3" if parts.netloc:
            # The SDK is slow to load; a folder needs none.
            from tidelog.storage.io.s3 import S3Store

            retry = StartRetry(SystemClock(), retry_s)
            return await retry.until_done(
                lambda: S3Store.open(parts.netloc, unquote(parts.path), s3)
            )
        case _:
            raise StoreUnfit(
                f"store url {url!r} is none of memory://, file:///folder, a path, s3://bucket/prefix"
            )


def folder_of(url: str) -> Path | None:
    """The folder that `file:///folder` or a plain path names; None where the URL names no folder.

    A file URL names an absolute path: `file://./folder` has a host, `.`, and so names no folder.
    """
    parts = urlsplit(url)
    match parts.scheme:
        case "" if url:
            return Path(url)
        case "file" if not parts.netloc and len(parts.path) > 1:
            return Path(unquote(parts.path))
        case _:
            return None
