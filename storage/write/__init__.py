"""From a produce request to a committed entry, and from a tail to a segment.

hot_segment     ClosedSegment: the requests of one flush, encoded into a draft; the response to each
requests        append requests, their records by topic, their checks and responses
hot_log         requests with acks=1 on a local disk, until their commit
hot_log_file    the bytes of a hot log file; how a recovery locks, reads and deletes the files
hot_log_copies  a recovery claims a hot log, and finds which of its requests are committed
writer          the write path: one flush at a time, one entry for all waiting requests
waiters         the callers that wait for the outcomes of requests, and their deadlines
set_aside       acknowledged requests that the store refuses: tried apart, set aside, tried again
committed_tail  puts the records of commits into the tail cache
counters        the counters of a writer
due_tails       the tails that a broker seals now
tail_segments   tails encoded as Parquet segments
uploads         uploads of segments: several at once, and never too old
sealer          moves tails into tables
table_ahead     checks of a table that has records which the WAL does not call sealed
"""
