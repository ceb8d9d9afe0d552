"""The work of `tidelog produce`, `consume` and `topics skew`. The options of the first two are in
service.cli.produce_consume.

lines          input lines to records
produce        batches in flight, with retries
consume        records of partitions
group_consume  consume --group
key_skew       topics skew: shares of keys, and salts
"""
