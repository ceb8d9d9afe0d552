"""Opening of an object store by its `--store` URL. The module `probe` tests a store's guarantees.

A command line imports this module to check a URL. The modules of the stores are slow to load, so
this module imports a store's module only when it opens the store.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from tidelog.storage.core.errors import StoreUnfit
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.s3_options import S3Options
from tidelog.storage.store.start_retry import StartRetry

if TYPE_CHECKING:
    from tidelog.storage.store.object_store import ObjectStore


async def open_store(
    url: str, *, s3: S3Options | None = None, retry_s: float = 0.0
) -> "ObjectStore":
    """Open `memory://`, `file:///folder`, a plain path, or `s3://bucket/prefix`.

    Raises `StoreUnfit` if an operator must first change the URL or the store. Raises `Unavailable`
    if the store does not answer for `retry_s`.
    """
    check_url(url)
    if s3 is not None and s3.endpoint_url is not None:
        check_endpoint(s3.endpoint_url)
    folder = folder_of(url)
    if folder is not None:
        from tidelog.storage.store.folder import FolderStore

        return await asyncio.to_thread(FolderStore, folder)
    parts = urlsplit(url)
    if parts.scheme == "memory":
        from tidelog.storage.store.memory import MemoryStore

        return MemoryStore()
    from tidelog.storage.store.s3 import S3Store

    retry = StartRetry(SystemClock(), retry_s)
    return await retry.until_done(lambda: S3Store.open(parts.netloc, unquote(parts.path), s3))


def check_url(url: str) -> None:
    """Raise StoreUnfit if the URL has none of the forms of a store."""
    parts = urlsplit(url)
    is_bucket = parts.scheme == "s3" and bool(parts.netloc)
    if folder_of(url) is None and parts.scheme != "memory" and not is_bucket:
        raise StoreUnfit(
            f"store url {url!r} is none of memory://, file:///folder, a path, s3://bucket/prefix"
        )


def check_endpoint(url: str) -> None:
    """Raise StoreUnfit if the URL of an S3 server has no scheme, no host, or a wrong port."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise StoreUnfit(f"s3_endpoint {url!r} does not have the form http://HOST:PORT")


def folder_of(url: str) -> Path | None:
    """Return the folder that `file:///folder` or a path names. If the URL names none, return None.

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
