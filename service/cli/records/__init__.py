"""The work of `tidelog produce` and `tidelog consume`. service.cli.produce_consume has the options.

lines          input lines to records
produce        batches in flight, with retries
consume        records of partitions
group_consume  consume --group
"""
