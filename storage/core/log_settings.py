"""Settings of the parts of a broker, as values. No other module has a default of them.

The parts import them, and so does `tidelog.service.settings`, which must not load the parts. Pure.
"""

from typing import NamedTuple

from tidelog.storage.core.time_bounds import DEFAULT_BOUNDS, Bounds

START_RETRY_S = 60.0
"""Time for which one step of a start may fail. A store that restarts (SeaweedFS, MinIO, a gateway)
answers again within this time. Orchestrators allow two minutes for a whole start."""
COMPACT_MEMORY_BYTES = 1024 * 1024 * 1024
"""Memory for the keys of one pass of a compaction."""


class WalSettings(NamedTuple):
    """Settings of the WAL."""

    bounds: Bounds = DEFAULT_BOUNDS
    """Bounds of a cluster that this process creates. An existing cluster has bounds of its own."""
    checkpoint_entries: int = 1000
    """Least number of entries between two checkpoints. If `checkpoint_interval_s` has not passed,
    there are more."""
    checkpoint_interval_s: float = 10.0
    """Least time between two checkpoints. After `checkpoint_entries_max` entries, a checkpoint is
    due even if this time has not passed."""
    checkpoint_entries_max: int = 20_000
    retry_s: float = 0.05
    """First pause after a PUT with an unknown outcome. The pause doubles each time, up to two
    seconds."""


class WriterSettings(NamedTuple):
    """Settings of the writer."""

    flush_bytes: int = 8 * 1024 * 1024
    """An open segment of this size is flushed before its time."""
    flush_bytes_max: int = 64 * 1024 * 1024
    """Approximate bound of the records in one entry."""
    buffer_bytes_max: int = 256 * 1024 * 1024
    """Bound of the bytes of requests that wait for their commit, also after an ack (acks=0, 1)."""
    codec: str = "lz4"
    """Compression of large chunks: lz4, zstd or empty for none."""
    answer_timeout_s: float = 30.0
    """After this time a caller gets an error. If the commit has begun, it continues."""


class PaceSettings(NamedTuple):
    """Settings of the pace of commits. Those of the sequencer count for the cluster."""

    commits_per_minute: int = 120
    """Entries a minute that the budget allows in the long run; 0: no budget."""
    commits_burst: int = 7200
    """Entries for which the budget saves while there are fewer: those of an hour at the default."""
    flush_interval_ms: int = 0
    """Least time between the starts of two entries, in place of the budget, unless `flush_bytes`
    are waiting. 0: the budget decides."""


class ReaderSettings(NamedTuple):
    """Byte limits of the caches."""

    chunk_cache_bytes: int = 64 * 1024 * 1024
    segment_cache_bytes: int = 256 * 1024 * 1024
    footer_cache_bytes: int = 32 * 1024 * 1024
    object_cache_bytes: int = 64 * 1024 * 1024
    """Of parts of WAL entries and uploads of other brokers. A consumer that keeps up needs only the
    newest ones."""


class SealerSettings(NamedTuple):
    """Settings of the sealer."""

    check_interval_s: float = 1.0
    sealed_wait_s: float = 2.0
    """Time for which the actions of a seal wait for a request whose entry they can use."""
    tail_chunks_max: int = 10_000
    """A tail of more chunks is sealed whatever its size: each chunk takes ~200 bytes of memory on
    every broker."""
    topic_chunks_max: int = 200_000
    """Above this number of chunks in all tails of a topic, the longest tails are sealed. Fewer
    would let a topic with thousands of busy partitions seal small segments all the time; with twice
    as many, another broker seals them, and above a quarter of all chunks brokers refuse records
    (storage.state.tail_chunk_counts)."""


class MembershipSettings(NamedTuple):
    """Interval and timeouts of heartbeats."""

    heartbeat_interval_s: float = 5.0
    member_timeout_s: float = 15.0
    """A broker without a heartbeat for this time counts as dead, unless it answers."""
    quiet_interval_s: float = 600.0
    """Time between two heartbeats while all live brokers answer each other."""
    quiet_look_s: float = 300.0
    """Time between two listings meanwhile, by the first in rank. It finds a broker whose messages
    reach no peer."""
    sweep_after_s: float = 3600.0
    """If a broker has no heartbeat for this time, any other broker may remove its object."""


class SequencerSettings(NamedTuple):
    """Settings of the sequencer."""

    handover_timeout_s: float = 1.0
    """Longest wait for the sequencer's answer. It must be longer than two PUTs take: the PUT in
    flight, and the PUT with this draft."""
    handover_bytes_max: int = 4 * 1024 * 1024
    """For a larger draft, the broker first uploads the chunks. The draft refers to the upload. To a
    sequencer in another zone, drafts are uploaded from 256 KiB on."""
    alone_bytes_max: int = 16 * 1024 * 1024
    """The same for a broker without peers. A PUT of so many bytes takes as long as uploads in parts
    and the PUT of an entry that names them, and is cheaper."""
    upload_bytes: int = 8 * 1024 * 1024
    """Bytes of one upload; larger drafts have several. More would take longer, and each PUT has a
    price: $0.60 per TB at this size, at S3's prices."""
    uploads_max: int = 8
    """Uploads of a broker at the same time."""
    entry_bytes_max: int = 64 * 1024 * 1024
    queue_bytes_max: int = 64 * 1024 * 1024
    """Bound of the drafts that wait here. Above it, this broker refuses drafts of peers, and the
    peers commit them themselves."""


class IcebergSettings(NamedTuple):
    """Settings of the Iceberg tables."""

    refresh_s: float = 10.0
    """Least time between two snapshots that this broker makes of a topic."""
    has_tail: bool = False
    """Whether a load contains the tail, up to the last acknowledged record."""


class LogSettings(NamedTuple):
    """Settings of all parts of a broker."""

    wal: WalSettings = WalSettings()
    writer: WriterSettings = WriterSettings()
    pace: PaceSettings = PaceSettings()
    reader: ReaderSettings = ReaderSettings()
    sealer: SealerSettings = SealerSettings()
    membership: MembershipSettings = MembershipSettings()
    sequencer: SequencerSettings = SequencerSettings()
    iceberg: IcebergSettings = IcebergSettings()
    tail_cache_bytes: int = 256 * 1024 * 1024
    poll_interval_s: float = 1.0
    """Time between two calls of `refresh` by `poll`, which keeps an idle broker's view fresh."""
    quiet_poll_s: float = 60.0
    """The same while all live brokers agree on the newest entry. A commit of a program that is no
    broker is seen within this time."""
    read_freshness_s: float = 1.0
    """Age that a view may have for a read that waits for records."""
    is_sealing: bool = True
    start_retry_s: float = START_RETRY_S
    is_coordinating: bool = True  # run the background work of consumer groups
    group_delay_s: float = 0.05  # the wait of an empty classic group for more members
