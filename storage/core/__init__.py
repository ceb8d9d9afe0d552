"""Types, object keys and codecs of the log. Pure: values in, values out.

errors           every error of the log, one class for each reaction of a caller
model            TopicPartition, AppendedRange, Acks, SegmentFile and other shared types
observer         the interface by which a tracer observes a broker; TRACE, PRINCIPAL
levels           the first and the newest level of the format; the check of an object's level
object_keys      builds and parses the keys of objects
histogram        counts of durations and sizes, by bucket
bounds           view age, WAL retention and file grace of a cluster
topic_configs    configs of a topic: names, defaults, checks
acls             access control lists, with Kafka's rules
chunk            records as Arrow columns, their weight; EncodedChunk, the bytes of a chunk
checksum         CRC-32C
partitioner      the partition of a record: by key, sticky, or requested
native           loops over bytes in C, if the installation had a compiler
murmur2          Kafka's hash of one key, and the partition that it chooses, without numpy
murmur2_columns  the hash of a column of keys
actions          every change that a commit can make to the cluster state; Chunk, a chunk's place
entry            commits, idempotency keys, hot marks, drafts; the bytes of a WAL entry
"""
