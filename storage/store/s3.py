"""Object store in an S3 bucket: `s3://bucket/prefix`. Only this module imports the SDK.

A conditional PUT is sent exactly once. The SDK's retries are off, and the HTTP client does not
repeat a PUT after a dropped connection. A repeated PUT could get 412 or 403 although the first PUT
succeeded (DESIGN 4). All other requests are retried a bounded number of times.
**On a crash** or cancellation at an await of `create`: the outcome is unknown. No partial object
exists.

Creates of 1 MiB and more run on the event loop of a second thread. With SeaweedFS, an upload of
8 MiB blocked the broker's loop for 12.4 ms in one callback (hash, sign, copy) without the thread,
and for 0.5 ms with it. For 1 MiB these times were 3.3 and 0.5 ms. Smaller uploads gain nothing.

SeaweedFS lists `a/b` before `a-b`, and a listing that starts after `a-b` omits `a/b`. So
`in_byte_order` lists each directory with a request of its own. It yields a subdirectory's objects
when the subdirectory's name *with the slash* is next in byte order. The cost is one request per
directory. A flat prefix such as `wal/` costs no more than in S3.
"""

import asyncio
import base64
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from email.utils import parsedate_to_datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import aioboto3
import aiohttp
import google_crc32c
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore import exceptions as sdk
from botocore.loaders import create_loader
from botocore.parsers import ResponseParserError

from tidelog.storage.core.errors import (
    Corrupt,
    LogError,
    ObjectNotFound,
    StoreRefused,
    StoreUnfit,
    Unavailable,
)
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.threads import LoopThread
from tidelog.storage.store.object_store import Created, ObjectInfo
from tidelog.storage.store.s3_options import S3Options

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client


_PAGE = 1000  # S3's limit for a page of a listing and for a delete request
_LANE_BYTES_MIN: Final = 1 << 20
_REGION = "us-east-1"  # S3's default region
_LOADER = create_loader()  # loads S3's API description (60 ms) once for all clients
_TRANSPORT = (sdk.BotoCoreError, ResponseParserError, aiohttp.ClientError, TimeoutError)
_UNSENT = (
    sdk.CredentialRetrievalError,
    sdk.NoCredentialsError,
    sdk.ParamValidationError,
    sdk.PartialCredentialsError,
    sdk.TokenRetrievalError,
)
_AMBIGUOUS = {408, 409, 425, 429}  # 4xx that do not say whether the object is or will be stored
_CREDENTIALS = "check the AWS credentials: environment, profile or role"
_ADVICE = {
    "AccessDenied": "allow s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket "
    "(without s3:ListBucket, S3 answers 403 for a missing key)",
    "NoSuchBucket": "create the bucket or correct its name",
    "NotImplemented": "this store does not support conditional PUT: use another store",
    "RequestTimeTooSkewed": "set the machine's clock",
    **dict.fromkeys(("AuthorizationHeaderMalformed", "PermanentRedirect"), "correct the region"),
    **dict.fromkeys(("ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"), _CREDENTIALS),
}


class _OnceSession(AIOHTTPSession):
    """An HTTP client that never sends a request twice."""

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)  # type: ignore[misc]
        # aiohttp repeats an "idempotent" PUT when its connection drops. aiohttp's test client turns
        # that off in the same way; tests/contract/test_s3_outcomes.py counts the requests.
        session._retry_connection = False  # noqa: SLF001
        return session


class _BeyondEnd(Unavailable):
    """416: the range begins at or after the object's end."""


class S3Store:
    """A store in a bucket, for one event loop. Owns clients and a thread from `open` to `close`."""

    def __init__(self, bucket: str, prefix: str, options: S3Options) -> None:
        """Make an unconnected store; callers use `open`."""
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._options = options
        self._session = _session(options)
        self._stack = contextlib.AsyncExitStack()
        self._lane = LoopThread(
            lambda: _client(_session(options), options, self._see, is_once=True),
            name="s3-uploads",
        )
        self._region = options.region or self._session.region_name or _REGION
        self._is_tree = bool(options.tree_listing)
        self._date = ""  # of the last answer, as the store wrote it
        self._seen_ms = 0

    @classmethod
    async def open(
        cls, bucket: str, prefix: str = "", options: S3Options | None = None
    ) -> "S3Store":
        """Connect and test the bucket.

        Raises `StoreUnfit` if the bucket is missing or the credentials are not valid,
        `StoreRefused` if the store denies access, `Unavailable` if it does not answer.
        """
        store = cls(bucket, prefix, options or S3Options())
        try:
            await store._connect()
        except BaseException:
            await store.close()
            raise
        return store

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def seen_ms(self) -> int:
        return self._seen_ms

    def _see(self, parsed: dict[str, Any], **_: object) -> None:
        """Store the `Date` of an answer, also of an error.

        Parse only a new date: it changes once a second. Called in the caller's thread and in the
        thread for uploads.
        """
        date = parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
        if date and date != self._date:
            self._date = date
            with contextlib.suppress(ValueError):  # a proxy may send another form
                self._seen_ms = int(parsedate_to_datetime(date).timestamp() * 1000)

    def table_uri(self, key: str) -> str:
        """Return the URI that opens the Delta table at `key`, together with `deltalake_options`."""
        return f"s3://{self._bucket}/{self._prefix}{key}"

    async def get(self, key: str) -> bytes:
        return await self._read(key, {"ChecksumMode": "ENABLED"})

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        try:
            return await self._read(key, {"Range": f"bytes={start}-{start + length - 1}"})
        except _BeyondEnd:
            return b""

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                request = {"Key": self._prefix + key, "IfNoneMatch": "*"}
                if sum(memoryview(part).nbytes for part in parts) < _LANE_BYTES_MIN:
                    await self._send(self._once, request, parts)
                else:
                    await self._lane.run(lambda client: self._send(client, request, parts))
        except sdk.ClientError as error:
            if _answer(error)[0] == 412:
                return Created.EXISTS
            if _is_definite(error):
                raise StoreRefused(f"{self.url} refused {key}: {_why(error)}") from error
            return Created.UNKNOWN
        except _UNSENT as error:
            raise StoreRefused(f"{self.url}: nothing was sent: {error}; {_CREDENTIALS}") from error
        except _TRANSPORT:
            return Created.UNKNOWN
        return Created.DONE

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        async with self._asking(f"put {key}"):
            await self._send(self._client, {"Key": self._prefix + key}, parts)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        if self._is_tree:
            async for info in in_byte_order(self._pages, prefix, start_after):
                yield info
            return
        async for infos, _ in self._pages(prefix, start_after, ""):
            for info in infos:
                yield info

    async def delete(self, keys: Iterable[str]) -> None:
        """Delete 1000 keys a request, in no defined order within a request."""
        remaining_keys = iter(keys)
        while batch := [self._prefix + key for key in itertools.islice(remaining_keys, _PAGE)]:
            async with self._asking("delete"):
                answer = await self._client.delete_objects(
                    Bucket=self._bucket,
                    Delete={"Objects": [{"Key": key} for key in batch], "Quiet": True},
                )
            for failed in answer.get("Errors", []):
                if (code := failed.get("Code", "")) != "NoSuchKey":
                    advice = _ADVICE.get(code, failed.get("Message", ""))
                    raise Unavailable(f"{self.url}: delete {failed.get('Key')}: {code}; {advice}")

    async def close(self) -> None:
        await self._lane.close()
        await self._stack.aclose()

    async def deltalake_options(self) -> dict[str, str]:
        """Return storage options for `deltalake`, with the AWS chain's current credentials.

        Credentials of a role expire, so call this for every table that is opened.
        """
        options = {"AWS_REGION": self._region, "AWS_CONDITIONAL_PUT": "etag"}
        is_path_style = self._options.is_path_style
        options["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"] = str(not is_path_style).lower()
        if endpoint := self._options.endpoint_url:
            scheme, _, host = endpoint.partition("://")
            # For a custom virtual-hosted endpoint, Rust's object_store needs the bucket in the URL.
            url = endpoint if is_path_style else f"{scheme}://{self._bucket}.{host}"
            options |= {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": str(scheme == "http").lower()}
        credentials: Any = await self._session.get_credentials()  # type: ignore[misc]
        if credentials is not None:
            frozen = await credentials.get_frozen_credentials()
            options["AWS_ACCESS_KEY_ID"] = frozen.access_key
            options["AWS_SECRET_ACCESS_KEY"] = frozen.secret_key
            if frozen.token:
                options["AWS_SESSION_TOKEN"] = frozen.token
        return options

    async def _connect(self) -> None:
        enter = self._stack.enter_async_context
        self._client: S3Client = await enter(_client(self._session, self._options, self._see))
        self._once: S3Client = await enter(
            _client(self._session, self._options, self._see, is_once=True)
        )
        await self._lane.open()
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                # Not HeadBucket: a refusal of a HEAD has no body, and so gives no reason.
                answer = await self._client.list_objects_v2(
                    Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1
                )
        except sdk.ClientError as error:
            kind: type[LogError] = StoreUnfit if _is_definite(error) else Unavailable
            if _is_denied(error):
                kind = StoreRefused
            raise kind(f"{self.url} cannot be used: {_why(error)}") from error
        except _UNSENT as error:
            raise StoreUnfit(f"{self.url} cannot be used: {error}; {_CREDENTIALS}") from error
        except _TRANSPORT as error:
            raise Unavailable(f"{self.url} cannot be reached: {error!r}") from error
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        if self._options.region is None:
            self._region = headers.get("x-amz-bucket-region", self._region)
        if self._options.tree_listing is None:
            self._is_tree = headers.get("server", "").startswith("SeaweedFS")

    async def _send(
        self, client: "S3Client", request: dict[str, Any], parts: Sequence[Part]
    ) -> None:
        body = parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)
        await client.put_object(
            Bucket=self._bucket, Body=body, ChecksumCRC32C=_crc32c(body), **request
        )

    async def _read(self, key: str, extra: dict[str, Any]) -> bytes:
        for attempt in range(1, self._options.attempts_max + 1):
            async with self._asking(f"get {key}", key):
                answer = await self._client.get_object(
                    Bucket=self._bucket, Key=self._prefix + key, **extra
                )
                try:
                    async with answer["Body"] as stream:
                        body: bytes = await stream.read()
                except sdk.FlexibleChecksumError as error:
                    raise Corrupt(key, str(error)) from error
                except (sdk.BotoCoreError, aiohttp.ClientError):
                    # The SDK retries only until it has the headers.
                    if attempt == self._options.attempts_max:
                        raise
                    continue
            # The SDK does not verify CRC32C. With a suffix such as "-3", the value is a checksum of
            # the checksums of three parts, not of the body.
            expected_crc = answer.get("ChecksumCRC32C", "")
            if (
                "Range" not in extra
                and expected_crc
                and "-" not in expected_crc
                and expected_crc != _crc32c(body)
            ):
                raise Corrupt(key, f"CRC32C is {_crc32c(body)}, the store expects {expected_crc}")
            return body
        raise AssertionError("the last attempt returns or raises")

    async def _pages(
        self, prefix: str, start_after: str, delimiter: str
    ) -> AsyncIterator[tuple[Sequence[ObjectInfo], Sequence[str]]]:
        """Yield pages: objects and, with a delimiter, common prefixes of the other objects."""
        request: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        if start_after:
            request["StartAfter"] = self._prefix + start_after
        if delimiter:
            request["Delimiter"] = delimiter
        skip = len(self._prefix)
        while True:
            async with self._asking(f"list {prefix}"):
                answer = await self._client.list_objects_v2(**request)
            infos = [
                ObjectInfo(it["Key"][skip:], it["Size"], int(it["LastModified"].timestamp() * 1000))
                for it in answer.get("Contents", [])
                if not it["Key"].endswith("/")  # a console's folder, or SeaweedFS's empty directory
            ]
            yield infos, [it["Prefix"][skip:] for it in answer.get("CommonPrefixes", [])]
            if not answer.get("IsTruncated"):
                return
            request["ContinuationToken"] = answer["NextContinuationToken"]

    @contextlib.asynccontextmanager
    async def _asking(self, operation: str, key: str = "") -> AsyncIterator[None]:
        """Translate the SDK's errors to `LogError`s; limit the time of all retries together."""
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                yield
        except sdk.ClientError as error:
            status, code = _answer(error)
            if key and status == 404 and code != "NoSuchBucket":
                raise ObjectNotFound(key) from None
            kind = StoreRefused if _is_definite(error) else Unavailable
            if status == 416:
                kind = _BeyondEnd
            raise kind(f"{self.url}: {operation}: {_why(error)}") from error
        except _TRANSPORT as error:
            raise Unavailable(f"{self.url}: {operation}: {error!r}") from error


def _session(options: S3Options) -> aioboto3.Session:
    core = AioSession()
    core.register_component("data_loader", _LOADER)
    return aioboto3.Session(botocore_session=core, region_name=options.region)


@contextlib.asynccontextmanager
async def _client(
    session: aioboto3.Session,
    options: S3Options,
    on_answer: Callable[..., None],
    *,
    is_once: bool = False,
) -> AsyncIterator["S3Client"]:
    attempts_max = 1 if is_once else options.attempts_max
    style = {None: "auto", True: "path", False: "virtual"}[options.path_style]
    async with session.client(
        "s3",
        endpoint_url=options.endpoint_url,
        region_name=options.region or session.region_name or _REGION,
        # Without TLS, skip the CA certificates: reading them takes 23 ms.
        verify=False if (options.endpoint_url or "").startswith("http:") else None,
        config=AioConfig(
            http_session_cls=_OnceSession if is_once else AIOHTTPSession,
            retries={"mode": "standard", "total_max_attempts": attempts_max},
            connect_timeout=options.connect_timeout_s,
            read_timeout=options.read_timeout_s,
            max_pool_connections=options.connections_max,
            s3={"addressing_style": "path" if options.is_path_style else style},
            # tidelog adds a CRC32C itself, because some servers refuse the SDK's checksum trailer.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    ) as client:
        client.meta.events.register_last("before-call.s3", _without_expect)
        client.meta.events.register("after-call.s3", on_answer)
        yield client


def _without_expect(params: dict[str, Any], **_: object) -> None:
    """Remove `Expect: 100-continue`.

    It costs a round trip, and aiohttp would wait for the answer 100 without a limit.
    """
    params["headers"].pop("Expect", None)


def _crc32c(body: bytes) -> str:
    return base64.b64encode(google_crc32c.value(body).to_bytes(4, "big")).decode()


def _answer(error: sdk.ClientError) -> tuple[int, str]:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status, error.response.get("Error", {}).get("Code", "")


def _is_definite(error: sdk.ClientError) -> bool:
    """Return whether the answer is a final refusal: nothing was stored, and nothing will be."""
    status, code = _answer(error)
    is_refusal = 300 <= status < 500 and status not in _AMBIGUOUS and code != "RequestTimeout"
    return is_refusal or code == "NotImplemented"


def _is_denied(error: sdk.ClientError) -> bool:
    """Return whether the store denies access to valid credentials.

    A new permission takes effect after some seconds, so a retry may succeed.
    """
    status, code = _answer(error)
    return status == 403 and _ADVICE.get(code) is not _CREDENTIALS


def _why(error: sdk.ClientError) -> str:
    status, code = _answer(error)
    message = error.response.get("Error", {}).get("Message", "")
    return f"{code} ({status}) {message}; {_ADVICE.get(code, 'see the answer of the store')}"


Pages: TypeAlias = Callable[
    [str, str, str], AsyncIterator[tuple[Sequence[ObjectInfo], Sequence[str]]]
]
"""(prefix, start_after, delimiter) -> pages of objects and of directories (with their slash)."""


async def in_byte_order(
    pages: Pages, prefix: str, start_after: str, *, directory: str = ""
) -> AsyncIterator[ObjectInfo]:
    """Yield objects as `ObjectStore.list` does.

    Holds one page per directory level, and the directories that wait.
    """
    directory = directory or prefix[: prefix.rfind("/") + 1]
    if start_after > directory and not start_after.startswith(directory):
        return
    # A listing after `first` omits the directory `first/`. It also omits directories with a shorter
    # name but a greater key: after `a-b`, the server omits `a/`. So `waiting` begins with them.
    is_inside = start_after.startswith(directory)
    first = start_after.removeprefix(directory).partition("/")[0] if is_inside else ""
    waiting = [
        path
        for end in range(1, len(first) + 1)
        if (first + "\0")[end] < "/" and (path := f"{directory}{first[:end]}/").startswith(prefix)
    ]
    heapq.heapify(waiting)
    async for infos, directories in pages(prefix, directory + first if first else "", "/"):
        page: list[tuple[str, ObjectInfo | None]] = [(info.key, info) for info in infos]
        page += [(path.removesuffix("/"), None) for path in directories]
        for name, info in sorted(page, key=itemgetter(0)):
            while waiting and waiting[0] < name:
                path = heapq.heappop(waiting)
                async for inner in in_byte_order(pages, path, start_after, directory=path):
                    yield inner
            if info is not None:
                if info.key > start_after:
                    yield info
            elif f"{name}/" not in waiting:
                heapq.heappush(waiting, f"{name}/")
    while waiting:
        path = heapq.heappop(waiting)
        async for inner in in_byte_order(pages, path, start_after, directory=path):
            yield inner
