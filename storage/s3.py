"""Objects in an S3 bucket: `s3://bucket/prefix`. The only module that knows the SDK.

A conditional PUT is sent exactly once: off are the SDK's retries, and the repetition of a PUT on a
dropped connection that its HTTP client makes by itself. Either would report 412 for one's own
success, or 403 for what the first sending stored. All else is retried a bounded number of times.
A crash or cancellation at any await of `create` leaves the outcome unknown, never half an object.

Uploads of a mebibyte and more run on a loop of their own thread. Against SeaweedFS one of 8 MiB
held the broker's loop for 12.4 ms in one callback (hashing, signing, copying), with the thread
0.5 ms; 1 MiB 3.3 and 0.5 ms; below there is nothing to win.
"""

import asyncio
import base64
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import aioboto3
import aiohttp
import google_crc32c
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore import exceptions as sdk
from botocore.loaders import create_loader
from botocore.parsers import ResponseParserError

from storage.errors import Corrupt, NotFound, StoreRefused, StoreUnfit, Unavailable
from storage.loop_thread import LoopThread
from storage.objectstore import Created, ObjectInfo, Part
from storage.s3_options import S3Options
from storage.tree_order import in_byte_order

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client

_PAGE = 1000  # S3's own bound, for listing and for deleting
_LANE_BYTES_MIN: Final = 1 << 20
_REGION = "us-east-1"  # what S3 takes when nobody names one
_LOADER = create_loader()  # 60 ms of S3's description, once for all clients
_TRANSPORT = (sdk.BotoCoreError, ResponseParserError, aiohttp.ClientError, TimeoutError)
_UNSENT = (
    sdk.CredentialRetrievalError,
    sdk.NoCredentialsError,
    sdk.ParamValidationError,
    sdk.PartialCredentialsError,
    sdk.TokenRetrievalError,
)
_AMBIGUOUS = {408, 409, 425, 429}  # 4xx that say nothing about the object, or nothing for long
_CREDENTIALS = "check the AWS credentials: environment, profile or role"
_ADVICE = {
    "AccessDenied": "allow s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket "
    "(without the last a missing key answers 403)",
    "NoSuchBucket": "create the bucket or correct its name",
    "NotImplemented": "this store has no conditional PUT: use one that has",
    "RequestTimeTooSkewed": "set the machine's clock",
    **dict.fromkeys(("AuthorizationHeaderMalformed", "PermanentRedirect"), "correct the region"),
    **dict.fromkeys(("ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"), _CREDENTIALS),
}


class _OnceSession(AIOHTTPSession):
    """An HTTP client that never sends a request twice."""

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)  # type: ignore[misc]
        # aiohttp repeats an "idempotent" PUT when its connection drops. Its own test client turns
        # that off like this; tests/contract/test_s3_outcomes.py counts the requests.
        session._retry_connection = False  # noqa: SLF001
        return session


class _BeyondEnd(Unavailable):
    """416: the range begins at or after the object's end."""


class S3Store:
    """Owns its clients and a thread from `open` to `close`; safe for the tasks of one loop."""

    def __init__(self, bucket: str, prefix: str, options: S3Options) -> None:
        """Use `open`: nothing is connected here."""
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._options = options
        self._session = _session(options)
        self._stack = contextlib.AsyncExitStack()
        self._lane = LoopThread(
            lambda: _client(_session(options), options, is_once=True),
            name="s3-uploads",
        )
        self._region = options.region or self._session.region_name or _REGION
        self._is_tree = bool(options.tree_listing)

    @classmethod
    async def open(
        cls, bucket: str, prefix: str = "", options: S3Options | None = None
    ) -> "S3Store":
        """Connect and look at the bucket; `StoreUnfit` where it is missing or closed to us."""
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

    def table_uri(self, key: str) -> str:
        """What a Delta table at `key` is opened by, together with `deltalake_options`."""
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
        """In no particular order within a thousand."""
        left = iter(keys)
        while batch := [self._prefix + key for key in itertools.islice(left, _PAGE)]:
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
        """Storage options for `deltalake`, with credentials as the chain gives them at this moment:
        those of a role expire, so ask again for every table that is opened."""
        options = {"AWS_REGION": self._region, "AWS_CONDITIONAL_PUT": "etag"}
        is_path_style = _is_path_style(self._options)
        options["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"] = str(not is_path_style).lower()
        if endpoint := self._options.endpoint_url:
            scheme, _, host = endpoint.partition("://")
            # Rust's object_store wants the bucket in a virtual-hosted endpoint of one's own.
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
        self._client: S3Client = await enter(_client(self._session, self._options))
        self._once: S3Client = await enter(_client(self._session, self._options, is_once=True))
        await self._lane.open()
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                # Like HeadBucket, but its refusals say why: an answer to HEAD has no body.
                answer = await self._client.list_objects_v2(
                    Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1
                )
        except sdk.ClientError as error:
            kind = StoreUnfit if _is_definite(error) else Unavailable
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
                except (
                    sdk.BotoCoreError,
                    aiohttp.ClientError,
                ):  # the SDK retries up to the headers
                    if attempt == self._options.attempts_max:
                        raise
                    continue
            # The SDK verifies what it can compute; CRC32C it cannot. "-3" is a sum of three parts.
            wanted = answer.get("ChecksumCRC32C", "")
            if "Range" not in extra and wanted and "-" not in wanted and wanted != _crc32c(body):
                raise Corrupt(key, f"CRC32C {_crc32c(body)} is not the store's {wanted}")
            return body
        raise AssertionError("the last attempt returns or raises")

    async def _pages(
        self, prefix: str, start_after: str, delimiter: str
    ) -> AsyncIterator[tuple[Sequence[ObjectInfo], Sequence[str]]]:
        """Objects and, with a delimiter, the prefixes that stand for the rest."""
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
                if not it["Key"].endswith("/")  # consoles' folders, SeaweedFS's empty directories
            ]
            yield infos, [it["Prefix"][skip:] for it in answer.get("CommonPrefixes", [])]
            if not answer.get("IsTruncated"):
                return
            request["ContinuationToken"] = answer["NextContinuationToken"]

    @contextlib.asynccontextmanager
    async def _asking(self, what: str, key: str = "") -> AsyncIterator[None]:
        """The SDK's failures as ours, and a bound on all its retries together."""
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                yield
        except sdk.ClientError as error:
            status, code = _answer(error)
            if key and status == 404 and code != "NoSuchBucket":
                raise NotFound(key) from None
            kind = _BeyondEnd if status == 416 else Unavailable
            raise kind(f"{self.url}: {what}: {_why(error)}") from error
        except _TRANSPORT as error:
            raise Unavailable(f"{self.url}: {what}: {error!r}") from error


def _session(options: S3Options) -> aioboto3.Session:
    core = AioSession()
    core.register_component("data_loader", _LOADER)
    return aioboto3.Session(botocore_session=core, region_name=options.region)


@contextlib.asynccontextmanager
async def _client(
    session: aioboto3.Session, options: S3Options, *, is_once: bool = False
) -> AsyncIterator["S3Client"]:
    attempts_max = 1 if is_once else options.attempts_max
    style = {None: "auto", True: "path", False: "virtual"}[options.path_style]
    async with session.client(
        "s3",
        endpoint_url=options.endpoint_url,
        region_name=options.region or session.region_name or _REGION,
        # Without TLS, 23 ms of reading CA certificates are for nothing.
        verify=False if (options.endpoint_url or "").startswith("http:") else None,
        config=AioConfig(
            http_session_cls=_OnceSession if is_once else AIOHTTPSession,
            retries={"mode": "standard", "total_max_attempts": attempts_max},
            connect_timeout=options.connect_timeout_s,
            read_timeout=options.read_timeout_s,
            max_pool_connections=options.connections_max,
            s3={"addressing_style": "path" if _is_path_style(options) else style},
            # Uploads carry our CRC32C; the SDK's own is a trailer, which not every S3 takes.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    ) as client:
        client.meta.events.register_last("before-call.s3", _without_expect)
        yield client


def _without_expect(params: dict[str, Any], **_: object) -> None:
    """`Expect: 100-continue` costs a round trip, and aiohttp waits for its answer for ever."""
    params["headers"].pop("Expect", None)


def _is_path_style(options: S3Options) -> bool:
    return bool(options.endpoint_url) if options.path_style is None else options.path_style


def _crc32c(body: bytes) -> str:
    return base64.b64encode(google_crc32c.value(body).to_bytes(4, "big")).decode()


def _answer(error: sdk.ClientError) -> tuple[int, str]:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status, error.response.get("Error", {}).get("Code", "")


def _is_definite(error: sdk.ClientError) -> bool:
    """Whether the answer is a no that stays a no, and nothing was done."""
    status, code = _answer(error)
    is_refusal = 300 <= status < 500 and status not in _AMBIGUOUS and code != "RequestTimeout"
    return is_refusal or code == "NotImplemented"


def _why(error: sdk.ClientError) -> str:
    status, code = _answer(error)
    message = error.response.get("Error", {}).get("Message", "")
    return f"{code} ({status}) {message}; {_ADVICE.get(code, 'see the answer of the store')}"
