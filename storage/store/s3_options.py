"""Options of an S3 store. Not in store/s3.py, because the SDK there takes 0.5 s to load."""

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """Connection options of a bucket. Credentials are no option; they come from the AWS chain."""

    endpoint_url: str | None = None  # None: AWS
    region: str | None = None  # None: from the AWS chain, else from the bucket
    path_style: bool | None = None  # None: true if an endpoint is given; see `is_path_style`
    tree_listing: bool | None = None  # None: from the `Server` header, see storage/store/s3.py
    connect_timeout_s: float = 3.0
    read_timeout_s: float = 10.0  # between two bytes of an answer; S3's p99 is 0.3 s
    request_timeout_s: float = 60.0  # for all attempts; 20 MB take this long at 3 Mbit/s
    attempts_max: int = 4  # for each request except a create, which has one attempt
    connections_max: int = 64

    @property
    def is_path_style(self) -> bool:
        return bool(self.endpoint_url) if self.path_style is None else self.path_style

    @property
    def is_local(self) -> bool:
        """Return whether the server is on this machine."""
        return urlsplit(self.endpoint_url or "").hostname in {"127.0.0.1", "::1", "localhost"}
