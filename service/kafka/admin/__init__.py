"""APIs of Kafka's admin clients.

calls    one request: rights, quota, outcome of each change, audit lines
topics   CreateTopics, DeleteTopics, CreatePartitions, DeleteRecords
acls     the APIs of ACLs, where security is off
configs  DescribeConfigs, AlterConfigs, IncrementalAlterConfigs
"""
