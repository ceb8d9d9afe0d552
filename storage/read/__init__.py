"""Reads of both tiers: the tail (WAL) and the table (segments).

reader          a broker's reads
backwards       the newest records before an offset
long_polls      reads that wait for new records
topic_changes   which partitions of a topic have new records, for readers of all of them: pure
segment_reader  footers and row groups of segments, verified
tail_cache      the newest records in memory
tail_windows    whole tails of several partitions, read in few large ranges
cache           a cache bounded in bytes; one fetch serves all waiting readers
plan            a snapshot of the log, and its split into tasks: pure
split_reader    the records of a split: segments and tail chunks
offline_log     takes snapshots of the log, without a broker
kafka_options   the options of Spark's Kafka source: topics, and where a read starts and ends
"""
