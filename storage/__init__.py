"""What the log *is*: state, bytes, and the object store they live in. Knows nothing of HTTP.

Foundations first; the exact layers are in pyproject.toml, and import-linter holds them. The first
part is pure: values in, values out, no clock, no IO, no randomness.

    errors        every error the log raises, one class for each thing a caller can do about it
    model         the nouns without behaviour: TopicPartition, Placement, SegmentFile
    keys          every object key, built and parsed
    objectstore   the seam to object storage: the protocol, and its in-memory implementation
    chunk         records as columns, and the bytes of a chunk
    partitioner   which partition a record goes to: Kafka's murmur2, sticky for null keys
    topics        the configs of a topic: names, defaults, checks
    entry         the bytes of a WAL entry
    state         the cluster state, the actions, and `apply`
    segment       the bytes of a segment: how Parquet is written and read
    tail          the newest records of each partition in memory
    hot           hot segments: what waits for its commit, and its sorting into chunks

    clock         wall time, boot time and ids: the one place that asks the machine
    folder        an object store in a directory
    s3            an object store in S3 and what speaks like it; alone knows the SDK
    stores        from a `--store` URL to a store that was probed and keeps its word
    cache         byte-bounded, single-flight copies of what was read
    table         the manifest: a topic's Delta table; alone knows Delta
    wal           the chain: commit, follow, checkpoint, and the rules against zombies
    hotlog        hot segments on the local disk: what acks=1 means
    writer        the write path: one flush commits all that waits
    reader        the read path: one walk over the tail and the segments
    sealer        a partition's tail becomes a segment of its table
    snapshot      a topic as of one moment, for readers without a broker
    log           the deep interface that brokers use: append, read, offsets, seal
    spark_source  the log as a Spark data source; alone in here knows Spark
"""
