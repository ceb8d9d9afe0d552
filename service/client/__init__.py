"""The Python client of tidelog: `tidelog.client` has the public names.

It runs where no broker runs, so it imports only the dependencies of the base distribution, and of
tidelog only `storage.core.murmur2`, which is plain Python: client and broker must agree on the
partition of a key. import-linter checks this. `poll_arrow` imports pyarrow when it is called.

The logic is asynchronous and exists once. The module `blocking` runs it in a thread for callers
without an event loop.

errors             the errors, and what a caller can do about each
servers            the list of brokers: parsed, learned, and which one is next
connection         requests: retries, another broker after a failure, deadlines
records            records and their bytes in requests and responses
producer           AsyncProducer
transactions       AsyncTransaction: records and offsets in one commit
partition_reader   reads partitions without a group
group_reader       reads as a member of a group
consumer           AsyncConsumer: what is delivered, decoded and committed
admin              AsyncAdmin: topics, groups, brokers, ACLs
blocking           Producer, Consumer, Transaction, Admin
"""
