"""Kafka's own protocol: a listener for unchanged Kafka clients, on the same broker as HTTP.

messages    the messages of Kafka's protocol, to and from bytes
client      the client of a request, as handlers see it; answers that come later
errors      Kafka's error codes, and the table from the log's errors to them
context     the parts of a broker that handlers use
frame       frames of bytes within bounds, and the memory of requests; pure
apis        the table of APIs; ApiVersions is made from it
handshake   ApiVersions and SASL PLAIN
server      the parts that the connections of a listener share; a request on its way
connection  one connection: requests in, answers out in the same order
listener    sockets with and without TLS, clocks, drain
routing     node ids, leaders, coordinators: Metadata and its relatives
produce     Produce, InitProducerId
fetch       Fetch, with long polls
offsets     ListOffsets, OffsetForLeaderEpoch
placement   DescribeLogDirs, ListPartitionReassignments
admin       topics, partitions and configs, for admin clients
"""
