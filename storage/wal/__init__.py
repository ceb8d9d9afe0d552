"""The chain of WAL entries.

wal_objects          the objects of the WAL in the store: reading, creation, verification
view                 one broker's view of the chain: commit, follow, expire, publish
entry_put            the PUT of an entry and its three outcomes
copy_fence           the hashes of this process's entries; they show that a copy of it runs
freshness            the age of a view, by the boot clock and the store's
store_time           wall time that the store's clock bounds
checkpoint_schedule  when a broker writes a checkpoint
announced            headers and chunks of entries that other brokers announced
"""
