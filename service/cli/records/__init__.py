"""The work of `tidelog produce`, `consume` and `topics skew`. The options of the first two are in
service.cli.produce_consume.

lines          input lines to records
produce        lines to AsyncProducer
resumable      produce --state
consume        records of partitions
group_consume  consume --group
undecodable    records as brokers send them, and --on-error
output         stdout, by a thread
key_skew       topics skew: shares of keys, and salts
"""
