"""The chain of WAL entries.

chain        the objects of the chain in the store
view         one broker's view of the chain: commit, follow, expire, publish
entry_put    the PUT of an entry and its three outcomes
own_entries  hashes of own entries; the fence against a copy of the process
freshness    the age of a view, by the boot clock and the store's
store_time   wall time that the store's clock bounds
checkpoints  when a broker writes a checkpoint
announced    entries and chunks that other brokers announced
"""
