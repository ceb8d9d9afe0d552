"""The messages of Kafka's protocol: typed classes, which are also the schema, and their bytes.

`decoder` and `encoder` of `compiler` serve every message; `header` frames them.

schema             the notation of messages: a class is the schema
primitives         varints, tagged fields, the error MalformedMessage
decoding           writes the Python source of decoders
encoding           writes the Python source of encoders
compiler           decoders and encoders of one version, compiled at the first use
header             the header of a request, the frame of a response
handshake          ApiVersions, SaslHandshake, SaslAuthenticate
metadata           Metadata, DescribeCluster, DescribeTopicPartitions, FindCoordinator
produce            Produce, InitProducerId
fetch              Fetch, ListOffsets, OffsetForLeaderEpoch
groups             JoinGroup, SyncGroup, Heartbeat, LeaveGroup; List-, Describe-, DeleteGroups;
                   ConsumerGroupHeartbeat
group_offsets      OffsetCommit, OffsetFetch, OffsetDelete
topics             topics and partitions: create, delete, sizes, reassignments; DeleteRecords
configs            DescribeConfigs, AlterConfigs, IncrementalAlterConfigs
acls               DescribeAcls, CreateAcls, DeleteAcls
consumer_protocol  the subscriptions and assignments of consumers, within group messages
"""
