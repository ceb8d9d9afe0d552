"""The work of `tidelog produce` and `tidelog consume`. service.cli.produce_consume has the options.

lines          input lines to records
produce        lines to AsyncProducer
resumable      produce --state
consume        records of partitions
group_consume  consume --group
undecodable    records as brokers send them, and --on-error
output         stdout, by a thread
"""
