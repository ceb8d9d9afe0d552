"""The work of `tidelog produce`, `consume` and `topics skew`. The options of the first two are in
service.cli.produce_consume.

lines          opens the input; makes records of lines
produce        produce: gives the records to AsyncProducer
resumable      produce --state
consume        consume without --group: a range of offsets of each partition
group_consume  consume --group
undecodable    makes output lines of records; --on-error
output         writes stdout in a thread
key_skew       topics skew: shares of keys, and salts
"""
