"""Kafka's own protocol: a listener for unchanged Kafka clients, on the same broker as HTTP.

messages       the messages of Kafka's protocol, to and from bytes
client         the client of a request, as handlers see it; answers that come later
errors         Kafka's error codes, and the table from the log's errors to them
context        the parts of a broker that handlers use
apis           the table of APIs; ApiVersions is made from it
connections    frames, the handshake, requests and answers of one connection, the listener
routing        node ids, leaders, coordinators: Metadata and its relatives
produce        Produce, InitProducerId
fetch          Fetch, with long polls
fetch_sessions  what consumers asked for, so that they send only changes
offsets        ListOffsets, OffsetForLeaderEpoch
groups         the APIs of groups
group_offsets  the APIs of committed offsets
placement      DescribeLogDirs, ListPartitionReassignments
admin          topics, partitions and configs, for admin clients
"""
