"""APIs of Kafka's admin clients.

calls    one request: rights, quota, outcome of each change, audit lines
topics   CreateTopics, DeleteTopics, CreatePartitions, DeleteRecords
configs  DescribeConfigs, AlterConfigs, IncrementalAlterConfigs
"""
