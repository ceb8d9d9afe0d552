"""The care of what is written, beside the brokers and on top of storage/: history is kept as long
as its topic says, small, clean and checked. Its commands are in service/cli_care.py, the duty of
brokers in service/care.py; nothing else of service/ knows it.

plan            what retention, merging and compaction would do to a partition; pure
garbage         what may be deleted for good; pure
cluster         the WAL, the tables and the store's clock, for all of the following
retain          log starts move, whole segments leave the table; delete-records
latest          the newest record of each key; pure
rewrite         segments in, one segment out: the body of every merge and compaction
engine          who does that work: this process, or ...
spark_jobs      ... Spark: the same code as tasks on executors
compact         small segments are merged, the newest record per key is kept
collect         objects that nothing can name any more are deleted
checks          what must hold of a partition and of a segment; pure
scrub_wal       the chain of the WAL, folded anew
scrub           the invariants, checked on what lies in the store
"""
