"""How an S3 bucket is reached. Apart from storage.s3, whose SDK takes half a second to load."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """How to reach a bucket. Credentials come by the usual AWS chain and are not settings."""

    endpoint_url: str | None = None  # None is AWS
    region: str | None = None  # None asks the AWS chain, then the bucket
    path_style: bool | None = None  # None: exactly where an endpoint is given
    tree_listing: bool | None = None  # None asks the server's name; see storage/tree_order.py
    connect_timeout_s: float = 3.0
    read_timeout_s: float = 10.0  # between two bytes of an answer; S3's p99 is 0.3 s
    request_timeout_s: float = 60.0  # everything together: 20 MB at 3 Mbit/s
    attempts_max: int = 4  # of reads, listings, deletes; a create has one
    connections_max: int = 64
