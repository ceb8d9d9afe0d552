"""The three outcomes of a conditional PUT (DESIGN 4), against a server with scripted answers.

Seen, and held here by counting requests: below all retries of the SDK, aiohttp sends a PUT a second
time when its connection is dropped before an answer, kept or new. With `_OnceSession` every create
is one request.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from aiobotocore.httpsession import AIOHTTPSession

import tidelog.storage.store.s3
from tests.support.seaweed import REGION
from tidelog.storage.core.errors import (
    Corrupt,
    ObjectNotFound,
    StoreRefused,
    StoreUnfit,
    Unavailable,
)
from tidelog.storage.store.object_store import Created
from tidelog.storage.store.s3 import S3Store
from tidelog.storage.store.s3_options import S3Options

LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


class Request(NamedTuple):
    method: str
    key: str
    headers: dict[str, str]
    body: bytes


class Stub:
    """An S3 that answers the nth request for a key with the nth of its answers, then the last.

    An answer is a status (`412`), a status and a code (`404 NoSuchBucket`), `reset`, `silence`,
    `garbage`, or the body of a 200; `cut` sends half of one. Without any it is 200.
    """

    def __init__(self) -> None:
        self.answers: dict[str, list[str]] = {}
        self.requests: list[Request] = []
        self.endpoint_url = ""
        self.has_silenced = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def puts(self, key: str) -> list[Request]:
        return [it for it in self.requests if it.method == "PUT" and it.key == key]

    def gets(self, key: str) -> list[Request]:
        return [it for it in self.requests if it.method == "GET" and it.key == key]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await self._read(reader):
                self.requests.append(request)
                if not await self._answer(request, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # a client that gave up
        finally:
            writer.transport.abort()  # a reset, not an end

    async def _read(self, reader: asyncio.StreamReader) -> Request | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except asyncio.IncompleteReadError:
            return None
        method, target, _ = head[0].split(" ")
        pairs = (line.partition(": ") for line in head[1:] if line)
        headers = {name.lower(): value for name, _, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        key = unquote(urlsplit(target).path).removeprefix("/bucket").removeprefix("/")
        return Request(method, key.removeprefix("p/"), headers, body)

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if not request.key:
            return await self._send(writer, 200, LISTING)
        answers = self.answers.get(request.key, ["200"])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        match answer.split(" "):
            case ["reset"]:
                return False
            case ["silence"]:
                self.has_silenced.set()
                await asyncio.sleep(60)
                return False
            case ["garbage"]:
                writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
                await writer.drain()
                return False
            case ["cut"]:
                await self._send(writer, 200, b"half", length=8)
                return False
            case [status, *code] if status.isdecimal():
                error = (
                    f"<Error><Code>{code[0]}</Code><Message>no</Message></Error>" if code else ""
                )
                return await self._send(writer, int(status), error.encode())
            case _:
                return await self._send(writer, 200, answer.encode(), checksum="AAAAAA==")

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        body: bytes,
        *,
        length: int | None = None,
        checksum: str = "",
    ) -> bool:
        head = f"HTTP/1.1 {status} It\r\nContent-Length: {length or len(body)}\r\n"
        head += f"x-amz-checksum-crc32c: {checksum}\r\n" if checksum else ""
        writer.write(head.encode() + b"\r\n" + body)
        await writer.drain()
        return True


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    stub = Stub()
    await stub.start()
    yield stub
    await stub.stop()


@contextlib.asynccontextmanager
async def opened(stub: Stub, *, read_timeout_s: float = 5.0, attempts_max: int = 2):
    options = S3Options(
        endpoint_url=stub.endpoint_url,
        region=REGION,
        read_timeout_s=read_timeout_s,
        attempts_max=attempts_max,
    )
    store = await S3Store.open("bucket", "p", options)
    try:
        yield store
    finally:
        await store.close()


OUTCOMES = {
    "200": Created.DONE,
    "412 PreconditionFailed": Created.EXISTS,
    "412": Created.EXISTS,
    "409 ConditionalRequestConflict": Created.UNKNOWN,
    "500 InternalError": Created.UNKNOWN,
    "500": Created.UNKNOWN,
    "502": Created.UNKNOWN,
    "503 SlowDown": Created.UNKNOWN,
    "504": Created.UNKNOWN,
    "400 RequestTimeout": Created.UNKNOWN,
    "408": Created.UNKNOWN,
    "429": Created.UNKNOWN,
    "reset": Created.UNKNOWN,
    "silence": Created.UNKNOWN,
    "garbage": Created.UNKNOWN,
}


@pytest.mark.parametrize("size", [100, 2_000_000], ids=["small", "large"])
async def test_every_answer_has_its_outcome(aws_credentials: None, stub: Stub, size: int) -> None:
    body = b"x" * size
    stub.answers = {answer: [answer] for answer in OUTCOMES}
    async with opened(stub, read_timeout_s=0.5) as store:
        for answer, outcome in OUTCOMES.items():
            # On a kept connection, as commits are: there an HTTP client may repeat by itself.
            assert await store.create("warm", [body]) is Created.DONE
            assert await store.create(answer, [body[:10], body[10:]]) is outcome, answer
    for answer in OUTCOMES:
        assert len(stub.puts(answer)) == 1, answer
        (request,) = stub.puts(answer)
        assert request.headers["if-none-match"] == "*"
        assert request.headers["x-amz-checksum-crc32c"]
        assert "expect" not in request.headers  # aiohttp would wait for a 100 without end
        assert request.body == body


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        ("400 BadDigest", ""),
        ("400 ExpiredToken", "check the AWS credentials"),
        ("401 Unauthorized", ""),
        ("403 AccessDenied", "allow s3:GetObject, s3:PutObject"),
        ("403 SignatureDoesNotMatch", "check the AWS credentials"),
        ("403 RequestTimeTooSkewed", "set the machine's clock"),
        ("404 NoSuchBucket", "create the bucket"),
        ("405 MethodNotAllowed", ""),
        ("501 NotImplemented", "does not support conditional PUT"),
    ],
)
@pytest.mark.parametrize("size", [100, 2_000_000], ids=["small", "large"])
async def test_a_definite_no_is_refused_with_advice(
    aws_credentials: None, stub: Stub, answer: str, advice: str, size: int
) -> None:
    """I6: a definite failure; the error names the cause and the remedy."""
    status, code = answer.split(" ")
    stub.answers["wal/1"] = [answer]
    async with opened(stub) as store:
        with pytest.raises(StoreRefused) as caught:
            await store.create("wal/1", [b"x" * size])
    assert str(caught.value).startswith(f"s3://bucket/p refused wal/1: {code} ({status})")
    assert advice in str(caught.value)
    assert len(stub.puts("wal/1")) == 1


async def test_without_credentials_nothing_is_sent(
    aws_credentials: None, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(stub) as store:
        store._once._request_signer._credentials = None  # as when a role is taken away
        with pytest.raises(StoreRefused, match=r"nothing was sent: .* check the AWS credentials"):
            await store.create("wal/1", [b"x"])
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreUnfit, match=r"s3://bucket/p cannot be used: .* check the AWS cred"):
        async with opened(stub):
            pass
    assert len(stub.requests) == 1  # the first look at the bucket


async def test_a_server_that_is_gone_is_unknown(aws_credentials: None, stub: Stub) -> None:
    async with opened(stub, attempts_max=1) as store:
        assert await store.create("wal/1", [b"x"]) is Created.DONE
        await stub.stop()
        assert await store.create("wal/2", [b"x"]) is Created.UNKNOWN
        assert await store.create("wal/2", [b"x" * 2_000_000]) is Created.UNKNOWN
        with pytest.raises(Unavailable, match="get wal/2"):
            await store.get("wal/2")


async def test_aiohttp_alone_repeats_a_dropped_put(
    aws_credentials: None, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why there is a session of our own: the repetition of one's own success says 412."""
    monkeypatch.setattr(tidelog.storage.store.s3, "_OnceSession", AIOHTTPSession)
    stub.answers = {"new": ["reset", "412"], "kept": ["reset", "412"]}
    async with opened(stub) as store:
        assert await store.create("new", [b"x"]) is Created.EXISTS
        assert await store.create("warm", [b"x"]) is Created.DONE
        assert await store.create("kept", [b"x"]) is Created.EXISTS
    assert [len(stub.puts(key)) for key in ("new", "warm", "kept")] == [2, 1, 2]


async def test_cancelled_create_leaves_client_whole(aws_credentials: None, stub: Stub) -> None:
    stub.answers["wal/1"] = ["silence"]
    async with opened(stub) as store:
        for size in (100, 2_000_000):
            task = asyncio.create_task(store.create("wal/1", [b"x" * size]))
            await stub.has_silenced.wait()
            stub.has_silenced.clear()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await store.create("wal/2", [b"x" * size]) is Created.DONE


async def test_reads_are_repeated_and_failures_named(aws_credentials: None, stub: Stub) -> None:
    stub.answers = {
        "twice": ["503 SlowDown", "cut", "cut", "200"],
        "cut": ["cut"],
        "missing": ["404 NoSuchKey"],
        "nobucket": ["404 NoSuchBucket"],
        "denied": ["403 AccessDenied"],
        "beyond": ["416 InvalidRange"],
        "rotten": ["these bytes"],
    }
    async with opened(stub, attempts_max=3) as store:
        assert await store.get("twice") == b""
        with pytest.raises(Unavailable, match="get cut"):
            await store.get("cut")
        with pytest.raises(ObjectNotFound):
            await store.get("missing")
        with pytest.raises(Unavailable, match="create the bucket"):
            await store.get("nobucket")
        with pytest.raises(Unavailable, match="s3:ListBucket"):
            await store.get("denied")
        assert await store.get_range("beyond", 10, 5) == b""
        with pytest.raises(Corrupt, match="CRC32C"):
            await store.get("rotten")
        assert await store.get_range("rotten", 0, 11) == b"these bytes"
    assert [len(stub.gets(key)) for key in ("twice", "cut", "missing", "denied")] == [4, 3, 1, 1]


async def test_a_put_of_a_liveness_file_is_repeated(aws_credentials: None, stub: Stub) -> None:
    stub.answers = {
        "brokers/1.json": ["503 SlowDown", "200"],
        "brokers/2.json": ["403 AccessDenied"],
    }
    async with opened(stub) as store:
        await store.put("brokers/1.json", [b"{", b"}"])
        with pytest.raises(Unavailable, match="AccessDenied"):
            await store.put("brokers/2.json", [b"{}"])
    assert [request.body for request in stub.puts("brokers/1.json")] == [b"{}"] * 2
