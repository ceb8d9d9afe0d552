"""Settings of the object store, and of the folder that replaces it for acks=1."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from tidelog.service.settings.fields import LOG, Section, setting
from tidelog.storage.core.errors import StoreUnfit
from tidelog.storage.store.open import check_endpoint, check_url
from tidelog.storage.store.s3_options import S3Options


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreSettings(Section):
    """Where the log is."""

    store: str = setting(
        "location of the log: a folder (`./path` or `file:///path`), `s3://bucket/prefix` or `memory://`",
        default="./tidelog-data",
    )
    s3_endpoint: str = setting("URL of an S3 server other than AWS")
    s3_region: str = setting(
        "region; if empty, the region of the AWS configuration chain, else us-east-1"
    )
    s3_path_style: str = setting(
        "whether the bucket is in the path of a URL instead of the host name; `auto` means `true` if `s3_endpoint` is set, else `false`",
        default="auto",
        words="auto true false",
    )
    hot_dir: str = setting(
        "local folder of the hot log, which makes acks=1 durable. If it is empty, a store in a folder has the hot log in its folder `.hot`, and a store in S3 has it in `~/.local/state/tidelog/<hash of the store's URL>`; `memory://` has none"
    )

    start_retry_s: ClassVar[float] = LOG.start_retry_s
    """How long a starting broker repeats a failed step. A test overrides it in a subclass."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        try:
            check_url(self.store)
            if self.s3_endpoint:
                check_endpoint(self.s3_endpoint)
        except StoreUnfit as error:
            yield str(error)

    @property
    def is_in_memory(self) -> bool:
        """Whether the log ends with this process, which is then its only broker."""
        return self.store.startswith("memory:")

    @property
    def s3(self) -> S3Options:
        return S3Options(
            endpoint_url=self.s3_endpoint or None,
            region=self.s3_region or None,
            path_style=None if self.s3_path_style == "auto" else self.s3_path_style == "true",
        )
