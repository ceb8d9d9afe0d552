"""Settings of the cluster: its identity and bounds, and how its brokers find each other."""

import dataclasses
from collections.abc import Iterator

from tidelog.service.settings.fields import LOG, MIB, ms_of, setting
from tidelog.service.settings.store import StoreSettings
from tidelog.storage.core.time_bounds import LEAST, MOST, RETENTION_FACTOR_MIN, Bounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSettings(StoreSettings):
    """The cluster in the store, and the times by which its brokers act together."""

    cluster_id: str = setting(
        "id that the cluster in the store must have; if empty, any id. If the store has no cluster, the broker creates one with this id, or with a random id"
    )
    wal_view_age_max_ms: int = setting(
        "for a cluster that this broker creates: time after which a view of the WAL expires if it is not refreshed; at least 60000",
        default=LOG.wal.bounds.view_age_ms,
        limits=(1, None),
    )
    wal_retention_ms: int = setting(
        "for a cluster that this broker creates: minimum time that WAL entries are kept; at least 3600000 and at least 4 times `wal_view_age_max_ms`, because with a shorter time a suspended broker could commit from an expired view",
        default=LOG.wal.bounds.wal_retention_ms,
        limits=(4, None),
    )
    file_grace_ms: int = setting(
        "for a cluster that this broker creates: time between the commit that removes a file from its table and the deletion of the file; must be longer than any read; at least 3600000",
        default=LOG.wal.bounds.file_grace_ms,
        limits=(0, MOST.file_grace_ms),
    )
    test_bounds: bool = setting(
        "for tests: allow smaller values of `wal_view_age_max_ms`, `wal_retention_ms` and `file_grace_ms`; with S3, only if the endpoint is on this machine",
        default=False,
    )
    poll_interval_ms: int = setting(
        "time between two reads of the WAL by an idle broker; a minute while all brokers answer each other and agree on the newest entry",
        default=ms_of(LOG.poll_interval_s),
        limits=(10, 60_000),
    )
    read_freshness_ms: int = setting(
        "a read that waits for records may miss those that were acknowledged within this time before its answer; a longer time saves GETs while brokers do not agree on the newest entry. A read that does not wait misses none",
        default=ms_of(LOG.read_freshness_s),
        limits=(0, 60_000),
    )
    broker_heartbeat_interval_ms: int = setting(
        "time between two heartbeats of a broker; each heartbeat is one PUT and one LIST. While all brokers answer each other, a broker writes each 10 minutes, and one of them lists each 5 minutes",
        default=ms_of(LOG.membership.heartbeat_interval_s),
        limits=(50, 60_000),
    )
    broker_timeout_ms: int = setting(
        "a broker that neither answers nor writes a heartbeat for this time counts as failed",
        default=ms_of(LOG.membership.member_timeout_s),
        limits=(100, None),
    )
    sequencer_timeout_ms: int = setting(
        "a broker commits by itself if the sequencer does not answer within this time",
        default=ms_of(LOG.sequencer.handover_timeout_s),
        limits=(10, None),
    )
    sequencer_upload_bytes: int = setting(
        "if a flush has more bytes of records than this, the broker uploads them and forwards only the keys of the objects to the sequencer. If the sequencer has another `zone`, 262144 at most; set 262144 if brokers are in several zones that `zone` does not name",
        default=LOG.sequencer.handover_bytes_max,
        limits=(0, 16 * MIB),
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.wal_retention_ms < RETENTION_FACTOR_MIN * self.wal_view_age_max_ms:
            yield f"wal_retention_ms ({self.wal_retention_ms}) must be at least {RETENTION_FACTOR_MIN} times wal_view_age_max_ms ({self.wal_view_age_max_ms})"
        for name, value, least in (
            ("wal_view_age_max_ms", self.wal_view_age_max_ms, LEAST.view_age_ms),
            ("wal_retention_ms", self.wal_retention_ms, LEAST.wal_retention_ms),
            ("file_grace_ms", self.file_grace_ms, LEAST.file_grace_ms),
        ):
            if value < least and not self.test_bounds:
                yield f"{name} ({value}) is below {least}: only a cluster for tests may have a smaller value (test_bounds)"
        if self.test_bounds and self.store.startswith("s3://") and not self.s3.is_local:
            yield "test_bounds is for a folder or an endpoint on this machine"
        if self.broker_timeout_ms < 2 * self.broker_heartbeat_interval_ms:
            yield f"broker_timeout_ms ({self.broker_timeout_ms}) must be at least twice broker_heartbeat_interval_ms ({self.broker_heartbeat_interval_ms})"

    @property
    def bounds(self) -> Bounds:
        """The bounds of a cluster that this broker creates."""
        return Bounds(self.wal_view_age_max_ms, self.wal_retention_ms, self.file_grace_ms)
