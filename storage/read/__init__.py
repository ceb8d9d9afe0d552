"""Reads of both tiers: the tail (WAL) and the table (segments).

reader          a broker's reads
long_polls      reads that wait for new records
segment_reader  footers and row groups of segments, verified
tail_cache      the newest records in memory
cache           a cache bounded in bytes; one fetch serves all waiting readers
plan            what to read as of one moment, split into tasks
split_reader    the records of a split: segments and tail chunks
offline_log     the log as of one moment, without a broker
kafka_options   offsets and topics in the options of Spark's Kafka source
"""
