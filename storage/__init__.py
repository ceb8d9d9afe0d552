"""The log: its records, its state, its encoded bytes, and the stores that hold the bytes. No HTTP.

Packages, lower ones first; import-linter checks that a package imports only lower ones
(pyproject.toml).

    core       pure: value types, object keys, codecs, actions and WAL entries
    kafka      pure: Kafka's record batches, to and from columns
    state      pure: the cluster state and `apply`
    io         object stores, clocks, threads, memory
    tables     the manifest (one Delta table per topic); Parquet segments
    wal        the chain of WAL entries in the store, and a broker's view of it
    read       reads of tails and of segments, with and without a broker
    write      hot segments, the hot log, the writer, the sealer
    cluster    liveness of brokers, the sequencer, messages between brokers
    log        Log: append, fetch, seal, administration; without peers and groups
    kafka_log  the log for Kafka's protocol: record batches in, record batches out
    groups     consumer groups: coordinator, instances, offset commits
    broker_stats  counters and gauges of all parts
    broker     Broker, a Log with peers and groups; opens and closes all parts of one broker
    spark      the Spark data source
    public     the modules that users import (`tidelog.spark`); installed in `tidelog`
"""
