"""Settings of seals, retention and compaction."""

import dataclasses

from tidelog.service.settings.fields import LOG, MIB, ms_of, setting
from tidelog.service.settings.store import StoreSettings
from tidelog.storage.core.log_settings import COMPACT_MEMORY_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaintenanceSettings(StoreSettings):
    """Work on the data in the store, by brokers and by the command line."""

    seal_enabled: bool = setting(
        "whether this broker seals tails into tables", default=LOG.is_sealing
    )
    retention_check_interval_ms: int = setting(
        "mean pause between two retention rounds of this broker. One broker also collects garbage: in each 12th round, or once a day if nothing was written. With 0 there are no rounds",
        default=300_000,
    )
    merge_cpu_percent: int = setting(
        "CPU time that merges by this broker may take, in percent of one core, at the lowest priority. With 0 this broker merges nothing",
        default=5,
        limits=(0, 100),
    )
    merge_after_ms: int = setting(
        "time between two looks of a broker at the small segments of a topic. Looks are only at topics with new segments",
        default=3_600_000,
        limits=(100, None),
    )
    iceberg_refresh_ms: int = setting(
        "least time between two snapshots that this broker makes of a topic's Iceberg table, when clients load it. A load in this time gets the last one",
        default=ms_of(LOG.iceberg.refresh_s),
        limits=(0, 3_600_000),
    )
    iceberg_freshness: str = setting(
        "what a load of an Iceberg table contains: `sealed` records, or all `acked` ones. With `acked`, a load writes the records that are not sealed yet as one Parquet file, if there are new ones. It is deleted a day later. Above 64 MiB, the load seals them instead",
        default="sealed",
        words="sealed acked",
    )
    compact_spark_bytes: int = setting(
        "if the segments to compact have more bytes than this, `tidelog compact` without `--engine` uses Spark, if Spark is installed; one process compacts about 100 MB/s, that is, the default size in three minutes",
        default=16 * 1024 * MIB,
    )
    compact_memory_bytes: int = setting(
        "memory for the keys of one pass of a compaction; if the distinct keys need more, the compaction makes several passes. A pass also needs memory for one output segment",
        default=COMPACT_MEMORY_BYTES,
        limits=(4 * MIB, None),
    )
