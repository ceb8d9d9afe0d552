"""What the log *is*: state, bytes, and the object store they live in. Knows nothing of HTTP.

Foundations first; the exact layers are in pyproject.toml, and import-linter holds them. The first
part is pure: values in, values out, no clock, no IO, no randomness.

    errors        every error the log raises, one class for each thing a caller can do about it
    model         the nouns without behaviour: TopicPartition, Placement, SegmentFile
    keys          every object key, built and parsed
    objectstore   the seam to object storage: the protocol, and its in-memory implementation
    s3_options    how an S3 bucket is reached
    histogram     how often a duration or a size was seen, by size class
    tree_order    byte order of keys from a server that lists like a tree of directories
    chunk         records as columns, and the bytes of a chunk
    partitioner   which partition a record goes to: Kafka's murmur2, sticky for null keys
    assignors     which member of a group reads which partition: range, round robin, sticky
    topics        the configs of a topic: names, defaults, checks
    positions     where a consumer instance stands
    acls          access control lists: who may do what with which resource, as Kafka decides it
    entry         the bytes of a WAL entry, and the actions in it
    producers     ids, epochs and sequences of Kafka's idempotent producers
    group         a consumer group and its members: the nouns
    group_members members of consumer groups, generations, assignment
    patterns      topics by regular expressions
    groups        committed offsets of consumer groups
    requests      idempotency keys and what they were answered
    access        keys, access control lists, quotas
    origins       drafts that were handed over, applied once
    partition     a partition's offsets, and the index of its tail
    state         the cluster state, and `apply`
    handover      what brokers say to each other; drafts of many become one entry
    members       who lives, and who of them commits for all
    offers        entries that peers say are in the chain
    told          chunks that peers told of
    manifest      what a topic's table is to the log: the protocol, and its in-memory implementation
    segment       the bytes of a segment: how Parquet is written and read
    tail          the newest records of each partition in memory
    hot           hot segments: what waits for its commit, and its sorting into chunks
    scan          what there is to read as of one moment, and its splitting into tasks
    boundary      where reading starts and ends: the options of Spark's Kafka source

    clock         wall time, boot time and ids: the one place that asks the machine
    malloc        memory that was freed is kept
    loop_thread   something on an event loop of its own thread: large uploads
    folder        an object store in a directory
    s3            an object store in S3 and what speaks like it; alone knows the SDK
    stores        from a `--store` URL to a store that was probed and keeps its word
    metered       a store that counts what it is asked
    readonly      the same to read alone: nothing is made, tried or written
    secret        the cluster's own, which brokers alone can read
    cache         byte-bounded, single-flight copies of what was read
    table         a topic's Delta table as its manifest; alone knows Delta
    chain         the objects of the chain as they lie in the store
    wal           a view of the chain: commit, follow, and the rules against zombies
    membership    liveness objects: ours, and a look at the others'
    wakeups       telling peers of what was committed
    sequencer     one broker commits for all, and each for itself when in doubt
    hotlog        hot segments on the local disk: what acks=1 means
    writer        the write path: one flush commits all that waits
    exactly_once  appends over topics with groups' offsets, and of Kafka producers
    access_changes  keys, ACLs and quotas: their changes
    reader        the read path: one walk over the tail and the segments
    sealer        a partition's tail becomes a segment of its table
    log           the deep interface that brokers use: append, read, offsets, seal
    coordinator   which broker hears a group's members, and who is silent
    offset_commits  commits of many members as one of the log
    consumers     consumer instances: what a group's coordinator does for them
    slices        reading what a plan names, without a broker
    snapshot      the log as of one moment, without a broker
    spark_source  the log as a Spark data source
    spark_stream  the same as a stream
    spark_native  the fast way into Spark: the JVM's own Parquet reader, and the tail
"""
