"""Requests to an S3 server in the words of IAM: actions, resources, conditions."""

import io
import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, unquote

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

ARN = "arn:aws:s3:::"


class Call(NamedTuple):
    """One thing that must be allowed."""

    action: str
    resource: str
    conditions: tuple[tuple[str, str], ...] = ()


def calls(environ: "WSGIEnvironment") -> list[Call]:
    """Of one request, by path (not by host). The body of a deletion is read, and put back."""
    method = environ["REQUEST_METHOD"]
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    bucket, _, key = unquote(environ["PATH_INFO"]).lstrip("/").partition("/")
    if not key:
        return _of_bucket(environ, method, bucket, query)
    resource = f"{ARN}{bucket}/{key}"
    match method:
        case "GET" | "HEAD":
            return [Call("s3:GetObject", resource)]
        case "PUT" if "partNumber" in query:
            return [Call("s3:PutObject", resource, (("s3:ObjectCreationOperation", "false"),))]
        case "POST" if "uploads" in query:
            return [Call("s3:PutObject", resource, (("s3:ObjectCreationOperation", "false"),))]
        case "PUT" | "POST":
            conditions = [("s3:ObjectCreationOperation", "true")]
            if none_match := environ.get("HTTP_IF_NONE_MATCH"):
                conditions.append(("s3:if-none-match", none_match))
            return [Call("s3:PutObject", resource, tuple(conditions))]
        case "DELETE" if "uploadId" in query:
            return [Call("s3:AbortMultipartUpload", resource)]
        case "DELETE":
            return [Call("s3:DeleteObject", resource)]
    raise AssertionError(f"{method} {environ['PATH_INFO']} is not known here")


def _of_bucket(
    environ: "WSGIEnvironment", method: str, bucket: str, query: dict[str, list[str]]
) -> list[Call]:
    if method == "POST" and "delete" in query:
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        environ["wsgi.input"] = io.BytesIO(body)
        keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
        return [Call("s3:DeleteObject", f"{ARN}{bucket}/{key}") for key in keys]
    if method == "PUT":
        return [Call("s3:CreateBucket", f"{ARN}{bucket}")]
    assert method in {"GET", "HEAD"}, f"{method} of a bucket"
    conditions = tuple(("s3:prefix", text) for text in query.get("prefix", ()))
    return [Call("s3:ListBucket", f"{ARN}{bucket}", conditions)]
