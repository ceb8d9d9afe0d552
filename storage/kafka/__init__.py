"""Kafka's record batches: check, unpack, read into columns, build from columns. Pure.

layout        the header of a batch; the errors of a batch that a client sent
refusals      the errors of bytes that are no records of a batch
codecs        gzip, snappy, lz4 and zstd, with a bound of the memory
numbers       the numbers of records: zigzag varints
records       the records of batches: check them, read them into columns
record_bytes  the bytes of records, from columns
batch         check a producer's batch, place it for a consumer; split, decode and build batches
kept          batches in requests, chunks and caches, as their producers sent them
consumer_protocol  the assignments of consumers
"""
