"""The console at /ui: files of this package, served by every broker.

Read once, at the start, and compressed then: ~70 KB for a browser that comes the first time, a 304
afterwards. Nothing is ever loaded from elsewhere, and nothing that users wrote is ever markup: the
policy says the first to the browser, and forbids inline scripts for the second.

The files are public, the same in every installation: what they show they ask the API for, and where
security is on that wants a login (service.keys_api).
"""

import gzip
import hashlib
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from service.errors import NoSuchResource

FILES = Path(__file__).with_name("ui")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked each time, answered 304
    "Vary": "Accept-Encoding",
}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


class _File(NamedTuple):
    body: bytes
    packed: bytes
    media_type: str
    etag: str


def load(folder: Path = FILES) -> dict[str, _File]:
    """Every file of the console by its path below /ui/."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            name = path.relative_to(folder).as_posix()
            packed = gzip.compress(body, 6, mtime=0)
            found[name] = _File(body, packed, TYPES[path.suffix], etag)
    return found


def console() -> APIRouter:
    """The routes of /ui, and the one that people try for a reference."""
    router = APIRouter(include_in_schema=False, tags=["console"])
    files = load()

    @router.get("/ui")
    async def get_console(request: Request) -> Response:
        # Relative, so that it holds behind whatever prefix a proxy takes away.
        if not request.scope.get("raw_path", b"/ui/").endswith(b"/"):
            return RedirectResponse("ui/", 307)
        return _answer(request, files["index.html"])

    @router.get("/docs")
    async def get_reference() -> Response:
        return RedirectResponse("ui/#/api", 307)

    @router.get("/ui/{path:path}")
    async def get_file(request: Request, path: str) -> Response:
        if path not in files:
            raise NoSuchResource(f"The console has no file {path}.")
        return _answer(request, files[path])

    return router


def _answer(request: Request, file: _File) -> Response:
    headers = HEADERS | {"ETag": file.etag, "Content-Type": file.media_type}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, headers=headers | {"Content-Encoding": "gzip"})
    return Response(file.body, headers=headers)
