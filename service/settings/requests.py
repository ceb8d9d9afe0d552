"""Settings of requests: what they create and wait for, and how much memory they take."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from tidelog.service.settings.fields import LOG, MIB, ms_of, setting
from tidelog.service.settings.listeners import ListenerSettings
from tidelog.storage.core.topic_configs import (
    AUTO_CREATE,
    DEFAULTS,
    NUM_PARTITIONS,
    PARTITIONS_MAX,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestSettings(ListenerSettings):
    """Defaults and limits of requests of all protocols."""

    default_partitions: int = setting(
        "partitions of a new topic if the request gives no number and the cluster has no default `num.partitions`",
        default=int(DEFAULTS[NUM_PARTITIONS].default),
        limits=(1, PARTITIONS_MAX),
    )
    auto_create_topics: bool = setting(
        "whether a request creates a topic that does not exist, if the cluster has no default `auto.create.topics.enable`: a produce request, or a Kafka client's request for metadata that allows it",
        default=DEFAULTS[AUTO_CREATE].default == "true",
    )
    flush_interval_ms: int = setting(
        "constant minimum time between two commits, in place of the budget `commits_per_minute`. With 250, the PUTs of a cluster under load cost about $52 a month on S3 Standard. With 0, the budget decides. The value of the sequencer counts for the cluster, so give all brokers the same",
        default=LOG.pace.flush_interval_ms,
        limits=(0, 60_000),
    )
    commits_per_minute: int = setting(
        "budget of the cluster: commits a minute in the long run, each of one PUT. A commit starts at once while the budget has commits left, and otherwise waits for its turn: half a second at most with 120. 120 a minute are at most $26.28 a month on S3 Standard. With 0, and for stores other than S3, there is no budget: a commit starts when the PUT of the previous one ends. Set 0 for an S3 server of your own. The value of the sequencer counts for the cluster",
        default=LOG.pace.commits_per_minute,
        limits=(0, 60_000),
    )
    commits_burst: int = setting(
        "commits that the budget may save while fewer are made; a broker starts with so many. 7200 are $0.04 on S3 Standard",
        default=LOG.pace.commits_burst,
        limits=(1, 10_000_000),
    )
    flush_bytes: int = setting(
        "size at which a broker flushes an open hot segment before its time",
        default=LOG.writer.flush_bytes,
        limits=(1024, 64 * MIB),
    )
    buffer_bytes_max: int = setting(
        "maximum bytes of records that wait for their commit; above this number the broker answers 429",
        default=LOG.writer.buffer_bytes_max,
        limits=(1024, None),
    )
    request_bytes_max: int = setting(
        "maximum size of a request body; the broker answers a larger one with 413",
        default=64 * MIB,
        limits=(1024, 1024 * MIB),
    )
    produce_timeout_ms: int = setting(
        "time after which the broker answers a produce request that has no outcome: with 503 if the request still waits for its flush (nothing is written), else with 504",
        default=ms_of(LOG.writer.answer_timeout_s),
        limits=(100, None),
    )
    fetch_bytes: int = setting(
        "`max_bytes` of a fetch that sets no `max_bytes`", default=1 * MIB, limits=(1, None)
    )
    fetch_bytes_max: int = setting(
        "maximum bytes of the records that one fetch returns, and of its answer if the records have more than 1 MiB",
        default=64 * MIB,
        limits=(1024, None),
    )
    consumer_instance_timeout_ms: int = setting(
        "session timeout of a consumer instance that is created without a `session.timeout.ms`",
        default=300_000,
        limits=(1, 2**31 - 1),
    )
    fetch_bytes_in_flight: int = setting(
        "maximum bytes of all fetch responses in flight together; above this number the broker answers a fetch with 503",
        default=256 * MIB,
        limits=(1024, None),
    )
    tail_cache_bytes: int = setting(
        "memory for the newest records, which are in the tail", default=LOG.tail_cache_bytes
    )
    read_cache_bytes: int = setting(
        "memory for data that was read from the store: row groups of Parquet segments (8/13), chunks of WAL entries and uploads (2/13), their objects (2/13), footers (1/13)",
        default=sum(LOG.reader),
    )

    # Fixed limits, not settings: a test overrides them in a subclass.
    connections_max: ClassVar[int] = 10_000
    """Maximum number of open connections. For a further connection, the server closes an unproved
    or an idle one (service.http.connection_admission). If it may close none, it answers 503, except for
    health."""
    fetch_wait_ms_max: ClassVar[int] = 30_000
    """Maximum time of a long poll."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.request_bytes_max > self.buffer_bytes_max:
            yield f"request_bytes_max ({self.request_bytes_max}) must not be over buffer_bytes_max ({self.buffer_bytes_max}), because a larger request would never be accepted"

    @property
    def topic_defaults(self) -> dict[str, str]:
        """Defaults of topics that these settings give, by Kafka's names for configs of brokers."""
        return {
            AUTO_CREATE: str(self.auto_create_topics).lower(),
            NUM_PARTITIONS: str(self.default_partitions),
        }
