"""The console at /ui: files of this package, served by every broker.

The broker reads and compresses them once, at its start. A browser loads ~70 KB at the first visit
and gets 304 afterwards. The console loads no file from another server, and never interprets data of
users as markup. The Content-Security-Policy enforces both: it forbids other origins and inline
scripts.

The files are public and the same in all installations. The data comes from the API, which requires
a login if security is on (service.routes.login).
"""

import gzip
import hashlib
from pathlib import Path
from typing import NamedTuple

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from tidelog.service.http.errors import NoSuchResource
from tidelog.service.http.route import HIDDEN, PLAIN, Route, RouteAccess

FILES = Path(__file__).with_name("static")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
CONSOLE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # the browser asks each time and gets 304
    "Vary": "Accept-Encoding",
}
MEDIA_TYPE_BY_SUFFIX = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


class _ConsoleFile(NamedTuple):
    body: bytes
    packed: bytes
    media_type: str
    etag: str


def load(folder: Path = FILES) -> dict[str, _ConsoleFile]:
    """Return the files of the console by path below /ui/."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in MEDIA_TYPE_BY_SUFFIX:
            body = path.read_bytes()
            etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            name = path.relative_to(folder).as_posix()
            packed = gzip.compress(body, 6, mtime=0)
            files[name] = _ConsoleFile(body, packed, MEDIA_TYPE_BY_SUFFIX[path.suffix], etag)
    return files


_FILES = load()


async def get_console(request: Request) -> Response:
    """Serve the console's page."""
    # A relative redirect works behind a proxy that strips a prefix.
    if not request.scope.get("raw_path", b"/ui/").endswith(b"/"):
        return RedirectResponse("ui/", 307)
    return _answer(request, _FILES["index.html"])


async def get_reference() -> Response:
    """Redirect to the console's reference of the API."""
    return RedirectResponse("ui/#/api", 307)


async def get_file(request: Request, path: str) -> Response:
    """Serve one of the console's files."""
    if path not in _FILES:
        raise NoSuchResource(f"The console has no file {path}.")
    return _answer(request, _FILES[path])


def _answer(request: Request, file: _ConsoleFile) -> Response:
    headers = CONSOLE_HEADERS | {"ETag": file.etag, "Content-Type": file.media_type}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, headers=headers | {"Content-Encoding": "gzip"})
    return Response(file.body, headers=headers)


# The routes are public, because all installations have the same files, and a browser that logs in
# has no key yet.
ROUTES = (
    Route("GET", "/ui", get_console, RouteAccess.PUBLIC, "console", PLAIN, HIDDEN),
    Route("GET", "/docs", get_reference, RouteAccess.PUBLIC, "console", PLAIN, HIDDEN),
    Route("GET", "/ui/{path:path}", get_file, RouteAccess.PUBLIC, "console", PLAIN, HIDDEN),
)
