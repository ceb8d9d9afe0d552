"""Kafka's own protocol: a listener for unchanged Kafka clients, on the same broker as HTTP.

messages       the messages of Kafka's protocol, to and from bytes
client         the client of a request, as its handler gets it; answers that are not ready yet
errors         Kafka's error codes, and the table from the log's errors to them
failures       the answer of each API to an error of the log that its handler raises
wide_answers   answers with many elements, which a thread encodes
context        the parts of a broker that handlers use
apis           the table of APIs, from which the answer to ApiVersions is made
connections    frames, the handshake, requests and answers of one connection, the listener
routing        node ids, leaders, coordinators: Metadata, FindCoordinator, DescribeCluster
produce        Produce, InitProducerId
appends        the queue of Produce requests whose batches are not appended
refusal_lines  log lines about refused requests
refused_batches  the batches behind a refused batch of their producer
fetch          Fetch, with long polls
fetch_sessions  the partitions of each consumer, so that its requests have only changes
offsets        ListOffsets, OffsetForLeaderEpoch
groups         the APIs of groups
group_offsets  the APIs of committed offsets
placement      DescribeLogDirs, ListPartitionReassignments
admin          topics, partitions and configs, for admin clients
"""
