"""The Python client of tidelog: `tidelog.client` has the public names.

A program with only the base distribution can use it. So it imports only the dependencies of that
distribution, and one other module of tidelog: `storage.core.murmur2`, which is plain Python,
because client and broker must choose the same partition for a key. import-linter checks this.
`poll_arrow` imports pyarrow when it is called.

The logic is asynchronous and exists once. The module `blocking` runs it in a thread for callers
without an event loop.

errors             the errors, and what a caller can do about each
servers            the list of brokers: parsed, learned, and which one is next
connection         requests: retries, another broker after a failure, deadlines
records            records and their bytes in requests and responses
producer           AsyncProducer: batches, order, retries
transactions       AsyncTransaction: records and offsets in one commit
partition_reader   the consumer's reads without a group
group_reader       the consumer's reads as a member of a group
consumer           AsyncConsumer: which records it delivers, decodes and commits; DeadLetters
admin              AsyncAdmin: topics, groups, brokers, ACLs
blocking           Producer, Consumer, Transaction, Admin
"""
