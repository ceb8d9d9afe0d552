"""Options of an S3 store. Separate from io/s3.py: its SDK takes half a second to load."""

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """Connection options of a bucket. Credentials come from the AWS chain and are no option."""

    endpoint_url: str | None = None  # None: AWS
    region: str | None = None  # None: the AWS chain's, else the bucket's
    path_style: bool | None = None  # None: only if an endpoint is given; see `is_path_style`
    tree_listing: bool | None = None  # None: by the `Server` header; see storage/io/s3_listing.py
    connect_timeout_s: float = 3.0
    read_timeout_s: float = 10.0  # between two bytes of an answer; S3's p99 is 0.3 s
    request_timeout_s: float = 60.0  # with all retries; 20 MB at 3 Mbit/s
    attempts_max: int = 4  # for reads, listings, deletes; a create has one attempt
    connections_max: int = 64

    @property
    def is_path_style(self) -> bool:
        return bool(self.endpoint_url) if self.path_style is None else self.path_style

    @property
    def is_local(self) -> bool:
        """Return whether the server is on this machine."""
        return urlsplit(self.endpoint_url or "").hostname in {"127.0.0.1", "::1", "localhost"}
