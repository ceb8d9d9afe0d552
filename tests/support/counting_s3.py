"""An S3 server in memory that counts each request: whose it was, what it did, to which objects.

    with running_counting_s3() as server:       # a process of its own, on a free port
        ...                                     # brokers on server.bucket at server.endpoint_url
        counts = server.counts()                # by Request, since the start
    python -m tests.support.counting_s3 --put-ms 60 --get-ms 30     # prints its port

It sees what no meter of a broker can: the requests of every client, those of deltalake too. PUT is
atomic create-if-absent, LIST is in byte order. It checks no signature and keeps nothing.
"""

import argparse
import asyncio
import bisect
import hashlib
import json
import math
import random
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import unquote, urlencode
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from aiohttp import web

from tidelog.storage.core import object_keys

BUCKET = "tidelog"
CONTROL = "-"
"""The path of what is no S3; no bucket has this name."""
PAGE = 1000
P99_FACTOR = 3.0
"""How much longer than the median one request in a hundred takes."""
BODY_BYTES_MAX = 1 << 30
_Z99 = 2.326  # the 99th percentile of the normal distribution


class Request(NamedTuple):
    """The fields by which requests are counted.

    `client` is `tidelog`, `deltalake` or the beginning of a User-Agent; `verb` is PUT, GET, HEAD,
    LIST, POST or DELETE, `kind` the kind of the object or of the listed prefix.
    """

    client: str
    verb: str
    kind: str
    status: int


class Latency(NamedTuple):
    """Medians in seconds, of a lognormal distribution, and the rate of a body's bytes."""

    write_s: float = 0.0
    """Of PUT, POST and LIST."""
    read_s: float = 0.0
    bytes_per_s: float = math.inf

    def drawn_s(self, draw: random.Random, verb: str, size: int) -> float:
        median_s = self.write_s if verb in {"PUT", "POST", "LIST"} else self.read_s
        spread = math.exp(draw.gauss(0, 1) * math.log(P99_FACTOR) / _Z99)
        return median_s * spread + size / self.bytes_per_s


NO_LATENCY = Latency()


class StoredObject(NamedTuple):
    """An object, and when it was written."""

    body: bytes
    at_s: float

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.body, usedforsecurity=False).hexdigest()}"'


class CountingS3:
    """The server: objects of one bucket by key, and the counts."""

    def __init__(self, latency: Latency, seed: int = 1) -> None:
        self.counts: Counter[Request] = Counter()
        self.bytes_in: Counter[str] = Counter()
        self.bytes_out: Counter[str] = Counter()
        self._latency = latency
        self._draw = random.Random(seed)
        self._objects: dict[str, StoredObject] = {}
        self._keys: list[str] = []
        self._uploads: dict[str, dict[int, bytes]] = {}

    def application(self) -> web.Application:
        application = web.Application(client_max_size=BODY_BYTES_MAX)
        application.router.add_get(f"/{CONTROL}/counts", self._get_counts)
        application.router.add_post(f"/{CONTROL}/reset", self._reset)
        application.router.add_post(f"/{CONTROL}/latency", self._set_latency)
        application.router.add_route("*", "/{bucket}{key:(?:/.*)?}", self._serve)
        return application

    # -- control

    async def _get_counts(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "requests": [[*request, count] for request, count in self.counts.items()],
                "bytes_in": self.bytes_in,
                "bytes_out": self.bytes_out,
                "objects": len(self._objects),
            }
        )

    async def _reset(self, _: web.Request) -> web.Response:
        for counter in (self.counts, self.bytes_in, self.bytes_out):
            counter.clear()
        return web.Response()

    async def _set_latency(self, request: web.Request) -> web.Response:
        values = {name: float(text) for name, text in request.query.items()}
        self._latency = Latency(**values)
        return web.Response()

    # -- S3

    async def _serve(self, request: web.Request) -> web.Response:
        body = await request.read()
        if "aws-chunked" in request.headers.get("Content-Encoding", ""):
            body = _unchunked(body)
        key = unquote(request.raw_path.partition("?")[0]).lstrip("/").partition("/")[2]
        verb, serve = self._operation(request, key)
        response = serve(request, key, body)
        answer = response.body if isinstance(response.body, bytes) else b""
        counted = Request(
            _client(request), verb, _requested_kind(request, key, body), response.status
        )
        self.counts[counted] += 1
        self.bytes_in[counted.client] += len(body)
        self.bytes_out[counted.client] += len(answer)
        latency_s = self._latency.drawn_s(self._draw, verb, max(len(body), len(answer)))
        if latency_s:
            await asyncio.sleep(latency_s)
        return response

    def _operation(
        self, request: web.Request, key: str
    ) -> tuple[str, Callable[[web.Request, str, bytes], web.Response]]:
        query = request.query
        if not key:
            if request.method == "GET" and "location" not in query:
                return "LIST", self._list
            if request.method == "POST":
                return "DELETE", self._delete_many
            return request.method, _answer_empty
        if request.method == "POST":
            return "POST", self._begin_upload if "uploads" in query else self._end_upload
        if request.method == "PUT" and "uploadId" in query:
            return "PUT", self._put_part
        if request.method == "PUT" and "x-amz-copy-source" in request.headers:
            return "PUT", self._copy
        serve = {
            "PUT": self._put,
            "GET": self._get,
            "HEAD": self._get,
            "DELETE": self._delete,
        }.get(request.method, _answer_not_implemented)
        return request.method, serve

    def _put(self, request: web.Request, key: str, body: bytes) -> web.Response:
        if request.headers.get("If-None-Match") == "*" and key in self._objects:
            return _error(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
        if_match = request.headers.get("If-Match")
        if if_match is not None:
            old = self._objects.get(key)
            if old is None or old.etag.strip('"') != if_match.strip('"'):
                return _error(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
        return web.Response(headers={"ETag": self._store(key, body).etag})

    def _store(self, key: str, body: bytes) -> StoredObject:
        if key not in self._objects:
            bisect.insort(self._keys, key)
        stored = self._objects[key] = StoredObject(body, time.time())
        return stored

    def _copy(self, request: web.Request, key: str, _: bytes) -> web.Response:
        source = unquote(request.headers["x-amz-copy-source"]).lstrip("/").partition("/")[2]
        if source not in self._objects:
            return _error(HTTPStatus.NOT_FOUND, "NoSuchKey")
        stored = self._store(key, self._objects[source].body)
        return _xml(f"<CopyObjectResult><ETag>{stored.etag}</ETag></CopyObjectResult>")

    def _begin_upload(self, _: web.Request, key: str, __: bytes) -> web.Response:
        upload_id = f"upload-{len(self._uploads)}"
        self._uploads[upload_id] = {}
        return _xml(
            f"<InitiateMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key>"
            f"<UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
        )

    def _put_part(self, request: web.Request, _: str, body: bytes) -> web.Response:
        parts = self._uploads.get(request.query["uploadId"])
        if parts is None:
            return _error(HTTPStatus.NOT_FOUND, "NoSuchUpload")
        parts[int(request.query["partNumber"])] = body
        return web.Response(headers={"ETag": StoredObject(body, 0.0).etag})

    def _end_upload(self, request: web.Request, key: str, _: bytes) -> web.Response:
        parts = self._uploads.pop(request.query["uploadId"], None)
        if parts is None:
            return _error(HTTPStatus.NOT_FOUND, "NoSuchUpload")
        if request.headers.get("If-None-Match") == "*" and key in self._objects:
            return _error(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
        stored = self._store(key, b"".join(parts[number] for number in sorted(parts)))
        return _xml(
            f"<CompleteMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key>"
            f"<ETag>{stored.etag}</ETag></CompleteMultipartUploadResult>"
        )

    def _get(self, request: web.Request, key: str, _: bytes) -> web.Response:
        stored = self._objects.get(key)
        if stored is None:
            return _error(HTTPStatus.NOT_FOUND, "NoSuchKey")
        headers = {
            "ETag": stored.etag,
            "Last-Modified": formatdate(stored.at_s, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        body, status = stored.body, HTTPStatus.OK
        if "Range" in request.headers:
            span = _span(request.headers["Range"], len(body))
            if span is None:
                return _error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange")
            headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{len(body)}"
            body, status = body[span.start : span.stop], HTTPStatus.PARTIAL_CONTENT
        return web.Response(body=body, status=status, headers=headers)

    def _delete(self, request: web.Request, key: str, _: bytes) -> web.Response:
        if "uploadId" in request.query:
            self._uploads.pop(request.query["uploadId"], None)
        else:
            self._remove(key)
        return web.Response(status=HTTPStatus.NO_CONTENT)

    def _delete_many(self, _: web.Request, __: str, body: bytes) -> web.Response:
        for key in _keys_in(body):
            self._remove(key)
        return _xml("<DeleteResult></DeleteResult>")

    def _remove(self, key: str) -> None:
        if self._objects.pop(key, None) is not None:
            self._keys.pop(bisect.bisect_left(self._keys, key))

    def _list(self, request: web.Request, _: str, __: bytes) -> web.Response:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = max(query.get("start-after", ""), query.get("continuation-token", ""))
        page_max = min(int(query.get("max-keys", PAGE)), PAGE)
        keys, folders, last, is_cut = self._page(prefix, delimiter, after, page_max)
        contents = "".join(self._listed(key) for key in keys)
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in folders
        )
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if is_cut else ""
        return _xml(
            f"<ListBucketResult><Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(keys) + len(folders)}</KeyCount><MaxKeys>{page_max}</MaxKeys>"
            f"<IsTruncated>{str(is_cut).lower()}</IsTruncated>{token}{contents}{common}"
            "</ListBucketResult>"
        )

    def _page(
        self, prefix: str, delimiter: str, after: str, page_max: int
    ) -> tuple[list[str], list[str], str, bool]:
        """Return keys and common prefixes, the last place, and whether there are more."""
        keys: list[str] = []
        folders: list[str] = []
        last = after
        index = (
            bisect.bisect_left(self._keys, prefix)
            if after < prefix
            else bisect.bisect_right(self._keys, after)
        )
        while index < len(self._keys) and self._keys[index].startswith(prefix):
            if len(keys) + len(folders) >= page_max:
                return keys, folders, last, True
            key = self._keys[index]
            folder, slash, _ = key[len(prefix) :].partition(delimiter or "\0")
            if delimiter and slash:
                folders.append(f"{prefix}{folder}{delimiter}")
                last = f"{folders[-1]}\U0010ffff"
                index = bisect.bisect_right(self._keys, last)
            else:
                keys.append(key)
                last = key
                index += 1
        return keys, folders, last, False

    def _listed(self, key: str) -> str:
        stored = self._objects[key]
        moment = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.at_s))
        return (
            f"<Contents><Key>{escape(key)}</Key><LastModified>{moment}</LastModified>"
            f"<ETag>{stored.etag}</ETag><Size>{len(stored.body)}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )


def _client(request: web.Request) -> str:
    agent = request.headers.get("User-Agent", "").lower()
    if "boto" in agent:
        return "tidelog"
    if "object_store" in agent or "delta" in agent:
        return "deltalake"
    return agent.partition("/")[0] or "unnamed"


def _requested_kind(request: web.Request, key: str, body: bytes) -> str:
    if key:
        return object_keys.kind(key)
    if request.method == "POST":
        return object_keys.kind(next(_keys_in(body), ""))
    return object_keys.kind(request.query.get("prefix", ""))


def _keys_in(body: bytes) -> Iterator[str]:
    """Iterate over the keys of a deletion of many objects."""
    for element in ET.fromstring(body).iter():
        if element.tag.rpartition("}")[2] == "Key":
            yield element.text or ""


def _span(header: str, size: int) -> range | None:
    """Return the bytes that a Range header means, or None if there are none."""
    first, _, last = header.partition("=")[2].partition("-")
    if not first:
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
    return range(start, stop) if start < stop else None


def _unchunked(body: bytes) -> bytes:
    """Return the content of a body in chunks with signatures or a trailer."""
    parts: list[bytes] = []
    place = 0
    while True:
        end = body.index(b"\r\n", place)
        size = int(body[place:end].partition(b";")[0], 16)
        if not size:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        place = end + 2 + size + 2


def _xml(text: str) -> web.Response:
    return web.Response(
        body=f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode(),
        content_type="application/xml",
    )


def _error(status: HTTPStatus, code: str) -> web.Response:
    response = _xml(f"<Error><Code>{code}</Code><Message>{status.phrase}</Message></Error>")
    response.set_status(status)
    return response


def _answer_empty(_: web.Request, __: str, ___: bytes) -> web.Response:
    return _xml("<LocationConstraint></LocationConstraint>")


def _answer_not_implemented(_: web.Request, __: str, ___: bytes) -> web.Response:
    return _error(HTTPStatus.NOT_IMPLEMENTED, "NotImplemented")


# -- a process of its own


class Counts(NamedTuple):
    """Requests, and bytes by client, since the start or the last reset."""

    requests: Counter[Request]
    bytes_in: dict[str, int]
    bytes_out: dict[str, int]
    objects: int

    def of(self, **fields: str | int) -> int:
        """Return the requests whose fields have these values."""
        return sum(
            count
            for request, count in self.requests.items()
            if all(getattr(request, name) == value for name, value in fields.items())
        )


class RunningServer(NamedTuple):
    """A server in a process of its own. Any credentials do."""

    endpoint_url: str
    bucket: str

    def counts(self) -> Counts:
        with urllib.request.urlopen(f"{self.endpoint_url}/{CONTROL}/counts") as answer:
            document = json.load(answer)
        requests = Counter({Request(*row[:-1]): row[-1] for row in document["requests"]})
        return Counts(requests, document["bytes_in"], document["bytes_out"], document["objects"])

    def reset(self) -> None:
        self._post("reset")

    def set_latency(self, latency: Latency) -> None:
        self._post(f"latency?{urlencode(latency._asdict())}")

    def _post(self, path: str) -> None:
        url = f"{self.endpoint_url}/{CONTROL}/{path}"
        urllib.request.urlopen(urllib.request.Request(url, method="POST")).close()


@contextmanager
def running_counting_s3(latency: Latency = NO_LATENCY) -> Iterator[RunningServer]:
    """Run a server in a process of its own, on 127.0.0.1."""
    command = [sys.executable, "-m", "tests.support.counting_s3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            server = RunningServer(f"http://127.0.0.1:{port}", BUCKET)
            server.set_latency(latency)
            yield server
        finally:
            process.terminate()


async def _run(latency: Latency, port: int) -> None:
    runner = web.AppRunner(CountingS3(latency).application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.counting_s3")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--put-ms", type=float, default=0.0, help="median of PUT, POST and LIST")
    parser.add_argument("--get-ms", type=float, default=0.0, help="median of GET and HEAD")
    parser.add_argument("--mb-s", type=float, default=math.inf, help="of one request's body")
    options = parser.parse_args()
    latency = Latency(options.put_ms / 1000, options.get_ms / 1000, options.mb_s * 1e6)
    asyncio.run(_run(latency, options.port))


if __name__ == "__main__":
    main()
